"""What `accelerate()` says afterwards: which calls multimm computed, which Dask, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from multimm.errors import printable


class Call(NamedTuple):
    """One call of a function."""

    function: str  #: such as "tensordot"
    operands: tuple[str, ...]  #: shape and dtype of each array
    note: str  #: what it became, or why it was left to Dask

    def __str__(self) -> str:
        return f"{self.function} of {' and '.join(self.operands) or 'nothing'}: {self.note}"


class Report:
    """The calls inside of one ``with multimm.accelerate() as report:``, in their order.

    Attributes
    ----------
    taken : list of Call
        Computed by multimm.
    left : list of Call
        Left to Dask, each with the reason.
    """

    def __init__(self) -> None:
        self.taken: list[Call] = []
        self.left: list[Call] = []

    def __str__(self) -> str:
        heads = ("taken", self.taken), ("left to Dask", self.left)
        lines = [f"{word} ({len(calls)})" for word, calls in heads]
        return "\n".join(
            line
            for head, (_, calls) in zip(lines, heads, strict=True)
            for line in (head, *_counted(calls))
        )

    def __repr__(self) -> str:
        return f"<accelerate(): {len(self.taken)} calls taken, {len(self.left)} left to Dask>"


def _counted(calls: Iterable[Call]) -> list[str]:
    """A line for each kind of call, and how often it came."""
    counts = Counter(calls)
    return [f"  {call}{f' ({n} times)' if n > 1 else ''}" for call, n in counts.items()]


def described(x: Any) -> str:
    """Shape and dtype of an operand that has them."""
    shape = "x".join(map(str, getattr(x, "shape", ()))) or "0-d"
    return printable(f"{shape} {getattr(x, 'dtype', type(x).__name__)}")
