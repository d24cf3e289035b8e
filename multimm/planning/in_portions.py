"""Layouts that multiply a tall or a wide matrix where it lies: see `multimm.planning.gathered`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from multimm.planning.blocking import EDGE, MOST_ELEMENTS, Cut, Options, lay_out
from multimm.planning.gathered import GatheredLayout
from multimm.planning.grid import Blocks, Grid, ceil_div, group
from multimm.planning.order import Order, in_order, owners_of_columns, unchanged
from multimm.planning.problem import Problem
from multimm.planning.spec import ClusterSpec, MatrixSpec

#: Times as many blocks of C as are needed: with more of them a worker sends the portions of one
#: while it multiplies for the next.
FINER = (1, 2, 4, 8)
#: Slabs as long as can be: what is large does not travel.
LONG = Cut(slabs=0.0625)
#: Blocks of C have as many elements as usual times this, at most: arbitrary, 2 GB on GPUs.
LARGEST = 2
#: A task has so many chunks at least, on average: arbitrary, with fewer there is little to gain.
LEAST_JOINED = 2


def in_portions(problem: Problem, cluster: ClusterSpec) -> Iterator[GatheredLayout]:
    """Layouts that multiply a tall or a wide matrix where it lies, in few tasks.

    None where each worker's portion of a block of C would be a chunk or two, or where it is not
    known that each block row of A, or block column of B, lies on one worker.
    """
    known = problem.c is None and not any(problem.rereadable)
    nothing = not problem.m * problem.n or cluster.workers == 1
    if problem.batch_shape or problem.gram or not known or nothing:
        return
    for by_columns, spec in enumerate((problem.a.T, problem.b)):
        owners = owners_of_columns(spec) if spec.owners else ()
        if owners and max(owners) < cluster.workers:
            yield from _layouts(problem, cluster, bool(by_columns), spec, owners)


def _layouts(
    problem: Problem, cluster: ClusterSpec, by_columns: bool, spec: MatrixSpec, owners: Blocks
) -> Iterator[GatheredLayout]:
    """Those of block columns of `spec`, B or A transposed, that lie on `owners`."""
    chunks, workers = spec.chunks[1], cluster.workers
    most_of_c = LARGEST * EDGE[cluster.slowest.kind] ** 2
    least = max(
        ceil_div(problem.m * problem.n, most_of_c),
        ceil_div(spec.rows * spec.cols, workers * MOST_ELEMENTS),
    )
    rounds = max(1, ceil_div(least, workers))  # else some worker would have nothing of C
    for count in (finer * rounds * workers for finer in FINER):
        order, portions = _dealt(chunks, owners, group(chunks, ceil_div(spec.cols, count)), workers)
        if 0 < LEAST_JOINED * sum(map(bool, portions)) <= len(chunks):
            yield _laid_out(problem, cluster, by_columns, order, portions)


def _dealt(chunks: Blocks, owners: Blocks, strips: Blocks, workers: int) -> tuple[Order, Blocks]:
    """The chunks of each strip in the order of their workers, and how long each portion is.

    >>> _dealt((1, 2, 3, 4), (1, 0, 1, 1), (3, 7), 2)
    ((1, 0, 2, 3), (2, 1, 0, 7))
    """
    ends, starts = [*accumulate(strips)], accumulate(chunks, initial=0)
    portion_of, portions = [], [0] * workers * len(strips)
    for start, size, owner in zip(starts, chunks, owners, strict=False):
        strip = min(bisect_right(ends, start), len(strips) - 1)
        portion_of.append(strip * workers + owner)
        portions[portion_of[-1]] += size
    return tuple(sorted(range(len(chunks)), key=portion_of.__getitem__)), tuple(portions)


def _laid_out(
    problem: Problem, cluster: ClusterSpec, by_columns: bool, order: Order, portions: Blocks
) -> GatheredLayout:
    """The layout with these portions, and with slabs and the other side as they are cut usually."""
    sorted_ = () if unchanged(order) else order
    if by_columns:
        problem = replace(problem, b=in_order(problem.b, order), columns=sorted_)
        grid = Grid(1, cluster.workers, 1)
    else:
        problem = replace(problem, a=in_order(problem.a.T, order).T, rows=sorted_)
        grid = Grid(cluster.workers, 1, 1)
    usual, _ = lay_out(problem, cluster, grid, Options(), LONG)
    rows, columns = (usual.m_blocks, portions) if by_columns else (portions, usual.n_blocks)
    band = ceil_div(len(rows), grid.p_m)
    return GatheredLayout(
        problem, grid, (), rows, columns, usual.slabs, band, pack_once=False, by_columns=by_columns
    )
