"""What a layout moves between workers: the closed form, and a count block by block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, product, starmap
from math import prod
from typing import NamedTuple

from multimm.planning.gathered import GatheredLayout
from multimm.planning.gram import GramLayout
from multimm.planning.grid import Coordinate, Grid, ceil_div, divisors
from multimm.planning.layout import Layout
from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import Problem
from multimm.planning.recut import Index, cuts_of, offsets, shape_of, size_of, spans


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


def received(layout: Layout, workers: int) -> Counter[int]:
    """Bytes that each worker (by rank) receives, counted block by block.

    Where the grid has more ranks than there are workers, ranks wrap around. Where it has fewer,
    blocks may come from workers beyond it.
    """
    total: Counter[int] = Counter()
    wraps = layout.grid.workers > workers
    if isinstance(layout, GatheredLayout):
        found = chain(_count_large(layout), _count_small(layout), _count_portions(layout))
    elif isinstance(layout, GramLayout):
        found = chain(_count_gram(layout), _count_sums(layout))
    else:
        found = chain(_count_a(layout), _count_b(layout), _count_sums(layout))
    for home, users, size in found:
        if wraps:
            home, users = home % workers, {rank % workers for rank in users}
        total.update(dict.fromkeys(users - {home}, size))
    return total


class Moved(NamedTuple):
    """Bytes that workers receive."""

    total: int
    busiest: float  #: of the worker that receives the most


def moved(layout: Layout, workers: int) -> Moved:
    """What is received, and what moves while operands are cut: an even share for each worker."""
    found, recut = of_products(layout, workers), layout.recut.nbytes
    return Moved(found.total + recut, found.busiest + recut / workers)


def of_products(layout: Layout, workers: int) -> Moved:
    """What is received of operands in the plan's blocks, and of sums: in a closed form.

    It is counted where blocks lie elsewhere, and so is what stacks move in several waves, and all
    where blocks are too few for the rows or columns of the grid.
    """
    grid, stacked = layout.grid, bool(layout.batch_blocks)
    idle = grid.p_n > len(layout.n_blocks) or grid.p_m > len(layout.row_sizes)
    if (
        layout.elsewhere
        or isinstance(layout, GatheredLayout)
        or (idle and not layout.mirrors)
        or (stacked and (layout.waves > 1 or layout.mirrors))
    ):
        counted = received(layout, workers)
        return Moved(sum(counted.values()), max(counted.values(), default=0))
    if isinstance(layout, GramLayout):
        return _of_gram(layout)
    return _of_stack(layout) if stacked else _of_product(layout)


def brought(layout: Layout, workers: int) -> int:
    """Bytes that workers exchange to bring operands into these blocks.

    Counted where owners are known. Else at most: blocks that are still to be made may be made where
    they are needed. What lies beyond the grid may travel twice.
    """
    if layout.problem.from_host:
        return sum(_whole_chunks(layout, role, workers) for role in layout.roles)
    return sum(_brought(layout, role, workers) for role in layout.cut_again)


def added(layout: Layout, workers: int) -> int:
    """Bytes that workers receive of the C that is added: counted, or at most, as in `brought`."""
    return 0 if layout.problem.c is None else _brought(layout, "c", workers)


def _brought(layout: Layout, role: str, workers: int) -> int:
    spec = layout.spec(role)
    if spec.owners:
        return sum(_pieces_brought(layout, role, workers))
    return spec.nbytes if min(layout.grid.workers, workers) > 1 else 0


def _whole_chunks(layout: Layout, role: str, workers: int) -> int:
    """Bytes of chunks that lie with another worker than one that takes blocks from them."""
    spec = layout.spec(role)
    if not spec.owners:
        return _brought(layout, role, workers)
    taken = {(home, at) for home, at, _ in _cuts(layout, role, workers)}
    owners = _owners(spec)
    sizes = (prod(size_of(spec.chunks, at)) for home, at in taken if owners[at] != home)
    return sum(sizes) * spec.itemsize


def _pieces_brought(layout: Layout, role: str, workers: int) -> Iterator[int]:
    """Bytes of each piece that does not lie where the block that it is of will be needed."""
    spec = layout.spec(role)
    owners = _owners(spec)
    for home, at, shape in _cuts(layout, role, workers):
        owner, whole = owners[at], shape == size_of(spec.chunks, at)
        times = 1 + (not whole) if owner >= layout.grid.workers else owner != home
        yield times * prod(shape) * spec.itemsize


def _owners(spec: MatrixSpec) -> dict[Index, int]:
    """The worker of each chunk."""
    return dict(zip(product(*(range(len(x)) for x in spec.chunks)), spec.owners, strict=True))


def _cuts(layout: Layout, role: str, workers: int) -> Iterator[tuple[int, Index, Index]]:
    """Of each piece of the plan's blocks: who needs it, of which chunk it is, and its shape."""
    spec, blocks = layout.spec(role), layout.operand_chunks(role)
    users = [share.users[0] for share in layout.shares(role)]
    matrices, rows, cols = product(*map(offsets, blocks[:-2])), *map(offsets, blocks[-2:])
    for (flat, where), (r, row), (c, col) in product(
        zip(users, matrices, strict=True), enumerate(rows), enumerate(cols)
    ):
        home = _needs(layout, role, flat, r, c) % workers
        for at, _, to in cuts_of(spec.chunks, (*where, row, col)):
            yield home, at, shape_of(to)


