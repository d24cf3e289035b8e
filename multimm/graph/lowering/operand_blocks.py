"""The blocks of A, B and C that tasks are given, and the tasks that read, join and pack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask._task_spec import List, Task, TaskRef

from multimm.graph.block_task import BlockTask, Key, Place, Sizes, after, within
from multimm.graph.label import Kind
from multimm.graph.lowering.backpressure import Barriers
from multimm.graph.lowering.operand import Argument, Operand
from multimm.graph.lowering.rechunk import brought, join, upload_sub_blocks
from multimm.graph.lowering.sub_blocks import task_of
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.multiply import Step, pack, read
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.rechunk import Index, size_of


@dataclass
class OperandBlocks:
    """Finds the operand blocks of one product, and adds the tasks that make them to `made`."""

    step: Step
    keys: Keys
    made: dict[Key, BlockTask]
    barriers: Barriers
    #: By operand and index: blocks of what comes in other blocks.
    others: dict[tuple[str, Index], Argument] = field(default_factory=dict)

    def addend(self, c: Operand, index: Index, place: Place) -> Argument:
        """C's block for one of the result, with the tasks that cut it where it lies."""
        if c.in_sub_blocks and self.keys.cluster.workers == 1:  # whatever its grid, all lies there
            return _in_sub_blocks(c, index, place.owner, c.key)
        found, tasks = brought(c, index, place.owner, place.order[:2], self.keys)
        self.made |= tasks
        return found

    def operand(self, operand: Operand, batch: Index, r: int, c: int, row: int, s: int) -> Argument:
        """Block (r, c) of an operand, with the tasks that read and pack it."""
        layout, index = self.keys.layout, operand.index(batch, r, c)
        user = layout.flat(operand.first_user(index))
        block = r if operand.role == "a" else c
        owner = layout.tiles.owner(operand.role, user, block, s)
        row_panel = layout.row_panel(row) if layout.stream else 0
        step = (row_panel, layout.step(s, self.keys.cluster.workers))
        sizes: Sizes = ()
        if layout.by_block and operand.reader is not None:
            return self._read_within(operand, index)
        if operand.reader is not None or operand.from_host:
            key: Key = (self.keys.name(operand.role), row_panel, *index)
            if key not in self.made:
                holds = layout.stream or layout.in_step
                barrier = layout.barrier(owner, row_panel, s) if holds else None
                # Of a step, those come first that the first products need.
                task = self._read(key, operand, index, owner, (*step, Kind.READ, block))
                if barrier is not None:
                    task = within(task, after, TaskRef(self.barriers.key(barrier, owner.part)))
                self.made[key] = task
        elif operand.in_sub_blocks:
            found = self._of_others(operand, index, owner, step)
            if operand.role not in layout.tiles.cut_apart:
                return found
            ((owner, (key,)),), sizes = found.inputs, found.sizes
        else:
            key = operand.key(index)
            sizes = ((size_of(operand.own_chunks, index), (key,)),)
        if operand.role in layout.operands.packed:
            key, sizes = self._packed(operand.role, key, index, owner, step, sizes), ()
        return Argument(TaskRef(key), ((owner, (key,)),), sizes)

    def _read(
        self, key: Key, operand: Operand, index: Index, owner: Coordinate, order: Index
    ) -> BlockTask:
        """A task that reads an operand block from its source, or brings it from host memory."""
        label = self.keys.label(Kind.READ, operand.role, index)
        if operand.from_host:
            parts, inputs, _ = _in_sub_blocks(operand, index, owner, operand.source)
            place = self.keys.place(owner, order, inputs)
            return BlockTask(key, upload_sub_blocks, parts, label=label, place=place)
        place = self.keys.place(owner, order)
        return BlockTask(key, read, *_source(operand, index), label=label, place=place)

    def _read_within(self, operand: Operand, index: Index) -> Argument:
        """A block that each product reads for itself, as a part of its task."""
        at = operand.role, index
        if at not in self.others:
            self.others[at] = Argument(Task(None, read, *_source(operand, index)), ())
        return self.others[at]

    def _of_others(
        self, operand: Operand, index: Index, owner: Coordinate, step: Index
    ) -> Argument:
        """A block of the array's own ones: made once, or given to each product in sub-blocks."""
        at = operand.role, index
        if at not in self.others:
            if operand.role in self.keys.layout.tiles.cut_apart:
                self.others[at] = self._joined(operand, index, owner, step)
            else:
                self.others[at] = _in_sub_blocks(operand, index, owner, operand.key)
        return self.others[at]

    def _joined(self, operand: Operand, index: Index, owner: Coordinate, step: Index) -> Argument:
        """A task that joins a block of the array's own ones, once, where it is kept."""
        found, tasks = brought(operand, index, owner, step, self.keys)
        self.made |= tasks
        if isinstance(found.ref, TaskRef):
            return found
        key: Key = (self.keys.name(f"joined-{operand.role}"), *index)
        place = self.keys.place(owner, (*step, Kind.JOIN), found.inputs)
        label = self.keys.label(Kind.JOIN, operand.role, index)
        self.made[key] = BlockTask(key, join, found.ref, label=label, place=place)
        return Argument(TaskRef(key), ((owner, (key,)),))

    def _packed(
        self, role: str, source: Key, index: Index, owner: Coordinate, step: Index, sizes: Sizes
    ) -> Key:
        """A task that packs an operand block where it is kept, before it travels."""
        row_panel = step[0]
        key = (self.keys.name(f"packed-{role}"), row_panel, *index)
        if key not in self.made:
            self.made[key] = BlockTask(
                key,
                pack,
                TaskRef(source),
                role=role,
                step=self.step,
                label=self.keys.label(Kind.PACK, role, index),
                place=self.keys.place(owner, (*step, Kind.PACK), ((owner, (source,)),)),
                sizes=sizes,
            )
        return key


def _source(operand: Operand, index: Index) -> tuple[Any, ...]:
    """What `read` is given for a block."""
    where = operand.where(index)
    reader = operand.reader_at(where)
    needs = getattr(reader, "needs", ())
    return (reader, where, List(*map(TaskRef, needs))) if needs else (reader, where)


def _in_sub_blocks(
    operand: Operand, index: Index, owner: Coordinate, key: Callable[[Index], Key]
) -> Argument:
    """A block in sub-blocks of the array's own ones, which have such keys, on one worker."""
    where = operand.where(index)
    found = operand.sub_blocks(where, key)
    keys = tuple(sub_block.of for sub_block in found)
    return Argument(task_of(found, where, operand.array.dtype), ((owner, keys),))
