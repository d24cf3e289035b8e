"""The keys of a product's tasks: ``(multimm-role-T, *indices)``. What a task does, its label says.

T is a token of the operands, the plan and the scalars, so that the same call gives the same keys,
and different plans never share results.
Operand blocks that are read or packed anew in each row panel have the row panel first; what is cut
out has last the worker that has it, by its rank in the plan's grid, whoever has taken that over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multimm.graph.block_task import Inputs, Key, Place
from multimm.graph.label import Kind, Label
from multimm.planning.hardware import ClusterSpec
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.rechunk import Index
from multimm.planning.work.owner_computes import OwnerComputes

#: Part of every token: raised when the meaning of a key changes.
KEY_VERSION = 8


@dataclass(frozen=True)
class Keys:
    """The keys, labels and places of one product's tasks.

    Parameters
    ----------
    token : str
    layout : Schedule
    cluster : ClusterSpec
        The workers that it is planned for.
    adds : bool
        There is a C that is added.
    """

    token: str
    layout: Schedule
    cluster: ClusterSpec
    adds: bool

    def name(self, role: str) -> str:
        """The first entry of the keys of a role."""
        return f"multimm-{role}-{self.token}"

    def uploaded(self, role: str) -> str:
        """The first entry of the keys of an array's own blocks on GPUs; empty if they stay."""
        p = self.layout.problem
        return self.name(f"uploaded-{role}") * (role in p.uploaded and not p.in_one)

    def label(self, kind: Kind, matrix: str = "C", block: Index = (), **more: Any) -> Label:
        """What a task of this product does."""
        return Label(self.token, kind, matrix.upper(), block, **more)

    def place(self, owner: Coordinate, order: Index, inputs: Inputs = ()) -> Place:
        """Where and when a task of this product is to run."""
        grid, cluster = self.layout.grid, self.cluster
        pinned = not self.layout.queued
        return Place(grid, cluster.workers, owner, order, inputs, cluster.numbers, pinned)

    def chain(self, batch: Index, i: int, j: int, s: int) -> Key:
        """The key of P(i, j) after k-tile s; C's own key where no tree follows the last k-tile."""
        if self.layout.parts == 1 and s == len(self.layout.k_tiles) - 1:
            return self.sum(batch, i, j)
        return (self.name("part"), *batch, i, j, s)

    def sum(self, batch: Index, i: int, j: int) -> Key:
        """The key of the complete sum P(i, j): C's own, unless there is something left to do."""
        if self.layout.mirrors and self.adds:
            return (self.name("half"), *batch, i, j)
        return (self.name("matmul"), *batch, i, j)

    def partial_product(self, work: OwnerComputes, number: int, across: int) -> Key:
        """The key of a partial product of a block of C; C's own key if it is all of the block."""
        output_tile = number // work.workers
        if len(work.output_tiles[output_tile]) == 1:
            return (self.name("matmul"), *work.of(output_tile, across))
        return (self.name("partial_product"), *work.of(number, across))
