"""An operand as the plan's blocks: rechunked, or read from its source in exactly those blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask.array as da

from multimm.graph.tasks import Block, Key
from multimm.planning.grid import Blocks
from multimm.planning.layout import Layout

Reader = Callable[[tuple[slice, ...]], Block]
Index = tuple[int, ...]


def reader_of(array: Any) -> Reader | None:
    """How to read any rectangle of the array from its source, if its layer can tell.

    `multimm.io.open_array` makes such layers: a `reader` attribute holds a picklable function
    from a tuple of slices to a block.
    """
    reader: Reader | None = getattr(array.dask.layers.get(array.name), "reader", None)
    return reader


@dataclass(frozen=True)
class Operand:
    """A or B of one product, in the plan's blocks.

    Parameters
    ----------
    role : str
        ``"a"`` or ``"b"``.
    array : dask.array.Array
        As stored; in the plan's blocks unless there is a reader.
    layout : Layout
    transposed : bool
        Stored transposed: block (r, c) of op(X) is block (c, r) of the array.
    reader : callable or None
    """

    role: str
    array: da.Array
    layout: Layout
    transposed: bool
    reader: Reader | None

    @classmethod
    def fit(cls, role: str, array: da.Array, layout: Layout, *, transposed: bool) -> Operand:
        """Bring the array into the blocks of the layout, lazily."""
        operand = cls(role, array, layout, transposed, reader_of(array))
        if operand.reader is None and array.chunks != operand.chunks:
            # Not Dask's peer-to-peer rechunk: its tasks know no placement and write to disk.
            array = array.rechunk(operand.chunks, method="tasks")
        return cls(role, array, layout, transposed, operand.reader)

    @cached_property
    def chunks(self) -> tuple[Blocks, ...]:
        """The array's chunks once it fits, in stored order."""
        layout = self.layout
        own = self.array.ndim - 2
        blocks = layout.batch_blocks[len(layout.batch_blocks) - own :]
        sizes = self.array.shape[:own]
        batch = tuple((1,) if size == 1 else b for size, b in zip(sizes, blocks, strict=True))
        rows, cols = layout.m_blocks, layout.slabs
        if self.role == "b":
            rows, cols = layout.slabs, layout.n_blocks
        return (*batch, cols, rows) if self.transposed else (*batch, rows, cols)

    def index(self, batch: Index, row: int, col: int) -> Index:
        """Where block (row, col) of op(X), for a batch block of C, is stored."""
        own = self.array.ndim - 2
        local = batch[len(batch) - own :] if own else ()
        local = tuple(
            0 if size == 1 else at for size, at in zip(self.array.shape, local, strict=False)
        )
        return (*local, col, row) if self.transposed else (*local, row, col)

    def first_user(self, index: Index) -> Index:
        """The first batch block of C that uses a stored block."""
        own = self.array.ndim - 2
        skipped = len(self.layout.batch_blocks) - own
        return (*(0,) * skipped, *index[:own])

    def key(self, index: Index) -> Key:
        """The array's own key of a stored block."""
        return (self.array.name, *index)

    def where(self, index: Index) -> tuple[slice, ...]:
        """The rectangle of the array that a stored block covers."""
        return tuple(offsets[at] for offsets, at in zip(self._offsets, index, strict=True))

    @cached_property
    def _offsets(self) -> tuple[list[slice], ...]:
        return tuple(offsets(blocks) for blocks in self.chunks)


def offsets(blocks: Blocks) -> list[slice]:
    """Where each block lies along its dimension.

    >>> offsets((4, 2))
    [slice(0, 4, None), slice(4, 6, None)]
    """
    found, start = [], 0
    for size in blocks:
        found.append(slice(start, start + size))
        start += size
    return found
