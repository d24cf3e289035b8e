"""A schedule: blocks, k-tiles and grid, who computes what when, and the tasks that this takes.

A *row panel* is a band of block rows that is worked on at once. One row panel covers all of C where
its partial sums fit in memory; otherwise the row panels follow each other, and each goes through
all k-tiles. Within a row panel the order is k-tile by k-tile:

    for row panel:  for k-tile s:  for block (i, j) of it:   P(i,j) <- A(i,s) B(s,j) + P(i,j)

so that only a few k-tiles of A and B are alive at a time.

Who computes which block is said by a work map (`multimm.planning.work`), and how operands come
there by `multimm.planning.distribution`, or, where one is multiplied chunk by chunk where it lies,
by `multimm.planning.work.owner_computes`, which says both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple

from multimm.planning.distribution import Distribution
from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import Problem
from multimm.planning.result import Result
from multimm.planning.tiling.counts import LONGEST
from multimm.planning.tiling.grid import (
    Blocks,
    Coordinate,
    Grid,
    Merge,
    ceil_div,
    keeper,
    merges,
    number_of,
    parts_of,
    spans,
)
from multimm.planning.tiling.result_chunks import within
from multimm.planning.tiling.stacks import Share, shares
from multimm.planning.work.cyclic import Cyclic, cyclic
from multimm.planning.work.owner_computes import OwnerComputes
from multimm.planning.work.partial_products import PartialProducts
from multimm.planning.work.symmetric import Symmetric, symmetric

#: K-tiles of A and B that may be alive at once: one in use and one on its way.
WINDOW = 2
#: K-tiles in a part of k, at most, where threads make operands ahead: arbitrary. 80 k-tiles of 2 MB
#: on two threads held 31, 18, 25, 42 and 82 MB in parts of 2, 4, 10, 20 and 40, and 156 in one
#: part; `dask.array.matmul` held 29. With parts of 4 another product held 1.7 times as much as it.
SHORT = 2


#: Operations from which on a product that packs its own operands pays: an H200 needs 35 us for
#: 1024 x 1024 x 1024, and 51 with FP32 multiply-adds.
LONE_FLOPS = 1.2e9
#: Bytes of an operand that may travel before a task begins that multiplies many k-tiles, and what
#: part of the other operand's: arbitrary, less than a millisecond of a link between GPUs.
LITTLE, LITTLE_OF = 64_000_000, 1 / 16


#: Of more reads than so many, barriers are not counted one by one: arbitrary.
COUNTED = 20_000


class Barrier(NamedTuple):
    """A worker's block products of one k-tile in one row panel: streamed reads wait for them."""

    row_panel: int
    k_tile: int
    row: int  #: of the grid
    col: int  #: of the grid


class Largest(NamedTuple):
    """Lengths of the longest blocks."""

    rows: int  #: of a block row, over all matrices of a stack's
    m: int  #: of each matrix
    n: int
    k: int


