"""What a layout costs: bytes held and seconds. Each is a sum of named terms."""

from __future__ import annotations

from math import ceil

from multimm.planning import traffic
from multimm.planning.layout import Layout
from multimm.planning.partition import WINDOW
from multimm.planning.problem import Problem
from multimm.planning.spec import ClusterSpec, DeviceSpec

Terms = dict[str, float]

#: Bytes per second at which finished blocks leave a full device: host link of a GPU
#: (dask-cuda copies through pageable memory, 6.9 GB/s measured), disk of a CPU (arbitrary).
SPILL_RATE = {"gpu": 6.9e9, "cpu": 0.5e9}


def memory(layout: Layout, cluster: ClusterSpec) -> tuple[Terms, Terms]:
    """Bytes of the fullest worker: what must stay, and what may be spilled, by name."""
    p, grid = layout.problem, layout.grid
    block = max(layout.row_sizes) * max(layout.n_blocks)
    slab = max(layout.slabs)
    panel_a, panel_b = layout.panels
    crowd = ceil(grid.workers / cluster.workers)  # ranks per worker: 1, but for a large p_k
    stay: Terms = {
        "partial sums": crowd * layout.wave_sums * p.sum_bytes,
        "sums being made": cluster.threads * block * (p.sum_bytes + p.out_bytes),
        "A in flight": crowd * WINDOW * panel_a * slab * p.a.itemsize,
    }
    if layout.parts > 1 and cluster.workers > 1:
        # Of each two workers with a part of the same sum, one receives the other's.
        # Those of a wave are still being added when the next one begins.
        waves = 1.5 if layout.waves > 1 else 0.5
        stay["sums received"] = crowd * (waves * layout.wave_sums + block) * p.sum_bytes
    if not layout.mirrors:
        stay["B in flight"] = crowd * WINDOW * panel_b * slab * p.b.itemsize
    if layout.problem.packable:
        sides = max(layout.row_sizes) * p.a.itemsize + max(layout.n_blocks) * p.b.itemsize
        stay["operands being packed"] = cluster.threads * slab * sides * layout.padding
    spill: Terms = {"C finished": crowd * (layout.share_result - layout.wave_sums) * p.out_bytes}
    if not layout.stream:
        home = {role: crowd * size for role, size in layout.at_home.items()}
        spill |= {f"{role.upper()} at home": size for role, size in home.items()}
        if layout.packed:
            names = " and ".join(role.upper() for role in layout.packed)
            spill[f"packed {names}"] = sum(home[role] for role in layout.packed) * layout.padding
    if p.reads_c:
        spill["C read"] = p.result_bytes / (grid.p_m * grid.p_n)
    return stay, {name: size for name, size in spill.items() if size > 0}


def seconds(layout: Layout, cluster: ClusterSpec, moved: float) -> Terms:
    """Seconds of the slowest worker, by name; `moved` is what it receives, in bytes.

    Block products, transfers and the scheduler work side by side: the longest of the three
    counts. On top of it the first blocks are waited for, partial sums of parts of k travel when
    the last slab is done, and what does not fit is spilled and read back.
    """
    p, device = layout.problem, cluster.slowest
    _, cuts = traffic.recut(layout)
    crowd = ceil(layout.grid.workers / cluster.workers)
    flops = crowd * 2 * layout.share_sums * layout.share_k
    first, rate = _first_blocks(layout), link_rate(layout, cluster)
    stay, spill = memory(layout, cluster)
    excess = max(0.0, sum(stay.values()) + sum(spill.values()) - cluster.budget_bytes)
    sums = layout.share_sums * p.sum_bytes * (layout.parts - 1) / layout.parts
    mirrored = 2 * (layout.share_result - layout.share_sums) * p.out_bytes  # read and written
    return {
        "block products": flops / (product_gflops(p, device) * 1e9),
        "transfers": moved / rate,
        "scheduling": (layout.tasks + cuts) * cluster.task_overhead_s,
        "first blocks": first / rate + cluster.link.latency_s * (first > 0),
        "last sums": sums / rate,
        "mirroring": mirrored / (device.copy_gbps * 1e9),
        "spilling": 2 * excess / SPILL_RATE[device.kind],
    }


def product_gflops(problem: Problem, device: DeviceSpec) -> float:
    """GFLOP/s of the problem's block products: measured, or scaled from the float32 rate."""
    measured = dict(device.packed_gflops).get(problem.pack) if problem.packable else None
    return measured or device.gflops / problem.relative_cost


def link_rate(layout: Layout, cluster: ClusterSpec) -> float:
    """Bytes per second that a worker receives, from its own node and from others in turn."""
    far = traffic.share_between_nodes(layout.problem, layout.grid, cluster.node)
    return 1e9 / ((1 - far) / cluster.link.gbps + far / cluster.between.gbps)


def _first_blocks(layout: Layout) -> int:
    """Bytes that a worker waits for before its first product, at worst.

    A worker that keeps a block of A and one of B of the first slab begins at once. With at
    least as many block rows, or columns, as workers in a part of k, all keep one.
    """
    p, grid, slab = layout.problem, layout.grid, max(layout.slabs)
    plane = grid.p_m * grid.p_n
    if traffic.volume(p, grid._replace(p_k=1)) == 0:
        return 0
    matrices = max(layout.batch_sizes) if len(p.b.shape) > 2 else 1
    block_a = slab * max(layout.row_sizes) * p.a.itemsize
    block_b = slab * max(layout.n_blocks) * matrices * p.b.itemsize
    if layout.mirrors:  # the other of two blocks
        return block_a if plane > 1 else 0
    waits_a = grid.p_n > 1 and len(layout.row_sizes) < plane
    waits_b = grid.p_m > 1 and len(layout.n_blocks) < plane
    return block_a * waits_a + block_b * waits_b


#: What runs side by side still gets in each other's way: this share of all but the longest
#: is added. Arbitrary; it makes the chooser prefer fewer bytes among equally fast plans.
FRICTION = 0.1


#: What comes before the first block product, after the last, or stops all.
AROUND = ("first blocks", "last sums", "mirroring", "spilling")


def total_seconds(terms: Terms) -> float:
    """Predicted seconds from the terms of `seconds`."""
    side_by_side = [terms[name] for name in ("block products", "transfers", "scheduling")]
    longest = max(side_by_side)
    hidden = FRICTION * (sum(side_by_side) - longest)
    return longest + hidden + sum(terms[name] for name in AROUND)
