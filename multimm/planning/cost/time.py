"""What a layout costs in seconds: a sum of named terms."""

from __future__ import annotations

from math import prod

from multimm.planning.cost.first_blocks import arrivals, link_rate
from multimm.planning.cost.host_transfers import (
    coming_back,
    going_up,
    held_up,
    host_tasks,
    way_back,
)
from multimm.planning.cost.memory import Terms, crowd
from multimm.planning.cost.reading import seconds as decoding
from multimm.planning.devices import DeviceSpec
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import FLOAT32, Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import ceil_div
from multimm.planning.work.symmetric import Symmetric

#: Of the scheduler's time for a task, what passes before the first one runs: all of them are
#: sent, ordered and listed first. 0.1 ms a task between 5 and 192 of them, on two H200s.
BEFORE = 0.2
#: The same for each chunk of the operands: the first task began 0.053 ms later for each of them (32
#: to 366, least squares over ten products on one H100 and on two H200s).
CHUNK = 0.11
#: The scheduler's time for a task where it has nothing else to do, as a multiple of what is assumed
#: of it: 256 tasks of nothing on two H200s take Dask 0.8 ms each, as many small products 1.1.
SCHEDULED = {"gpu": 1.6, "cpu": 1.0}
#: What Dask does in a worker for each task that computes, beside running it, as a multiple
#: of the same: 3 ms where tasks of 0.3 ms follow each other on each of two H200s, four on each.
#: Products hide it. (Of copies to and from host memory, which have threads, it is not known.)
IN_WORKER = {"gpu": 5.0, "cpu": 0.0}
#: From the end of one task to the beginning of the next in the same thread, as a multiple of the
#: scheduler's time for a task: 0.2 ms on H200s, 2 to 3 ms where workers share two cores with each
#: other, the scheduler and TCP.
SWITCH = {"gpu": 0.4, "cpu": 4.0}
#: The same of a cluster of one GPU: 32 and 64 tall products of 1 to 4 ms took an H200 1.4
#: and 1.6 ms each more than 4 and 8 larger ones, what is scheduled beside them included. (Of
#: several workers the same is not known.)
ALONE = 2.0
#: Of that, the share where the next product is launched while one runs. Of 3 x 3 products of 18 ms
#: on an H200, the last one was back after 241 ms; with all of it 283 are predicted.
AHEAD = 0.25
#: More of it where a worker has nothing else to do: the scheduler sends a task when all that it
#: needs is there. 1.4 to 2.5 ms between k-tiles of tall symmetric products on two H200s.
CHAINED = {"gpu": 3.6, "cpu": 0.0}
#: From the end of a task to the beginning of what it alone held up, as a multiple of the same: 3
#: ms, for the scheduler sends what it has for a worker every 5 ms. A product has such steps where
#: blocks are packed once, cut anew, added up or mirrored: 2 to 5 ms each on two H200s, in squares
#: of 16384 to 32768.
STEP = 6
#: A task that packs a block or cuts one anew, beside its bytes; and, for packing, bytes read and
#: written for each of the block: 2.0, 2.6 and 3.6 ms for 0.5, 1 and 2 GiB in products on two H200s
#: (0.55 and 1.1 ms for the first two where nothing else happens in the process).
PACK_S, PACK_BYTES = 1.5e-3, 4
#: The same within a product, for each byte that the kernel reads or writes: 2.5 and 2.1 ms for 2^30
#: elements in `float32` and `tf32` on an H200.
WITHIN_BYTES = 1.2
#: The same of a block that a symmetric product packs for both sides, for each of its bytes: tall
#: ones are read twice, which takes 3.0 and 2.4 ms for as many.
MIRRORED_BYTES = 2.7
#: Of a sum of parts of k, for each part that a worker fetches, beside the first block's latency: as
#: a share of that. On H200s three took 3.5 to 5 ms, seven took 10.
PART = 0.4
#: Of an operand that is cut again, for each coalesced transfer of sub-blocks that a worker fetches;
#: and for each sub-block that it copies. On an H200 blocks of 81, 256 and 1024 sub-blocks took 0.6,
#: 2 and 7.5 ms more than their bytes. On CPU workers what a task lacks comes in one message: 32
#: chunks of 0.26 MB, half of them from another worker, took 2 to 4 ms more than two of 4.2 MB,
#: copies included.
FETCH_S, SUB_BLOCK_S = {"gpu": 4e-4, "cpu": 5e-5}, {"gpu": 8e-6, "cpu": 5e-5}
#: A GPU worker's interpreter launches packing and product of a chunk that a task of many multiplies
#: by itself. The GPU waits where it is faster: in tasks of 32 and 122 such chunks each took an H100
#: 0.27 and 0.25 ms in `tf32`, where its kernels take 0.19 and 0.16.
LAUNCH_S = 2.6e-4
#: Bytes read and written for each of the sums that a k-tile leaves to the next one. Nothing hides
#: them: 0.8 to 1.4 ms for 1 GiB of sums, of which a kernel reads P and writes D, on an H200.
SUMS_BYTES = 4

