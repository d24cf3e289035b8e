"""The command line, and Python, as a shell starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import multimm


def environment():
    """This process's own, in which multimm is found from any folder."""
    root = Path(multimm.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def python(*args, env=None, **options):
    """How Python with these arguments ends; `env` is put into its environment."""
    return subprocess.run(
        [sys.executable, *map(str, args)], env=environment() | (env or {}),
        capture_output=True, text=True, **options,
    )  # fmt: skip


def runs(pid):
    """Whether a process runs: one that has ended, and only waits for its parent, does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command(*args, **options):
    """``python -m multimm`` in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "multimm", *map(str, args)],
        env=environment(),
        start_new_session=True,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )
