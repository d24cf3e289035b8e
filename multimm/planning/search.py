"""The arrangements of some workers, laid out and ranked by predicted time: see `choice`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from multimm.planning.blocking import lay_out
from multimm.planning.candidates.along_chunks import along_chunks
from multimm.planning.candidates.read_ahead import (
    MOST_LINKS,
    as_queued,
    in_short_parts,
    made_by_tasks,
    with_little_ahead,
)
from multimm.planning.cost import communication, memory, time
from multimm.planning.hardware import ClusterSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.counts import (
    AS_USUAL,
    EDGE,
    MOST_BLOCK_ROWS,
    Cut,
)
from multimm.planning.tiling.grid import Grid, ceil_div, grids
from multimm.planning.work.symmetric import FREE_PLACES

#: Cuts that are tried. Fewer, longer k-tiles are fewer tasks; more, shorter ones let the first
#: product begin sooner. A symmetric product in finer blocks wastes less on its diagonal, and its
#: triangle is shared more evenly; in coarser ones, where only k is divided among workers, it is
#: fewer tasks.
SOME_K_TILES, K_TILES = (0.125, 0.5), (0.0625, 0.25, 1, 2, 4)
FINER = ((1, 1), (1, 2), (2, 1), (2, 2))  # rows of blocks, and columns
#: The same of operands that go up to GPUs, beside those: there they are joined in any case.
EVEN = tuple(Cut(finer, finer, even=True) for finer in (1, 1.5, 2))
FINER_SYMMETRIC = tuple((finer, finer) for finer in (0.5, 1, 1.5, 2, 3, 4, 6, 8))
#: Where k-tiles take so many times as long as the best ones, shorter ones are not tried: no golden
#: plan changes. With 1.2 one takes 8 % longer.
FAR = 1.4
#: Cuts into the operands' own chunks: as they are, and tiny ones joined.
AS_THEY_COME = Cut(given=True, joined=False)
GIVEN = (Cut(given=True), AS_THEY_COME)
#: Only the best so many arrangements, cut as usual, are cut in other ways. Of regular blocks the
#: fifth may be the best: of 65536 squares in chunks of 1000 on four CPU workers by 2 %.
ARRANGEMENTS = 5
#: Twice as many of those, each with its blocks, are cut into k-tiles of all lengths. In 300 plans
#: for 2 to 8 GPUs the search of everything, which takes twice as long, found three better ones, by
#: 7 % at most.
FINALISTS = 4

#: Block rows of a symmetric product, at most, for every block of its triangle is assigned:
#: arbitrary, a C of 17 TB on GPUs. Beyond, it is planned as any other product is.
MOST_SYMMETRIC_ROWS = 128
#: The same of blocks that the caller fixed: also arbitrary, 1000 rows take half a minute to plan.
MOST_GIVEN_ROWS = 256
#: Sums of parts of k that one task may add, beside two: powers of two, so that the bits stay.
FAN_IN = (4, 8, 16)
#: Share of a worker's memory that the k-tiles of one task may take: arbitrary.
FUSED = 0.3
#: A plan that takes no more than so many times the least seconds may win for its bytes: arbitrary,
#: predictions are no better.
NEARLY = 1.02


class Rank(NamedTuple):
    """What the chooser compares: the smallest wins, by the first field that differs."""

    too_large: bool
    seconds: float
    moved: int  #: bytes
    parts: int  #: of k
    columns: int  #: of the grid


def candidates(problem: Problem, cluster: ClusterSpec, options: Options) -> dict[Schedule, Rank]:
    """Arrangements of the workers, laid out; of a symmetric product, with C in halves and whole."""
    halves: dict[Schedule, Rank] = {}
    if _may_halve(problem, cluster, options):
        halves = _mirrored(_searched(problem, cluster, options))
    # With given blocks the bits must not depend on the workers, nor may what is mirrored.
    if halves and (options.blocks is not None or _ahead_of_all(halves, problem, cluster)):
        return halves
    return halves | _searched(replace(problem, symmetric=False), cluster, options)


def first_look(problem: Problem, cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """Arrangements in the operands' own chunks.

    Those of a symmetric product are cut as usual, for its rows and columns are alike, with C in
    halves, and whole.
    """
    whole, options = replace(problem, symmetric=False), Options()
    cut = AS_USUAL if problem.symmetric else AS_THEY_COME
    found = dict(cut_alike(whole, cluster, options, cut))
    if _may_halve(problem, cluster, options):
        found |= _mirrored(cut_alike(problem, cluster, options, cut))
    return found | packed_within(found, cluster)


def _may_halve(problem: Problem, cluster: ClusterSpec, options: Options) -> bool:
    """Whether C is symmetric, and of few enough block rows to assign those of one half."""
    given = options.edges[0]
    most = MOST_GIVEN_ROWS * given if given else MOST_SYMMETRIC_ROWS * EDGE[cluster.slowest.kind]
    arrangements = _arrangements(problem.symmetric, cluster.workers, options.p_k)
    return problem.symmetric and problem.m <= most and bool(arrangements)


def _mirrored(found: Mapping[Schedule, Rank]) -> dict[Schedule, Rank]:
    """Those that compute one half of C."""
    return {x: rank for x, rank in found.items() if x.mirrors}


def _ahead_of_all(ranks: dict[Schedule, Rank], problem: Problem, cluster: ClusterSpec) -> bool:
    """One takes less than the block products of all of C would, on all workers."""
    best = min(ranks.values())
    rate = cluster.workers * time.product_gflops(problem, cluster.slowest) * 1e9
    return not best.too_large and NEARLY * best.seconds < problem.flops / rate


def _searched(problem: Problem, cluster: ClusterSpec, options: Options) -> dict[Schedule, Rank]:
    """Every arrangement cut as usual, and the best of them in every way."""
    ranks = dict(cut_alike(problem, cluster, options))
    if min(ranks, key=ranks.__getitem__).slow_to_vary:
        return ranks
    finalists = _finalists(ranks, problem.symmetric)
    finer = FINER_SYMMETRIC if problem.symmetric else FINER
    cuts = [Cut(*factors) for factors in (finer if options.blocks is None else FINER[:1])]
    if problem.uploaded and options.blocks is None:
        cuts += EVEN

    def cut_as(grid: Grid, cut: Cut) -> Rank:
        layout = lay_out(problem, cluster, grid, options, cut)
        ranks[layout] = rank_of(layout, cluster)
        return ranks[layout]

    # Blocks are judged by two lengths of k-tiles, and the best of them cut in all ways.
    some, others = (SOME_K_TILES, K_TILES) if options.slabs is None else ((1,), ())
    by_blocks = {
        (grid, cut): min(cut_as(grid, cut._replace(k_tiles=k_tiles)) for k_tiles in some)
        for grid, cut in product(finalists, cuts)
    }
    for grid, cut in sorted(by_blocks, key=by_blocks.__getitem__)[: 2 * FINALISTS]:
        best = by_blocks[grid, cut]
        for k_tiles in others:
            rank = cut_as(grid, cut._replace(k_tiles=k_tiles))
            best = min(best, rank)
            if k_tiles >= 1 and rank.seconds > FAR * best.seconds:
                break
    if problem.chunked:
        # They may be cut as an arrangement wants them that, cut as usual, is none of the best.
        for cut in GIVEN:
            ranks |= cut_alike(problem, cluster, options, cut)
    return refined(ranks, cluster, options)


def refined(
    ranks: dict[Schedule, Rank], cluster: ClusterSpec, options: Options
) -> dict[Schedule, Rank]:
    """These and the best of them along storage chunks, and with other tasks for the same blocks."""
    best = best_of_each_grid([*ranks], ranks, 1)[:FINALISTS]
    along = dict.fromkeys(x for layout in best for x in along_chunks(layout, cluster, options))
    ranks = ranks | ranked((x for x in along if x not in ranks), cluster)
    ranks = ranks | added_at_once(ranks, cluster)
    if options.blocks is None:  # else the bits must not depend on the workers, nor may the kernels
        ranks |= packed_within(ranks, cluster)
    ranks |= fused(ranks, cluster)
    return ranks if options.p_k is not None else bounded(ranks, cluster)


def bounded(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """Those in which tasks don't make operands long before these are needed: see `read_ahead`.

    A GPU worker has one thread, and memory for a task that takes all of k.
    """
    if cluster.slowest.kind == "gpu" or not any(map(made_by_tasks, ranks)):
        return ranks
    ranks = ranked(dict.fromkeys(map(as_queued, ranks)), cluster)
    short = ranked(dict.fromkeys(in_short_parts(x, cluster) for x in ranks), cluster)
    if cluster.threads == 1 and cluster.workers > 1:
        return short
    ranks = {x: rank for x, rank in ranks.items() if x.links <= MOST_LINKS} | short
    fitting = [x for x, rank in ranks.items() if not rank.too_large]
    return {x: ranks[x] for x in with_little_ahead(fitting or list(ranks), cluster)}


# What was looked at first is looked at again by a search.
@lru_cache(maxsize=16)
def cut_alike(
    problem: Problem, cluster: ClusterSpec, options: Options, cut: Cut = AS_USUAL
) -> Mapping[Schedule, Rank]:
    """Every arrangement, all cut in the same way."""
    arrangements = _arrangements(problem.symmetric, cluster.workers, options.p_k)
    return ranked((lay_out(problem, cluster, grid, options, cut) for grid in arrangements), cluster)


def _arrangements(symmetric: bool, workers: int, p_k: int | None) -> list[Grid]:
    """Of all workers; for a symmetric product none that needs very many block rows.

    Both of its operands are A: such long, thin arrangements move most.
    """
    longest = MOST_BLOCK_ROWS if symmetric else workers
    return [x for x in grids(workers, p_k) if max(x.p_m, x.p_n) <= longest]


def _finalists(ranks: dict[Schedule, Rank], symmetric: bool) -> list[Grid]:
    """The best arrangements, but those whose transposes do as well, as they will however cut."""
    ranked = sorted(ranks, key=ranks.__getitem__)
    best: dict[tuple[frozenset[Grid], float, int], Grid] = {}
    for layout in ranked:
        grid, rank = layout.grid, ranks[layout]
        both = frozenset((grid, Grid(grid.p_n, grid.p_m, grid.p_k)))
        best.setdefault((both, rank.seconds, rank.moved), grid)
    found = [*best.values()][:ARRANGEMENTS]
    if symmetric:  # in fewer blocks than usual, the few of a triangle may be shared far more evenly
        grids = (layout.grid for layout in ranked)
        found += [x for x in grids if x.p_n == x.p_k == 1 and x.p_m <= FREE_PLACES]
    return list(dict.fromkeys(found))


def added_at_once(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """The best layouts of each grid, with more than two sums of parts of k added by one task.

    That is fewer steps at the end, and more bytes to one worker at a time: best for a small C. The
    bits are the same.
    """
    split = [layout for layout in ranks if layout.parts > 2]
    wider = [
        replace(layout, fan_in=fan_in)
        for layout in best_of_each_grid(split, ranks, 2)
        for fan_in in FAN_IN
        if fan_in < 2 * layout.parts
    ]
    return ranked(wider, cluster)


def fused(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """The best layouts of each grid whose tasks may multiply several k-tiles. Bits stay the same.

    What a task works on cannot be spilled meanwhile: so many as take no more than `FUSED` of the
    memory, in tasks as even as possible. What is still to be made need not be there all at once.
    """
    found = []
    fusible = [x for x in ranks if x.fusible and not any(x.problem.made_in_place)]
    as_given = [x for x in fusible if not x.operands.cut_again]  # what is cut anew is waited for
    tried = (x for some in (fusible, as_given) for x in best_of_each_grid(some, ranks, 2))
    for layout in dict.fromkeys(tried):
        most = max(
            1, int(FUSED * cluster.budget_bytes // max(1, sum(layout.operands.in_use.values())))
        )
        tasks = ceil_div(layout.steps, most)
        found.append(replace(layout, k_tiles_per_task=ceil_div(layout.steps, tasks)))
    return ranked(found, cluster)


def packed_within(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """The best layouts of each grid, with blocks packed by every product that uses them.

    Packing a block where it is kept is one task more, and of blocks that are used a few times the
    task takes longer than the packing: 31 against 18 ms for 8192 on two H200s, 27 against 22 for
    16384 in tf32.
    """
    packed = [layout for layout in ranks if layout.operands.packed]
    as_given = [x for x in packed if not x.operands.cut_again]  # small blocks gain most
    tried = (x for found in (packed, as_given) for x in best_of_each_grid(found, ranks, FINALISTS))
    return ranked((replace(x, pack_once=False) for x in dict.fromkeys(tried)), cluster)


def best_of_each_grid(
    layouts: list[Schedule], ranks: dict[Schedule, Rank], most: int
) -> list[Schedule]:
    """So many of them, at most, of each arrangement."""
    of_grid: dict[Grid, list[Schedule]] = {}
    for layout in sorted(layouts, key=ranks.__getitem__):
        of_grid.setdefault(layout.grid, []).append(layout)
    return [layout for found in of_grid.values() for layout in found[:most]]


def ranked(layouts: Iterable[Schedule], cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """These layouts of some of the workers."""
    return {layout: rank_of(layout, cluster) for layout in layouts}


# Cuts that differ on paper are often the same blocks.
@lru_cache(maxsize=128)
def rank_of(layout: Schedule, cluster: ClusterSpec) -> Rank:
    """What the chooser compares."""
    cluster = cluster.first(layout.grid.workers)
    moved = communication.moved(layout, cluster.workers)
    stay, spill = memory.held(layout, cluster)
    too_large = memory.excess((stay, {}), cluster) > 0
    spilled = memory.excess((stay, spill), cluster)
    terms = time.seconds(layout, cluster, moved.busiest, spilled)
    total = time.total_seconds(terms, cluster.slowest.kind)
    return Rank(too_large, total, moved.total, layout.parts, layout.grid.p_n)


def unmoved(layout: Schedule, cluster: ClusterSpec) -> float:
    """Seconds if nothing moved, and all fitted: no more than it takes."""
    terms = time.seconds(layout, cluster.first(layout.grid.workers), 0)
    return time.total_seconds(terms, cluster.slowest.kind)
