"""What a layout costs: bytes moved, bytes held, seconds. Each is a sum of named terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import ceil, prod

from multimm.planning.grid import Coordinate, Grid, divisors, merges
from multimm.planning.layout import WINDOW, Layout
from multimm.planning.problem import Problem
from multimm.planning.spec import ClusterSpec

Terms = dict[str, float]

#: Bytes per second at which finished blocks leave a full device: host link of a GPU
#: (dask-cuda copies through pageable memory, 6.9 GB/s measured), disk of a CPU (arbitrary).
SPILL_RATE = {"gpu": 6.9e9, "cpu": 0.5e9}


def volume(problem: Problem, grid: Grid) -> int:
    """Bytes that all workers together receive, from the closed form.

    Every grid column but a block's own receives A, every grid row but its own receives B,
    and p_k - 1 of p_k partial sums travel:
    |A| (p_n - 1) + |B| (p_m - 1) + |C| (p_k - 1).
    """
    sums = problem.batch * problem.m * problem.n * problem.sum_bytes
    return (
        problem.a.nbytes * (grid.p_n - 1)
        + problem.b.nbytes * (grid.p_m - 1)
        + sums * (grid.p_k - 1)
    )


def bound_2d(problem: Problem, workers: int) -> int:
    """The least `volume` of any p_m x p_n arrangement of `workers`."""
    return min(volume(problem, Grid(rows, workers // rows, 1)) for rows in divisors(workers))


def received(layout: Layout, workers: int) -> Counter[int]:
    """Bytes that each worker (by rank) receives, counted block by block.

    Where the grid has more ranks than there are workers, ranks wrap around.
    """
    total: Counter[int] = Counter()
    for count in (_count_a, _count_b, _count_sums):
        for home, users, size in count(layout):
            receivers = {rank % workers for rank in users} - {home % workers}
            total.update(dict.fromkeys(receivers, size))
    return total


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
                grid.rank(grid.home_a(rows[0], s, part)),
                users,
                matrices * size * slab * spec.itemsize,
            )


def _count_b(layout: Layout) -> Iterator[Transfer]:
    spec, grid = layout.problem.b, layout.grid
    for flats, matrices in _batch_blocks(layout, spec.shape):
        waves: dict[int, set[int]] = {}  # a streamed block is sent again in every wave
        for row in (
            flat * len(layout.m_blocks) + i for flat in flats for i in range(len(layout.m_blocks))
        ):
            waves.setdefault(layout.wave(row) * layout.stream, set()).add(row % grid.p_m)
        for (s, slab), (j, size) in product(enumerate(layout.slabs), enumerate(layout.n_blocks)):
            home = grid.rank(layout.home_b(min(flats), s, j))
            for rows in waves.values():
                users = {grid.rank(Coordinate(row, j, layout.part_of[s])) for row in rows}
                yield home, users, matrices * size * slab * spec.itemsize


def _count_sums(layout: Layout) -> Iterator[Transfer]:
    """Partial sums travel to the worker that keeps the sum."""
    for (row, rows), (j, cols) in product(enumerate(layout.row_sizes), enumerate(layout.n_blocks)):
        for merge in merges(layout.parts, row + j):
            keeper = layout.grid.rank(Coordinate(row, j, merge.keeper))
            sender = layout.grid.rank(Coordinate(row, j, merge.sender))
            yield sender, {keeper}, rows * cols * layout.problem.sum_bytes


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


def memory(layout: Layout, cluster: ClusterSpec) -> tuple[Terms, Terms]:
    """Bytes of the fullest worker: what must stay, and what may be spilled, by name."""
    p, grid = layout.problem, layout.grid
    block = max(layout.row_sizes) * max(layout.n_blocks)
    slab = max(layout.slabs)
    b_matrices = max(layout.batch_sizes) if len(p.b.shape) > 2 else 1
    crowd = ceil(grid.workers / cluster.workers)  # ranks per worker: 1, but for a large p_k
    stay: Terms = {
        "partial sums": crowd * layout.wave_rows * layout.share_cols * p.sum_bytes,
        "sums being made": cluster.threads * block * (p.sum_bytes + p.out_bytes),
        "A in flight": crowd * WINDOW * layout.wave_rows * slab * p.a.itemsize,
        "B in flight": crowd * WINDOW * b_matrices * slab * layout.share_cols * p.b.itemsize,
    }
    if layout.problem.packable:
        sides = max(layout.row_sizes) * p.a.itemsize + max(layout.n_blocks) * p.b.itemsize
        stay["operands being packed"] = cluster.threads * slab * sides * layout.padding
    spill: Terms = {
        "C finished": crowd
        * (layout.share_rows - layout.wave_rows)
        * layout.share_cols
        * p.out_bytes
    }
    if not layout.stream:
        spill["A at home"] = p.a.nbytes / min(grid.workers, cluster.workers)
        spill["B at home"] = p.b.nbytes / min(grid.workers, cluster.workers)
        if layout.packs:
            share = layout.padding / min(grid.workers, cluster.workers)
            spill["packed A and B"] = (p.a.nbytes + p.b.nbytes) * share
    if p.reads_c:
        spill["C read"] = p.result_bytes / (grid.p_m * grid.p_n)
    return stay, {name: size for name, size in spill.items() if size > 0}


def seconds(layout: Layout, cluster: ClusterSpec, moved: float) -> Terms:
    """Seconds of the slowest worker, by name; `moved` is what it receives, in bytes.

    Block products, transfers and the scheduler work side by side: the longest of the three
    counts. On top of it the first slab is waited for, partial sums of parts of k travel when
    the last slab is done, and what does not fit is spilled and read back.
    """
    p, device = layout.problem, cluster.slowest
    crowd = ceil(layout.grid.workers / cluster.workers)
    flops = crowd * 2 * layout.share_rows * layout.share_cols * layout.share_k * p.relative_cost
    first = max(layout.slabs) * (layout.wave_rows * p.a.itemsize + layout.share_cols * p.b.itemsize)
    stay, spill = memory(layout, cluster)
    excess = max(0.0, sum(stay.values()) + sum(spill.values()) - cluster.budget_bytes)
    lonely = layout.grid.workers == 1
    sums = layout.share_rows * layout.share_cols * p.sum_bytes * (layout.parts - 1) / layout.parts
    return {
        "block products": flops / (device.gflops * 1e9),
        "transfers": moved / (cluster.link.gbps * 1e9),
        "scheduling": layout.tasks * cluster.task_overhead_s,
        "first slab": 0.0 if lonely else first / (cluster.link.gbps * 1e9) + cluster.link.latency_s,
        "last sums": sums / (cluster.link.gbps * 1e9),
        "spilling": 2 * excess / SPILL_RATE[device.kind],
    }


#: What runs side by side still gets in each other's way: this share of all but the longest
#: is added. Arbitrary; it makes the chooser prefer fewer bytes among equally fast plans.
FRICTION = 0.1


def total_seconds(terms: Terms) -> float:
    """Predicted seconds from the terms of `seconds`."""
    side_by_side = [terms[name] for name in ("block products", "transfers", "scheduling")]
    longest = max(side_by_side)
    hidden = FRICTION * (sum(side_by_side) - longest)
    return longest + hidden + terms["first slab"] + terms["last sums"] + terms["spilling"]
