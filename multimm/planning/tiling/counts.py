"""How many blocks and k-tiles, for one arrangement of workers.

Where they begin and end is for `multimm.planning.tiling.boundaries` to say.
"""

from __future__ import annotations

from math import ceil, isqrt, prod
from typing import NamedTuple

from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import Problem
from multimm.planning.tiling.grid import Grid, ceil_div, remembered

#: Edge of a float32 block: a 16384 x 16384 product keeps an H200 busy for 0.17 s and was the
#: fastest block measured on 8 of them; 4096 on a CPU is about a second of one core.
EDGE = {"gpu": 16384, "cpu": 4096}
#: Blocks are not cut below this edge to make more of them: an H200 needs 4096 for its full
#: FP32 rate and 2048 for 95 % of it; 512 on a CPU is arbitrary.
LEAST_EDGE = {"gpu": 2048, "cpu": 512}
#: Chains of block products per worker and thread, at least: while one is multiplied another one's
#: next k-tile is fetched. One worker fetches nothing.
CHAINS = 2
#: C is not cut into more block rows or columns than so many for a better plan: of a symmetric
#: product, one percent of the operations is at stake.
MOST_BLOCK_ROWS = 64
#: Blocks along one side beyond which they are neither cut further nor searched for better ones, for
#: each look at them takes milliseconds: arbitrary.
LONGEST = 5_000
#: Elements of an operand's block, at most: the largest that were ever multiplied, on an H200.
MOST_ELEMENTS = 2**31
#: Elements up to which chunks that tasks make are joined in a process without workers: a megabyte
#: of float64. Half of that takes 10000 chunks of 100 squares 1.4 times as long; with twice as many
#: stacks hold 1.5 times what Dask's product does.
JOINED = 2**17
#: Bytes that Dask notes of each chunk of C in its own product, where k is two chunks: 100, 1600 and
#: 10000 of them took 8 to 11 KB each.
NOTED = 8_000
#: Of what Dask's product holds of C, and notes of it, how many times as much a block row or column
#: may take in a process without workers; and how many least blocks in any case: arbitrary, the
#: latter 8 MB in float64.
TIMES, FEW = 1.5, 4


class Cut(NamedTuple):
    """How many times as many blocks and k-tiles as usual: what a search varies."""

    rows: float = 1  #: of blocks of C
    columns: float = 1
    k_tiles: float = 1
    given: bool = False  #: or the operands' own chunks, only tiny ones joined
    joined: bool = True  #: or these not either
    even: bool = False  #: wherever the operands' chunks end


AS_USUAL = Cut()


class Most(NamedTuple):
    """How large blocks may be."""

    c: int = MOST_ELEMENTS  #: elements of C, of each matrix
    stack: int = MOST_ELEMENTS  #: elements of all matrices that are joined
    m: int = MOST_ELEMENTS  #: rows of A
    n: int = MOST_ELEMENTS  #: columns of B
    rows: int = MOST_ELEMENTS  #: of C
    columns: int = MOST_ELEMENTS  #: of C
    k: int = MOST_ELEMENTS  #: columns of A, and rows of B


def bounds_blocks(cluster: ClusterSpec) -> bool:
    """Whether it is a process without workers: what its memory can't hold is not spilled."""
    return cluster.alone and cluster.slowest.kind == "cpu" and not cluster.slowest.spills


# Asked for with every layout.
@remembered
def most_of(problem: Problem, cluster: ClusterSpec) -> Most:
    """How large blocks may be, whatever their sides are.

    Whatever uses C works on as many of its blocks at once as there are threads, and holds each
    several times. So where nothing spills, in a process without workers, blocks are no larger than
    those of Dask's own product: rows as A's chunks have, columns as B's. Below a least block chunks
    are joined. Workers take larger blocks, for each task costs them a message
    (docs/decisions/memory-and-faults.md).

    The same goes for operands that tasks make: Dask's product lets go of a chunk once all blocks of
    C have it. Where that is one, we do so as well.
    """
    made, in_process = problem.made_anywhere, bounds_blocks(cluster)
    if not in_process and (cluster.slowest.kind == "gpu" or not any(made)):
        return Most()
    a, b, batch = problem.a, problem.b, prod(map(max, problem.batch_chunks))
    longest = [[max(1, *own) for own in x.chunks[-2:]] for x in (a, b)]
    (rows, k_of_a), (k_of_b, columns) = longest
    c = max(LEAST_EDGE["cpu"] ** 2, rows * columns) if in_process else MOST_ELEMENTS
    stack = max(JOINED, batch * max(rows * columns, rows * k_of_a, k_of_b * columns))
    most = Most(*(min(MOST_ELEMENTS, size) for size in (c, stack)))
    if in_process:
        sides = _sides(problem, rows, columns, c)
        most = most._replace(rows=sides[0], columns=sides[1])
    if made[0] and len(b.chunks[-1]) == 1:
        m, k = _longest(a, batch)
        most = most._replace(m=m, k=k)
    if made[1] and len(a.chunks[-2]) == 1:
        n, k = _longest(b.T, batch)
        most = most._replace(n=n, k=min(k, most.k))
    return most


