"""What a worker waits for before its first product, and how fast blocks travel to it."""

from __future__ import annotations

from collections import Counter
from itertools import product

from multimm.planning.cost import communication
from multimm.planning.hardware import ClusterSpec
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import ceil_div

#: For each block of an operand that a worker fetches before its first product, beside its bytes:
#: one of 1 MB to 1 GB took 2 ms more than its bytes would between two idle H200s, each of four of
#: 64 or 256 MB 2.5.
FETCH_S = {"gpu": 2e-3, "cpu": 1.2e-3}
#: The same of those that it fetches beside products, as a multiple of the scheduler's time for a
#: task, 4 ms: blocks of 309 and 461 MB came one after another, and took 6 ms more each. On CPUs a
#: byte's time has it.
BESIDE = {"gpu": 8.0, "cpu": 0.0}


def link_rate(layout: Schedule, cluster: ClusterSpec) -> float:
    """Bytes per second that a worker receives, from its own node and from others in turn."""
    far = communication.share_between_nodes(layout.problem, layout.grid, cluster.node)
    return 1e9 / ((1 - far) / cluster.link.gbps + far / cluster.between.gbps)


def arrivals(
    layout: Schedule, cluster: ClusterSpec, moved: float, product: float
) -> tuple[float, float]:
    """Seconds of transfers that products may hide, and of those that come before the first one.

    A task of partial products needs all chunks at once, and of partial products only those travel
    meanwhile.
    """
    rate = link_rate(layout, cluster)
    if layout.in_place is None:
        blocks = moved / _block_bytes(layout)
        fetched = BESIDE[cluster.slowest.kind] * blocks * cluster.task_overhead_s
        return moved / rate + fetched, _waiting(layout, cluster, product)
    chunks, nbytes = layout.in_place.arriving
    fetched = FETCH_S[cluster.slowest.kind] * chunks
    first = cluster.link.latency_s * (chunks > 0) + fetched + nbytes / rate
    return max(0.0, moved - nbytes) / rate, first


def _block_bytes(layout: Schedule) -> float:
    """Bytes of a block of the operands, on average."""
    count = len(layout.row_sizes) + ("b" in layout.roles) * len(layout.n_blocks)
    specs = [(layout.spec(x), layout.operands.width(x)) for x in layout.roles]
    nbytes = sum(spec.nbytes // spec.itemsize * width for spec, width in specs)
    return max(1.0, nbytes / (count * len(layout.k_tiles)))


def _waiting(layout: Schedule, cluster: ClusterSpec, product: float) -> float:
    """Seconds in which a worker has nothing to do for want of blocks of the first k-tile, at worst.

    It fetches what it does not keep of them, all at once, and meanwhile multiplies what it keeps,
    in `product` seconds each.
    """
    fetches, kept, size = _first_k_tile(layout)
    if not fetches:
        return 0.0
    arrival = (1 + fetches) * cluster.link.latency_s + size / link_rate(layout, cluster)
    return max(0.0, arrival - kept * product)


def _first_k_tile(layout: Schedule) -> tuple[int, int, float]:
    """Of a worker, at worst: blocks that it lacks, products without them, bytes for the next one.

    What lies with a worker beyond the grid comes from there. Of a block that is cut from others,
    what other workers have of it comes first, and until then there are no products.
    """
    grid, k_tile = layout.grid, layout.largest.k
    plane = grid.p_m * grid.p_n
    beyond = {
        x for x in (*layout.operands.cut_again, *layout.operands.in_place) if layout.lies_beyond(x)
    }
    size_a = k_tile * layout.largest.rows * layout.operands.width("a")
    if layout.mirrors:  # the other one of two blocks
        return int(plane > 1 or bool(beyond)), 0, size_a
    matrices = max(layout.batch_sizes) if len(layout.problem.b.shape) > 2 else 1
    size_b = k_tile * layout.largest.n * matrices * layout.operands.width("b")
    rows = ceil_div(len(layout.row_sizes), grid.p_m)
    columns = ceil_div(len(layout.n_blocks), grid.p_n)
    keeps_a = 0 if "a" in beyond else _keeps(layout, "a", rows // grid.p_n)
    # Of a stack, each matrix may have a B of its own, which goes nowhere.
    shared = len(layout.m_blocks) > 1 or any(len(share.users) > 1 for share in layout.shares("b"))
    if shared or not layout.batch_blocks:
        keeps_b = 0 if "b" in beyond else _keeps(layout, "b", columns // grid.p_m)
        kept = keeps_a * keeps_b
    else:
        per_row, columns = columns, rows * columns
        keeps_b = 0 if "b" in beyond else _keeps(layout, "b", columns)
        kept = min(keeps_a * per_row, keeps_b)
    lacks = rows - keeps_a + columns - keeps_b
    cut, away = layout.operands.cut_apart if grid.workers > 1 else (), 1 - 1 / grid.workers
    come_a = size_a * (away if keeps_a and "a" in cut else keeps_a < rows)
    come_b = size_b * (away if keeps_b and "b" in cut else keeps_b < columns)
    if cut:
        return lacks or len(cut), 0, come_a + come_b
    return lacks, kept, max(come_a, come_b) if kept else come_a + come_b


def _keeps(layout: Schedule, role: str, usual: int) -> int:
    """Blocks of the first k-tile that a worker keeps of those that it needs: `usual`, unless they
    lie elsewhere.
    """
    if role not in layout.operands.elsewhere:
        return usual
    grid, held = layout.grid, Counter[int]()
    edges = layout.m_blocks if role == "a" else layout.n_blocks
    blocks = product(layout.shares(role), range(len(edges)), enumerate(layout.first_k_tile[:-1]))
    for share, block, (part, k_tile) in blocks:
        flat = share.users[0]
        rank = layout.tiles.owners(role, flat, block)[k_tile]
        at = grid.place(rank)
        needed = any((at.row, at.col) in used for used in layout.blockwise.users(role, flat, block))
        held[rank] += needed and at.part == part
    return min(held[rank] for rank in range(grid.workers) if grid.place(rank).part < layout.parts)
