"""What a plan is made from: matrices, devices, links and clusters, as plain values.

Nothing here knows Dask, CUDA or a live client; `multimm.cluster.describe` fills a
`ClusterSpec` from a running cluster, and a test or a laptop writes one by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod

from multimm.errors import DTypeError, OptionError, ShapeError, integer

#: Share of a worker's memory that a plan may use, without what its process holds for itself; the
#: rest is for buffers of the transport and for results that other work keeps. Dask spills from 0.6
#: of a CPU worker's memory; dask-cuda from 0.8 of a GPU's, as much as its pool has at the start.
MEMORY_SHARE = {"gpu": 0.77, "cpu": 0.6}


def _itemsize(dtype: str) -> int:
    """Bytes of an element, by NumPy's name of its dtype: planning needs no more of NumPy."""
    found = re.fullmatch(r"(?:u?int|float|bfloat|complex)(\d+)", dtype)
    if found is None and dtype != "bool":
        raise DTypeError(
            f"dtype {dtype!r} does not say how long an element is: use NumPy's full name, such as "
            "'float64', or give itemsize as well"
        )
    return 1 if found is None else int(found[1]) // 8


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix (or a stack of them) without its values.

    Parameters
    ----------
    shape : tuple of int
        The last two entries are rows and columns; the ones before are batch dimensions.
    dtype : str
        NumPy's name of the element type, such as ``"float32"``.
    itemsize : int, optional
        Bytes per element. Default: those of the dtype's name.
    chunks : tuple of tuple of int, optional
        Block sizes per dimension. Default: one block.
    owners : tuple of int, optional
        Where blocks lie on workers, or will: the worker of each block, in C order, by its place
        among the cluster's workers. Default: nobody knows.
    hosted : bool
        Blocks lie in host memory, also where GPUs multiply them. For products on paper: of arrays
        their blocks say so.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()
    owners: tuple[int, ...] = ()
    hosted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "chunks", tuple(map(tuple, self.chunks)))
        if len(self.shape) < 2:
            raise ShapeError(f"a matrix has at least 2 dimensions, got shape {self.shape}")
        sizes = tuple(map(integer, self.shape))
        if any(size is None or size < 0 for size in sizes):
            raise ShapeError(f"a matrix of shape {self.shape}: sizes are integers, 0 or more")
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "itemsize", self.itemsize or _itemsize(self.dtype))
        if not self.chunks:
            object.__setattr__(self, "chunks", tuple((size,) for size in self.shape))
        if tuple(map(sum, self.chunks)) != tuple(self.shape):
            raise ShapeError(
                f"chunks {self.chunks} do not add up to shape {self.shape}: give the sizes of the "
                "blocks along each dimension, as in dask.array"
            )
        if self.owners and len(self.owners) != self.blocks:
            given = f"{len(self.owners)} owners of {self.blocks} blocks"
            raise ShapeError(f"{given}: give one for each block")

    @property
    def rows(self) -> int:
        """Rows of each matrix."""
        return self.shape[-2]

    @property
    def cols(self) -> int:
        """Columns of each matrix."""
        return self.shape[-1]

    @cached_property
    def blocks(self) -> int:
        """Blocks of all matrices."""
        return prod(map(len, self.chunks))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return prod(self.shape) * self.itemsize

    @cached_property
    def fullest(self) -> int:
        """Bytes of its blocks on the worker that has most of them; 0 where nobody knows."""
        held: Counter[int] = Counter()
        for owner, sizes in zip(self.owners, product(*self.chunks), strict=False):
            held[owner] += prod(sizes) * self.itemsize
        return max(held.values(), default=0)

    @property
    def T(self) -> MatrixSpec:
        """The spec of the transposed matrix."""
        shape = (*self.shape[:-2], self.cols, self.rows)
        chunks = (*self.chunks[:-2], self.chunks[-1], self.chunks[-2])
        rows, cols = map(len, self.chunks[-2:])
        matrices = range(0, len(self.owners), rows * cols)
        owners = tuple(
            owner
            for start in matrices
            for col in range(cols)
            for owner in self.owners[start + col : start + rows * cols : cols]
        )
        return replace(self, shape=shape, chunks=chunks, owners=owners)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What computes the block products of one worker.

    Parameters
    ----------
    name : str
        As the driver or the operating system calls it.
    kind : {"gpu", "cpu"}
    memory_bytes : int
        All memory of the worker's device (GPU memory, or the worker's share of RAM).
    gflops : float
        Sustained float32 rate of a block product, GFLOP/s.
    copy_gbps : float
        Rate at which the device reads plus writes its own memory, GB/s.
    spills : bool
        Finished blocks that do not fit are moved out (to host memory or to disk).
    packs : tuple of str
        The precisions for which float32 blocks are packed for a GPU's tensor cores.
    packed_gflops : tuple of (str, float)
        Rates of block products of packed operands, by precision: measured, or predicted. Where one
        is missing, it is in the shipped ratio to `gflops`.
    measured : str
        The day on which `gflops` and `packed_gflops` were measured; empty: as shipped.
    process_bytes : int
        Of `memory_bytes`, what the worker's process holds for itself, whatever is multiplied.
    """

    name: str
    kind: str
    memory_bytes: int
    gflops: float
    copy_gbps: float
    spills: bool = True
    packs: tuple[str, ...] = ()
    packed_gflops: tuple[tuple[str, float], ...] = ()
    measured: str = ""
    process_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("gpu", "cpu"):
            raise OptionError(f"device kind {self.kind!r}: allowed are 'gpu' and 'cpu'")
        rates = self.gflops, self.copy_gbps, *dict(self.packed_gflops).values()
        if self.memory_bytes <= 0 or min(rates) <= 0:
            given = f"memory_bytes={self.memory_bytes}, rates in GFLOP/s and GB/s {rates}"
            raise OptionError(f"device {self.name!r}: {given}: all must be positive")

    @property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use at once."""
        left = max(0, self.memory_bytes - self.process_bytes)
        return int(left * MEMORY_SHARE[self.kind])


