"""Cases of a test that are much like each other: `make test` runs some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """All cases for `pytest.mark.parametrize`: those that are not `kept` are marked slow."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are not all among {cases}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in kept else pytest.mark.slow,
        )
        for case in cases
    ]


def here_and_on_workers(fixture: str, names: Iterable[str], slow: Iterable[str]) -> Any:
    """Each `name` in this process, and on three workers, where some are marked slow."""
    cases = [
        pytest.param(
            workers,
            name,
            id=f"{workers} workers-{name}",
            marks=[pytest.mark.slow] * (workers > 0 and name in slow),
        )
        for workers in (0, 3)
        for name in names
    ]
    return pytest.mark.parametrize((fixture, "name"), cases, indirect=[fixture], scope="module")
