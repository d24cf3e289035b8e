"""The command line as a shell starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import multimm


def command(*args, **options):
    """``python -m multimm`` in a process group of its own, as a shell starts it."""
    root = Path(multimm.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "multimm", *map(str, args)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )
