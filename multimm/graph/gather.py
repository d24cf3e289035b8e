"""The tasks of a product whose large operand is multiplied where it lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from dask._task_spec import List, Task, TaskRef

from multimm.graph.block_task import BlockTask, Inputs, Key, Place
from multimm.graph.keys import Keys
from multimm.graph.operand import Operand
from multimm.graph.pieces import made_of, pieces
from multimm.graph.portions import join_portions, portion
from multimm.graph.tasks import Step
from multimm.planning.gathered import GatheredLayout
from multimm.planning.grid import Coordinate
from multimm.planning.portions import Group
from multimm.planning.recut import Index, Where, size_of
from multimm.planning.spec import ClusterSpec


@dataclass(frozen=True)
class Gatherer:
    """Makes the tasks: one for each portion, and for each block of C that has several."""

    layout: GatheredLayout
    cluster: ClusterSpec
    operands: list[Operand]
    step: Step
    keys: Keys

    def tasks(self) -> dict[Key, BlockTask]:
        """Every task of the product, by key."""
        layout, made = self.layout, []
        for i, j in layout.pairs:
            made.append(self._portion(*((j, i) if layout.by_columns else (i, j))))
        made += [self._joined(*at) for at in layout.joined]
        return {task.key: task for task in made}

    @property
    def large(self) -> Operand:
        """What is multiplied where it lies."""
        return self.operands[self.layout.by_columns]

    @property
    def small(self) -> Operand:
        """What travels."""
        return self.operands[not self.layout.by_columns]

    @cached_property
    def inner(self) -> Step:
        """Of products that only add up."""
        return replace(self.step, alpha=1, dtype=self.step.accumulate)

    def _portion(self, number: int, across: int) -> BlockTask:
        """What one worker makes of a block of C."""
        layout, groups = self.layout, self.layout.portions.made[number].groups
        slabs = sorted({s for group in groups for s in group.slabs})
        small, homes = zip(*(self._slab(s, across) for s in slabs), strict=True)
        rows = [[self._rows(group, s) for s in group.slabs] for group in groups]
        inputs = {key: home for found in homes for key, home in found.items()}
        inputs |= {key: home for group in groups for key, home in self._chunks(group)}
        owner = Coordinate(*layout.cell(number, 0), 0)
        several = len(layout.strips[number // layout.grid.workers]) > 1
        return BlockTask(
            self.keys.portion(layout, number, across),
            portion,
            List(*small),
            List(*(List(*group) for group in rows)),
            uses=tuple(tuple(slabs.index(s) for s in group.slabs) for group in groups),
            by_columns=layout.by_columns,
            step=self.inner if several and layout.adds else self.step,
            inner=self.inner,
            place=self._place(owner, (0, 0, *layout.cell(number, across)), tuple(inputs.items())),
        )

    def _slab(self, s: int, across: int) -> tuple[Task, dict[Key, Coordinate]]:
        """A slab of the small operand, and where the chunks lie that it is cut from."""
        operand, layout = self.small, self.layout
        at = (across, s) if layout.by_columns else (s, across)
        where = operand.where(operand.index((), *at))
        part, keys = pieces(operand.key, operand.own_chunks, where, operand.array.dtype)
        shape = operand.array.numblocks[:: -1 if operand.transposed else 1]
        found = {}
        for key in keys:
            index = key[1:][:: -1 if operand.transposed else 1]
            chunk = int(np.ravel_multi_index(index, shape))
            found[key] = layout.grid.place(layout.keeper_of_small(chunk))
        return part, found

    def _rows(self, group: Group, s: int) -> Task:
        """A group's rows of a slab, of the large operand."""
        layout, operand = self.layout, self.large
        column = layout.portions.slabs[s]
        indices = [self._stored(row, column) for row in group.rows]
        sizes = [size_of(operand.own_chunks, index) for index in indices]
        axis = layout.by_columns ^ operand.transposed
        ends = [*accumulate((size[axis] for size in sizes), initial=0)]
        height, width = slice(0, ends[-1]), slice(0, layout.slabs[s])
        cuts = [
            (tuple(slice(0, length) for length in size), _across(slice(*span), width, axis))
            for size, span in zip(sizes, pairwise(ends), strict=True)
        ]
        keys = [operand.key(index) for index in indices]
        return made_of(keys, cuts, sizes, _across(height, width, axis), operand.array.dtype)

    def _chunks(self, group: Group) -> list[tuple[Key, Coordinate]]:
        """The large operand's chunks of a group, and where they lie."""
        layout, owners, wide = (
            self.layout,
            self.layout.laid.owners,
            len(self.layout.portions.columns),
        )
        at = [(row, layout.portions.slabs[s]) for row in group.rows for s in group.slabs]
        return [
            (self.large.key(self._stored(*x)), layout.grid.place(owners[x[0] * wide + x[1]]))
            for x in at
        ]

    def _stored(self, row: int, column: int) -> Index:
        """Where a chunk of the large operand is stored."""
        at = (column, row) if self.layout.by_columns else (row, column)
        return self.large.index((), *at)

    def _joined(self, strip: int, across: int) -> BlockTask:
        """A block of C."""
        layout, by_columns = self.layout, self.layout.by_columns
        at = layout.cell(strip, across)
        numbers = layout.strips[strip]
        keys = [self.keys.portion(layout, number, across) for number in numbers]
        cells = [layout.cell(number, across) for number in numbers]
        sizes = [(layout.m_blocks[i], layout.n_blocks[j]) for i, j in cells]
        runs = [
            run._replace(found=tuple((numbers.index(n), rows) for n, rows in run.found))
            for run in layout.portions.runs(strip)
        ]
        return BlockTask(
            (self.keys.name("matmul"), *at),
            join_portions,
            *map(TaskRef, keys),
            shape=tuple(blocks[i] for blocks, i in zip(layout.sides, at, strict=True)),
            sizes=tuple(zip(keys, sizes, strict=True)),
            runs=tuple(runs),
            by_columns=by_columns,
            step=replace(self.step, beta=0) if layout.adds else None,
            place=self._place(layout.keeper_of(strip), (0, layout.steps, *at)),
        )

    def _place(self, owner: Coordinate, order: Index, inputs: Inputs = ()) -> Place:
        on = self.cluster
        return Place(
            self.keys.token, self.layout.grid, on.workers, owner, order, inputs, on.numbers
        )


def _across(along: slice, other: slice, axis: int) -> Where:
    """A rectangle: so far along an axis, and so far along the other."""
    return (other, along) if axis else (along, other)
