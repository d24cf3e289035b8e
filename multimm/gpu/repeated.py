"""Calls of a kind that was seen before: launched again without checking and deciding again.

What is checked and decided depends on shapes, strides, dtypes, alignment and scalars; where
operands lie matters only for whether the result overlaps them. For small arrays deciding takes
much longer than computing, so what was decided is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Array = Any
Kind = tuple[Any, ...] | None

#: Of different kinds; when they are that many, all are forgotten. Arbitrary.
CAPACITY = 1024


class Kept(NamedTuple):
    """What was decided for a kind of call."""

    run: Callable[[Sequence[int]], None]  #: takes the operands' addresses, the result's last
    bounds: tuple[tuple[int, int], ...]  #: first byte of each operand and the one after its last
    in_place: tuple[bool, ...]  #: whether each may be the result, if they begin at one address

    def again(self, pointers: Sequence[int]) -> bool:
        """Launch, unless the result may overlap an operand: then someone has to look closer."""
        *read, written = pointers
        low, high = self.bounds[-1]
        for pointer, (first, end), same in zip(read, self.bounds, self.in_place, strict=False):
            apart = pointer + end <= written + low or pointer + first >= written + high
            if not apart and not (same and pointer == written):
                return False
        self.run(pointers)
        return True


def kind_of(*operands: Array) -> Kind:
    """What decisions depend on, or None if something is no CuPy array."""
    try:
        return tuple(
            x
            if x is None
            else (type(x), x.shape, x.strides, x.dtype, x.data.ptr % 16, x.data.device_id)
            for x in operands
        )
    except AttributeError:
        return None


def keep(known: dict[Kind, Kept], kind: Kind, run: Callable[[Sequence[int]], None],
         operands: Sequence[Array], *, in_place: bool) -> None:  # fmt: skip
    """Keep what was decided for `operands`, checked and read as they are, the result last."""
    if len(known) >= CAPACITY:
        known.clear()
    out = operands[-1]
    known[kind] = Kept(
        run,
        tuple(_bounds(x) for x in operands),
        tuple(in_place and x.strides == out.strides for x in operands[:-1]),
    )


def _bounds(x: Array) -> tuple[int, int]:
    """Bytes from the address of an array, which is not empty, to its ends."""
    steps = [(size - 1) * step for size, step in zip(x.shape, x.strides, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + x.itemsize
