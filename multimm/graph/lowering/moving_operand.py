"""The operand that travels to where the other one lies: which sub-blocks its k-tiles are made of.

Each worker may coalesce what it has of it, cut as k-tiles need it: to fetch a block takes a
millisecond and more, however small it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from multimm.graph.block_task import BlockTask, Key
from multimm.graph.label import Kind
from multimm.graph.lowering.operand import Operand
from multimm.graph.lowering.rechunk import cut_out
from multimm.graph.lowering.sub_blocks import coalesced, task_of
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.grid import Coordinate, number_of
from multimm.planning.tiling.rechunk import Part, Where, shape_of
from multimm.planning.work.owner_computes import OwnerComputes

Cell = tuple[int, int]  #: a k-tile, and a block across


@dataclass(frozen=True)
class SmallOperand:
    """One operand of a product whose other one stays where it lies."""

    own: OwnerComputes
    operand: Operand
    keys: Keys

    @cached_property
    def owners(self) -> dict[Key, Coordinate]:
        """Where its chunks lie, or are to be made."""
        operand, turn = self.operand, -1 if self.operand.transposed else 1
        blocks = operand.array.numblocks[::turn]
        found = {}
        for at in product(*map(range, operand.array.numblocks)):
            worker = self.own.owner_of_small(number_of(at[::turn], blocks))
            found[operand.key(at)] = self.keys.layout.grid.place(worker)
        return found

    @cached_property
    def _cut(self) -> dict[Cell, list[Part]]:
        """Sub-blocks of its chunks, by k-tile and block across."""
        operand, layout = self.operand, self.keys.layout
        found = {}
        for s, across in product(range(len(layout.k_tiles)), range(len(self.own.across))):
            where = self._where(s, across)
            own = operand.sub_blocks(where, operand.key)
            found[s, across] = [sub_block for sub_block in own if prod(sub_block.shape)]
        return found

    def _where(self, s: int, across: int) -> Where:
        """The part of the array that is a k-tile and a block across."""
        return self.operand.where(self.operand.index((), *self.own.of(s, across)))

    @cached_property
    def _coalesced_transfers(self) -> tuple[dict[Cell, list[Part]], list[BlockTask]]:
        """The same sub-blocks as parts of coalesced transfers, and the tasks that make these."""
        layout, owners = self.keys.layout, self.owners
        own: dict[Coordinate, list[tuple[Cell, Part]]] = {}
        for cell, sub_blocks in self._cut.items():
            for sub_block in sub_blocks:
                own.setdefault(owners[sub_block.of], []).append((cell, sub_block))
        tasks, found = [], {cell: list[Part]() for cell in self._cut}
        for owner, cells in own.items():
            key: Key = (self.keys.name("coalesced"), layout.grid.rank(owner))
            sub_blocks = [sub_block for _, sub_block in cells]
            sources = tuple(dict.fromkeys(sub_block.of for sub_block in sub_blocks))
            parts = task_of(sub_blocks, (slice(0, 0),), self.operand.array.dtype)
            place = self.keys.place(owner, (0, 0, Kind.COALESCE), ((owner, sources),))
            label = self.keys.label(Kind.COALESCE, self.operand.role)
            tasks.append(BlockTask(key, cut_out, parts, label=label, place=place))
            for (cell, _), sub_block in zip(cells, coalesced(sub_blocks, key), strict=True):
                found[cell].append(sub_block)
        return found, tasks

    @property
    def tasks(self) -> list[BlockTask]:
        """Those that make coalesced transfers."""
        return self._coalesced_transfers[1] if self.own.partial_products.coalesced else []

    def k_tiles(
        self, used: list[int], across: int
    ) -> tuple[dict[Key, Coordinate], tuple[SubBlocks, ...]]:
        """What k-tiles are cut from, in the order of its numbers, with where that lies, and how."""
        layout = self.keys.layout
        sub_blocks = (
            self._coalesced_transfers[0] if self.own.partial_products.coalesced else self._cut
        )
        numbers: dict[Key, int] = {}
        k_tiles = []
        for s in used:
            own = sub_blocks[s, across]
            shape = shape_of(self._where(s, across))
            blocks = [numbers.setdefault(sub_block.of, len(numbers)) for sub_block in own]
            cuts = tuple((sub_block.cut, sub_block.to) for sub_block in own)
            k_tiles.append(SubBlocks(blocks, cuts, tuple(x.size for x in own), shape))
        owners = self.owners
        if self.own.partial_products.coalesced:
            owners = {key: layout.grid.place(key[1]) for key in numbers}
        return {key: owners[key] for key in numbers}, tuple(k_tiles)
