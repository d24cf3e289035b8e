"""Sizes of blocks and slabs for one arrangement of workers.

The inputs' own chunks are kept where they serve (neighbours joined when they are tiny) and
replaced by even blocks where they do not; the boundaries of two operands are never merged
into their union.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, NamedTuple

from multimm.errors import OptionError, integer
from multimm.planning import memory
from multimm.planning.gram import GramLayout
from multimm.planning.grid import (
    Blocks,
    Grid,
    ceil_div,
    even,
    group,
    largest_share,
    regular,
    remembered,
)
from multimm.planning.layout import Layout
from multimm.planning.problem import Problem
from multimm.planning.spec import ClusterSpec, MatrixSpec

#: Edge of a float32 block: a 16384 x 16384 product keeps an H200 busy for 0.17 s and was the
#: fastest block measured on 8 of them; 4096 on a CPU is about a second of one core.
EDGE = {"gpu": 16384, "cpu": 4096}
#: Blocks are not cut below this edge to make more of them: an H200 needs 4096 for its full
#: FP32 rate and 2048 for 95 % of it; 512 on a CPU is arbitrary.
LEAST_EDGE = {"gpu": 2048, "cpu": 512}
#: The two for what NumPy multiplies without BLAS, by loops that go down B's columns: 1.5e9
#: multiply-adds of int32 per second in blocks of 200 to 400, 1.0e9 of 600, 0.4e9 of 1024 (one core
#: of an x86 server). Of long sides longer ones, for tasks beyond some 32^3 are too many: arbitrary.
LOOP_EDGE, LEAST_LOOP_EDGE, LOOP_BLOCKS = 400, 200, 32
#: Multiply-adds that cost so much more than float32's have no BLAS: integers and long doubles.
LOOPS = 50
#: Chains of block products per worker and thread, at least: while one is multiplied another one's
#: next slab is fetched. One worker fetches nothing.
CHAINS = 2
#: C is not cut into more block rows or columns than so many for a better plan: of a Gram product,
#: one percent of the operations is at stake.
MOST_BLOCK_ROWS = 64
#: Elements of an operand's block, at most: the largest that were ever multiplied, on an H200.
MOST_ELEMENTS = 2**31
#: Operands in more chunks than so many along a side are never multiplied chunk by chunk.
MOST_CHUNKS = 256
#: Kernels compute tiles of 128 x 256 and pack slabs of 64; rows that begin on 16 bytes are copied
#: fastest. With columns in blocks of 15446 two H200s multiplied 46336 squares at 93 % of their own
#: FP32 rate, 32768 and 65536 at 98 and 99 %.
GRAINS = (256, 128, 64, 32, 16, 8, 4)
#: Blocks are rounded to a grain if they are at least so many long, and no worker's share grows by
#: more than this: arbitrary.
LEAST_GRAINS, ROUNDING = 16, 1.002
#: Given chunks are kept if the busiest worker's share grows by no more than this: arbitrary.
IMBALANCE = 1.2


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller fixed.

    Parameters
    ----------
    blocks : int or pair of int, optional
        Rows and columns of C's blocks; None for a side that is planned.
    slabs : int, optional
        Length of a slab of k.
    p_k : int, optional
        Parts of k.
    whole : bool
        Everything is one block.
    """

    blocks: int | tuple[int, int] | None = None
    slabs: int | None = None
    p_k: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        blocks: Any = self.blocks
        if isinstance(blocks, tuple):
            if len(blocks) != 2:
                raise OptionError(f"blocks={blocks!r}: give one edge or (rows, columns)")
            blocks = tuple(_positive("blocks", edge) for edge in blocks)
        else:
            blocks = _positive("blocks", blocks)
        # Python's own integers, whatever was given: plans are remembered and printed.
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "slabs", _positive("slabs", self.slabs))
        object.__setattr__(self, "p_k", _positive("p_k", self.p_k))

    @property
    def given(self) -> bool:
        """Whether anything is fixed."""
        return (self.blocks, self.slabs, self.p_k) != (None, None, None)

    @property
    def edges(self) -> tuple[int | None, int | None]:
        """Rows and columns of C's blocks, where fixed."""
        return self.blocks if isinstance(self.blocks, tuple) else (self.blocks, self.blocks)