def _sides(problem: Problem, rows: int, columns: int, c: int) -> tuple[int, int]:
    """Rows and columns of a block of C, at most; chunks of A have `rows`, and those of B `columns`.

    What is computed of C along an axis, such as C less its means, holds a whole block row or block
    column. Where chunks are joined that is several times as much as of Dask's product. But Dask's
    product has more tasks, which take memory as well.
    """
    m, n = max(1, problem.m), max(1, problem.n)
    row_count, column_count = len(problem.a.chunks[-2]), len(problem.b.chunks[-1])
    noted = row_count * column_count * NOTED // problem.out_bytes
    few = FEW * LEAST_EDGE["cpu"] ** 2
    sides = m * n // row_count, m * n // column_count
    tall, wide = (max(few, int(TIMES * (side + noted))) for side in sides)
    tall, wide = max(rows, tall // n), max(columns, wide // m)
    a_made, b_made = problem.made_anywhere
    if a_made and n <= isqrt(c):  # else what tasks make of A stays for the next block column
        wide = n
    if b_made and m <= isqrt(c):
        tall = m
    height, width = (
        min(size, max(chunk, min(isqrt(c), most)))
        for size, chunk, most in ((m, rows, tall), (n, columns, wide))
    )
    return max(rows, min(tall, c // width)), max(columns, min(wide, c // height))


def is_large(problem: Problem) -> bool:
    """Whether sums of all of C at once matter beside what Dask's own product holds.

    That is, of a block of C, products of all chunks along k; or few least blocks.
    """
    rows, columns = max(problem.a.chunks[-2]), max(problem.b.chunks[-1])
    each = max(FEW * LEAST_EDGE["cpu"] ** 2, len(problem.a.chunks[-1]) * rows * columns)
    return problem.summed_bytes > each * problem.sum_bytes


def _longest(spec: MatrixSpec, batch: int) -> tuple[int, int]:
    """Rows and columns of an operand's block that is as large as a chunk, or as what is joined.

    Few rows rather than a short k; and no more blocks along a side than are planned well.
    """
    rows, columns = (max(1, *chunks) for chunks in spec.chunks[-2:])
    most = max(JOINED, rows * columns * batch) // max(1, batch)
    many_rows = max(rows, most // max(1, spec.cols) // rows * rows)
    many_columns = max(columns, most // min(many_rows, max(1, spec.rows)) // columns * columns)
    least_rows, least_columns = (ceil_div(size, LONGEST) for size in spec.shape[-2:])
    return max(many_rows, least_rows), max(many_columns, least_columns)


def count_c(
    problem: Problem,
    grid: Grid,
    parallel: int,
    chains: int,
    edge: int,
    least: int,
    cut: Cut,
    most: int,
) -> tuple[int, int]:
    """Block rows and block columns of each of so many batch blocks of C, worked on in parallel."""
    sizes = problem.m, problem.n, problem.k
    rows, cols = _counts(sizes, grid, parallel, chains, edge, least, most)
    if parallel < max(2, grid.p_m):  # else each matrix stays with one row of workers
        rows = _cut(rows, problem.m, least, most, cut.rows)
    cols = _cut(cols, problem.n, least, most, cut.columns)
    return (max(rows, cols),) * 2 if problem.symmetric else (rows, cols)


def count_k_tiles(
    problem: Problem, grid: Grid, counts: tuple[int, int], edge: int, least: int, cut: Cut
) -> int:
    """K-tiles, beside so many block rows and block columns of C."""
    k, p_k = problem.k, grid.p_k
    sides = [ceil_div(size, n) for size, n in zip((problem.m, problem.n), counts, strict=True)]
    k_tiles = max(p_k, _count(k, p_k, _room(edge, *sides), least))
    if grid.workers > 1 and k // (2 * k_tiles) >= least:
        k_tiles *= 2  # at least two k-tiles per part: the second travels while the first is used
    k_tiles = max(p_k, min(ceil(k_tiles * cut.k_tiles), max(k_tiles, k // least)))
    return max(k_tiles, ceil_div(max(sides) * k, MOST_ELEMENTS))


@remembered
def _counts(
    sizes: tuple[int, int, int],
    grid: Grid,
    parallel: int,
    chains: int,
    edge: int,
    least: int,
    most: int,
) -> tuple[int, int]:
    """Block rows and block columns of C: `chains` for each worker, where C has so many."""
    (m, n, k), square = sizes, isqrt(most)
    thick = (
        min(_room(edge, n, k), _room(square, n)),
        min(_room(edge, m, k), _room(square, m)),
    )
    rows = _count(m, ceil_div(grid.p_m, parallel), thick[0], least)
    cols = _count(n, grid.p_n, thick[1], least)
    while parallel * rows * cols < chains * grid.p_m * grid.p_n:
        grow_rows = m // rows >= n // cols
        if max(m // rows, n // cols) < 2 * least:
            break
        rows, cols = (rows * 2, cols) if grow_rows else (rows, cols * 2)
    if grid.workers > 1:
        return rows, cols
    # Counted one by one, both sides of a lone worker's blocks may be cut where one would do.
    most = min(most, edge * edge)
    while rows * cols // 2 >= chains and 2 * ceil_div(m, rows) * ceil_div(n, cols) <= most:
        rows, cols = (ceil_div(rows, 2), cols) if rows >= cols else (rows, ceil_div(cols, 2))
    return rows, cols


def _cut(count: int, size: int, least: int, most: int, finer: float) -> int:
    """More blocks than `count`, but none below `least` and no more than are of use; or fewer."""
    if finer < 1:
        return max(ceil(count * finer), min(count, ceil_div(size, isqrt(most))))
    return max(count, min(ceil(count * finer), size // least, MOST_BLOCK_ROWS))


def _room(edge: int, *others: int) -> int:
    """How long a block may be beside the block's other dimensions: about edge^2 elements."""
    return edge * edge // max(1, *(min(edge, other) for other in others))


def _count(size: int, workers: int, edge: int, least: int) -> int:
    """How many blocks: a multiple of `workers`, none longer than `edge`, none below `least`."""
    rounds = max(1, ceil_div(size, edge * workers))
    return max(1, min(rounds * workers, max(workers, size // least)))
