"""Sizes of blocks and k-tiles for one arrangement of workers.

How many there are is counted in `multimm.planning.tiling.counts`, and where they are cut is chosen
in `multimm.planning.tiling.boundaries`.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt, prod

from multimm.planning.cost import memory
from multimm.planning.hardware import ClusterSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.boundaries import (
    AS_GIVEN,
    batch_blocks,
    choose_k_tiles,
    choose_parts,
    choose_side,
)
from multimm.planning.tiling.counts import (
    AS_USUAL,
    CHAINS,
    EDGE,
    LEAST_EDGE,
    LONGEST,
    Cut,
    bounds_blocks,
    count_c,
    count_k_tiles,
    is_large,
    most_of,
)
from multimm.planning.tiling.grid import Blocks, Grid, ceil_div


def lay_out(
    problem: Problem,
    cluster: ClusterSpec,
    grid: Grid,
    options: Options,
    cut: Cut = AS_USUAL,
    k_parts: Blocks = (),
) -> Schedule:
    """Blocks, k-tiles and row panels for `grid`, cut further until they fit the memory budget.

    Workers without a place in `grid` count for nothing.
    """
    cluster = cluster.first(grid.workers)
    kind = cluster.slowest.kind
    edge, least = EDGE[kind], LEAST_EDGE[kind] // 2
    layout = _blocks(problem, cluster, grid, options, edge, cut, k_parts)
    held = memory.held(layout, cluster)
    if layout.operands.packed and not all(problem.rereadable) and memory.excess(held, cluster):
        # Rather pack a block for each product than spill what was packed.
        layout = replace(layout, pack_once=False)
        held = memory.held(layout, cluster)
    while not _fits(layout, held, cluster) and (edge > least or layout.band > 1):
        if layout.longest > LONGEST:
            break
        narrower = _narrower(layout, cluster)
        if narrower is not None:
            layout = narrower
        else:  # cut blocks and k-tiles
            edge //= 2
            layout = replace(
                _blocks(problem, cluster, grid, options, edge, cut, k_parts),
                stream=layout.stream,
                by_block=layout.by_block,
                pack_once=layout.pack_once,
            )
        held = memory.held(layout, cluster)
    return layout


def in_memory(layout: Schedule, cluster: ClusterSpec) -> tuple[Schedule, memory.Held]:
    """The same blocks, of as many at once as fit in memory, and what they take."""
    held = memory.held(layout, cluster)
    while not _fits(layout, held, cluster) and (narrower := _narrower(layout, cluster)) is not None:
        layout, held = narrower, memory.held(narrower, cluster)
    return layout, held


def _narrower(layout: Schedule, cluster: ClusterSpec) -> Schedule | None:
    """The same blocks in less memory; None where all has been done."""
    # 1. Read operands as they are needed, where they can be read again.
    rereadable = layout.problem.rereadable
    if all(rereadable) and not layout.stream:
        return replace(layout, stream=True)
    # 2. Without workers make blocks of a large C one by one.
    large = layout.problem.summed_bytes > cluster.budget_bytes
    if layout.alone and large and any(rereadable) and not layout.by_block:
        return replace(layout, stream=True, band=1, by_block=True)
    # 3. Work on fewer block rows at once.
    return replace(layout, band=ceil_div(layout.band, 2)) if layout.band > 1 else None


def _fits(layout: Schedule, held: memory.Held, cluster: ClusterSpec) -> bool:
    """All that is needed stays in memory; spilling is what `lay_out` tries to avoid."""
    # Operands that cannot be read again are Dask's to spill.
    if layout.stream or not all(layout.problem.rereadable):
        held = held[0], {}
    return not memory.excess(held, cluster)


def _blocks(
    problem: Problem,
    cluster: ClusterSpec,
    grid: Grid,
    options: Options,
    edge: int,
    cut: Cut,
    k_parts: Blocks,
) -> Schedule:
    least = min(edge, LEAST_EDGE[cluster.slowest.kind])
    as_given = cut.given and problem.batch_chunked
    wanted = CHAINS * cluster.threads * grid.p_m
    most = most_of(problem, cluster)
    stacked = min(edge, isqrt(4 * most.stack))
    batch = problem.batch_chunks if as_given else batch_blocks(problem, stacked, wanted)
    parallel = prod(len(blocks) for blocks in batch)
    chains = cluster.threads * (CHAINS if grid.workers > 1 else 1)
    counts = count_c(problem, grid, parallel, chains, edge, least, cut, most.c)
    k_tiles = count_k_tiles(problem, grid, counts, edge, least, cut)
    keep = (least if cut.joined else AS_GIVEN) if cut.given else 0
    if k_parts and cut.given:
        k_k_tiles = choose_parts(problem, k_parts, k_tiles, keep)
    else:
        k_k_tiles = choose_k_tiles(problem, grid, k_tiles, options.slabs, keep, most.k)
    (rows, cols), (block_m, block_n) = counts, options.edges
    halves, alone = problem.symmetric and block_m == block_n, bounds_blocks(cluster)
    along = rows if halves else grid.p_m
    # What uses a large C along an axis waits for all blocks that its chunks are cut of.
    across = min(len(problem.a.chunks[-2]), len(problem.b.chunks[-1]))
    only_regular = alone and is_large(problem) and across > 1 and not problem.chunks
    m_blocks = choose_side(
        problem, -2, rows, along, block_m, keep, min(most.m, most.rows), only_regular, cut.even
    )
    band = ceil_div(parallel * len(m_blocks), grid.p_m)
    n_blocks = m_blocks
    if not halves:
        n_blocks = choose_side(
            problem, -1, cols, grid.p_n, block_n, keep, min(most.n, most.columns), only_regular,
            cut.even,
        )  # fmt: skip
    blocks = batch, m_blocks, n_blocks, k_k_tiles
    return Schedule(problem, grid, *blocks, band, mirrors=halves, k_parts=k_parts, alone=alone)
