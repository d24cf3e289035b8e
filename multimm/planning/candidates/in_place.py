"""Layouts that take operands where they lie, of which a search of even arrangements knows nothing.

Blocks that a task of Dask's has made lie wherever a worker was free: mostly about in turn, and not
quite evenly. k is summed in the parts of the workers that have it. For partial products see
`multimm.planning.candidates.owner_computes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from math import inf

from multimm.planning.blocking import lay_out
from multimm.planning.candidates.owner_computes import (
    held_of_ranges,
    in_partial_products,
    with_most,
)
from multimm.planning.cost.communication import bound_2d, volume
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import AS_THEY_COME, GIVEN, Rank, rank_of, ranked, refined, unmoved
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import Grid, ceil_div, parts_of

#: C in fewer blocks than usual, too: where k is divided, it is mostly small. And fewer k-tiles.
HALVES, K_TILES = (0.5, 1), (0.125, 0.5, 1)
PART_CUTS = [Cut(x, x, k, given) for x in HALVES for k in K_TILES for given in (True, False)]


def in_place(problem: Problem, cluster: ClusterSpec, limit: float) -> dict[Schedule, Rank]:
    """Layouts in which one of the operands, or a stack, is multiplied by workers that have it.

    Those that would take more seconds than `limit`, even if nothing moved, are left out.
    """
    found = chain(in_partial_products(problem, cluster), stacks_in_place(problem, cluster))
    return ranked((x for x in found if limit == inf or unmoved(x, cluster) <= limit), cluster)


def stacks_in_place(problem: Problem, cluster: ClusterSpec) -> Iterator[Schedule]:
    """Layouts in which each block of a stack is multiplied by the worker that has most of it.

    Of A's blocks and B's, as they come. Also such that no worker has more of them than others.
    """
    lie = [*problem.a.owners, *problem.b.owners]
    known = lie and max(lie) < cluster.workers and not any(problem.rereadable)
    if cluster.workers == 1 or problem.c is not None or not (known and problem.batch_chunked):
        return
    grid = Grid(cluster.workers, 1, 1)
    layout = lay_out(problem, cluster, grid, Options(), AS_THEY_COME)
    if layout.mirrors or layout.row_panels > 1:
        return
    held = [Counter[int]() for _ in layout.row_sizes]
    for role in layout.operands.in_place:
        width, rows = layout.spec(role).itemsize, range(len(layout.m_blocks))
        across = layout.m_blocks if role == "a" else layout.n_blocks
        for share, (block, size) in product(layout.shares(role), enumerate(across)):
            each = share.matrices * size * width
            owners = layout.tiles.owners(role, share.users[0], block)
            for user, i in product(share.users, (block,) if role == "a" else rows):
                for owner, k_tile in zip(owners, layout.k_tiles, strict=True):
                    held[layout.row(user, i)][owner] += each * k_tile
    count = len(held)
    if any(held):
        for most in (count, ceil_div(count, cluster.workers)):
            owners = with_most(held, range(cluster.workers), most)
            yield replace(layout, row_owners=owners, band=count)  # one row panel


# Where a search follows what was tried first, its plan asks for them again.
@lru_cache(maxsize=1)
def parts_in_place(problem: Problem, cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """Layouts in which each worker's part of k is what it has of it, be it more or less.

    Of the larger of the operands that lie on workers, which come in the same blocks along k:

        along k            0    1    2    3    4    5        in order   0    2    4  |  1    3    5
        lies on worker     w0   w1   w0   w1   w0   w1   ->             w0   w0   w0 |  w1   w1   w1

    Then nothing of it travels, where else (p - 1) / p of it would with p workers.
    """
    a, b = problem.a, problem.b
    if problem.batch_shape or any(problem.rereadable) or a.chunks[-1] != b.chunks[-2]:
        return {}
    otherwise = bound_2d(problem, cluster.workers) + a.nbytes + b.nbytes  # at most
    if volume(problem, Grid(1, 1, cluster.workers)) >= otherwise:
        return {}
    known = [spec for spec in (a, b.T) if spec.owners]
    alone = max(known, key=lambda spec: spec.nbytes).column_owners if known else ()
    ranks: dict[Schedule, Rank] = {}
    for owners in dict.fromkeys((alone, _most_of_each_range(known))):
        p = max(owners, default=0) + 1
        as_stored = owners == parts_of(len(owners), p)
        if len({*owners}) < p or not 1 < p <= cluster.workers or as_stored or 0 in a.chunks[-1]:
            continue
        own: dict[Schedule, Rank] = {}
        for cut in dict.fromkeys((*PART_CUTS, *GIVEN)):
            layout = lay_out(problem, cluster, Grid(1, 1, p), Options(), cut, owners)
            own[layout] = rank_of(layout, cluster)
        ranks |= refined(own, cluster, Options())
    return ranks


def _most_of_each_range(known: Sequence[MatrixSpec]) -> tuple[int, ...]:
    """For each range of k the worker that has most of A and B there, none of them for too many."""
    held = held_of_ranges(known)
    workers = sorted({*chain(*held)})
    return with_most(held, workers, ceil_div(len(held), max(1, len(workers))))
