"""Layouts that take operands where they lie, of which a search of even arrangements knows nothing.

Blocks that a task of Dask's has made lie wherever a worker was free: mostly about in turn, and not
quite evenly. k is summed in the parts of the workers that have it. For partial products see
`multimm.planning.candidates.owner_computes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, product

from multimm.planning.blocking import lay_out
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import GIVEN, Rank, rank_of, ranked, refined
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import Grid, ceil_div, parts_of

#: C in fewer blocks than usual, too: where k is divided, it is mostly small. And fewer k-tiles.
HALVES, K_TILES = (0.5, 1), (0.125, 0.5, 1)
PART_CUTS = [Cut(x, x, k, given) for x in HALVES for k in K_TILES for given in (True, False)]


def in_place(problem: Problem, cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """Layouts in which k, or one of the operands, is multiplied by workers that have it."""
    partial_products = ranked(in_partial_products(problem, cluster), cluster)
    return parts_in_place(problem, cluster) | partial_products


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
            layout, held = lay_out(problem, cluster, Grid(1, 1, p), Options(), cut, owners)
            own[layout] = rank_of(layout, cluster, held)
        ranks |= refined(own, cluster, Options())
    return ranks


def _most_of_each_range(known: Sequence[MatrixSpec]) -> tuple[int, ...]:
    """For each range of k the worker that has most of A and B there, none of them for too many.

    Parameters
    ----------
    known : sequence of MatrixSpec
        A, and B transposed, if it is known where they lie.
    """
    held = [Counter[int]() for spec in known[:1] for _ in spec.chunks[1]]
    for spec in known:
        sizes = product(spec.chunks[0], enumerate(spec.chunks[1]))
        for owner, (rows, (place, columns)) in zip(spec.owners, sizes, strict=True):
            held[place][owner] += rows * columns * spec.itemsize
    workers = sorted({*chain(*held)})
    room = Counter(dict.fromkeys(workers, ceil_div(len(held), max(1, len(workers)))))
    found = [0] * len(held)
    for place in sorted(range(len(held)), key=lambda x: -max(held[x].values())):
        own = max((w for w in workers if room[w]), key=held[place].__getitem__)
        found[place], room[own] = own, room[own] - 1
    return tuple(found)
