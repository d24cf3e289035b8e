"""What the caller fixed of a plan, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multimm.errors import OptionError, integer

#: Parts of k, at most: arbitrary, more than anybody has workers.
MOST_PARTS = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller fixed.

    Parameters
    ----------
    blocks : int or pair of int, optional
        Rows and columns of C's blocks; None for a side that is planned.
    slabs : int, optional
        Length of a k-tile.
    p_k : int, optional
        Parts of k.
    """

    blocks: int | tuple[int, int] | None = None
    slabs: int | None = None
    p_k: int | None = None

    def __post_init__(self) -> None:
        blocks: Any = self.blocks
        if isinstance(blocks, tuple):
            if len(blocks) != 2:
                raise OptionError(f"blocks={blocks!r}: give one edge or (rows, columns)")
            blocks = tuple(_positive("blocks", edge) for edge in blocks)
        else:
            blocks = _positive("blocks", blocks)
        # Python's own integers, whatever was given: plans are remembered and printed.
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "slabs", _positive("slabs", self.slabs))
        object.__setattr__(self, "p_k", _positive("p_k", self.p_k))
        if (self.p_k or 1) > MOST_PARTS:
            raise OptionError(
                f"p_k={self.p_k}: at most {MOST_PARTS} parts of k are planned for; give about as "
                "many as there are workers"
            )

    @property
    def given(self) -> bool:
        """Whether anything is fixed."""
        return (self.blocks, self.slabs, self.p_k) != (None, None, None)

    @property
    def edges(self) -> tuple[int | None, int | None]:
        """Rows and columns of C's blocks, where fixed."""
        return self.blocks if isinstance(self.blocks, tuple) else (self.blocks, self.blocks)


def _positive(name: str, value: Any) -> int | None:
    number = integer(value)
    if value is not None and (number is None or number < 1):
        pair = ", or (rows, columns) of them" * (name == "blocks")
        raise OptionError(f"{name}={value!r}: a positive integer is needed, or None{pair}")
    return number