def _needs(layout: Layout, role: str, flat: int, row: int, col: int) -> int:
    """The number of the worker that keeps a block of an operand, or adds one of C."""
    if role == "c":
        return layout.completes(layout.row(flat, row), col)
    return layout.keeps(role, flat, *((row, col) if role == "a" else (col, row)))


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


#: Of one block: the rank that keeps it, the ranks that use it, its bytes.
Transfer = tuple[int, set[int], int]


def _count_a(layout: Layout) -> Iterator[Transfer]:
    grid = layout.grid
    columns = {j % grid.p_n for _, j in layout.pairs}
    for share, (i, size) in product(layout.shares("a"), enumerate(layout.m_blocks)):
        waves = _rows_by_wave(layout, (layout.row(flat, i) for flat in share.users))
        for (s, slab), used in product(enumerate(layout.slabs), waves):
            part = layout.part_of[s]
            home = layout.keeps("a", share.users[0], i, s)
            users = {grid.rank(Coordinate(row, col, part)) for row in used for col in columns}
            yield home, users, share.matrices * size * slab * layout.width("a")


def _count_b(layout: Layout) -> Iterator[Transfer]:
    grid, rows = layout.grid, sorted({i for i, _ in layout.pairs})
    for share in layout.shares("b"):
        waves = _rows_by_wave(layout, starmap(layout.row, product(share.users, rows)))
        for (s, slab), (j, size) in product(enumerate(layout.slabs), enumerate(layout.n_blocks)):
            home = layout.keeps("b", share.users[0], j, s)
            for used in waves:
                users = {grid.rank(Coordinate(row, j, layout.part_of[s])) for row in used}
                yield home, users, share.matrices * size * slab * layout.width("b")


def _rows_by_wave(layout: Layout, rows: Iterable[int]) -> list[set[int]]:
    """Grid rows of some block rows, wave by wave: copies are let go when one is over."""
    found: dict[int, set[int]] = {}
    for row in rows:
        found.setdefault(layout.wave(row), set()).add(row % layout.grid.p_m)
    return list(found.values())


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
            home = layout.keeps("a", flat, i, s)
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


def _count_large(layout: GatheredLayout) -> Iterator[Transfer]:
    """Chunks that others multiply than those who have them."""
    for worker, size in layout.fetched.items():
        yield -1, {worker}, size


def _count_small(layout: GatheredLayout) -> list[Transfer]:
    """Chunks of the other operand travel whole to all who need some of them, or of their bundle."""
    spec, portions = layout.spec(layout.small), layout.portions
    along, across = spec.chunks[:: -1 if layout.by_columns else 1]
    ends, found, bundles = [*accumulate(portions.columns)], list[Transfer](), dict[int, set[int]]()
    users_of = [
        set().union(*portions.users[bisect_right(ends, start) : bisect_left(ends, end) + 1])
        for start, end in spans(along)
    ]
    for (at, length), (other, size) in product(enumerate(along), enumerate(across)):
        index = (other, at) if layout.by_columns else (at, other)
        keeper = layout.keeper_of_small(index[0] * len(spec.chunks[1]) + index[1])
        users = users_of[at] if length * size else set()
        if layout.bundled and users:
            bundles.setdefault(keeper, set()).update(users)
            users = bundles[keeper]  # complete at the end
        found.append((keeper, users, length * size * spec.itemsize))
    return found


def _count_portions(layout: GatheredLayout) -> Iterator[Transfer]:
    """Portions of C's blocks travel to the worker that joins them; k is in one part."""
    for strip, across in layout.joined:
        keeper = layout.grid.rank(layout.keeper_of(strip))
        for portion in layout.strips[strip]:
            row, column = layout.cell(portion, across)
            size = layout.m_blocks[row] * layout.n_blocks[column] * layout.joined_bytes
            yield layout.grid.rank(layout.owner(row, column, 0)), {keeper}, size
