"""What a layout moves between workers, in a closed form where there is one."""

from __future__ import annotations

from math import prod
from operator import mul
from typing import NamedTuple

from multimm.planning.cost.counted_transfers import received, shares_blocks
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Grid, ceil_div, divisors


def volume(problem: Problem, grid: Grid) -> int:
    """Bytes that all workers together receive, from the closed form.

    Every grid column but a block's own receives A, every grid row but its own receives B,
    and p_k - 1 of p_k partial sums travel:
    |A| (p_n - 1) + |B| (p_m - 1) + |C| (p_k - 1).
    In a symmetric product B is A once more, and only one triangle of C is summed. Of a stack,
    matrices are assigned to grid rows first: B is shared by those of one matrix only, but an
    operand that is broadcast by those of all matrices that use it. At least, that is: where the
    rows of the matrices do not come out even with the grid's, more of these share one.
    """
    a, b = problem.a.nbytes, problem.b.nbytes
    of_a, of_b = (max(1, prod(spec.shape[:-2])) for spec in (problem.a, problem.b))
    rows_a = min(grid.p_m, max(1, problem.batch // of_a))
    rows_b = ceil_div(grid.p_m, min(of_b, grid.p_m))
    return a * (grid.p_n * rows_a - 1) + b * (rows_b - 1) + _sums(problem) * (grid.p_k - 1)


def _sums(problem: Problem) -> int:
    """Bytes of all sums: of a symmetric product, those of one triangle."""
    columns = (problem.m + 1) / 2 if problem.symmetric else problem.n
    return int(problem.batch * problem.m * columns) * problem.sum_bytes


def share_between_nodes(problem: Problem, grid: Grid, per_node: int) -> float:
    """The share of `volume` that comes from another node, between 0 and 1.

    Ranks run along p_k, then p_n, then p_m, and so do nodes of `per_node` ranks: parts of k
    share a node first, then the workers of a grid row.
    """
    if grid.workers <= per_node:
        return 0.0
    total = volume(problem, grid)
    parts = min(grid.p_k, per_node)
    cols = min(grid.p_n, max(1, per_node // grid.p_k))
    rows = min(grid.p_m, max(1, per_node // (grid.p_k * grid.p_n)))
    # A block is sent to each worker of its row; those on its own node get it there.
    inside = volume(problem, Grid(rows, cols, parts))
    return 1 - inside / total if total else 0.0


def bound_2d(problem: Problem, workers: int) -> int:
    """The least `volume` of any p_m x p_n arrangement of `workers`."""
    return min(volume(problem, Grid(rows, workers // rows, 1)) for rows in divisors(workers))


#: Tasks that are counted one by one for each arrangement that is looked at: about 0.1 s.
COUNTED = 10_000


class Moved(NamedTuple):
    """Bytes that workers receive."""

    total: int
    busiest: float  #: of the worker that receives the most


def moved(layout: Schedule, workers: int) -> Moved:
    """What is received, and even shares of what else moves: to cut, to add, to hand out C."""
    found = of_products(layout, workers)
    more = layout.operands.rechunk.nbytes + layout.fetched_c + layout.handing_out(workers)[1]
    return Moved(found.total + more, found.busiest + more / workers)


def of_products(layout: Schedule, workers: int) -> Moved:
    """What is received of operands in the plan's blocks, and of sums: in a closed form.

    It is counted where blocks lie elsewhere, and so is what stacks move in several row panels, and
    all where blocks are too few for the rows or columns of the grid, if it is no plan of very many.
    """
    grid, stacked = layout.grid, bool(layout.batch_blocks)
    idle = grid.p_n > len(layout.n_blocks) or grid.p_m > len(layout.row_sizes)
    if (
        layout.operands.elsewhere
        or layout.in_place is not None
        or shares_blocks(layout)
        or (idle and not layout.mirrors and layout.tasks <= COUNTED)
        or (stacked and (layout.row_panels > 1 or layout.mirrors))
    ):
        counted = received(layout, workers)
        return Moved(sum(counted.values()), max(counted.values(), default=0))
    p, work, widths = (
        layout.problem,
        layout.blockwise,
        [layout.operands.width(role) for role in "ab"],
    )
    sums = _sums(p) * (layout.parts - 1)
    most = work.most_received(layout.steps, max(layout.k_tiles), layout.share_k)
    total = p.k * sum(map(mul, work.sent, widths)) + sums
    even = layout.mirrors or stacked
    of_sums = sums / layout.ranks if even else _share(work.most_summed * p.sum_bytes, layout.parts)
    return Moved(total, sum(map(mul, most, widths)) + of_sums)


def _share(size: int, parts: int) -> float:
    """What one of so many receives of the others' sums."""
    return size * (1 - 1 / parts)
