"""Layouts that take operands where they lie, of which a search of even arrangements knows nothing.

Blocks that a task of Dask's has made lie wherever a worker was free: mostly about in turn, and not
quite evenly. See `multimm.planning.candidates.block_order`, and for partial products
`multimm.planning.candidates.owner_computes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from multimm.planning.candidates.block_order import (
    larger_owners_of_k,
    stack_where_it_lies,
    where_they_lie,
)
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.hardware import ClusterSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import Rank, rank_of, ranked, refined
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import Grid, ceil_div

#: C in fewer blocks than usual, too: where k is divided, it is mostly small.
HALVES = (0.5, 1)


class Family(NamedTuple):
    """Layouts of one kind."""

    ranks: dict[Schedule, Rank]
    cluster: ClusterSpec
    reason: str
    #: What stays in place, where C comes in other blocks than that: others would keep its rows.
    strategy: str = ""


def in_place(problem: Problem, cluster: ClusterSpec) -> Iterator[Family]:
    """Layouts in which rows, columns or matrices are multiplied by the workers that have them."""
    for other, grid in where_they_lie(problem, cluster.workers):
        if ranks := _as_they_come(other, cluster, grid):
            yield Family(ranks, cluster, "operands stay where they lie")
    if (stack := stack_where_it_lies(problem, cluster.workers)) is not None:
        ranks = ranked([_whole_matrices(stack, cluster)], cluster)
        yield Family(ranks, cluster, "matrices stay where they lie")
    by_name: dict[str, list[Schedule]] = {}
    for layout in in_partial_products(problem, cluster):
        if layout.in_place is not None:
            by_name.setdefault(layout.in_place.large.upper(), []).append(layout)
    for name, found in by_name.items():
        reason = f"{name} stays where it lies, and what is made of it travels"
        yield Family(ranked(found, cluster), cluster, reason, f"stationary {name}")


def parts_in_place(problem: Problem, cluster: ClusterSpec) -> Iterator[Family]:
    """Layouts in which each worker's part of k is what it has of it, be it more or less.

    Of blocks of k that lie on workers in their order. Even parts are what other layouts have.
    """
    blocks, p = Counter(larger_owners_of_k(problem)), cluster.workers
    counts = tuple(blocks[worker] for worker in range(p))
    if not all(counts) or sum(counts) != blocks.total() or max(counts) - min(counts) < 2:
        return
    ranks: dict[Schedule, Rank] = {}
    for factor in HALVES:
        cut = Cut(factor, factor, given=True)
        layout, _ = lay_out(problem, cluster, Grid(1, 1, p), Options(), cut)
        if layout.k_tiles == problem.a.chunks[-1] and not layout.stream:
            ranks |= ranked([replace(layout, part_k_tiles=counts)], cluster)
    if ranks:
        yield Family(refined(ranks, cluster, Options()), cluster, "parts of k are where they lie")


def _whole_matrices(problem: Problem, cluster: ClusterSpec) -> Schedule:
    """A stack in the blocks that it comes in, assigned to the workers in turn."""
    blocks = next(
        x.chunks[0] for x in (problem.a, problem.b) if x.shape[:-2] == problem.batch_shape
    )
    sizes, band = ((problem.m,), (problem.n,), (problem.k,)), ceil_div(len(blocks), cluster.workers)
    grid = Grid(cluster.workers, 1, 1)
    return Schedule(problem, grid, (blocks,), *sizes, band=band, pack_once=False)


def _as_they_come(problem: Problem, cluster: ClusterSpec, grid: Grid) -> dict[Schedule, Rank]:
    """A grid's layouts in the blocks that operands come in.

    Empty where rows or columns that are taken in another order would be cut or joined.
    """
    layout, held = lay_out(problem, cluster, grid, Options(), Cut(given=True))
    rows_differ = problem.rows and layout.m_blocks != problem.a.chunks[0]
    columns_differ = problem.columns and layout.n_blocks != problem.b.chunks[1]
    if rows_differ or columns_differ:
        return {}
    return refined({layout: rank_of(layout, cluster, held)}, cluster, Options())