@dataclass(frozen=True, slots=True)
class Link:
    """How blocks travel between two workers."""

    name: str
    gbps: float  #: GB/s that each worker receives through Dask's transport, while all do
    latency_s: float  #: seconds before the first byte of a block arrives
    measured: str = ""  #: the day on which this was measured; empty: as shipped


#: Measured in products on two H200s, both receiving: 4.2 ms for 0.5 GiB, 5.4 for 1, 8.2 for 2. On
#: eight, with the stock transport and nothing else running, a pair had 66-114 GB/s.
NVLINK = Link("nvlink", 150.0, 2.5e-3)
#: One network card of 400 Gb/s per GPU between nodes; half of its rate, not measured.
INFINIBAND = Link("infiniband", 25.0, 1e-3)
#: TCP between processes of one host; arbitrary, of the order seen with Dask's TCP transport.
LOCAL_TCP = Link("tcp", 1.0, 1e-3)
#: Threads of one process hand over a reference.
SHARED_MEMORY = Link("shared memory", 1000.0, 1e-5)

#: One NVIDIA H200: sustained FP32 rate of our kernel and device copy, both measured there;
#: spilling to host memory is dask-cuda's default.
H200 = DeviceSpec(
    "NVIDIA H200", "gpu", 150_754_820_096, 53_500.0, 4199.0, packs=("float32", "tf32")
)


#: Of a product on workers of H200s: 11 to 13 ms on two and on four, and where eight of them shared
#: one GPU; 6 to 7 ms where there is only one worker.
CALL_S, LONE_CALL_S = 12e-3, 7e-3


def call_seconds(workers: int) -> float:
    """Seconds of a call on so many workers, without its tasks."""
    return CALL_S if workers > 1 else LONE_CALL_S


