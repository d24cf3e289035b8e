"""Print docs/first-run.md anew: each command that stands above a block of output is run.

    python docs/_ext/first_run.py

A block belongs to the line "`multimm ...`:" before it. The commands run in the environment of this
interpreter, so run it on a machine with nothing else to do: the page shows its seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "first-run.md"
SHOWN = re.compile(r"^`(multimm [^`\n]*)`:\n\n```\n.*?^```$", re.DOTALL | re.MULTILINE)


def printed(found: re.Match[str]) -> str:
    """The command and what it prints now."""
    with tempfile.TemporaryDirectory() as folder:
        # Where nothing was measured or compiled yet, as on a new machine.
        names = {"MULTIMM_CACHE_DIR": folder, "PYTHONPATH": str(PAGE.parents[1])}
        done = subprocess.run(
            [sys.executable, "-m", *found[1].split()],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | names,
        )
    lines = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    return f"`{found[1]}`:\n\n```\n{lines}\n```"


if __name__ == "__main__":
    PAGE.write_text(SHOWN.sub(printed, PAGE.read_text("utf-8")), "utf-8")
