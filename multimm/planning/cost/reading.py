"""What it takes to read operands from files whose storage chunks are decoded as a whole."""

from __future__ import annotations

from math import prod

from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import Storage
from multimm.planning.schedule import Schedule

#: Decoded bytes per second of one thread, and seconds for each chunk, however small; by codec, with
#: files in the page cache, of one core of an x86 server: Zarr uncompressed 1.1e9, zstd 0.22e9 to
#: 0.38e9, HDF5's LZF 0.21e9, 0.3 to 1 ms for one of 50 kB; gzip 0.13e9 to 0.2e9 by both.
RATES = {"": (1.0e9, 4e-4), "slow": (0.14e9, 4e-4), "other": (0.3e9, 4e-4)}
#: Threads that a task of a GPU worker reads with, if its host has the cores, and how many times as
#: fast as one they are together: 3.9 GB/s of zstd on 16 cores beside an H100, 2.7 with 8 threads
#: (by decoding of our own; not measured since Zarr decodes).
READERS, READERS_TOGETHER = 16, 5


def read_in_chunks(layout: Schedule) -> dict[str, Storage]:
    """By role: storage of the operands that are read from such files, C included."""
    problem = layout.problem
    specs = {role: layout.spec(role) for role in layout.roles}
    if problem.c is not None:
        specs["c"] = problem.c
    return {role: spec.storage for role, spec in specs.items() if spec.storage is not None}


def held(layout: Schedule, cluster: ClusterSpec) -> int:
    """Bytes that the reading threads of a worker hold beside the blocks in flight."""
    stored = read_in_chunks(layout)
    if not stored or cluster.slowest.kind == "gpu":  # they hold host memory
        return 0
    each = max(stored[role].held(_largest(layout, role)) for role in stored)
    return cluster.threads * each


def seconds(layout: Schedule, cluster: ClusterSpec) -> float:
    """Seconds of a worker that decodes its share of chunks, for each block and row panel again."""
    workers = min(cluster.workers, layout.grid.workers)  # a lone task may run on any worker
    threads = cluster.threads * (READERS_TOGETHER if cluster.slowest.kind == "gpu" else 1)
    total = 0.0
    for role, storage in read_in_chunks(layout).items():
        rate, each = RATES[storage.codec]
        total += decodes(layout, role) * (storage.chunk_bytes / rate + each)
    return total / (workers * threads)


def decodes(layout: Schedule, role: str) -> float:
    """How many chunks of an operand are decoded, over all blocks and row panels."""
    storage = layout.spec(role).storage
    if storage is None:
        return 0
    return storage.decoded(_blocks(layout, role)) * _times(layout, role)


def _blocks(layout: Schedule, role: str) -> tuple[tuple[int, ...], ...]:
    """The blocks in which an operand is read: C as it comes."""
    return layout.spec("c").chunks if role == "c" else layout.operand_chunks(role)


def _largest(layout: Schedule, role: str) -> int:
    return prod(map(max, _blocks(layout, role))) * layout.spec(role).itemsize


def _times(layout: Schedule, role: str) -> float:
    """How often each block is read: again in each row panel that needs it, of what is streamed."""
    if not layout.stream or role == "c":
        return 1
    panels = [panel for panel in layout.operand_panels() if panel[0] == role]
    columns = len(layout.n_blocks) if role == "a" and layout.by_block else 1
    return columns * len(panels) / max(1, len({(flat, block) for _, _, flat, block in panels}))