def between_nodes(link: Link) -> Link:
    """The link to other nodes of workers that are linked so within theirs."""
    return INFINIBAND if link is NVLINK else link


@dataclass(frozen=True)
class ClusterSpec:
    """The workers that a product is planned for.

    Parameters
    ----------
    devices : tuple of DeviceSpec
        One per worker.
    link : Link
        Between any two workers of a node.
    addresses : tuple of str
        The workers' addresses, in the order of `devices`; empty for a cluster on paper.
    threads : int
        Block products that one worker runs at the same time.
    task_overhead_s : float
        Scheduler time per task, seconds (0.5 ms of the scheduler's and the client's processor
        in a product of 4096 tasks; threads of one process need less).
    call_s : float
        Seconds of a product without tasks: planned, sent, begun, and waited for (`call_seconds`;
        threads of one process need less).
    per_node : int
        Workers of one node, next to each other in `devices`. 0: all are on one.
    between : Link
        From one worker to one on another node.
    numbers : tuple of int
        Of workers that a plan has numbered anew (`multimm.planning.renumber`): their places among
        the scheduler's workers. Empty: their own.
    """

    devices: tuple[DeviceSpec, ...]
    link: Link = LOCAL_TCP
    addresses: tuple[str, ...] = field(default=())
    threads: int = 1
    task_overhead_s: float = 5e-4
    call_s: float = CALL_S
    per_node: int = 0
    between: Link = INFINIBAND
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise OptionError("a cluster needs at least one worker, got none")
        if self.addresses and len(self.addresses) != len(self.devices):
            raise OptionError(
                f"{len(self.addresses)} addresses for {len(self.devices)} devices: give one each"
            )
        if self.threads < 1:
            raise OptionError(f"threads={self.threads}: at least 1 is needed")
        if self.per_node < 0:
            raise OptionError(f"per_node={self.per_node}: 0 or more are needed")

    @classmethod
    def homogeneous(
        cls, device: DeviceSpec, workers: int, link: Link = NVLINK, threads: int = 1
    ) -> ClusterSpec:
        """A cluster of equal workers, on paper."""
        if workers < 1:
            raise OptionError(f"workers={workers}: at least 1 is needed")
        call_s, between = call_seconds(workers), between_nodes(link)
        return cls((device,) * workers, link, threads=threads, call_s=call_s, between=between)

    @property
    def on_gpus(self) -> bool:
        """Whether every worker computes on a GPU."""
        return all(device.kind == "gpu" for device in self.devices)

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.devices)

    @property
    def node(self) -> int:
        """How many workers share a node."""
        return self.per_node or self.workers

    def first(self, workers: int) -> ClusterSpec:
        """The first so many workers: those that have a place in a grid of so many."""
        if workers >= self.workers:
            return self
        return replace(
            self,
            devices=self.devices[:workers],
            addresses=self.addresses[:workers],
            numbers=self.numbers[:workers],
        )

    def reordered(self, order: Sequence[int]) -> ClusterSpec:
        """The same workers with other ranks: `order` has their present ones."""
        numbers = tuple(self.number(rank) for rank in order)
        return replace(
            self,
            devices=tuple(self.devices[rank] for rank in order),
            addresses=tuple(self.addresses[rank] for rank in order if self.addresses),
            numbers=() if numbers == tuple(range(self.workers)) else numbers,
        )

    def number(self, rank: int) -> int:
        """The place of a worker among the scheduler's."""
        return self.numbers[rank] if self.numbers else rank

    def ranks(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of workers by their places among the scheduler's."""
        if not self.numbers:
            return numbers
        ranks = {number: rank for rank, number in enumerate(self.numbers)}
        return tuple(ranks[number] for number in numbers)

    @cached_property
    def slowest(self) -> DeviceSpec:
        """The device whose rate bounds an even division of the work."""
        return min(self.devices, key=lambda device: device.gflops)

    @cached_property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use at once on the smallest worker."""
        return min(device.budget_bytes for device in self.devices)