#: NumPy multiplies an array by its own transpose in this share of the time, if they are of these
#: dtypes: 0.53 to 0.57 in float32, of 128 to 2000 columns, 0.54 to 0.61 in float64, on an EPYC.
SYRK, REAL = 0.57, ("float32", "float64")

#: A CPU multiplies at the measured rate what lies in its caches. For each byte of its operands a
#: product takes longer, as if so many were copied, read or written: 2.1 to 2.6 for a tall matrix by
#: 16 or 64 columns, 0.6 to 1.2 for what is transposed or long, on one core of an EPYC.
#: The same for each byte of C, which comes in new memory: 8000 x 100 by 100 x 8000 took two CPU
#: workers as much longer than their operations as 3 to 3.6 of them, in float32 and in float64.
READ_BYTES, MADE_BYTES = 1.6, 3.0

#: Packed blocks are filled up to multiples of so many rows. Counted of sides up to so long.
PACKED_ROWS, NARROW = 128, 1024

#: Bytes per second at which finished blocks leave a full device: host link of a GPU
#: (dask-cuda copies through pageable memory, 6.9 GB/s measured), disk of a CPU (arbitrary).
SPILL_RATE = {"gpu": 6.9e9, "cpu": 0.5e9}

#: What one thread of a worker does.
IN_TURN = (
    "block products",
    "packing",
    "cutting",
    "decoding",
    "sums between k-tiles",
    "launching",
    "between tasks",
)
#: What runs beside that.
BESIDE = ("transfers", "scheduling", "to the GPUs", "from the GPUs")
#: What comes before the first block product, after the last, or stops all.
AROUND = (
    "starting",
    "from step to step",
    "first blocks",
    "last sums",
    "joining C",
    "handing C out",
    "last blocks from a GPU",
    "spilling",
)
#: What runs side by side still gets in each other's way: this share of all but the longest
#: is added. Arbitrary; it makes the chooser prefer fewer bytes among equally fast plans.
FRICTION = 0.1


