"""What a layout moves between workers: the closed form, and a count block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from multimm.planning.gram import GramLayout
from multimm.planning.grid import Coordinate, Grid, divisors
from multimm.planning.layout import Layout
from multimm.planning.problem import Problem


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
    matrices are dealt out to grid rows first: B is shared by those of one matrix only.
    """
    sums = problem.batch * problem.m * problem.n * problem.sum_bytes
    if problem.gram:
        sums = _triangle(problem)
    stacked = len(problem.b.shape) > 2 and prod(problem.b.shape[:-2]) == problem.batch
    sharing = ceil(grid.p_m / min(problem.batch, grid.p_m)) if stacked else grid.p_m
    a, b = sizes or (problem.a.nbytes, problem.b.nbytes)
    times = ceil(waves / problem.batch) if stacked else waves
    return a * (grid.p_n - 1) + b * times * (sharing - 1) + sums * (grid.p_k - 1)


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


def received(layout: Layout, workers: int) -> Counter[int]:
    """Bytes that each worker (by rank) receives, counted block by block.

    Where the grid has more ranks than there are workers, ranks wrap around.
    """
    total: Counter[int] = Counter()
    operands = (_count_gram,) if isinstance(layout, GramLayout) else (_count_a, _count_b)
    for count in (*operands, _count_sums):
        for home, users, size in count(layout):
            receivers = {rank % workers for rank in users} - {home % workers}
            total.update(dict.fromkeys(receivers, size))
    return total


class Moved(NamedTuple):
    """Bytes that workers receive, with what moves while an operand is cut into other blocks."""

    total: int
    busiest: float  #: of the worker that receives the most


def moved(layout: Layout, workers: int) -> Moved:
    """What is received: the closed form, shared evenly, unless blocks lie elsewhere.

    Then it is counted, and so is what moves in a Gram product, whose blocks serve both sides.
    """
    recut, _ = layout.recut
    if layout.elsewhere:
        counted = received(layout, workers)
        most = max(counted.values(), default=0)
        return Moved(sum(counted.values()) + recut, most + recut / workers)
    if isinstance(layout, GramLayout):
        width = layout.width("a")
        others = _triangle(layout.problem) * (layout.parts - 1) + recut
        total = layout.in_waves.sent * layout.problem.k * width + others
        if len(layout.problem.a.shape) == 2:
            return Moved(total, layout.most_received * width + others / layout.grid.workers)
        return Moved(total, total / layout.grid.workers)
    a, b = (
        layout.spec(role).nbytes // layout.spec(role).itemsize * layout.width(role) for role in "ab"
    )
    total = volume(layout.problem, layout.grid, (a, b), layout.waves) + recut
    return Moved(total, total / layout.grid.workers)


#: Of one block: the rank that keeps it, the ranks that use it, its bytes.
Transfer = tuple[int, set[int], int]


def _count_a(layout: Layout) -> Iterator[Transfer]:
    spec, grid = layout.problem.a, layout.grid
    columns = range(min(grid.p_n, len(layout.n_blocks)))
    for flats, matrices in _batch_blocks(layout, spec.shape):
        for (i, size), (s, slab) in product(enumerate(layout.m_blocks), enumerate(layout.slabs)):
            rows = sorted(flat * len(layout.m_blocks) + i for flat in flats)
            part = layout.part_of[s]
            users = {
                grid.rank(Coordinate(row, col, part))
                for row in dict.fromkeys(row % grid.p_m for row in rows)
                for col in columns
            }
            yield (
                grid.rank(layout.home("a", min(flats), i, s)),
                users,
                matrices * size * slab * layout.width("a"),
            )


def _count_b(layout: Layout) -> Iterator[Transfer]:
    spec, grid = layout.problem.b, layout.grid
    for flats, matrices in _batch_blocks(layout, spec.shape):
        waves: dict[int, set[int]] = {}  # copies are let go: a block is sent in every wave
        for row in (
            flat * len(layout.m_blocks) + i for flat in flats for i in range(len(layout.m_blocks))
        ):
            waves.setdefault(layout.wave(row), set()).add(row % grid.p_m)
        for (s, slab), (j, size) in product(enumerate(layout.slabs), enumerate(layout.n_blocks)):
            home = grid.rank(layout.home("b", min(flats), j, s))
            for rows in waves.values():
                users = {grid.rank(Coordinate(row, j, layout.part_of[s])) for row in rows}
                yield home, users, matrices * size * slab * layout.width("b")


def _count_gram(layout: GramLayout) -> Iterator[Transfer]:
    """The blocks of the one operand serve both sides."""
    grid, rows = layout.grid, len(layout.m_blocks)
    waves = range(layout.waves)
    for (flat, count), i, wave in product(enumerate(layout.batch_sizes), range(rows), waves):
        places = layout.users(flat, i, wave)
        if not places:
            continue
        for s, slab in enumerate(layout.slabs):
            part = layout.part_of[s]
            users = {grid.rank(Coordinate(*place, part)) for place in places}
            home = grid.rank(layout.home("a", flat, i, s))
            yield home, users, count * layout.m_blocks[i] * slab * layout.width("a")


def _count_sums(layout: Layout) -> Iterator[Transfer]:
    """Partial sums travel to the worker that keeps the sum."""
    if layout.parts == 1:
        return
    for flat, (i, j) in product(range(len(layout.batch_sizes)), layout.pairs):
        row = layout.row(flat, i)
        size = layout.row_sizes[row] * layout.n_blocks[j] * layout.problem.sum_bytes
        for merge in layout.merges(row, j):
            keeper = layout.grid.rank(layout.owner(row, j, merge.keeper))
            for sender in merge.senders:
                yield layout.grid.rank(layout.owner(row, j, sender)), {keeper}, size


def _batch_blocks(layout: Layout, shape: tuple[int, ...]) -> list[tuple[list[int], int]]:
    """Per batch block of an operand: the flat batch blocks of C that use it, and its matrices."""
    own = len(shape) - 2
    skipped = len(layout.batch_blocks) - own
    users: dict[tuple[int, ...], list[int]] = {}
    for flat, index in enumerate(product(*(range(len(b)) for b in layout.batch_blocks))):
        key = tuple(0 if shape[d] == 1 else at for d, at in enumerate(index[skipped:]))
        users.setdefault(key, []).append(flat)
    blocks = layout.batch_blocks[skipped:]
    return [
        (flats, prod(1 if shape[d] == 1 else blocks[d][at] for d, at in enumerate(key)))
        for key, flats in users.items()
    ]
