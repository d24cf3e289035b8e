"""The keys of a product's tasks, with β the indices along the batch dimensions, w a wave and v a
worker's place in the plan's grid, which an heir may have taken:

    (multimm-a-T, w, β, i, s)  (multimm-b-T, w, β, s, j)   operand blocks read in wave w
    (multimm-uploaded-a-T, ...)  (multimm-uploaded-b-T, ...)  (multimm-uploaded-c-T, ...)
                                                           the arrays' own blocks, on GPUs
    (multimm-joined-a-T, β, i, s)  (multimm-joined-b-T, ...)  or made of other blocks, as stored;
    (multimm-cut-a-T, β, i, s, v)  (multimm-cut-b-T, ...)  what worker v has of it, in a bundle
    (multimm-cut-c-T, β, i, j, v)                          the same of the C that is added
    (multimm-packed-a-T, w, β, i, s)  (multimm-packed-b-T, ...)  blocks for the tensor cores
    (multimm-gate-T, w, s, y, x)                           the sums after slab s of wave w of the
                                                           worker in row y, column x of the grid
    (multimm-part-T, β, i, j, s)                           P(i,j) after slab s
    (multimm-sum-T, β, i, j, l, r)                         parts of k from l on, those from r last
    (multimm-half-T, β, i, j)                              a Gram product's sum, before C is added
    (multimm-portion-T, i, j)                              of a block of C, which is joined
    (multimm-bundle-T, v)                                  what worker v has of a small operand
    (multimm-matmul-T, β, i, j)                            C's blocks, as they are stored
    (multimm-chunk-T, β, i, j)                             C's chunks, where they are others
    (multimm-cut-matmul-T, β, i, j, v)                     what worker v has of one, in a bundle
    (multimm-downloaded-T, β, i, j)                        the same in host memory

Of the others, i, j and s count in the plan's order, which `multimm.planning.candidates.block_order`
may change.

T is a token of the operands, the plan and the scalars, so that the same call gives the same
keys, and different plans never share results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multimm.graph.block_task import Inputs, Key, Place
from multimm.graph.label import Kind, Label
from multimm.planning.candidates.block_order import stored_at
from multimm.planning.hardware import ClusterSpec
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.rechunk import Index
from multimm.planning.work.owner_computes import OwnerComputes

#: Part of every token: raised when the meaning of a key changes.
KEY_VERSION = 8


@dataclass(frozen=True)
class Keys:
    """The keys of one product.

    Parameters
    ----------
    token : str
    layout : Schedule
    adds : bool
        There is a C that is added.
    """

    token: str
    layout: Schedule
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

    def place(
        self, cluster: ClusterSpec, owner: Coordinate, order: Index, inputs: Inputs = ()
    ) -> Place:
        """Where and when a task of this product is to run, on workers that it is planned for."""
        grid = self.layout.grid
        return Place(grid, cluster.workers, owner, order, inputs, cluster.numbers)

    def chain(self, batch: Index, i: int, j: int, s: int) -> Key:
        """The key of P(i, j) after slab s; C's own key where no tree follows the last slab."""
        if self.layout.parts == 1 and s == len(self.layout.slabs) - 1:
            return self.sum(batch, i, j)
        return (self.name("part"), *batch, i, j, s)

    def sum(self, batch: Index, i: int, j: int) -> Key:
        """The key of the complete sum P(i, j): C's own, unless there is something left to do."""
        if self.layout.mirrors and self.adds:
            return (self.name("half"), *batch, i, j)
        return (self.name("matmul"), *self.stored(batch, i, j))

    def stored(self, batch: Index, i: int, j: int) -> Index:
        """Where a block of C is stored."""
        p = self.layout.problem
        matrices = (stored_at(p.stack, at) for at in batch)
        return (*matrices, stored_at(p.rows, i), stored_at(p.columns, j))

    def portion(self, work: OwnerComputes, number: int, across: int) -> Key:
        """The key of a portion of a block of C; C's own key if it is all of the block."""
        strip = number // work.portions.workers
        if len(work.strips[strip]) == 1:
            return (self.name("matmul"), *work.of(strip, across))
        return (self.name("portion"), *work.of(number, across))
