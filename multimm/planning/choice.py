"""Which schedule a product gets, and why.

Every arrangement of P = p_m p_n p_k workers is one of these; what is *stationary* never
travels, the arrows do:

    stationary C (p_k = 1)          stationary A (p_n = 1)          stationary B (p_m = 1)

      B   v     v                     B = one row per part            B  [w0 | w1]
        +----+----+                   of k, to all of a column           [w2 | w3]
    A > | w0 | w1 | A rows go right,  A  [w0 | w1]  (w0, w1: parts    A goes down, C's partial
        +----+----+ B columns down.      [w2 | w3]   of k) and        sums of a column of
      > | w2 | w3 | C stays.          C's partial sums go left.       workers are added.
        +----+----+

with p_m, p_n and p_k all above one, C is stationary within each part of k and the partial
sums of the parts are added ("three-dimensional"). The volume of all is
|A| (p_n - 1) + |B| (p_m - 1) + |C| (p_k - 1), so the largest matrix wants the factor 1: a
tall-skinny product keeps A or B in place, a symmetric product of long vectors splits k.

Source of the volume: van de Geijn and Watts, "SUMMA" (1997), for the plane; Solomonik and
Demmel, "Communication-optimal parallel 2.5D matrix multiplication" (2011), with parts of k.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from math import inf, prod

from multimm.display.units import duration, human
from multimm.planning.candidates.in_place import in_place, parts_in_place
from multimm.planning.candidates.rank_map import renumbered
from multimm.planning.candidates.worker_subset import at_least, with_fewer
from multimm.planning.cost import time as cost_time
from multimm.planning.hardware import ClusterSpec
from multimm.planning.limits import refuse_storage_chunks, refuse_the_hopeless
from multimm.planning.options import Options
from multimm.planning.plan import Asked, MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import NEARLY, Rank, candidates, cut_alike, first_look, ranked
from multimm.planning.tiling.counts import AS_USUAL, JOINED, Cut, most_of
from multimm.planning.tiling.grid import Grid

#: Plans that were seen to take longer than predicted have to be so many times as fast as others, or
#: to move so many times fewer bytes: see `_preferred`. Arbitrary.
GAIN, FEWER = 1.1, 2
#: On CPU workers a later plan wins that spares at least this share of the fastest one's bytes. It
#: may be later by so many seconds at most, by such a share of the time, and by what the spared
#: bytes would take if each took so many times as long. For workers share cores with each other and
#: the scheduler, and bytes take longer beside tasks than is predicted: the benchmark's contraction
#: "abef,ijef->abij" in 4 tasks that move 21 MB took two workers 63 ms, in 12 that move 3.6 MB 56
#: (medians 81 and 71), where 39 and 46 are predicted; "etx,ftx->ef" with 41 and 29 MB 116 and 106
#: (188 and 144).
FEWER_BYTES, MORE_S, MORE, DEARER = 0.35, 0.01, 0.2, 3

logger = logging.getLogger(__name__)

#: If a first look finds a plan within so many seconds of the least that any plan takes, nothing
#: else is searched for. A search takes 6 to 80 ms of a processor.
SEARCH_S = {"cpu": 0.04, "gpu": 0.022}
#: On GPUs, for plans of up to so many seconds and chunks of both operands, a few arrangements in
#: other blocks (`PROBES`) say whether to search: not if the best of them takes so many times as
#: long as what was found. No golden plan changes by it; with 64 chunks one would take 51 ms for 30.
PROBED_S, FEW_CHUNKS, HOPELESS = 0.036, 24, 1.1
#: So many candidates of a search for few chunks are looked at again where these lie elsewhere.
#: Arbitrary: one golden plan would change, by 3 %, which is of one array on both sides.
KEPT = 6
#: How arrangements are cut that are tried first: as usual, and into long k-tiles.
PROBES = (AS_USUAL, Cut(k_tiles=0.125))
#: Bytes of operands and result below which fewer workers are looked at, too: they are often better
#: for what is so small. Arbitrary.
FEWER_WORKERS_BYTES = {"cpu": 0, "gpu": 1e9}
#: A product that one worker finishes in this time is one task: arbitrary, the scheduler's
#: time for twenty tasks.
SMALL_SECONDS = 0.01
#: ... and whose blocks together are no larger than this: arbitrary.
SMALL_BYTES = 64_000_000
#: ... and for which no more chunks come from other CPU workers that have made them. One task waits
#: for them all, and Dask makes them wherever a worker is free; chunks of several blocks are made
#: where they are multiplied. With 16 that come one task takes no more of two workers' processors
#: than blocks do, with 25 a third more, with 100 twice as much (docs/decisions/planning.md).
SMALL_FETCHES = 20


# The same shapes are multiplied again and again, and a search takes some milliseconds.
@lru_cache(maxsize=128)
def plan_matmul(
    problem: Problem,
    cluster: ClusterSpec,
    *,
    precision: str = "float32",
    options: Options | None = None,
) -> MatmulPlan:
    """Choose grid, blocks, k-tiles and row panels with the least predicted time that fit in memory.

    Parameters
    ----------
    problem : Problem
    cluster : ClusterSpec
    precision : str
        Carried in the plan; it does not change the schedule.
    options : Options, optional
        Blocks, k-tiles and p_k that the caller fixed.

    Returns
    -------
    MatmulPlan
        Also one that does not fit in memory, or in Dask's scheduler: ``plan.check()`` raises.

    Raises
    ------
    MemoryBudgetError
        If that is so by orders of magnitude, or of the storage chunks that are read: nothing is
        laid out then.
    """
    options = options or Options()
    refuse_the_hopeless(problem, cluster, options)
    refuse_storage_chunks(problem, cluster)
    asked = Asked(problem, options, plan_matmul)
    # 1. A small product is one task: moving it costs less than scheduling it.
    if not options.given and is_small(problem, cluster):
        layout = _one_block(problem, cluster)
        alone = cost_time.seconds(layout, cluster, 0)["block products"]
        reason = f"it takes {duration(alone)} on one worker"
        return MatmulPlan(layout, cluster, precision, "one task", reason, asked)
    # 2. Otherwise workers are numbered as operands lie on them, and blocks may stay there.
    problem, cluster = renumbered(problem, cluster)
    as_they_come = {} if options.given else _as_they_come(problem, cluster)
    placed = {} if options.given else in_place(problem, cluster, _limit(as_they_come, cluster))
    found = _at_once(problem, cluster, placed | as_they_come) if as_they_come else {}
    if found:
        ranks, all_work = found, min(found.values())
        if _is_little(problem, cluster):
            ranks = with_fewer(problem, cluster, options, all_work) or found
    else:  # or workers are arranged in every way, or fewer of them if that is faster.
        found = _searched_for(problem, cluster, options)
        all_work = min(found.values())
        placed |= {} if options.given else parts_in_place(problem, cluster)
        ranks = (with_fewer(problem, cluster, options, all_work) or found) | placed
    # 3. One of them is preferred.
    best = _preferred(ranks, cluster)
    plan = MatmulPlan(best, cluster, precision, strategy_name(best), "", asked)
    plan = replace(plan, reason=_reason(plan, ranks, all_work.seconds))
    logger.debug("%s", plan)
    return plan


def _searched_for(problem: Problem, cluster: ClusterSpec, options: Options) -> dict[Schedule, Rank]:
    """Candidates; of few chunks on GPUs the best of those for chunks that lie nowhere.

    These are searched for once, wherever operands lie at the next call.
    """
    a, b = problem.a, problem.b
    plain = problem.c is None and not (problem.same or problem.awaited or options.given)
    if not (plain and (a.owners or b.owners) and _few_on_gpus(problem, cluster)):
        return candidates(problem, cluster, options)
    anywhere = replace(problem, a=replace(a, owners=()), b=replace(b, owners=()))
    unnamed = replace(cluster, addresses=(), numbers=())  # which worker has the first blocks, too
    best = _best_anywhere(anywhere, unnamed)
    return ranked((replace(layout, problem=problem) for layout in best), cluster)


@lru_cache(maxsize=128)
def _best_anywhere(problem: Problem, cluster: ClusterSpec) -> tuple[Schedule, ...]:
    """The best candidates."""
    found = candidates(problem, cluster, Options())
    return tuple(sorted(found, key=found.__getitem__)[:KEPT])


def _as_they_come(problem: Problem, cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """Layouts that a first look finds where blocks lie on workers; none if there may be better."""
    chunked = problem.chunked or any(len(chunks) > 1 for chunks in problem.batch_chunks)
    known = chunked and (problem.a.owners or problem.b.owners) and cluster.workers > 1
    on_cpus = cluster.slowest.kind == "cpu"
    if not known or problem.awaited:
        return {}
    if on_cpus and problem.symmetric:  # halves of C are searched for
        return parts_in_place(problem, cluster)
    if problem.c is not None and _is_little(problem, cluster):  # none is multiplied in place
        return {}
    return first_look(problem, cluster)


def _limit(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> float:
    """Seconds beyond which no other layout is preferred to these."""
    best = min(ranks.values(), default=None)
    if best is None or best.too_large:
        return inf
    later = min(MORE_S, MORE * best.seconds) if cluster.slowest.kind == "cpu" else 0
    return NEARLY * best.seconds + later


def _at_once(
    problem: Problem, cluster: ClusterSpec, found: dict[Schedule, Rank]
) -> dict[Schedule, Rank]:
    """What a first look has found, and parts of k; none if a search may find better."""
    rank = found[_preferred(found, cluster)]
    later = inf if rank.too_large else rank.seconds - at_least(problem, cluster)
    if later <= SEARCH_S[cluster.slowest.kind]:
        return found
    if not _few_on_gpus(problem, cluster) or later > PROBED_S:
        return {}
    probes = [cut_alike(problem, cluster, Options(), cut) for cut in PROBES]
    best = min(own.seconds for ranks in probes for own in ranks.values())
    if best <= HOPELESS * rank.seconds:
        return {}
    return found | parts_in_place(problem, cluster)


def _few_on_gpus(problem: Problem, cluster: ClusterSpec) -> bool:
    """Whether so few chunks lie on GPUs that a search may take longer than what it gains."""
    few = problem.a.blocks + problem.b.blocks <= FEW_CHUNKS
    return few and cluster.slowest.kind == "gpu"


def _is_little(problem: Problem, cluster: ClusterSpec) -> bool:
    """Whether fewer workers may be better than all for an operand where it lies."""
    size = problem.a.nbytes + problem.result_bytes + (0 if problem.same else problem.b.nbytes)
    return size < FEWER_WORKERS_BYTES[cluster.slowest.kind]


# Asked for with every product of operands in host memory, as long as the other plans are.
@lru_cache(maxsize=128)
def in_one_task(problem: Problem, cluster: ClusterSpec, precision: str) -> MatmulPlan:
    """All of a product of operands in host memory as one task, whose steps follow each other."""
    layout = replace(_one_block(replace(problem, in_one=True), cluster), pack_once=False)
    reason = "copies to a GPU and back take less than further tasks"
    asked = Asked(problem, Options(), plan_matmul)
    return MatmulPlan(layout, cluster, precision, "one task", reason, asked)


def _one_block(problem: Problem, cluster: ClusterSpec) -> Schedule:
    """All of a product as one task."""
    batch = tuple((size,) for size in problem.batch_shape)
    # Of one array on both sides only one goes to a GPU, or is joined and read by a CPU; a C would
    # be added by another task.
    once = problem.in_one or cluster.slowest.kind == "cpu"
    halves = once and problem.symmetric and problem.c is None
    blocks = (problem.m,), (problem.n,), (problem.k,)
    return Schedule(problem, Grid(1, 1, 1), batch, *blocks, band=1, mirrors=halves)


def is_small(problem: Problem, cluster: ClusterSpec) -> bool:
    """One worker finishes it before others could be told, and waits for few chunks of theirs."""
    seconds = problem.flops / (cost_time.product_gflops(problem, cluster.slowest) * 1e9)
    size = problem.a.nbytes + problem.b.nbytes + problem.result_bytes
    if problem.batch * problem.m * problem.n > cluster.threads * most_of(problem, cluster).c:
        return False
    if _fetches(problem, cluster) > SMALL_FETCHES:
        return False
    operands = zip((problem.a, problem.b), problem.made_anywhere, strict=True)
    made = sum(prod(spec.shape) for spec, anywhere in operands if anywhere)
    if made > JOINED and cluster.slowest.kind == "cpu":  # one task holds all, and joined once more
        return False
    return seconds <= SMALL_SECONDS and size <= min(SMALL_BYTES, cluster.budget_bytes)


def _fetches(problem: Problem, cluster: ClusterSpec) -> float:
    """Chunks that one of the CPU workers would fetch, of those that tasks make anywhere.

    0 where blocks for all workers would have parts of chunks.
    """
    blocks = len(problem.a.chunks[-2]) * len(problem.b.chunks[-1])
    if not problem.awaited or cluster.slowest.kind == "gpu" or blocks < cluster.workers:
        return 0
    specs = (problem.a,) if problem.same else (problem.a, problem.b)
    made = [
        spec.blocks
        for spec, read in zip(specs, problem.rereadable, strict=False)
        if not (read or spec.owners)
    ]
    return sum(made) * (1 - 1 / cluster.workers)


def strategy_name(layout: Schedule) -> str:
    """What stays in place in an arrangement."""
    p_m, p_n, p_k = layout.grid
    if layout.in_place is not None:
        return "owners compute"
    if layout.grid.workers == 1:
        return "one worker"
    if p_k == 1:
        return "C stays in place"
    if p_m == p_n == 1:
        return "each sums a range of k (split k)"
    if 1 in (p_m, p_n):
        return f"{'A' if p_n == 1 else 'B'} stays in place"
    return f"each block of C summed by {p_k}"


def _preferred(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> Schedule:
    """The layout that is taken: the cheapest, but what took longer than predicted has to gain.

    Sums of parts of k travel when all else is done, and wait for the slowest worker: on eight
    workers that shared four GPUs, 32768 in `float32` with two parts took 1.37 times as long as
    predicted; without, on two GPUs, 1.03 to 1.15 times. On the only GPU, joining chunks of 128 MB
    took 1.03 to 1.6 times as long as multiplying each by itself, by a smaller matrix
    (docs/decisions/tasks.md). Of several GPUs, products of single chunks are a little slower than
    of large blocks, which no prediction knows.
    """
    gpu = cluster.slowest.kind == "gpu"
    sums = {x: rank for x, rank in ranks.items() if _sends_sums(x)}
    others = {x: rank for x, rank in ranks.items() if x not in sums}
    lone = gpu and cluster.workers == 1
    sure = [x for x in others if others[x].parts == 1 and (not lone or _joins_nothing(x))]
    found = _gaining(others, sure, cluster)
    sums[found] = ranks[found]
    return _gaining(sums, [found] * gpu, cluster)


def _gaining(ranks: dict[Schedule, Rank], sure: list[Schedule], cluster: ClusterSpec) -> Schedule:
    """The cheapest layout, or the cheapest of those that are sure where it gains too little."""
    best = _cheapest(ranks, cluster)
    other = _cheapest({x: ranks[x] for x in sure}, cluster) if sure else best
    new, old = ranks[best], ranks[other]
    faster = new.too_large < old.too_large or GAIN * new.seconds < old.seconds
    return best if faster or FEWER * new.moved < old.moved else other


def _sends_sums(layout: Schedule) -> bool:
    """Whether partial products may travel."""
    return layout.in_place is not None and layout.grid.workers > 1


def _joins_nothing(layout: Schedule) -> bool:
    """Whether chunks are multiplied as they come.

    They are the blocks, or each is multiplied by a matrix no larger than one of them.
    """
    own, parts = layout.in_place, layout.partial_products
    if own is None:
        return not layout.operands.cut_again
    if parts is None or parts.totals.sub_blocks:
        return False
    largest = max(parts.rows) * max(parts.columns)
    return 0 < parts.alone <= largest and own.sent.nbytes <= largest * own.laid.itemsize


def _cheapest(ranks: dict[Schedule, Rank], cluster: ClusterSpec) -> Schedule:
    """The layout that moves least of those that are nearly as fast as the fastest."""
    first = min(ranks.values())
    fitting = {x: rank for x, rank in ranks.items() if rank.too_large == first.too_large}

    def cost_of(layout: Schedule) -> tuple[int, int, float, int]:
        rank = ranks[layout]
        return rank.moved, rank.parts, rank.seconds, rank.columns

    def within(seconds: float) -> list[Schedule]:
        return [x for x, rank in fitting.items() if rank.seconds <= seconds]

    found = min(within(NEARLY * first.seconds), key=cost_of)
    if cluster.slowest.kind == "cpu":
        other = min(within(first.seconds + min(MORE_S, MORE * first.seconds)), key=cost_of)
        later = ranks[other].seconds - ranks[found].seconds
        spared = ranks[found].moved - ranks[other].moved
        worth = (DEARER - 1) * spared / (cluster.workers * cluster.link.gbps * 1e9)
        if spared >= FEWER_BYTES * ranks[found].moved and later <= worth:
            return other
    return found


def _reason(plan: MatmulPlan, ranks: dict[Schedule, Rank], of_all: float) -> str:
    """Why this arrangement of these; with all workers the best one takes so many seconds."""
    layout, workers = plan.layout, plan.cluster.workers
    if layout.in_place is not None:
        large = layout.in_place.large.upper()
        stays = f"{large} stays where it lies, its partial products travel"
        return f"{stays}; {human(plan.bytes_moved)} move"
    if layout.row_owners or layout.k_parts:
        what = "ranges of k are summed where they lie"
        if layout.row_owners:
            what = "each block of the stack is multiplied where most of it lies"
        return f"{what}; {human(plan.bytes_moved)} move"
    if workers == 1:
        return "there is one worker"
    moved = f"{human(ranks[layout].moved)} move" if ranks[layout].moved else "nothing moves"
    if layout.operands.rechunk.nbytes:
        moved += f", about {human(layout.operands.rechunk.nbytes)} of them to rechunk operands"
    if min(ranks.values()).seconds < of_all:
        count = layout.grid.workers
        alone = f"{count} worker{'s' * (count > 1)} alone take{'s' * (count == 1)}"
        moved = f"{alone} {duration(plan.seconds)}, all {workers} {duration(of_all)}; {moved}"
    others = [other for other in ranks if other.grid != layout.grid]
    if not others and layout.grid.workers == 1:
        return moved
    if not others:
        return f"p_k = {layout.grid.p_k} leaves no other arrangement; {moved}"
    second = min(others, key=ranks.__getitem__)
    other, own = ranks[second], ranks[layout]
    text = f"{moved}; the next best, {second.grid.sides}"
    if other.moved:
        text += f", moves {human(other.moved)}"
    return text if other.moved >= max(1, own.moved) else f"{text}, {_drawback(other, own)}"


def _drawback(other: Rank, own: Rank) -> str:
    """What speaks against an arrangement that moves less."""
    if other.too_large > own.too_large:
        return "which does not fit"
    slow, fast = sorted((other.seconds, own.seconds), reverse=True)
    if slow <= NEARLY * fast:
        time = f"as fast within {NEARLY - 1:.0%}"
    else:
        time = f"{duration(other.seconds)} in place of {duration(own.seconds)}"
    if other.parts > own.parts == 1:
        return f"{time}, but with sums of {other.parts} ranges of k, which travel last"
    return time
