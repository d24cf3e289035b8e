"""Copies between host memory and GPUs: tasks, and seconds."""

from __future__ import annotations

from math import prod

from multimm.planning.cost.memory import IN_FLIGHT
from multimm.planning.hardware import ClusterSpec
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import ceil_div

#: Bytes per second from NumPy arrays to a GPU, two at a time beside other tasks; of each block,
#: more seconds. With both, blocks of 1, 0.5 and 0.25 GiB go up at 46, 42 and 36 GB/s, as measured
#: on one H200; 0.25 GiB went up at 35 to 47 to each of two.
UPLOAD_RATE, UPLOAD_S = 48e9, 2e-3
#: The same of one at a time, and of what is read from files: 9 ms for 256 MiB on one H200.
LONE_UPLOAD_RATE = 30e9
#: And back into new arrays: 18 to 22 GB/s on four H200s (`multimm.gpu.transfer.pinned_copy`).
DOWNLOAD_RATE = 20e9
#: Where chunks are cut for blocks, so many times as much goes up before the first product: those
#: for other blocks of its k-tile go up meanwhile. On two H200s it began after 79 to 142 ms.
BEFORE_CUT = 1.7
#: What all workers of a node bring back together: new memory is the host's. Two H200s with 32 cores
#: took 170 and 200 ms for 4.3 GB; of more it is not known.
DOWNLOAD_RATE_OF_NODE = 25e9
#: Before the first product that waits for them, and behind the last block that comes back, the same
#: takes so many seconds more: squares of 1024 to 8192 on an H200 took 25 to 65 ms, where without
#: them 10 to 48 were predicted. And of a chunk that goes there with others, seconds: 32 of 1 to 16
#: MiB take up to 7 ms more than two of as many bytes.
COPIED_S, CHUNK_S = 4e-3, 2e-4
#: From one product of a worker to the next while blocks are copied, by threads that share the
#: interpreter with all else: 32 products of 13.6 ms on an H200 took 0.55 s. At most half of the
#: time that they are copied for. Where the next one is launched meanwhile only the first ones wait:
#: of 16 products of 22 ms on one H200, and of 8 of 24 ms on each of two, none began 1 ms late when
#: all operands were there.
BESIDE_COPIES = 3e-3


def host_tasks(layout: Schedule) -> int:
    """Tasks that bring operands to the GPUs, or blocks of the result back, and do nothing else."""
    return (0 if layout.stream else _uploads(layout)) + _downloads(layout)


def _uploads(layout: Schedule) -> int:
    """Tasks that bring operands to the GPUs; a stream counts them among its own."""
    p = layout.problem
    if p.in_one:
        return 0
    if p.from_host:  # in the plan's blocks
        panels = sum(role in layout.uploaded for role, *_ in layout.operand_panels())
        return len(layout.k_tiles) * panels
    read = {role for role, reads in zip("ab", p.rereadable, strict=True) if reads}
    return sum(layout.spec(role).blocks for role in layout.uploaded if role not in read)


def _downloads(layout: Schedule) -> int:
    """Tasks that bring blocks back: what makes one does so, unless a barrier waits for it, too."""
    p = layout.problem
    if p.in_one or not p.downloaded or not (layout.stream or layout.row_panels > 1):
        return 0
    return prod(map(len, (*layout.batch_blocks, layout.m_blocks, layout.n_blocks)))


def going_up(layout: Schedule, cluster: ClusterSpec) -> tuple[float, float]:
    """Seconds of the worker that has most of the operands in host memory: beside its products, and
    before the first of them, for what that multiplies.
    """
    roles = layout.uploaded
    if not roles:
        return 0.0, 0.0
    specs = [layout.spec(role) for role in roles]
    chunks = CHUNK_S * sum(spec.blocks for spec in specs)
    if layout.problem.in_one:
        return 0.0, sum(spec.nbytes for spec in specs) / LONE_UPLOAD_RATE + chunks
    nbytes = sum(spec.fullest or spec.nbytes / cluster.workers for spec in specs)
    if layout.stream:
        nbytes = layout.read_bytes / cluster.workers
    of_first: float = sum(layout.operands.first_use.get(role, 0) for role in roles)
    of_first *= BEFORE_CUT if layout.operands.cut_apart else 1
    from_host = layout.problem.from_host  # in the plan's blocks, of sub-blocks of chunks
    from_files = any(layout.problem.rereadable) and not from_host
    rate = LONE_UPLOAD_RATE if from_files else UPLOAD_RATE
    seconds = nbytes / rate + UPLOAD_S * ceil_div(_uploads(layout), cluster.workers)
    if from_host:
        seconds += chunks / cluster.workers
    first = min(seconds, of_first / rate + UPLOAD_S * len(roles) * from_host)
    return seconds - first, first + COPIED_S


def held_up(layout: Schedule, cluster: ClusterSpec, copied: float) -> float:
    """Seconds that a worker's products wait for threads that copy, which they do for so long."""
    products = ceil_div(layout.tasks, cluster.workers)
    if layout.overlaps:
        products = min(IN_FLIGHT, products)
    return min(BESIDE_COPIES * products, copied / 2)


def way_back(layout: Schedule, cluster: ClusterSpec, each: int) -> float:
    """Seconds of a worker's blocks of the result on their way to host memory."""
    p = layout.problem
    used = min(cluster.node, layout.grid.workers)
    rate = min(DOWNLOAD_RATE, DOWNLOAD_RATE_OF_NODE / used)
    return each * layout.work.most_kept * p.out_bytes / rate if p.downloaded else 0.0


def coming_back(
    layout: Schedule, each: int, seconds: float, products: float
) -> tuple[float, float]:
    """Of a worker's `way_back`, what is beside its products, which take so long, and behind them.

    Chains go through the k-tiles together: all blocks of a row panel are finished by its last
    products. Those of the last row panel come back from the first of these on, and after them.
    """
    if not seconds or layout.problem.in_one:
        return 0.0, seconds
    block = layout.largest.rows * layout.largest.n
    share = min(1.0, block * layout.row_panels / (each * layout.work.most_kept))  # of a row panel's
    meanwhile = products / layout.links * (1 - share)
    behind = max(seconds * share, seconds - meanwhile) / layout.row_panels
    return seconds - behind, behind + COPIED_S