@dataclass(frozen=True)
class Schedule:
    """How one product is cut, assigned and put in order.

    Parameters
    ----------
    problem : Problem
    grid : Grid
    batch_blocks : tuple of Blocks
        Per batch dimension.
    m_blocks, n_blocks, k_tiles : Blocks
        Of C's rows, of C's columns, of k.
    band : int
        Block rows that each grid row works on in one row panel.
    stream : bool
        Operand blocks are read when their k-tile comes, again in every row panel, and no earlier
        than `WINDOW` k-tiles ahead; only for operands that can be made again.
    pack_once : bool
        Blocks that are used more than once may be packed where they are kept; else each
        product packs its own, which takes less memory.
    fan_in : int
        Sums of parts of k that one task adds, at most: a power of two.
    k_tiles_per_task : int
        K-tiles that one task multiplies in turn, at most, where it keeps them.
    mirrors : bool
        One triangle of C's blocks is computed and mirrored: see `work.symmetric`.
    k_parts : Blocks
        The part of k that each chunk along k is in, where parts are what workers have of it: those
        of a part follow each other, as if they were stored so. Empty: parts are even.
    partial_products : PartialProducts, optional
        One operand is multiplied where it lies: see `work.partial_products`. Then block rows, or
        block columns, are partial products of those of C.
    row_owners : Blocks
        The row of the grid that computes each block row, over all matrices. Empty: in turn.
    queued : bool
        Dask decides where tasks run, and when: see `candidates.read_ahead`.
    alone : bool
        There are no workers, and Dask puts the tasks of this process in order: what uses a block of
        C runs right behind it. A row panel that waited for the one before would run before that.
    by_block : bool
        Each product reads its own blocks of what can be read again: nothing of it is kept, nor read
        ahead. Without workers, where C does not fit: its blocks may be used in any order then.
    """

    # What layouts of one product differ in tells them apart: they are looked up many times.
    problem: Problem = field(hash=False)
    grid: Grid
    batch_blocks: tuple[Blocks, ...]
    m_blocks: Blocks
    n_blocks: Blocks
    k_tiles: Blocks
    band: int
    stream: bool = False
    pack_once: bool = True
    fan_in: int = 2
    k_tiles_per_task: int = 1
    mirrors: bool = False
    k_parts: Blocks = ()
    partial_products: PartialProducts | None = field(default=None, hash=False)
    row_owners: Blocks = ()
    queued: bool = False
    alone: bool = False
    by_block: bool = False

    @cached_property
    def batch_sizes(self) -> Blocks:
        """Matrices in each batch block, the batch dimensions flattened in C order."""
        return tuple(prod(sizes) for sizes in product(*self.batch_blocks))

    @cached_property
    def row_sizes(self) -> Blocks:
        """Rows of C, over all matrices, in each block row; block rows run over the batch first."""
        if self.batch_sizes == (1,):
            return self.m_blocks
        return tuple(count * size for count in self.batch_sizes for size in self.m_blocks)

    @cached_property
    def largest(self) -> Largest:
        """The longest of its block rows and so on."""
        sides = self.row_sizes, self.m_blocks, self.n_blocks, self.k_tiles
        return Largest(*map(max, sides))

    @cached_property
    def part_of(self) -> Blocks:
        """The part of k that each k-tile belongs to: even parts, where k-tiles cut others."""
        if self.k_parts:
            lengths = Counter[int]()
            for part, chunk in zip(self.k_parts, self.problem.a.chunks[-1], strict=True):
                lengths[part] += chunk
            ends = [*accumulate(lengths[part] for part in range(len(lengths)))]
            if len(ends) == self.grid.p_k and {*ends} <= {*accumulate(self.k_tiles)}:
                return tuple(bisect_right(ends, start) for start, _ in spans(self.k_tiles))
        return parts_of(len(self.k_tiles), self.grid.p_k)

    @cached_property
    def k_order(self) -> Blocks:
        """The chunks along k as k-tiles take them, part by part; empty where they are stored so."""
        parts = self.k_parts
        order = tuple(sorted(range(len(parts)), key=parts.__getitem__))
        return order if order != (*range(len(parts)),) else ()

    @cached_property
    def first_k_tile(self) -> Blocks:
        """The k-tile that each part of k begins with, and behind the last the k-tile count."""
        starts = dict(zip(reversed(self.part_of), reversed(range(len(self.part_of))), strict=True))
        return (*sorted(starts.values()), len(self.k_tiles))

    @property
    def parts(self) -> int:
        """Parts of k in use: p_k, or fewer where there are fewer k-tiles."""
        return self.part_of[-1] + 1

    @property
    def ranks(self) -> int:
        """Places of the grid that have a part of k."""
        return self.grid.p_m * self.grid.p_n * self.parts

    @cached_property
    def steps(self) -> int:
        """K-tiles in the longest part of k that are multiplied by tasks of their own."""
        if self.partial_products:
            return 1
        return max(end - start for start, end in pairwise(self.first_k_tile))

    def in_turn(self, workers: int) -> bool:
        """Whether a worker with several parts of k takes one after another.

        What is read when it is needed has barriers within a part alone, and all parts together.
        """
        return self.ranks > workers and not self.stream

    @cached_property
    def in_step(self) -> bool:
        """Whether all blocks of C take a k-tile before any takes one `WINDOW` later.

        Dask puts the tasks of a process in order block by block otherwise, and an operand that
        tasks make is held for the next blocks, if these take it, too. All of C is held here, twice
        while it is added to, and what the k-tiles need.
        """
        if not (
            self.alone
            and not (self.stream or self.partial_products)
            and self.problem.awaited
            and not all(self.problem.rereadable)
            and self.row_panels == 1 < self.work.count
            and self.k_tiles_per_task == 1
            and self.steps > WINDOW
        ):
            return False
        held = sum(self.spec(role).nbytes for role in self.roles if role not in self.for_one)
        k_tiles = WINDOW * sum(self.spec(role).nbytes for role in self.roles) // self.steps
        return 2 * self.problem.summed_bytes <= held >= k_tiles

    @cached_property
    def for_one(self) -> tuple[str, ...]:
        """The operands each of whose blocks is for one block of C."""
        beside = {"a": self.n_blocks, "b": self.m_blocks}
        return tuple(
            role
            for role in self.roles
            if len(beside[role]) == 1 and all(len(x.users) == 1 for x in self.shares(role))
        )

    def begins(self, part: int, workers: int) -> int:
        """The step at which a worker begins a part of k."""
        return part // workers * (self.steps + 1) if self.in_turn(workers) else 0

    def step(self, k_tile: int, workers: int) -> int:
        """When a worker multiplies a k-tile: so many of its steps come before."""
        part = self.part_of[k_tile]
        return self.begins(part, workers) + k_tile - self.first_k_tile[part]

    @property
    def links(self) -> int:
        """Tasks that follow each other in the longest part of k, for each block of C."""
        return ceil_div(self.steps, self.k_tiles_per_task)

    @property
    def overlaps(self) -> bool:
        """Whether products of host blocks are launched while others run (`multiply_beside`).

        Not those of a single block of C: a worker's thread would make their operands far ahead.
        """
        p = self.problem
        in_tasks = bool(p.uploaded or p.downloaded) and not p.in_one and not self.partial_products
        return in_tasks and self.work.count > 1

    @property
    def row_panels(self) -> int:
        """Bands of block rows that follow each other."""
        return ceil_div(len(self.row_sizes), self.band * self.grid.p_m)

    def row_panel(self, row: int) -> int:
        """The row panel in which a block row is worked on."""
        return row // (self.band * self.grid.p_m)

    def flat(self, batch_index: Sequence[int]) -> int:
        """The number of a batch block, counted in C order."""
        return number_of(batch_index, [*map(len, self.batch_blocks)])

    def batch_index(self, flat: int) -> tuple[int, ...]:
        """The indices of a batch block from its number."""
        index: list[int] = []
        for blocks in reversed(self.batch_blocks):
            flat, at = divmod(flat, len(blocks))
            index.append(at)
        return tuple(reversed(index))

    def row(self, flat: int, i: int) -> int:
        """The flattened block row of block row `i` of a batch block."""
        return flat * len(self.m_blocks) + i

    @property
    def roles(self) -> tuple[str, ...]:
        """The operands that blocks are read, kept or sent of: where C is mirrored, B is A."""
        return ("a",) if self.mirrors else ("a", "b")

    @property
    def uploaded(self) -> tuple[str, ...]:
        """Those of A, B and C whose blocks come from host memory."""
        return tuple(x for x in self.problem.uploaded if x == "c" or x in self.roles)

    def spec(self, role: str) -> MatrixSpec:
        """The operand "a" or "b", as it is multiplied, or the "c" that is added."""
        problem = self.problem
        if role == "c":
            return problem.c or MatrixSpec((*problem.batch_shape, problem.m, problem.n))
        return self._in_order[role] if self.k_order else problem.a if role == "a" else problem.b

    @cached_property
    def _in_order(self) -> dict[str, MatrixSpec]:
        """A and B as if their chunks along k were stored as they are taken."""
        a, b, order = self.problem.a, self.problem.b, self.k_order
        return {"a": a.in_order(order), "b": b.T.in_order(order).T}

    @cached_property
    def blockwise(self) -> Cyclic | Symmetric:
        """Who computes which block of rows and columns, and when."""
        (p_m, p_n, _), p, per_row_panel = self.grid, self.problem, self.band * self.grid.p_m
        if self.mirrors:
            dtype = "float32" if p.packs else p.accumulate  # kernels of ours leave tiles out then
            return symmetric(p_m, p_n, self.m_blocks, self.batch_sizes, dtype, per_row_panel)
        blocks = self.batch_blocks, self.m_blocks, self.n_blocks
        shapes = p.a.shape, p.b.shape
        return cyclic(p_m, p_n, *blocks, shapes, per_row_panel, self.row_owners)

    @cached_property
    def in_place(self) -> OwnerComputes | None:
        """Operands of which one is multiplied chunk by chunk where it lies, if that is so."""
        if self.partial_products is None or not isinstance(self.blockwise, Cyclic):
            return None
        return OwnerComputes(self, self.partial_products, self.blockwise)

    @cached_property
    def work(self) -> Cyclic | Symmetric | OwnerComputes:
        """Who computes what, and who makes the blocks of C of that."""
        return self.in_place or self.blockwise

    @cached_property
    def tiles(self) -> Distribution:
        """Operands in the blocks of this schedule, and who keeps these."""
        return Distribution(self)

    @cached_property
    def operands(self) -> Distribution | OwnerComputes:
        """How operands come to those that multiply them."""
        return self.in_place or self.tiles

    @cached_property
    def result(self) -> Result:
        """C in the blocks of this schedule, and in the chunks that it comes in."""
        return Result(self)

    def operand_chunks(self, role: str) -> tuple[Blocks, ...]:
        """The blocks of an operand, as it is multiplied or added."""
        if role == "c":
            return (*self.batch_blocks, self.m_blocks, self.n_blocks)
        shape = self.spec(role).shape
        own = self.batch_blocks[len(self.batch_blocks) - (len(shape) - 2) :]
        batch = ((1,) if size == 1 else b for size, b in zip(shape, own, strict=False))
        if role == "a":
            return (*batch, self.m_blocks, self.k_tiles)
        return (*batch, self.k_tiles, self.n_blocks)

    def comes_otherwise(self, role: str) -> bool:
        """Whether an operand is known to come in other blocks than these."""
        spec = self.spec(role)
        known = spec.owners or any(len(x) > 1 for x in spec.chunks)
        return bool(known) and spec.chunks != self.operand_chunks(role)

    @cached_property
    def cuts_c(self) -> bool:
        """Whether the C that is added comes in other blocks than the result's."""
        return self.comes_otherwise("c")

    def lies_beyond(self, role: str) -> bool:
        """Whether a block of an operand lies with a worker that has no place in the grid."""
        return max(self.spec(role).owners, default=0) >= self.grid.workers

    @property
    def on_tensor_cores(self) -> bool:
        """Whether block products are expected to run there."""
        flops = 2 * self.largest.m * self.largest.n * self.largest.k
        by_itself = self.problem.packable and flops >= LONE_FLOPS
        return bool(self.operands.packed) or self.problem.alone or by_itself

    def shares(self, role: str) -> tuple[Share, ...]:
        """The batch blocks of an operand; one where there are no stacks."""
        return shares(self.batch_blocks, self.spec(role).shape)

    @property
    def flops(self) -> int:
        """Floating-point operations that are executed, over all matrices."""
        return 2 * self.problem.k * self.work.computed if self.mirrors else self.problem.flops

    @cached_property
    def share_k(self) -> int:
        """Length of the longest part of k."""
        return max(
            sum(self.k_tiles[start:end])
            for start, end in zip(self.first_k_tile, self.first_k_tile[1:], strict=False)
        )

    @property
    def joined_bytes(self) -> int:
        """Bytes of an element of the partial products that are joined."""
        adds = self.in_place is not None and self.in_place.adds
        return self.problem.sum_bytes if adds else self.problem.out_bytes

    def worker(self, row: int, j: int, part: int) -> Coordinate:
        """Who computes a block of C, for one part of k."""
        return Coordinate(*self.work.worker(row, j), part)

    def owner(self, row: int, j: int) -> Coordinate:
        """Who has the complete sum of what is computed."""
        part = keeper(self.parts, self.turns[row, j], self.fan_in) if self.parts > 1 else 0
        return self.worker(row, j, part)

    def merges(self, row: int, j: int) -> tuple[Merge, ...]:
        """The additions that sum the parts of a computed block of C."""
        return merges(self.parts, self.turns[row, j], self.fan_in) if self.parts > 1 else ()

    @cached_property
    def turns(self) -> dict[tuple[int, int], int]:
        """By computed block of C: how many its place has had before, so that owners take turns."""
        found: dict[tuple[int, int], int] = {}
        before: Counter[tuple[int, int]] = Counter()
        for flat, (i, j) in product(range(len(self.batch_sizes)), self.work.pairs):
            row = self.row(flat, i)
            r, c = self.work.worker(row, j)
            place = r % self.grid.p_m, c % self.grid.p_n
            found[row, j] = (sum(place) + before[place]) % self.parts
            before[place] += 1
        return found

    @property
    def longest(self) -> int:
        """Blocks along the side, or k-tiles along k, that has most of them."""
        return max(map(len, (self.m_blocks, self.n_blocks, self.k_tiles)))

    @property
    def slow_to_vary(self) -> bool:
        """Whether so many blocks, or chunks that are wanted, make each look at others take long."""
        return max(self.longest, *map(len, self.problem.chunks), 0) > LONGEST

    def completes(self, i: int, j: int, flat: int = 0) -> int:
        """The number of the worker that makes a block of the result, of one batch block."""
        return self.grid.rank(self.owner(*self.work.cell(self.row(flat, i), j)))

    @cached_property
    def made_once(self) -> bool:
        """Whether each chunk of operands that tasks make anywhere is for one product.

        An operand that comes as a single chunk may be for all of them.
        """
        chunked = [role for role in self.roles if self.spec(role).blocks > 1]
        return bool(chunked) and {*chunked} <= {*self.made_for_one}

    @cached_property
    def made_for_one(self) -> tuple[str, ...]:
        """Operands that tasks make anywhere, and each of whose chunks is for one product."""
        made = dict(zip("ab", self.problem.made_anywhere, strict=True))
        return tuple(
            role
            for role in self.for_one
            if made[role] and all(map(within, self.spec(role).chunks, self.operand_chunks(role)))
        )

    @cached_property
    def fetched_c(self) -> int:
        """Bytes of a C in these blocks that are known to lie elsewhere than they are added."""
        spec, columns = self.spec("c"), len(self.n_blocks)
        if self.cuts_c:
            return 0
        blocks = enumerate(zip(spec.owners, product(*spec.chunks), strict=False))
        return spec.itemsize * sum(
            prod(sizes)
            for at, (lies, sizes) in blocks
            if lies != self.completes(*divmod(at, columns))
        )

    @property
    def fusible(self) -> bool:
        """Whether a task may multiply several k-tiles.

        All that it needs lies with its worker, but for what is little, and a worker would wait
        between k-tiles: C is one block, and there is no other to go on with. Or its blocks go to
        host memory: they come back one after another, and not all when the last k-tile is over.
        """
        if self.steps == 1 or self.operands.packed:
            return False
        if self.work.count > 1:
            whole = not self.mirrors and self.parts == self.row_panels == 1
            there = self.problem.downloaded and not self.problem.awaited
            return whole and self.overlaps and there
        little = min(LITTLE, LITTLE_OF * max(self.spec(role).nbytes for role in self.roles))
        return all(
            role in self.operands.in_place
            and (not self.operands.arrives(role) or self.spec(role).nbytes <= little)
            for role in self.roles
        )

    def barrier(
        self, owner: Coordinate, row_panel: int, k_tile: int, window: int = WINDOW
    ) -> Barrier | None:
        """What a streamed read waits for: the k-tile `window` steps back; None in the first steps.

        A step back from the first k-tile of a row panel leads to the last ones of the row panel
        before. A worker without blocks of its own in that row panel goes by another one.
        """
        part = self.part_of[k_tile]
        first, end = self.first_k_tile[part], self.first_k_tile[part + 1]
        back = k_tile - window
        while back < first and row_panel > 0:
            row_panel, back = row_panel - 1, back + (end - first)
        if back < first:
            return None
        place = owner.row % self.grid.p_m, owner.col % self.grid.p_n
        return Barrier(row_panel, back, *self.work.stand_in(row_panel, place))

    def opening(self, row: int, j: int, part: int) -> Barrier | None:
        """What the first product of a block of C waits for; None in the first row panel.

        Otherwise the operands of all row panels would be fetched at once; without workers nothing
        is. Streamed reads wait themselves.
        """
        row_panel = self.row_panel(row)
        if self.stream or self.alone or row_panel == 0:
            return None
        return self.barrier(self.worker(row, j, part), row_panel, self.first_k_tile[part], window=1)

    def behind(self, barrier: Barrier) -> Iterator[tuple[int, int]]:
        """The block rows and columns whose sums a barrier waits for."""
        yield from self.work.behind(barrier.row_panel, (barrier.row, barrier.col))

    @cached_property
    def tasks(self) -> int:
        """Tasks of the product: block products, partial sums, reads, their barriers, packs.

        Counted, but for the barriers of very many reads: at most.
        """
        k_tiles, per_task = len(self.k_tiles), self.k_tiles_per_task
        sums = len(merges(self.parts, 0, self.fan_in))
        chained = sum(ceil_div(end - start, per_task) for start, end in pairwise(self.first_k_tile))
        chained = 1 if self.partial_products else chained
        products = (
            self.work.count * (chained + sums)
            + self.work.finishing(adds=self.problem.c is not None)
            + self.operands.coalesced_transfers
        )
        packed = self.operands.packed
        panels = self.operand_panels() if self.stream or packed else set()
        packs = k_tiles * sum(role in packed for role, *_ in panels)
        if self.in_step:
            return products + packs + (self.steps - WINDOW) * self.parts
        if not self.stream:  # barriers hold back the row panels after the first
            return products + packs + (0 if self.alone else self.work.held_back * self.parts)
        if self.by_block:
            return products + packs
        reads = products + packs + k_tiles * len(panels)
        if k_tiles * len(panels) > COUNTED:
            places = self.grid.p_m * self.grid.p_n
            return reads + k_tiles * min(len(panels), self.row_panels * places)
        barriers = {
            self.barrier(self.tiles.owner(role, flat, block, k_tile), row_panel, k_tile)
            for (role, row_panel, flat, block), k_tile in product(panels, range(k_tiles))
        }
        return reads + len(barriers - {None})

    def operand_panels(self) -> set[tuple[str, int, int, int]]:
        """Role, row panel (0 unless streamed), matrix and block of all that is read or packed."""
        edges, row_panels = {"a": self.m_blocks, "b": self.n_blocks}, self.blockwise.row_panels
        return {
            (role, row_panel, share.users[0], block)
            for role in self.roles
            for share, block in product(self.shares(role), range(len(edges[role])))
            for row_panel in (row_panels(role, share.users[0], block) if self.stream else (0,))
        }

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the operands that are read, some in several row panels."""
        edges, k = {"a": self.m_blocks, "b": self.n_blocks}, self.problem.k
        width = {role: self.spec(role).itemsize for role in self.roles}
        of = {role: {x.users[0]: x for x in self.shares(role)} for role in self.roles}
        return sum(
            of[role][flat].matrices * edges[role][block] * k * width[role]
            for role, _, flat, block in self.operand_panels()
        )
