"""The operand that travels to where the other one lies: which pieces its slabs are made of.

Each worker may bundle what it has of it, cut as slabs need it: to fetch a block takes a millisecond
and more, however small it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from multimm.graph.block_task import BlockTask, Inputs, Key, Place
from multimm.graph.label import Kind
from multimm.graph.lowering.operand import Operand, number_of
from multimm.graph.lowering.rechunk import Piece, bundled, cut_out, task_of
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.partial_products import Slab
from multimm.planning.in_place import InPlace
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.rechunk import Index, cuts_of, shape_of, size_of

Cell = tuple[int, int]  #: a slab, and a block across


@dataclass(frozen=True)
class SmallOperand:
    """One operand of a product whose other one stays where it lies."""

    layout: Schedule
    own: InPlace
    operand: Operand
    keys: Keys
    place: Callable[[Coordinate, Index, Inputs], Place]

    @cached_property
    def homes(self) -> dict[Key, Coordinate]:
        """Where its chunks lie, or are to be made."""
        operand, turn = self.operand, -1 if self.operand.transposed else 1
        blocks = operand.array.numblocks[::turn]
        found = {}
        for at in product(*map(range, operand.array.numblocks)):
            worker = self.own.keeper_of_small(number_of(at[::turn], blocks))
            found[operand.key(at)] = self.layout.grid.place(worker)
        return found

    @cached_property
    def _cut(self) -> dict[Cell, list[Piece]]:
        """Pieces of its chunks, by slab and block across."""
        operand, layout = self.operand, self.layout
        found = {}
        for s, across in product(range(len(layout.slabs)), range(len(self.own.work.across))):
            at = (across, s) if self.own.portions.by_columns else (s, across)
            cuts = cuts_of(operand.own_chunks, operand.where(operand.index((), *at)))
            found[s, across] = [
                Piece(operand.key(index), size_of(operand.own_chunks, index), cut, to)
                for index, cut, to in cuts
                if prod(shape_of(to))
            ]
        return found

    @cached_property
    def _bundles(self) -> tuple[dict[Cell, list[Piece]], list[BlockTask]]:
        """The same pieces as parts of bundles, and the tasks that make these."""
        layout, homes = self.layout, self.homes
        own: dict[Coordinate, list[tuple[Cell, Piece]]] = {}
        for cell, pieces in self._cut.items():
            for piece in pieces:
                own.setdefault(homes[piece.key], []).append((cell, piece))
        tasks, found = [], {cell: list[Piece]() for cell in self._cut}
        for home, cells in own.items():
            key: Key = (self.keys.name("bundle"), layout.grid.rank(home))
            pieces = [piece for _, piece in cells]
            sources = tuple(dict.fromkeys(piece.key for piece in pieces))
            parts = task_of(pieces, (slice(0, 0),), self.operand.array.dtype)
            place = self.place(home, (0, 0, Kind.COALESCE), ((home, sources),))
            label = self.keys.label(Kind.COALESCE, self.operand.role)
            tasks.append(BlockTask(key, cut_out, parts, label=label, place=place))
            for (cell, _), piece in zip(cells, bundled(pieces, key), strict=True):
                found[cell].append(piece)
        return found, tasks

    @property
    def tasks(self) -> list[BlockTask]:
        """Those that make bundles."""
        return self._bundles[1] if self.own.portions.bundled else []

    def slabs(self, used: list[int], across: int) -> tuple[dict[Key, Coordinate], tuple[Slab, ...]]:
        """What slabs are cut from, in the order of its numbers, with where that lies, and how."""
        layout = self.layout
        pieces = self._bundles[0] if self.own.portions.bundled else self._cut
        numbers: dict[Key, int] = {}
        slabs = []
        for s in used:
            own = pieces[s, across]
            at = (across, s) if self.own.portions.by_columns else (s, across)
            shape = shape_of(self.operand.where(self.operand.index((), *at)))
            blocks = tuple(numbers.setdefault(piece.key, len(numbers)) for piece in own)
            cuts = tuple((piece.cut, piece.to) for piece in own)
            slabs.append(Slab(blocks, cuts, tuple(piece.size for piece in own), shape))
        homes = self.homes
        if self.own.portions.bundled:
            homes = {key: layout.grid.place(key[1]) for key in numbers}
        return {key: homes[key] for key in numbers}, tuple(slabs)
