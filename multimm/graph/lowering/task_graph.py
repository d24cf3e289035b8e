"""The tasks of a product: one straight loop over blocks and k-tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

from dask._task_spec import List, TaskRef

from multimm.graph.block_task import Block, BlockTask, Key, Place, Sizes, after, within
from multimm.graph.label import Kind, Label
from multimm.graph.lowering.backpressure import Barriers
from multimm.graph.lowering.operand import Argument, Operand
from multimm.graph.lowering.operand_blocks import OperandBlocks
from multimm.graph.lowering.symmetric import (
    add_diagonal,
    link_diagonal,
    link_symmetric,
    scale,
)
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.host_offload import multiply_beside
from multimm.graph.tasks.multiply import Step, add, adjoint, multiply, transpose
from multimm.planning.tiling.rechunk import Index

Verb = Callable[..., Block]


@dataclass
class Builder:
    """Makes the tasks of one product."""

    operands: list[Operand]
    c: Operand | None
    step: Step
    keys: Keys
    made: dict[Key, BlockTask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inner = self.step.inner
        self.barriers = Barriers(self.keys, self.made)
        self.blocks = OperandBlocks(self.step, self.keys, self.made, self.barriers)

    def tasks(self) -> dict[Key, BlockTask]:
        """Every task of the product, by key."""
        layout = self.keys.layout
        for batch in product(*(range(len(blocks)) for blocks in layout.batch_blocks)):
            for i, j in layout.work.pairs:
                for part in range(layout.parts):
                    self._chain(batch, i, j, part)
                self._merge(batch, i, j)
                if layout.mirrors:
                    self._mirror(batch, i, j)
        if layout.stream:
            self.barriers.keep()
        return self.made

    def _chain(self, batch: Index, i: int, j: int, part: int) -> None:
        """P(i, j) of one part of k, k-tile after k-tile."""
        layout = self.keys.layout
        func = multiply_beside if layout.overlaps else multiply
        row = layout.row(layout.flat(batch), i)
        opening = layout.opening(row, j, part)
        # A barrier returns None, which is what a chain begins with.
        previous = None if opening is None else TaskRef(self.barriers.key(opening, part))
        start, end = layout.first_k_tile[part : part + 2]
        diagonal = layout.mirrors and i == j
        for first in range(start, end, layout.k_tiles_per_task):
            k_tiles = range(first, min(first + layout.k_tiles_per_task, end))
            key = self.keys.chain(batch, i, j, k_tiles[-1])
            arguments = [self._arguments(batch, i, j, row, s) for s in k_tiles]
            inputs, sizes = (
                tuple(chain(*(getattr(x, name) for x in chain(*arguments))))
                for name in ("inputs", "sizes")
            )
            order = self._order(row, j, layout.step(first, self.keys.cluster.workers))
            place = self.keys.place(layout.worker(row, j, part), order, inputs)
            complete = diagonal and key == self.keys.sum(batch, i, j)
            more: dict[str, Any] = {"complete": True} if complete else {}
            if layout.mirrors:
                more["verb"] = link_diagonal if diagonal else link_symmetric
            *before, last = ([x.ref for x in pair] for pair in arguments)
            if before:
                more |= {"before": List(*(List(*refs) for refs in before)), "inner": self.inner}
            spanned = (k_tiles[0], k_tiles[-1]) if len(layout.k_tiles) > 1 else ()
            label = self._label(Kind.MULTIPLY, batch, i, j, k_tiles=spanned)
            self._add(key, func, [*last, previous], label, place, (*batch, i, j), sizes, **more)
            if layout.in_step and (barrier := layout.barrier(place.owner, 0, first)):
                waits = List(TaskRef(self.barriers.key(barrier, part)))
                self.made[key] = within(self.made[key], after, waits)
            previous = TaskRef(key)

    def _arguments(self, batch: Index, i: int, j: int, row: int, s: int) -> tuple[Argument, ...]:
        """What is multiplied for P(i, j) and a k-tile."""
        a, block = self.operands[0], self.blocks.operand
        left = block(a, batch, i, s, row, s)
        if not self.keys.layout.mirrors:
            return left, block(self.operands[1], batch, s, j, row, s)
        return (left, block(a, batch, j, s, row, s)) if i != j else (left,)

    def _merge(self, batch: Index, i: int, j: int) -> None:
        """Add the parts of k in a fixed tree."""
        layout = self.keys.layout
        row = layout.row(layout.flat(batch), i)
        sums = {
            part: self.keys.chain(batch, i, j, layout.first_k_tile[part + 1] - 1)
            for part in range(layout.parts)
        }
        tree, last = layout.merges(row, j), {part: part for part in sums}
        for merge in tree:
            left, *_, right = merge.addends
            last[left] = last[right]
            key: Key = (self.keys.name("sum"), *batch, i, j, left, right)
            func: Verb = add
            if merge is tree[-1]:
                key = self.keys.sum(batch, i, j)
                func = add_diagonal if layout.mirrors and i == j else add
            owner = layout.worker(row, j, merge.owner)
            begins = layout.begins(last[left], self.keys.cluster.workers)
            place = self.keys.place(owner, self._order(row, j, begins + layout.steps))
            label = self._label(Kind.ADD, batch, i, j, parts=(left, last[left]))
            parts = [TaskRef(sums[part]) for part in merge.addends]
            self._add(key, func, parts, label, place, (*batch, i, j))
            sums[left] = key

    def _mirror(self, batch: Index, i: int, j: int) -> None:
        """Make both blocks (i, j) and (j, i) of C from one sum, where it lies.

        What is on the diagonal is symmetric already. C enters last: it need not be.
        """
        layout = self.keys.layout
        row = layout.row(layout.flat(batch), i)
        begins = layout.begins(layout.parts - 1, self.keys.cluster.workers)
        step = begins + layout.steps + 1
        if not self.keys.cluster.on_gpus:  # right behind what it mirrors
            step -= 1 + (layout.parts == 1)
        place = self.keys.place(layout.owner(row, j), self._order(row, j, step))
        source, name = TaskRef(self.keys.sum(batch, i, j)), self.keys.name("matmul")
        if self.c is not None:
            for turned, at in ((False, (*batch, i, j)), (True, (*batch, j, i))):
                if i != j or not turned:
                    label = self._label(Kind.FINISH, *((batch, j, i) if turned else (batch, i, j)))
                    self._add((name, *at), scale, [source], label, place, at, turned=turned)
        elif i != j:
            key = (name, *batch, j, i)
            label = self._label(Kind.FINISH, batch, j, i)
            turn = adjoint if self.step.hermitian else transpose
            self.made[key] = BlockTask(key, turn, source, label=label, place=place)

    def _order(self, row: int, j: int, step: int) -> Index:
        """When a task of a block of C is due: in each row panel k-tile by k-tile, row by row.

        A triangle on CPUs goes column by column: with its mirror images these are rows of C, and
        what uses a row need not wait for all of C. On GPUs transfers hide better behind its rows,
        which take one block of the operand after another.
        """
        layout = self.keys.layout
        panel, at = layout.row_panel(row), (row, j)
        if layout.mirrors and not self.keys.cluster.on_gpus:
            i = row % len(layout.m_blocks)
            at = (row - i + j, i)
        return (panel, step, Kind.MULTIPLY, *at)

    def _label(self, kind: Kind, batch: Index, i: int, j: int, **more: Any) -> Label:
        """What a task does for a block of C."""
        return self.keys.label(kind, block=(*batch, i, j), **more)

    def _add(
        self,
        key: Key,
        func: Verb,
        operands: list[Any],
        label: Label,
        place: Place,
        at: Index,
        sizes: Sizes = (),
        **more: Any,
    ) -> None:
        """One task for a block of C; the one that makes it applies alpha, beta and C as well."""
        args: dict[str, Any] = {"step": self.inner, "label": label, **more}
        last = key[0] == self.keys.name("matmul")
        if last:
            args["step"] = self.step
        if last and self.c is not None:
            args["c"], inputs, own = self.blocks.addend(self.c, at, place)
            place, sizes = place._replace(inputs=(*place.inputs, *inputs)), (*sizes, *own)
        self.made[key] = BlockTask(key, func, *operands, **args, place=place, sizes=sizes)
