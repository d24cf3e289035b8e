"""The tasks of a product: one straight loop over blocks and slabs.

Their keys are listed in `multimm.graph.keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, NamedTuple

from dask._task_spec import List, Task, TaskRef

from multimm.graph.block_task import JOIN, READY, Block, BlockTask, Inputs, Key, Place, Sizes
from multimm.graph.gram_tasks import (
    add_diagonal,
    link_diagonal,
    link_gram,
    multiply_diagonal,
    multiply_gram,
    scale,
)
from multimm.graph.keys import Keys
from multimm.graph.operand import Operand
from multimm.graph.pieces import multiply_pieces, pieces
from multimm.graph.recut import brought, join, upload_pieces
from multimm.graph.tasks import (
    Step,
    add,
    after,
    in_turn,
    link,
    multiply,
    pack,
    read,
    transpose,
    wait_for,
)
from multimm.planning.grid import Coordinate
from multimm.planning.layout import Gate, Layout
from multimm.planning.recut import Index, Where, size_of
from multimm.planning.workers import ClusterSpec

Verb = Callable[..., Block]


class Factor(NamedTuple):
    """An operand block, as a task is given it."""

    ref: TaskRef | Task  #: to the block, or what makes it of others
    inputs: Inputs  #: those blocks, and where each is at home
    sizes: Sizes = ()  #: of those that are an array's own and used as they are


def _verbs(*, gram: bool, diagonal: bool) -> tuple[Verb, Verb]:
    """What multiplies the operands of a slab: as a task, and as one of several in a task."""
    if diagonal:
        return multiply_diagonal, link_diagonal
    return (multiply_gram, link_gram) if gram else (multiply, link)


@dataclass
class Builder:
    """Makes the tasks of one product."""

    layout: Layout
    cluster: ClusterSpec
    operands: list[Operand]
    c: Operand | None
    step: Step
    keys: Keys
    made: dict[Key, BlockTask] = field(default_factory=dict)
    #: By operand and index: blocks of what comes in other blocks.
    others: dict[tuple[str, Index], Factor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inner = self.step.inner

    def tasks(self) -> dict[Key, BlockTask]:
        """Every task of the product, by key."""
        layout = self.layout
        for batch in product(*(range(len(blocks)) for blocks in layout.batch_blocks)):
            for i, j in layout.pairs:
                for part in range(layout.parts):
                    self._chain(batch, i, j, part)
                self._merge(batch, i, j)
                if layout.mirrors:
                    self._mirror(batch, i, j)
        if layout.stream:
            self._keep_gates()
        return self.made

    def _chain(self, batch: Index, i: int, j: int, part: int) -> None:
        """P(i, j) of one part of k, slab after slab."""
        layout = self.layout
        row = layout.row(layout.flat(batch), i)
        opening = layout.opening(row, j, part)
        # A gate returns None, which is what a chain begins with.
        previous = None if opening is None else TaskRef(self._gate(opening, part))
        start, end = layout.first_slab[part : part + 2]
        diagonal = layout.mirrors and i == j
        func, linked = _verbs(gram=layout.mirrors, diagonal=diagonal)
        for first in range(start, end, layout.slabs_per_task):
            slabs = range(first, min(first + layout.slabs_per_task, end))
            key = self.keys.chain(batch, i, j, slabs[-1])
            factors = [self._factors(batch, i, j, row, s) for s in slabs]
            inputs, sizes = (
                tuple(chain(*(getattr(x, name) for x in chain(*factors))))
                for name in ("inputs", "sizes")
            )
            order = (layout.wave(row), first - start, row, j)
            place = self._place(layout.owner(row, j, part), order, inputs)
            complete = diagonal and key == self.keys.sum(batch, i, j)
            more: dict[str, Any] = {"complete": True} if complete else {}
            *before, last = ([x.ref for x in pair] for pair in factors)
            verb: Verb = func
            if before:
                earlier = List(*(List(*refs) for refs in before))
                verb = in_turn
                more |= {"link": linked, "before": earlier, "inner": self.inner}
            elif not all(isinstance(ref, TaskRef) for ref in last):
                verb, more = multiply_pieces, more | {"verb": func}
            self._add(key, verb, [*last, previous], place, (*batch, i, j), sizes, **more)
            previous = TaskRef(key)

    def _factors(self, batch: Index, i: int, j: int, row: int, s: int) -> tuple[Factor, ...]:
        """What is multiplied for P(i, j) and a slab."""
        left = self._operand(self.operands[0], batch, i, s, row, s)
        if not self.layout.mirrors:
            return left, self._operand(self.operands[1], batch, s, j, row, s)
        return (left, self._operand(self.operands[0], batch, j, s, row, s)) if i != j else (left,)

    def _merge(self, batch: Index, i: int, j: int) -> None:
        """Add the parts of k in a fixed tree."""
        layout = self.layout
        row = layout.row(layout.flat(batch), i)
        sums = {
            part: self.keys.chain(batch, i, j, layout.first_slab[part + 1] - 1)
            for part in range(layout.parts)
        }
        tree = layout.merges(row, j)
        for merge in tree:
            left, *_, right = merge.addends
            key: Key = (self.keys.name("sum"), *batch, i, j, left, right)
            func: Verb = add
            if merge is tree[-1]:
                key = self.keys.sum(batch, i, j)
                func = add_diagonal if layout.mirrors and i == j else add
            owner = layout.owner(row, j, merge.keeper)
            order = (layout.wave(row), layout.steps, row, j)
            place = self._place(owner, order)
            parts = [TaskRef(sums[part]) for part in merge.addends]
            self._add(key, func, parts, place, (*batch, i, j))
            sums[left] = key

    def _mirror(self, batch: Index, i: int, j: int) -> None:
        """Make both blocks (i, j) and (j, i) of C from one sum, where it lies.

        What is on the diagonal is symmetric already. C enters last: it need not be.
        """
        layout = self.layout
        row = layout.row(layout.flat(batch), i)
        order = (layout.wave(row), layout.steps + 1, row, j)
        place = self._place(layout.keeper(row, j), order)
        source, name = TaskRef(self.keys.sum(batch, i, j)), self.keys.name("matmul")
        if self.c is not None:
            for turned, at in ((False, (*batch, i, j)), (True, (*batch, j, i))):
                if i != j or not turned:
                    self._add((name, *at), scale, [source], place, at, turned=turned)
        elif i != j:
            key = (name, *batch, j, i)
            self.made[key] = BlockTask(key, transpose, source, place=place)

    def _place(self, owner: Coordinate, order: Index, inputs: Inputs = ()) -> Place:
        return self.keys.place(self.cluster, owner, order, inputs)

    def _add(
        self,
        key: Key,
        func: Verb,
        operands: list[Any],
        place: Place,
        at: Index,
        sizes: Sizes = (),
        **more: Any,
    ) -> None:
        """One task for a block of C; the one that makes it applies alpha, beta and C as well."""
        args: dict[str, Any] = {"step": self.inner, **more}
        last = key[0] == self.keys.name("matmul")
        if last:
            args["step"] = self.step
        if last and self.c is not None:
            args["c"], inputs, own = self._addend(self.c, at, place)
            place, sizes = place._replace(inputs=(*place.inputs, *inputs)), (*sizes, *own)
            if func is not multiply_pieces and not isinstance(args["c"], TaskRef):
                func, args["verb"] = multiply_pieces, func
        self.made[key] = BlockTask(key, func, *operands, **args, place=place, sizes=sizes)

    def _addend(self, c: Operand, index: Index, place: Place) -> Factor:
        """C's block for one of the result, with the tasks that cut it where it lies."""
        if c.in_pieces and self.cluster.workers == 1:  # whatever its grid, all lies there
            parts, keys = pieces(c.key, c.own_chunks, c.where(index), c.array.dtype)
            return Factor(parts, tuple((key, place.owner) for key in keys))
        step, name = place.order[:2], self.keys.name("cut-c")
        found = brought(c, index, place.owner, step, name, self._place)
        self.made |= found.tasks
        return Factor(found.ref, found.inputs, found.sizes)

    def _operand(self, operand: Operand, batch: Index, r: int, c: int, row: int, s: int) -> Factor:
        """Block (r, c) of an operand, with the tasks that read and pack it."""
        layout, index = self.layout, operand.index(batch, r, c)
        user = layout.flat(operand.first_user(index))
        block = r if operand.role == "a" else c
        home = layout.home(operand.role, user, block, s)
        wave = layout.wave(row) if layout.stream else 0
        order = (wave, s - layout.first_slab[layout.part_of[s]], *READY)
        sizes: Sizes = ()
        if operand.reader is not None or operand.from_host:
            key: Key = (self.keys.name(operand.role), wave, *index)
            if key not in self.made:
                gate = layout.gate(home, wave, s) if layout.stream else None
                waits = [] if gate is None else [TaskRef(self._gate(gate, home.part))]
                # Of a step, those come first that the first products need.
                self._read(key, operand, operand.where(index), waits, home, (*order, block))
        elif operand.in_pieces:
            found = self._of_others(operand, index, home, order)
            if not layout.cut_once:
                return found
            ((key, home),), sizes = found.inputs, found.sizes
        else:
            key = operand.key(index)
            sizes = ((key, size_of(operand.own_chunks, index)),)
        if operand.role in layout.packed:
            key, sizes = self._packed(operand.role, key, (wave, *index), home, order, sizes), ()
        return Factor(TaskRef(key), ((key, home),), sizes)

    def _read(
        self,
        key: Key,
        operand: Operand,
        where: Where,
        waits: list[TaskRef],
        home: Coordinate,
        order: Index,
    ) -> None:
        """A task that reads an operand block from its source, or brings it from host memory."""
        verb: Verb = read
        source: tuple[Any, ...] = operand.reader, where
        inputs: Inputs = ()
        if operand.from_host:
            parts, keys = pieces(operand.source, operand.own_chunks, where, operand.array.dtype)
            verb, source, inputs = upload_pieces, (parts,), tuple((key, home) for key in keys)
        place = self._place(home, order, inputs)
        self.made[key] = BlockTask(key, verb, *source, *waits, place=place)

    def _of_others(self, operand: Operand, index: Index, home: Coordinate, order: Index) -> Factor:
        """A block of the array's own ones: made once, or given to each product in pieces."""
        at = operand.role, index
        if at not in self.others:
            if self.layout.cut_once:
                self.others[at] = self._joined(operand, index, home, order[:2])
            else:
                where, dtype = operand.where(index), operand.array.dtype
                parts, keys = pieces(operand.key, operand.own_chunks, where, dtype)
                self.others[at] = Factor(parts, tuple((key, home) for key in keys))
        return self.others[at]

    def _joined(self, operand: Operand, index: Index, home: Coordinate, step: Index) -> Factor:
        """A task that joins a block of the array's own ones, once, where it is at home."""
        name = self.keys.name(f"cut-{operand.role}")
        found = brought(operand, index, home, step, name, self._place)
        self.made |= found.tasks
        if found.own:
            return Factor(found.ref, found.inputs, found.sizes)
        key: Key = (self.keys.name(f"joined-{operand.role}"), *index)
        place = self._place(home, (*step, *JOIN), found.inputs)
        self.made[key] = BlockTask(key, join, found.parts, place=place)
        return Factor(TaskRef(key), ((key, home),))

    def _packed(
        self, role: str, source: Key, at: Index, home: Coordinate, order: Index, sizes: Sizes
    ) -> Key:
        """A task that packs an operand block where it is at home, before it travels."""
        key = (self.keys.name(f"packed-{role}"), *at)
        if key not in self.made:
            place = self._place(home, order, ((source, home),))
            self.made[key] = BlockTask(
                key, pack, TaskRef(source), role=role, step=self.step, place=place, sizes=sizes
            )
        return key

    def _gate(self, gate: Gate, part: int) -> Key:
        """A task that is done when a worker's products of one slab are; it returns nothing."""
        layout = self.layout
        key = (self.keys.name("gate"), *gate)
        if key not in self.made:
            sums = []
            for row, j in layout.behind(gate):
                flat, i = divmod(row, len(layout.m_blocks))
                sums.append(TaskRef(self.keys.chain(layout.batch_index(flat), i, j, gate.slab)))
            step = gate.slab - layout.first_slab[part]
            last = len(layout.row_sizes)  # behind every block product of its step
            place = self._place(Coordinate(gate.row, gate.col, part), (gate.wave, step, last, 0))
            self.made[key] = BlockTask(key, wait_for, *sums, place=place)
        return key

    def _keep_gates(self) -> None:
        """Have the last task of each worker depend on its gates, so that Dask keeps them.

        A lost worker's heir needs blocks that others have read and let go of. They are read again;
        a gate that is gone would be made again, too, from all sums of its worker until then.
        """
        gates: dict[int, list[BlockTask]] = {}
        last: dict[int, BlockTask] = {}
        for task in self.made.values():
            rank = self.layout.grid.rank(task.place.owner)
            if task.func is wait_for:
                gates.setdefault(rank, []).append(task)
            elif rank not in last or task.place.order > last[rank].place.order:
                last[rank] = task
        for rank, own in gates.items():
            end = last[rank]
            # Where others have a wave more, the last gates stand behind this worker's last task.
            kept = [TaskRef(gate.key) for gate in own if gate.place.order[:2] < end.place.order[:2]]
            kwargs = {**end.kwargs, "func": end.func, "gates": List(*kept), "sizes": end.sizes}
            self.made[end.key] = BlockTask(end.key, after, *end.args, place=end.place, **kwargs)
