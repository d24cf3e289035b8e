"""Products that some of the workers do sooner than all of them.

Every worker more means more tasks, which the scheduler sends one after the other, and more
operand blocks that travel. A small product does not pay for that: 16384 x 819 @ 819 x 16384 takes
18 ms on one H200, 24 on two and 29 on four. Those that have a place are the first ones, so that
they share a node as far as they can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.cost import time
from multimm.planning.hardware import ClusterSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import NEARLY, Rank, cut_alike, ranked, refined
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import ceil_div

#: How the products of few workers are cut best: into few tasks. Of 840 plans for 3 to 16 H200s none
#: takes more than 1 % longer than after a search of everything for the workers that are left.
CUTS = Cut(k_tiles=0.125), Cut(k_tiles=0.5), Cut(columns=2, k_tiles=0.125)
#: Workers of a node are left out of products that one worker computes within so many calls' time:
#: in `tf32` squares of 16384, of two calls, took 27 ms on two of four H200s and 36 on all of them,
#: 24576, of five, 43 on either.
CALLS = 5


def with_fewer(
    problem: Problem, cluster: ClusterSpec, options: Options, best: Rank
) -> dict[Schedule, Rank]:
    """Arrangements of fewer workers, if one of them takes less than `best`, of all.

    Of nearly equal numbers the smallest: what more workers take is predicted too low, the more the
    slower the host is (in `tf32` 20480 squares take 33 ms on two of four H200s and 41 on all, 32
    and 33 are predicted). Blocks, k-tiles or parts of k that the caller fixed are as many tasks on
    fewer workers. Operands that are still to be made may take longer than the product, and all
    workers make them sooner.
    """
    if best.too_large or options.given or problem.awaited:
        return {}
    found: dict[Schedule, Rank] = {}
    limit = best.seconds
    for count in _counts(problem, cluster):
        if at_least(problem, cluster.first(count)) < limit:
            ranks = _in_few_tasks(problem, cluster.first(count))
            first = min(ranks.values())
            if not first.too_large and first.seconds < limit:
                found = ranks
                limit = first.seconds / NEARLY
    return found


def _in_few_tasks(problem: Problem, cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """All arrangements, in few blocks and k-tiles, or in those in which operands come."""
    options, plain = Options(), replace(problem, symmetric=False)
    ranks: dict[Schedule, Rank] = {}
    for cut in CUTS:
        ranks |= cut_alike(plain, cluster, options, cut)
    if problem.symmetric:
        ranks |= cut_alike(problem, cluster, options, CUTS[0])
    if problem.chunked:
        ranks |= cut_alike(problem, cluster, options, Cut(given=True))
    ranks = refined(ranks, cluster, options)
    return ranks | ranked(in_partial_products(problem, cluster), cluster)


def _counts(problem: Problem, cluster: ClusterSpec) -> Iterator[int]:
    """Numbers of workers, fewer than all.

    Powers of two of whole nodes; of one node's workers only for a short product. What lies on
    workers stays within their nodes: only there are links as fast as is reckoned.
    """
    node = cluster.node
    c = () if problem.c is None else problem.c.owners
    owned = max(problem.a.owners + problem.b.owners + c, default=0)
    powers = [2**i for i in range(cluster.workers.bit_length())]
    short = problem.flops <= CALLS * cluster.call_s * _rate(problem, cluster)
    within = takewhile(node.__gt__, powers) if short else ()
    for count in (*within, *(node * power for power in powers)):
        nodes = ceil_div(count, node)
        if count < cluster.workers and owned < node * nodes:
            yield count


def at_least(problem: Problem, cluster: ClusterSpec) -> float:
    """Seconds of any plan of which each worker has a task."""
    flops = problem.flops / (2 if problem.symmetric else 1)
    sent = cluster.workers * cluster.task_overhead_s
    products = flops / (cluster.workers * _rate(problem, cluster))
    operands = problem.a.nbytes + (0 if problem.symmetric else problem.b.nbytes)
    products += time.reading(operands / cluster.workers, cluster.slowest)
    products += time.making(problem.result_bytes / cluster.workers, cluster.slowest)
    return time.starting(problem, cluster, cluster.workers) + max(sent, products)


def _rate(problem: Problem, cluster: ClusterSpec) -> float:
    """Operations per second of the slowest worker."""
    return time.product_gflops(problem, cluster.slowest) * 1e9
