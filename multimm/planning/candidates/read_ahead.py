"""Operands that tasks make: how much of them threads make before it is needed.

K-tiles are added to a block of C one after another. A worker with few blocks has other threads make
operands meanwhile, as much as there is: all of it lies in memory. With k in short parts, each
summed by itself, every thread finds something to multiply, and nothing is made long before it is
needed. `dask.array.matmul` sums in parts of one chunk.

Workers make operands ahead with one thread, too, while a product is on its way from the scheduler.
Dask prevents that, as long as it may place tasks: see `as_queued`.

What comes from files is read when it is needed, and no sooner: see
`multimm.graph.lowering.backpressure`.
"""

from __future__ import annotations

from dataclasses import replace

from multimm.planning.cost.memory import crowd
from multimm.planning.hardware import ClusterSpec
from multimm.planning.schedule import SHORT, Schedule
from multimm.planning.tiling.counts import MOST_ELEMENTS, bounds_blocks, most_of
from multimm.planning.tiling.grid import Grid, ceil_div

#: Bytes of such operands that may lie in memory at once, what share of all that a worker
#: multiplies, and how many times the least that any layout needs: arbitrary.
LITTLE, SHARE, NEARLY_LEAST = 16_000_000, 0.125, 1.5
#: K-tiles in a part of k on the only worker, at most, where nothing is made ahead. `dask.order`
#: notes of each task all chunks that it is made of: X'X of 10000 chunks, in 770 k-tiles, took
#: 203 MB, and in parts of 200, 64 and 16 of them 67, 36 and 26. Dask's own product takes 70.
MOST_LINKS = 64
#: Sums of short parts that a task adds which Dask places: as many as in Dask's own product.
ADDED = 4


def made_by_tasks(layout: Schedule) -> bool:
    """Whether an operand comes from tasks of others, at any time, and not from a file."""
    problem = layout.problem
    return problem.awaited and not all(problem.rereadable) and not layout.stream


def in_short_parts(layout: Schedule, cluster: ClusterSpec) -> Schedule:
    """The same layout, with k in short parts if threads would make operands without bound.

    Or in parts that Dask puts in order with little memory.
    """
    p_m, p_n, p_k = layout.grid
    ahead = _runs_ahead(layout, cluster)
    most = SHORT if ahead else MOST_LINKS if cluster.workers == 1 else layout.links
    if not made_by_tasks(layout) or layout.k_parts or layout.links <= most:
        return layout
    if layout.queued and ahead:
        return replace(layout, grid=Grid(p_m, p_n, p_k * layout.links), fan_in=ADDED)
    return replace(layout, grid=Grid(p_m, p_n, p_k * ceil_div(layout.links, most)))


def as_queued(layout: Schedule) -> Schedule:
    """The same layout, left to Dask if each chunk that tasks make anywhere is for one product.

    Of tasks that wait for nothing, Dask sends a worker as many as it has threads, and the next ones
    when products are done. All that are pinned it sends at once.
    """
    several = layout.grid.workers > 1 and not layout.k_parts
    if not (several and made_by_tasks(layout) and layout.made_once) or layout.spec("c").owners:
        return layout
    return replace(layout, queued=True, band=ceil_div(len(layout.row_sizes), layout.grid.p_m))


def with_little_ahead(layouts: list[Schedule], cluster: ClusterSpec) -> list[Schedule]:
    """Those that don't have much more in memory, of operands that tasks make, than they need."""
    ahead = {layout: _made_ahead(layout, cluster) for layout in layouts}
    most = NEARLY_LEAST * min(ahead.values(), default=0)
    return [x for x in layouts if ahead[x] <= max(most, LITTLE, SHARE * _operands(x, cluster))]


def takes_little(layout: Schedule) -> bool:
    """Whether no task of owner computes needs much of its large operand, which is still to be made.

    Two of its chunks, or as much as may lie in memory otherwise.
    """
    if layout.in_place is None:
        return True
    own, spec = layout.in_place.partial_products, layout.in_place.laid
    most = max(
        sum(
            sum(own.rows[i] for i in rows) * sum(own.columns[own.k_tiles[s]] for s in k_tiles)
            for rows, k_tiles in partial_product.groups
        )
        for partial_product in own.made.values()
    )
    chunk = max(own.rows) * max(own.columns)
    return most * spec.itemsize <= max(SHORT * chunk * spec.itemsize, LITTLE, SHARE * spec.nbytes)


def _made_ahead(layout: Schedule, cluster: ClusterSpec) -> int:
    """Bytes of operands that tasks make and that a worker may have in memory at once."""
    if not made_by_tasks(layout):
        return 0
    if _runs_ahead(layout, cluster):
        return _operands(layout, cluster)
    steps = min(SHORT, layout.links) if _few_blocks(layout, cluster) else 1
    tasks = cluster.threads * steps * layout.k_tiles_per_task
    ahead = sum(_made_at_once(layout, cluster, role, tasks) for role in layout.operands.in_use)
    return min(ahead, _operands(layout, cluster))


def _made_at_once(layout: Schedule, cluster: ClusterSpec, role: str, tasks: int) -> int:
    """Bytes that tasks make of an operand that so many others multiply: whole chunks along k.

    What is a single chunk along k is there as a whole, whatever is multiplied of it.
    """
    spec, in_use = layout.spec(role), layout.operands.in_use[role]
    chunks = spec.chunks[-1 if role == "a" else -2]
    if not in_use:
        return 0
    if bounds_blocks(cluster) and spec.blocks == 1:
        return spec.nbytes
    most, grid = most_of(layout.problem, cluster), layout.grid
    length, blocks, p = {
        "a": (most.m, layout.m_blocks, grid.p_m),
        "b": (most.n, layout.n_blocks, grid.p_n),
    }[role]
    if length < MOST_ELEMENTS:  # each task takes a block, and no other one takes it again
        in_use //= ceil_div(len(blocks), p)
    elif len(chunks) == 1 and not bounds_blocks(cluster):
        return tasks * in_use
    return tasks * max(in_use, in_use * max(chunks) // layout.largest.k)


def _operands(layout: Schedule, cluster: ClusterSpec) -> int:
    return crowd(layout, cluster) * sum(layout.operands.kept.values())


def _few_blocks(layout: Schedule, cluster: ClusterSpec) -> bool:
    """Whether several threads have no more blocks of C than they are."""
    blocks = ceil_div(layout.work.count, layout.grid.p_m * layout.grid.p_n)
    # What Dask queues is made while the next product is on its way.
    return blocks <= cluster.threads and (cluster.threads > 1 or layout.queued)


def _runs_ahead(layout: Schedule, cluster: ClusterSpec) -> bool:
    """Whether threads make operands for one block of C without bound."""
    return _few_blocks(layout, cluster) and layout.links > SHORT
