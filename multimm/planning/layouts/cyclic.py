"""How the parts of a problem are dealt out: who computes what, where operands are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from multimm.planning.candidates.block_order import as_stored
from multimm.planning.layouts.owners import Homes
from multimm.planning.layouts.result_chunks import Chunk, chunks_of, counted, within
from multimm.planning.tiling.grid import (
    Blocks,
    Coordinate,
    Merge,
    ceil_div,
    made_regular,
    merges,
    turns,
)
from multimm.planning.tiling.partition import WINDOW

#: Bytes of an operand that may travel before a task begins that multiplies many slabs, and what
#: part of the other operand's: arbitrary, less than a millisecond of a link between GPUs.
LITTLE, LITTLE_OF = 64_000_000, 1 / 16


#: Of results in more chunks and blocks than so many, what is joined is not counted chunk by chunk,
#: which takes 10 us each: arbitrary.
COUNTED = 20_000


class Gate(NamedTuple):
    """A worker's block products of one slab in one wave: streamed reads wait for them."""

    wave: int
    slab: int
    row: int  #: of the grid
    col: int  #: of the grid


@dataclass(frozen=True)
class Layout(Homes):
    """A partition of a product whose blocks are dealt out cyclically."""

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed, of each batch block."""
        return self.work.pairs

    @property
    def blocks(self) -> int:
        """Blocks of C that are computed."""
        return self.work.count

    @property
    def share_result(self) -> int:
        """Elements of C that the busiest worker keeps."""
        return self.work.most_kept

    @property
    def finishing(self) -> int:
        """Tasks on blocks of C after their last sum.

        They mirror blocks off the diagonal, and add C where there is one.
        """
        if not self.mirrors:
            return 0
        rows = len(self.m_blocks)
        each = rows * (rows - 1) // 2 if self.problem.c is None else rows * rows
        return len(self.batch_sizes) * each

    @property
    def joined_small(self) -> int:
        """Bytes of slabs that a task joins from several chunks, all at once."""
        return 0

    @property
    def first_use(self) -> dict[str, int]:
        """Bytes of each operand that a worker's first product multiplies, by role, at most."""
        length = max(self.slabs) * min(self.slabs_per_task, self.steps)
        edges = {"a": max(self.row_sizes), "b": max(self.n_blocks)}
        return {role: edges[role] * length * self.spec(role).itemsize for role in self.roles}

    @property
    def portions_received(self) -> int:
        """Elements of others' portions that one worker joins, at most."""
        return 0

    def owner(self, row: int, j: int, part: int) -> Coordinate:
        """Who computes a block of C, for one part of k."""
        return Coordinate(*self.work.owner(row, j), part)

    def keeper(self, row: int, j: int) -> Coordinate:
        """Who has the complete sum of a computed block of C."""
        tree = self.merges(row, j)
        return self.owner(row, j, tree[-1].keeper if tree else 0)

    def merges(self, row: int, j: int) -> tuple[Merge, ...]:
        """The additions that sum the parts of a computed block of C."""
        return merges(self.parts, self.turn(row, j), self.fan_in) if self.parts > 1 else ()

    def turn(self, row: int, j: int) -> int:
        """Which worker of its place keeps a block's sum: one of those alike in `merges`."""
        return self._turns[row, j] % turns(self.parts, self.fan_in)

    @cached_property
    def _turns(self) -> dict[tuple[int, int], int]:
        """By computed block of C: how many its place has had before, so that keepers take turns."""
        found: dict[tuple[int, int], int] = {}
        before: Counter[tuple[int, int]] = Counter()
        for flat, (i, j) in product(range(len(self.batch_sizes)), self.pairs):
            row = self.row(flat, i)
            at = self.owner(row, j, 0)
            place = at.row % self.grid.p_m, at.col % self.grid.p_n
            found[row, j] = sum(place) + before[place]
            before[place] += 1
        return found

    @property
    def longest(self) -> int:
        """Blocks along the side, or slabs along k, that has most of them."""
        return max(map(len, (self.m_blocks, self.n_blocks, self.slabs)))

    @property
    def stack(self) -> tuple[Blocks, ...]:
        """Matrices of the result's blocks, as stored, per batch dimension."""
        p = self.problem
        return tuple(as_stored(blocks, p.stack) for blocks in self.batch_blocks)

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of the result's blocks, as stored."""
        p = self.problem
        return as_stored(self.m_blocks, p.rows), as_stored(self.n_blocks, p.columns)

    @property
    def own_chunks(self) -> tuple[Blocks, ...]:
        """Sizes of the blocks in which the result is made, as stored."""
        return (*self.stack, *self.sides)

    @cached_property
    def chunks(self) -> tuple[Blocks, ...]:
        """Chunks of the result: what is wanted, else regular ones, if possible its blocks."""
        return self.problem.chunks or tuple(map(made_regular, self.own_chunks))

    @cached_property
    def hands_out(self) -> bool:
        """Whether chunks of the result are others than its blocks: `layouts.result_chunks`."""
        p = self.problem
        orders = ((p.rows, self.m_blocks), (p.columns, self.n_blocks))
        if any(order and len(order) != len(blocks) for order, blocks in orders):
            return False  # nobody takes it: its blocks are not those that an order is of
        return self.chunks != self.own_chunks

    @property
    def block_owners(self) -> tuple[int, ...]:
        """The number of the worker that makes each block of the result, as stored."""
        p = self.problem
        matrices = [as_stored(range(len(blocks)), p.stack) for blocks in self.batch_blocks]
        rows = as_stored(range(len(self.m_blocks)), p.rows)
        columns = as_stored(range(len(self.n_blocks)), p.columns)
        return tuple(
            self.completes(i, j, self.flat(batch))
            for *batch, i, j in product(*matrices, rows, columns)
        )

    @cached_property
    def handed_out(self) -> tuple[Chunk, ...]:
        """What each chunk of the result is made of; none where the blocks are the chunks."""
        if not self.hands_out:
            return ()
        return tuple(chunks_of(self.chunks, self.own_chunks, self.block_owners))

    def handing_out(self, workers: int) -> tuple[int, int]:
        """Tasks that make the chunks of the result of its blocks, and bytes that travel for it.

        Counted, but for many chunks of which some are joined: at most.
        """
        if not self.hands_out:
            return 0, 0
        chunks, blocks = self.chunks, self.own_chunks
        count, parts = prod(map(len, chunks)), prod(map(len, blocks))
        if all(map(within, chunks, blocks)):
            return count, 0
        if count + parts > COUNTED:
            return count + parts, self.problem.result_bytes if workers > 1 else 0
        tasks, moved = counted(self.handed_out, workers)
        return tasks, moved * self.problem.out_bytes

    def result_owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each chunk of C, as stored; empty for stacks and where Dask decides."""
        if not self.placed(workers):
            return ()
        ranks = [x.keeper for x in self.handed_out] if self.hands_out else self.block_owners
        return tuple(rank % workers for rank in ranks)

    def placed(self, workers: int) -> bool:
        """Whether several workers have blocks of one matrix, and it is known which."""
        return not self.batch_blocks and self.blocks > 1

    def completes(self, i: int, j: int, flat: int = 0) -> int:
        """The number of the worker that makes a block of the result, of one batch block."""
        i, j = (max(i, j), min(i, j)) if self.mirrors else (i, j)
        return self.grid.rank(self.keeper(self.row(flat, i), j))

    @cached_property
    def fetches_c(self) -> bool:
        """Whether a block of the C that is added is known to lie elsewhere than it is needed."""
        owners, columns = self.spec("c").owners, len(self.spec("c").chunks[1])
        if self.cuts_c or not owners:
            return bool(owners)
        return any(x != self.completes(*divmod(at, columns)) for at, x in enumerate(owners))

    @property
    def fusible(self) -> bool:
        """Whether a task may multiply several slabs: all that it needs lies with its worker.

        But for what is little. And a worker would wait between slabs: C is one block, and there is
        no other to go on with.
        """
        alone = self.blocks == 1 and self.steps > 1 and not self.packed
        little = min(LITTLE, LITTLE_OF * max(self.spec(role).nbytes for role in self.roles))
        return alone and all(
            role in self.lying and (not self.arrives(role) or self.spec(role).nbytes <= little)
            for role in self.roles
        )

    def gate(self, home: Coordinate, wave: int, slab: int, window: int = WINDOW) -> Gate | None:
        """What a streamed read waits for: the slab `window` steps back; None in the first steps.

        A step back from the first slab of a wave leads to the last ones of the wave before.
        A worker without blocks of its own in that wave goes by another one.
        """
        part = self.part_of[slab]
        first, end = self.first_slab[part], self.first_slab[part + 1]
        back = slab - window
        while back < first and wave > 0:
            wave, back = wave - 1, back + (end - first)
        if back < first:
            return None
        place = home.row % self.grid.p_m, home.col % self.grid.p_n
        return Gate(wave, back, *self.work.stand_in(wave, place))

    def opening(self, row: int, j: int, part: int) -> Gate | None:
        """What the first product of a block of C waits for; None in the first wave.

        Otherwise the operands of all waves would be fetched at once. Streamed reads wait
        themselves.
        """
        wave = self.wave(row)
        if self.stream or wave == 0:
            return None
        return self.gate(self.owner(row, j, part), wave, self.first_slab[part], window=1)

    def behind(self, gate: Gate) -> Iterator[tuple[int, int]]:
        """The block rows and columns whose sums a gate waits for."""
        yield from self.work.behind(gate.wave, (gate.row, gate.col))

    @cached_property
    def tasks(self) -> int:
        """Tasks of the product: block products, partial sums, reads, their gates, packs.

        Counted, but for the gates of very many reads: at most.
        """
        slabs, per_task = len(self.slabs), self.slabs_per_task
        sums = len(merges(self.parts, 0, self.fan_in))
        chained = sum(ceil_div(end - start, per_task) for start, end in pairwise(self.first_slab))
        products = self.blocks * (chained + sums) + self.finishing
        panels = self.operand_panels() if self.stream or self.packed else set()
        packs = slabs * sum(role in self.packed for role, *_ in panels)
        if not self.stream:
            return products + packs + self.openings
        reads = products + packs + slabs * len(panels)
        if slabs * len(panels) > COUNTED:
            places = self.grid.p_m * self.grid.p_n
            return reads + slabs * min(len(panels), self.waves * places)
        gates = {
            self.gate(self.home(role, flat, block, slab), wave, slab)
            for (role, wave, flat, block), slab in product(panels, range(slabs))
        }
        return reads + len(gates - {None})

    @property
    def openings(self) -> int:
        """Gates that hold back the waves after the first."""
        return 0 if self.stream else self.work.held_back * self.parts

    def operand_panels(self) -> set[tuple[str, int, int, int]]:
        """Role, wave (0 unless streamed), matrix and block of all that is read or packed."""
        edges, waves = {"a": self.m_blocks, "b": self.n_blocks}, self.work.waves
        return {
            (role, wave, share.users[0], block)
            for role in self.roles
            for share, block in product(self.shares(role), range(len(edges[role])))
            for wave in (waves(role, share.users[0], block) if self.stream else (0,))
        }

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the operands that are read, some in several waves."""
        edges, k = {"a": self.m_blocks, "b": self.n_blocks}, self.problem.k
        width = {role: self.spec(role).itemsize for role in self.roles}
        of = {role: {x.users[0]: x for x in self.shares(role)} for role in self.roles}
        return sum(
            of[role][flat].matrices * edges[role][block] * k * width[role]
            for role, _, flat, block in self.operand_panels()
        )
