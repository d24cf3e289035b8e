"""Layouts that take operands where they lie, of which a search of even arrangements knows nothing.

Blocks that a task of Dask's has made lie wherever a worker was free: mostly about in turn, and not
quite evenly. Rows, columns and matrices then have the turns of the workers that have them (see
`multimm.planning.work.cyclic`), and k is summed in their parts. For partial products see
`multimm.planning.candidates.owner_computes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, product

from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import Rank, given_cuts, rank_of, ranked, refined
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import Blocks, Grid, Located, ceil_div, parts_of

#: C in fewer blocks than usual, too: where k is divided, it is mostly small. And fewer k-tiles.
HALVES, K_TILES = (0.5, 1), (0.125, 0.5, 1)
PART_CUTS = [Cut(x, x, k, given) for x in HALVES for k in K_TILES for given in (True, False)]


def in_place(problem: Problem, cluster: ClusterSpec) -> dict[Schedule, Rank]:
    """Layouts in which k, rows, columns or matrices are multiplied by workers that have them."""
    ranks = parts_in_place(problem, cluster)
    for located, grid in sides_in_place(problem, cluster.workers):
        for cut in given_cuts(cluster):
            layout, held = lay_out(problem, cluster, grid, Options(), cut, located)
            if layout.located == located:  # or blocks would be cut or joined
                ranks |= refined({layout: rank_of(layout, cluster, held)}, cluster, Options())
    whole = [stack_in_place(problem, cluster.workers), *in_partial_products(problem, cluster)]
    return ranks | ranked(filter(None, whole), cluster)


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
        for cut in dict.fromkeys((*PART_CUTS, *given_cuts(cluster))):
            located = Located(parts=owners)
            layout, held = lay_out(problem, cluster, Grid(1, 1, p), Options(), cut, located)
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


def sides_in_place(problem: Problem, workers: int) -> Iterator[tuple[Located, Grid]]:
    """The turns of block rows, and those of block columns, that stay with their workers.

    With the grid of these. Only where each block row of A, or block column of B, lies on one
    worker, and where blocks in their order would not stay. C has to come in the same blocks, if
    there is one.
    """
    if problem.batch_shape or problem.symmetric or any(problem.rereadable):
        return
    c = problem.c
    if rows := _turns(problem.a.T, None if c is None else c.T, workers):
        yield Located(rows=rows), Grid(workers, 1, 1)
    if columns := _turns(problem.b, c, workers):
        yield Located(columns=columns), Grid(1, workers, 1)


def _turns(spec: MatrixSpec, c: MatrixSpec | None, workers: int) -> Blocks:
    """The turns of its columns; empty where they are in their order, or C's others."""
    turns = turns_of(spec.column_owners, workers) if spec.owners else ()
    alike = c is None or c.chunks[1] == spec.chunks[1]
    return turns if alike and turns != (*range(len(turns)),) else ()


def stack_in_place(problem: Problem, workers: int) -> Schedule | None:
    """A stack in the blocks that it comes in, with its matrices in turn of who has them.

    By the larger of the operands that lie on workers. None unless all come in blocks of whole
    matrices, the same for each that is not shared by all.
    """
    a, b, c = problem.a, problem.b, problem.c
    given = [spec for spec in (a, b, c) if spec is not None]
    own = [spec for spec in given if len(spec.shape) > 2 and spec.shape[0] > 1]
    whole = all(len(blocks) == 1 for spec in given for blocks in spec.chunks[-2:])
    alike = len({spec.chunks[0] for spec in own}) == 1
    if len(problem.batch_shape) != 1 or problem.symmetric or any(problem.rereadable):
        return None
    known = [spec for spec in own if spec.owners and spec is not c]
    if not (whole and alike and known):
        return None
    turns = turns_of(max(known, key=lambda spec: spec.nbytes).owners, workers)
    sizes, band = ((problem.m,), (problem.n,), (problem.k,)), ceil_div(len(turns), workers)
    return Schedule(
        problem, Grid(workers, 1, 1), (own[0].chunks[0],), *sizes, band=band, pack_once=False,
        located=Located(rows=turns),
    )  # fmt: skip


def turns_of(owners: Sequence[int], workers: int) -> Blocks:
    """Turns of blocks, so that each is its owner's as long as that one has turns left.

    >>> turns_of((1, 1, 0, 1, 0), 2)
    (1, 3, 0, 4, 2)
    """
    free = [[*range(worker, len(owners), workers)][::-1] for worker in range(workers)]
    found = [free[x].pop() if x < workers and free[x] else -1 for x in owners]
    left = iter(sorted(turn for own in free for turn in own))
    return tuple(next(left) if turn < 0 else turn for turn in found)