def _positive(name: str, value: Any) -> int | None:
    number = integer(value)
    if value is not None and (number is None or number < 1):
        pair = ", or (rows, columns) of them" * (name == "blocks")
        raise OptionError(f"{name}={value!r}: a positive integer is needed, or None{pair}")
    return number


class Cut(NamedTuple):
    """How many times as many blocks and slabs as usual: what a search varies."""

    rows: float = 1  #: of blocks of C
    columns: float = 1
    slabs: float = 1
    given: bool = False  #: or the operands' own chunks, only tiny ones joined


AS_USUAL = Cut()


def lay_out(
    problem: Problem, cluster: ClusterSpec, grid: Grid, options: Options, cut: Cut = AS_USUAL
) -> tuple[Layout, memory.Held]:
    """Blocks, slabs and waves for `grid`, cut further until they fit the memory budget.

    With what `memory.held` says about them. Workers without a place in `grid` count for nothing.
    """
    cluster = cluster.first(grid.workers)
    if options.whole:
        batch = tuple((size,) for size in problem.batch_shape)
        # Of one array on both sides only one goes to a GPU; a C would be added by another task.
        halves = problem.in_one and problem.gram and problem.c is None
        kind = GramLayout if halves else Layout
        layout = kind(problem, grid, batch, (problem.m,), (problem.n,), (problem.k,), band=1)
        return layout, memory.held(layout, cluster)
    edge, least = _edges(problem, cluster)
    least //= 2
    layout = _blocks(problem, cluster, grid, options, edge, cut)
    held = memory.held(layout, cluster)
    if layout.packed and not all(problem.rereadable) and memory.excess(held, cluster):
        # Rather pack a block for each product than spill what was packed.
        layout = replace(layout, pack_once=False)
        held = memory.held(layout, cluster)
    while not _fits(layout, held, cluster) and (edge > least or layout.band > 1):
        # 1. Read operands as they are needed, where they can be read again.
        if all(problem.rereadable) and not layout.stream:
            layout = replace(layout, stream=True)
        # 2. Work on fewer block rows at once.
        elif layout.band > 1:
            layout = replace(layout, band=ceil_div(layout.band, 2))
        # 3. Cut blocks and slabs.
        else:
            edge //= 2
            layout = replace(
                _blocks(problem, cluster, grid, options, edge, cut),
                stream=layout.stream,
                pack_once=layout.pack_once,
            )
        held = memory.held(layout, cluster)
    return layout, held


def _loops(problem: Problem, cluster: ClusterSpec) -> bool:
    """Whether NumPy multiplies blocks without BLAS."""
    return cluster.slowest.kind == "cpu" and problem.relative_cost >= LOOPS