def by_phase(kind: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Terms that follow each other on a kind of device, that run beside them, and all others.

    CPU workers send and receive with the cores that multiply: no product hides a transfer.
    """
    if kind == "gpu":
        return IN_TURN, BESIDE, AROUND
    return (*IN_TURN, "transfers"), tuple(x for x in BESIDE if x != "transfers"), AROUND


def seconds(layout: Schedule, cluster: ClusterSpec, moved: float, spilled: float = 0) -> Terms:
    """Seconds of the slowest worker, by name; it receives and spills so many bytes.

    A worker packs, multiplies, hands sums from k-tile to k-tile and goes from task to task in turn.
    That, transfers and the scheduler run side by side: the longest of the three counts. On top of
    it the product is planned and sent, the first blocks are waited for, partial sums of parts of k
    travel when the last k-tile is done, and what does not fit is spilled and read back.
    """
    p, device = layout.problem, cluster.slowest
    copying = device.copy_gbps * 1e9
    cuts = layout.operands.rechunk.tasks
    each = crowd(layout, cluster)
    flops = each * _flops(layout, device)
    rate, packing = link_rate(layout, cluster), _packing(layout, cluster)
    levels, fetched, sums = _sums(layout)
    handed_on = each * layout.work.handed_on(layout.steps) * p.sum_bytes
    handed_out, joined = layout.result.handing_out(cluster.workers)
    tasks = layout.tasks + cuts + host_tasks(layout) + handed_out
    chains = ceil_div(layout.work.count * layout.parts, cluster.workers)
    products = flops * _filled_up(layout) / (product_gflops(p, device) * 1e9)
    products += reading(each * _read(layout), device)
    products += making(each * layout.work.most_kept * p.out_bytes, device)
    alone = (products + packing * (not layout.operands.packed)) / (chains * layout.steps)
    handing_on = SUMS_BYTES * handed_on / copying
    transfers, first = arrivals(layout, cluster, moved, alone)
    up, first_up = going_up(layout, cluster)
    back = way_back(layout, cluster, each)
    terms = {
        "block products": products,
        "transfers": transfers,
        "packing": packing,
        "cutting": _cutting(layout, cluster),
        "decoding": decoding(layout, cluster),
        "to the GPUs": up,
        "from the GPUs": 0.0,
        "sums between k-tiles": handing_on,
        "launching": _launching(layout, device, products + packing + handing_on),
        "between tasks": _between_tasks(layout, cluster, tasks)
        + held_up(layout, cluster, up + first_up + back),
        "scheduling": _scheduling(tasks, layout.tasks + cuts, cluster),
        "starting": starting(p, cluster, tasks),
        "from step to step": (_steps(layout) + levels) * STEP * cluster.task_overhead_s,
        "first blocks": first + first_up,
        "last sums": sums * p.sum_bytes / rate + (levels + PART * fetched) * cluster.link.latency_s,
        "joining C": _joining(layout, cluster),
        "handing C out": _handing_out(layout, cluster, joined),
        "last blocks from a GPU": 0.0,
        "spilling": 2 * spilled / SPILL_RATE[device.kind],
    }
    # Of C, what is on its way back beside the products depends on how long these take.
    in_turn = max(up, sum(terms[name] for name in IN_TURN))
    beside, last = coming_back(layout, each, back, in_turn)
    terms |= {"from the GPUs": beside, "last blocks from a GPU": last}
    return terms


def _scheduling(tasks: int, computing: int, cluster: ClusterSpec) -> float:
    """Seconds of the scheduler for all tasks, or of a worker for its own that compute."""
    kind, own = cluster.slowest.kind, ceil_div(computing, cluster.workers)
    return max(SCHEDULED[kind] * tasks, IN_WORKER[kind] * own) * cluster.task_overhead_s


def _between_tasks(layout: Schedule, cluster: ClusterSpec, tasks: int) -> float:
    """Seconds from the end of a task to the beginning of the next one, over all of a thread's."""
    kind, count = cluster.slowest.kind, layout.work.count * layout.parts
    switch = ALONE if cluster.alone and kind == "gpu" else SWITCH[kind]
    switches = ceil_div(tasks, cluster.workers) / cluster.threads * switch
    if layout.overlaps:
        switches *= AHEAD
    links = layout.links - 1 if count // cluster.workers <= cluster.threads else 0
    return (switches + links * CHAINED[kind]) * cluster.task_overhead_s


def _steps(layout: Schedule) -> int:
    """Steps that hold all others up, beside the levels of sums."""
    p, operands = layout.problem, layout.operands
    return (
        bool(operands.packed)
        + bool(operands.cut_apart)  # C is not waited for
        + bool(operands.coalesced_transfers)
        + (layout.work.finishing(adds=p.c is not None) > 0)
        + (bool(layout.uploaded) + p.downloaded) * (not p.in_one)
        + layout.result.hands_out
    )


def knows_transposes(problem: Problem, device: DeviceSpec) -> bool:
    """Whether a product of an array and its transpose is NumPy's, by a routine of BLAS for that."""
    return device.kind == "cpu" and not problem.exact and problem.accumulate in REAL


def _flops(layout: Schedule, device: DeviceSpec) -> float:
    """Operations of the busiest worker that take as long as those of a plain product."""
    work = layout.work
    if isinstance(work, Symmetric) and knows_transposes(layout.problem, device):
        return 2 * work.most_after(1 - SYRK) * layout.share_k
    return 2 * work.multiplied(layout.share_k)


def _sums(layout: Schedule) -> tuple[int, int, int]:
    """Levels of the tree over the parts of k; blocks, and elements, that the busiest receives."""
    block = max(1, layout.largest.rows * layout.largest.n)
    parts, blocks, levels, fetched = layout.parts, ceil_div(layout.work.most_summed, block), 0, 0
    while parts > 1:
        at_once = min(layout.fan_in, parts)
        blocks = ceil_div(blocks, at_once)
        fetched += (at_once - 1) * blocks
        parts, levels = ceil_div(parts, layout.fan_in), levels + 1
    return levels, fetched, fetched * block


def _joining(layout: Schedule, cluster: ClusterSpec) -> float:
    """Seconds from the last partial product to the last block of C: those of one block travel."""
    if layout.in_place is None or not layout.in_place.joined:
        return 0.0
    work = layout.in_place
    size, device, workers = layout.joined_bytes, cluster.slowest, cluster.workers
    per_row = work.most_fetched / max(1, work.most_joined)  # in so many partial products it is
    rows, columns = layout.work.sides
    travels = max(rows) * max(columns) * size * per_row / link_rate(layout, cluster)
    read = work.most_joined * size * (1 + per_row)
    copied = (read + work.most_joined * layout.problem.out_bytes) / (device.copy_gbps * 1e9)
    return travels + copied + (1 + PART * (workers - 1)) * cluster.link.latency_s


def _handing_out(layout: Schedule, cluster: ClusterSpec, moved: int) -> float:
    """Seconds for the last chunks of C: all is read and written, and so many bytes travel."""
    if not layout.result.hands_out:
        return 0.0
    copied = 2 * layout.work.most_kept * layout.problem.out_bytes
    travels = moved / min(cluster.workers, layout.grid.workers) / link_rate(layout, cluster)
    latency = cluster.link.latency_s * (moved > 0)
    return copied / (cluster.slowest.copy_gbps * 1e9) + travels + latency


def _packing(layout: Schedule, cluster: ClusterSpec) -> float:
    """Seconds of the busiest worker: blocks packed once by owners, others in every product."""
    p = layout.problem
    by_product = p.exact or p.real_products > 1 or p.by_residues
    if not (p.packable or (p.packs and by_product)):
        return 0.0
    seconds, rate = 0.0, cluster.slowest.copy_gbps * 1e9
    if layout.in_place is not None:
        packed = layout.in_place.packed_by_products.items()
        return sum(_packed_within(p, layout.spec(role), role) * n for role, n in packed) / rate
    sides = {"a": (layout.row_sizes, p.a), "b": (layout.n_blocks, p.b)}
    for role in layout.roles:
        edges, spec = sides[role]
        once, count = role in layout.operands.packed, len(edges)
        elements = max(edges) * layout.largest.k
        # Of a symmetric product, blocks on the diagonal are packed for both sides, others for each.
        alone = count if once or layout.mirrors else 0
        within = 0 if once else count * (count - 1) if layout.mirrors else layout.work.count
        seconds += _most(within, layout, cluster) * _packed_within(p, spec, role) * elements / rate
        each = PACK_BYTES if once else MIRRORED_BYTES
        moved = each * max(spec.itemsize, p.sum_bytes) * elements
        seconds += _most(alone, layout, cluster) * (PACK_S * once + moved / rate)
    return seconds


def _packed_within(problem: Problem, spec: MatrixSpec, role: str) -> float:
    """Bytes that packing an element within a product takes as long as."""
    real = problem.reals(role) * FLOAT32
    narrow = spec.itemsize < real and not problem.exact
    widened = 2 * real if narrow else 0  # written and read
    widened += 2 * problem.written(role)
    return WITHIN_BYTES * (spec.itemsize + problem.packed_bytes(role) + widened)


def _cutting(layout: Schedule, cluster: ClusterSpec) -> float:
    """Seconds of a worker that brings its share of the operands into other blocks.

    And, on a GPU, gathers what it has made of chunks in one partial product.
    """
    workers = min(cluster.workers, layout.grid.workers)  # a lone task may run on any worker
    rechunk, device = layout.operands.rechunk, cluster.slowest
    rate, fetch = device.copy_gbps * 1e9, FETCH_S[device.kind]
    once = ceil_div(rechunk.tasks, workers) * PACK_S + ceil_div(rechunk.fetched, workers) * fetch
    copied = rechunk.copied
    if layout.in_place is not None and device.kind == "gpu":
        copied += layout.in_place.gathered
    moved = 2 * copied / workers  # read and written
    return once + ceil_div(rechunk.sub_blocks, workers) * SUB_BLOCK_S[device.kind] + moved / rate


def reading(nbytes: float, device: DeviceSpec) -> float:
    """Seconds in which products of a CPU read so many bytes, beside those that they compute in."""
    return READ_BYTES * nbytes / (device.copy_gbps * 1e9) if device.kind == "cpu" else 0.0


def making(nbytes: float, device: DeviceSpec) -> float:
    """The same of so many bytes of C, which they write."""
    return MADE_BYTES * nbytes / (device.copy_gbps * 1e9) if device.kind == "cpu" else 0.0


def _read(layout: Schedule) -> float:
    """Bytes of the operands that are multiplied at a place of the grid, each of them once."""
    (p_m, p_n, p_k), b = layout.grid, layout.problem.b
    of_b = 0 if layout.mirrors else b.nbytes / (p_n * p_k)
    if len(b.shape) > 2:  # with a matrix for each of A's
        of_b /= p_m
    return layout.problem.a.nbytes / (p_m * p_k) + of_b


def _most(blocks: int, layout: Schedule, cluster: ClusterSpec) -> int:
    """Of so many blocks in every k-tile, those of the busiest worker."""
    return ceil_div(blocks * len(layout.k_tiles), cluster.workers)


def _filled_up(layout: Schedule) -> float:
    """By how much more is multiplied of narrow blocks: whole tiles of tensor cores."""
    if not layout.problem.packs:
        return 1.0
    sides = layout.largest.rows, layout.largest.n
    return prod(ceil_div(x, PACKED_ROWS) * PACKED_ROWS / x for x in sides if 0 < x < NARROW)


def product_gflops(problem: Problem, device: DeviceSpec) -> float:
    """GFLOP/s of the problem's block products: measured, or scaled from the float32 rate."""
    packed = problem.packs and not problem.on_int8
    if packed and (measured := dict(device.packed_gflops).get(problem.scheme)):
        return measured / problem.real_products
    return device.gflops / problem.relative_cost


def starting(problem: Problem, cluster: ClusterSpec, tasks: int) -> float:
    """Seconds until the first of so many tasks runs, and from the last one to the answer."""
    given = (problem.a, None if problem.symmetric else problem.b, problem.c)
    chunks = sum(spec.blocks for spec in given if spec is not None)
    return cluster.call_s + (BEFORE * tasks + CHUNK * chunks) * cluster.task_overhead_s


def _launching(layout: Schedule, device: DeviceSpec, kernels: float) -> float:
    """Seconds in which a GPU waits for launches, beside those of the kernels that they launch."""
    if layout.in_place is None or device.kind != "gpu":
        return 0.0
    return max(0.0, layout.in_place.most_products * LAUNCH_S - kernels)


def total_seconds(terms: Terms, kind: str) -> float:
    """Predicted seconds from the terms of `seconds`, on a kind of device."""
    in_turn, beside, around = by_phase(kind)
    side_by_side = [sum(terms[name] for name in in_turn), *(terms[name] for name in beside)]
    longest = max(side_by_side)
    hidden = FRICTION * (sum(side_by_side) - longest)
    return longest + hidden + sum(terms[name] for name in around)
