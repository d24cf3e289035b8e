"""What a layout moves between workers, in a closed form where there is one."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from multimm.planning.cost.counted_transfers import received
from multimm.planning.layouts.cyclic import Layout
from multimm.planning.layouts.owner_computes import GatheredLayout
from multimm.planning.layouts.symmetric import GramLayout
from multimm.planning.problem import Problem
from multimm.planning.tiling.grid import Grid, ceil_div, divisors


def volume(
    problem: Problem, grid: Grid, sizes: tuple[int, int] | None = None, waves: int = 1
) -> int:
    """Bytes that all workers together receive, from the closed form.

    `sizes` are those of A and B on their way, where they are packed for it. Copies are let go when
    a wave is over: a B that all rows of C need is sent in every one, and one of a stack in those of
    its matrix.

    Every grid column but a block's own receives A, every grid row but its own receives B,
    and p_k - 1 of p_k partial sums travel:
    |A| (p_n - 1) + |B| (p_m - 1) + |C| (p_k - 1).
    In a Gram product B is A once more, and only one triangle of C is summed. Of a stack,
    matrices are dealt out to grid rows first: B is shared by those of one matrix only, but an
    operand that is broadcast by those of all matrices that use it. At least, that is: where the
    rows of the matrices do not come out even with the grid's, more of these share one.
    """
    sums = problem.batch * problem.m * problem.n * problem.sum_bytes
    if problem.gram:
        sums = _triangle(problem)
    a, b = sizes or (problem.a.nbytes, problem.b.nbytes)
    of_a, of_b = (max(1, prod(spec.shape[:-2])) for spec in (problem.a, problem.b))
    rows_a = min(grid.p_m, max(1, problem.batch // of_a))
    rows_b = ceil_div(grid.p_m, min(of_b, grid.p_m))
    return (
        a * (grid.p_n * rows_a - 1)
        + b * ceil_div(waves, of_b) * (rows_b - 1)
        + sums * (grid.p_k - 1)
    )


def _triangle(problem: Problem) -> int:
    """Bytes of the sums of a Gram product."""
    return problem.batch * problem.m * (problem.m + 1) // 2 * problem.sum_bytes


def share_between_nodes(problem: Problem, grid: Grid, per_node: int) -> float:
    """The share of `volume` that comes from another node, between 0 and 1.

    Ranks run along p_k, then p_n, then p_m, and so do nodes of `per_node` ranks: parts of k
    share a node first, then the workers of a grid row.
    """
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


def moved(layout: Layout, workers: int) -> Moved:
    """What is received, and what moves while operands are cut and C is handed out: even shares."""
    found = of_products(layout, workers)
    more = layout.recut.nbytes + layout.handing_out(workers)[1]
    return Moved(found.total + more, found.busiest + more / workers)


def of_products(layout: Layout, workers: int) -> Moved:
    """What is received of operands in the plan's blocks, and of sums: in a closed form.

    It is counted where blocks lie elsewhere, and so is what stacks move in several waves, and all
    where blocks are too few for the rows or columns of the grid, if it is no plan of very many.
    """
    grid, stacked = layout.grid, bool(layout.batch_blocks)
    idle = grid.p_n > len(layout.n_blocks) or grid.p_m > len(layout.row_sizes)
    if (
        layout.elsewhere
        or isinstance(layout, GatheredLayout)
        or (idle and not layout.mirrors and layout.tasks <= COUNTED)
        or (stacked and (layout.waves > 1 or layout.mirrors))
    ):
        counted = received(layout, workers)
        return Moved(sum(counted.values()), max(counted.values(), default=0))
    if isinstance(layout, GramLayout):
        return _of_gram(layout)
    return _of_stack(layout) if stacked else _of_product(layout)


def _of_gram(layout: GramLayout) -> Moved:
    width, sums = layout.width("a"), _triangle(layout.problem) * (layout.parts - 1)
    total = layout.in_waves.sent * layout.problem.k * width + sums
    return Moved(total, layout.most_received * width + sums / layout.ranks)


def _of_stack(layout: Layout) -> Moved:
    """Rows of its matrices need not come out even with the grid's."""
    problem = layout.problem
    a, b = (n * layout.width(role) for n, role in zip(layout.copies, "ab", strict=True))
    sums = problem.batch * problem.m * problem.n * problem.sum_bytes * (layout.parts - 1)
    total = (a + b) * problem.k + sums
    return Moved(total, total / layout.ranks)


def _of_product(layout: Layout) -> Moved:
    """The busiest has most rows of A, columns of B and slabs, and keeps fewest of their blocks."""
    problem, grid, parts = layout.problem, layout.grid, layout.parts
    a, b = layout.width("a"), layout.width("b")
    sizes = problem.m * problem.k * a, problem.k * problem.n * b
    total = volume(problem, grid._replace(p_k=parts), sizes, layout.waves)
    rows = ceil_div(len(layout.row_sizes), grid.p_m) * layout.steps
    columns = ceil_div(len(layout.n_blocks), grid.p_n) * layout.steps
    of_a = layout.share_rows * a * (1 - rows // grid.p_n / rows)
    of_b = layout.share_cols * b * (1 - columns // grid.p_m / columns) * layout.waves
    sums = layout.share_sums * problem.sum_bytes * (1 - 1 / parts)
    return Moved(total, layout.share_k * (of_a + of_b) + sums)