def _edges(problem: Problem, cluster: ClusterSpec) -> tuple[int, int]:
    """Usual edge of a block, and the one below which none is cut to make more of them."""
    if not _loops(problem, cluster):
        return EDGE[cluster.slowest.kind], LEAST_EDGE[cluster.slowest.kind]
    edge = max(LOOP_EDGE, ceil_div(max(problem.m, problem.n, problem.k), LOOP_BLOCKS))
    return edge, max(LEAST_LOOP_EDGE, edge // 2)


def _no_longer(cut: Cut) -> Cut:
    """With slabs no longer than usual."""
    return cut._replace(slabs=max(1, cut.slabs))


def _longest_chunk(problem: Problem) -> int:
    return max(map(max, (*problem.a.chunks[-2:], *problem.b.chunks[-2:])))


def _fits(layout: Layout, held: memory.Held, cluster: ClusterSpec) -> bool:
    """All that is needed stays in memory; spilling is what `lay_out` tries to avoid."""
    # Operands that cannot be read again are Dask's to spill.
    if layout.stream or not all(layout.problem.rereadable):
        held = held[0], {}
    return not memory.excess(held, cluster)


def _blocks(
    problem: Problem, cluster: ClusterSpec, grid: Grid, options: Options, edge: int, cut: Cut
) -> Layout:
    least = min(edge, _edges(problem, cluster)[1])
    batch = batch_blocks(problem, edge, CHAINS * cluster.threads * grid.p_m)
    parallel = prod(len(blocks) for blocks in batch)
    chains = cluster.threads * (CHAINS if grid.workers > 1 else 1)
    counts = _count_c(problem, grid, parallel, chains, edge, least, cut)
    loops = _loops(problem, cluster)
    slabs = _count_slabs(problem, grid, counts, edge, least, _no_longer(cut) if loops else cut)
    keep = least if cut.given or (loops and _longest_chunk(problem) <= edge) else 0
    k_slabs = _slabs(problem, grid, slabs, options.slabs, keep)
    a, b, (rows, cols), (block_m, block_n) = problem.a, problem.b, counts, options.edges
    halves = problem.gram and block_m == block_n
    along = rows if halves else grid.p_m
    m_blocks = _choose(problem.m, rows, along, [a.chunks[-2]], block_m, _kept(a, keep))
    band = ceil_div(parallel * len(m_blocks), grid.p_m)
    if halves:
        return GramLayout(problem, grid, batch, m_blocks, m_blocks, k_slabs, band)
    n_blocks = _choose(problem.n, cols, grid.p_n, [b.chunks[-1]], block_n, _kept(b, keep))
    return Layout(problem, grid, batch, m_blocks, n_blocks, k_slabs, band)


def _count_c(
    problem: Problem, grid: Grid, parallel: int, chains: int, edge: int, least: int, cut: Cut
) -> tuple[int, int]:
    """Block rows and block columns of each of so many batch blocks of C, worked on in parallel."""
    sizes = problem.m, problem.n, problem.k
    rows, cols = _counts(*sizes, grid, parallel, chains, edge, least)
    if parallel < max(2, grid.p_m):  # else each matrix stays with one row of workers
        rows = _cut(rows, problem.m, least, cut.rows)
    cols = _cut(cols, problem.n, least, cut.columns)
    return (max(rows, cols),) * 2 if problem.gram else (rows, cols)


def _count_slabs(
    problem: Problem, grid: Grid, counts: tuple[int, int], edge: int, least: int, cut: Cut
) -> int:
    """Slabs, beside so many block rows and block columns of C."""
    k, p_k = problem.k, grid.p_k
    sides = [ceil_div(size, n) for size, n in zip((problem.m, problem.n), counts, strict=True)]
    slabs = max(p_k, _count(k, p_k, _room(edge, *sides), least))
    if grid.workers > 1 and k // (2 * slabs) >= least:
        slabs *= 2  # at least two slabs per part: the second travels while the first is used
    slabs = max(p_k, min(ceil(slabs * cut.slabs), max(slabs, k // least)))
    return max(slabs, ceil_div(max(sides) * k, MOST_ELEMENTS))


def _slabs(problem: Problem, grid: Grid, count: int, fixed: int | None, keep: int) -> Blocks:
    """The operand that lies somewhere, and the larger one, keeps its chunks along k."""
    hints = [(problem.a, problem.a.chunks[-1]), (problem.b, problem.b.chunks[-2])]
    hints.sort(key=lambda hint: (bool(hint[0].owners), hint[0].nbytes), reverse=True)
    along_k = [chunks for _, chunks in hints]
    return _choose(problem.k, count, grid.p_k, along_k, fixed, _kept(hints[0][0], keep))


def _kept(spec: MatrixSpec, keep: int) -> int:
    """`keep`, but 0 of one that comes in one block: nobody knows how that comes."""
    return keep if any(len(blocks) > 1 for blocks in spec.chunks[-2:]) else 0


@remembered
def _counts(
    m: int, n: int, k: int, grid: Grid, parallel: int, chains: int, edge: int, least: int
) -> tuple[int, int]:
    """Block rows and block columns of C: `chains` for each worker, where C has so many."""
    thick = _room(edge, n, k), _room(edge, m, k)
    rows = _count(m, ceil_div(grid.p_m, parallel), thick[0], least)
    cols = _count(n, grid.p_n, thick[1], least)
    while parallel * rows * cols < chains * grid.p_m * grid.p_n:
        grow_rows = m // rows >= n // cols
        if max(m // rows, n // cols) < 2 * least:
            break
        rows, cols = (rows * 2, cols) if grow_rows else (rows, cols * 2)
    return rows, cols


def _cut(count: int, size: int, least: int, finer: float) -> int:
    """More blocks than `count`, but none below `least` and no more than are of use; or fewer."""
    if finer < 1:
        return ceil(count * finer)
    return max(count, min(ceil(count * finer), size // least, MOST_BLOCK_ROWS))


def batch_blocks(problem: Problem, edge: int, wanted: int) -> tuple[Blocks, ...]:
    """Chunks of the batch dimensions, small matrices joined up to about edge^2 elements.

    Where there are enough matrices, `wanted` batch blocks or more: then none is shared.
    """
    matrix = max(problem.m * problem.n, problem.m * problem.k, problem.k * problem.n, 1)
    room = max(1, min(edge * edge // (4 * matrix), problem.batch // wanted))
    grouped: list[Blocks] = []
    for chunks in reversed(problem.batch_chunks):
        blocks = group(chunks, room)
        if max(blocks) > 2 * room:
            blocks = even(sum(chunks), ceil_div(sum(chunks), room))
        grouped.append(blocks)
        room = max(1, room // max(1, max(blocks)))
    return tuple(reversed(grouped))


def _room(edge: int, *others: int) -> int:
    """How long a block may be beside the block's other dimensions: about edge^2 elements."""
    return edge * edge // max(1, *(min(edge, other) for other in others))


def _count(size: int, workers: int, edge: int, least: int) -> int:
    """How many blocks: a multiple of `workers`, none longer than `edge`, none below `least`."""
    rounds = max(1, ceil_div(size, edge * workers))
    return max(1, min(rounds * workers, max(workers, size // least)))


@remembered
def _evenly(size: int, count: int, workers: int) -> Blocks:
    """`count` blocks, all of one size but the last where that gives as many: files are chunked so.

    Of a round size, if no worker gets more for it.
    """
    usual = regular(size, ceil_div(size, count))
    if len(usual) != count:
        usual = even(size, count)
    most = ROUNDING * largest_share(usual, workers)
    for grain in GRAINS:
        blocks = regular(size, ceil_div(size, count * grain) * grain)
        fits = len(blocks) == count and size >= LEAST_GRAINS * count * grain
        if fits and largest_share(blocks, workers) <= most:
            return blocks
    return usual


def _choose(
    size: int, count: int, workers: int, hints: Sequence[Blocks], fixed: int | None, keep: int
) -> Blocks:
    """The given chunks, joined, if they serve as well as `count` even blocks; else those.

    With `keep`, the first hint is taken as it is, chunks below that length joined.
    """
    if fixed is not None:
        return regular(size, fixed)
    if keep and min(2, workers) <= len(hints[0]) <= MOST_CHUNKS:  # one block serves one worker
        return group(hints[0], keep)
    blocks = _evenly(size, count, workers)
    for chunks in hints:
        joined = group(chunks, max(blocks))
        few_enough = len(joined) <= 2 * len(blocks)
        small_enough = max(joined) <= 1.5 * max(blocks)
        fair = largest_share(joined, workers) <= IMBALANCE * largest_share(blocks, workers)
        if few_enough and small_enough and fair:
            return joined
    return blocks
