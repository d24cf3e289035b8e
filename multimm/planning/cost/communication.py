"""What a layout moves between workers: counted, or of very many tasks in a closed form."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from multimm.planning.cost.counted_transfers import received
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Grid, ceil_div, divisors


def volume(problem: Problem, grid: Grid, width: int = 0, row_panels: int = 1) -> int:
    """Bytes that all workers together receive, from the closed form.

    Every grid column but a block's own receives A, every grid row but its own receives B,
    and p_k - 1 of p_k partial sums travel:
    |A| (p_n - 1) + |B| (p_m - 1) + |C| (p_k - 1).
    In a symmetric product B is A once more, and only one triangle of C is summed. Of a stack,
    matrices are assigned to grid rows first: B is shared by those of one matrix only, but an
    operand that is broadcast by those of all matrices that use it. At least, that is: where the
    rows of the matrices do not come out even with the grid's, more of these share one.

    Parameters
    ----------
    problem : Problem
    grid : Grid
    width : int, optional
        Bytes of an operand's element on its way, where these are packed.
    row_panels : int, optional
        In each of which B travels again.
    """
    a, b = (x.nbytes * (width or x.itemsize) // x.itemsize for x in (problem.a, problem.b))
    of_a, of_b = (max(1, prod(spec.shape[:-2])) for spec in (problem.a, problem.b))
    rows_a = min(grid.p_m, max(1, problem.batch // of_a))
    rows_b = ceil_div(grid.p_m, min(of_b, grid.p_m))
    sums = _sums(problem) * (grid.p_k - 1)
    return a * (grid.p_n * rows_a - 1) + b * row_panels * (rows_b - 1) + sums


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


#: Candidates of more tasks are not counted block by block: of 100 the first plan of 65536 squares
#: for eight GPUs took 16 ms in place of 13, of 1000 twice as long.
COUNTED = 50


class Moved(NamedTuple):
    """Bytes that workers receive."""

    total: int
    busiest: float  #: of the worker that receives the most


def moved(layout: Schedule, workers: int) -> Moved:
    """What is received, and even shares of what else moves: to cut, to add, to hand out C."""
    found = of_products(layout, workers)
    more = layout.operands.rechunk.nbytes + layout.fetched_c + layout.result.handing_out(workers)[1]
    return Moved(found.total + more, found.busiest + more / workers)


def of_products(layout: Schedule, workers: int, most: int = COUNTED) -> Moved:
    """What is received of operands in the plan's blocks, and of sums.

    Counted, but for more tasks than so many; `volume` says of triangles, and of blocks that lie
    elsewhere, too little.
    """
    tiled = layout.in_place is None and not layout.operands.elsewhere and not layout.mirrors
    if tiled and layout.tasks > most:
        width = layout.problem.packed_itemsize if layout.operands.packed else 0
        total = volume(layout.problem, layout.grid, width, layout.row_panels)
        return Moved(total, total / workers)
    counted = received(layout, workers)
    return Moved(sum(counted.values()), max(counted.values(), default=0))
