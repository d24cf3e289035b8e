"""The repository's package `benchmarks`, which is no part of what is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from multimm.errors import OptionError


def find_benchmarks(command: str) -> None:
    """Make it importable, for a command that needs it.

    Raises
    ------
    OptionError
        If this is not a checkout.
    """
    import multimm

    root = Path(multimm.__file__).resolve().parents[1]
    if (root / "benchmarks" / "report").is_dir() and str(root) not in sys.path:
        sys.path.insert(0, str(root))  # an editable installation shows the package multimm alone
    try:
        found = find_spec("benchmarks.report")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise OptionError(
            f"multimm {command} runs from a checkout of the repository: its package 'benchmarks' "
            "is not installed with multimm"
        )
