"""What computes the products of one worker, and the links between workers.

The constants are those of devices and links that were measured, or of the order seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from multimm.errors import OptionError

#: Share of a worker's memory that a plan may use, without what its process holds for itself; the
#: rest is for buffers of the transport and for results that other work keeps. Dask spills from 0.6
#: of a CPU worker's memory; dask-cuda from 0.8 of a GPU's, as much as its pool has at the start.
MEMORY_SHARE = {"gpu": 0.77, "cpu": 0.6}


#: Rates that plans reckon with, GFLOP/s and GB/s: arbitrary, far beyond what there is. Seconds of
#: any product stay finite numbers.
RATES = (1e-9, 1e15)


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
        The precisions for which blocks are packed for a GPU's tensor cores: float32 ones, and for
        ``"float64"`` those of doubles and complex numbers, by residues.
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
        if self.memory_bytes <= 0 or not all(_is_rate(rate) for rate in rates):
            given = f"memory_bytes={self.memory_bytes}, rates in GFLOP/s and GB/s {rates}"
            raise OptionError(
                f"device {self.name!r}: {given}: all must be positive, and rates from {RATES[0]:g} "
                f"to {RATES[1]:g}"
            )

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

    def __post_init__(self) -> None:
        if not _is_rate(self.gbps) or not 0 <= self.latency_s < math.inf:
            raise OptionError(
                f"link {self.name!r}: {self.gbps} GB/s after {self.latency_s} s: a rate from "
                f"{RATES[0]:g} to {RATES[1]:g} is needed, and a latency of 0 or more"
            )


def _is_rate(value: float) -> bool:
    return RATES[0] <= value <= RATES[1]  # NaN is none


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
    "NVIDIA H200", "gpu", 150_754_820_096, 53_500.0, 4199.0, packs=("float32", "tf32", "float64")
)


def between_nodes(link: Link) -> Link:
    """The link to other nodes of workers that are linked so within theirs."""
    return INFINIBAND if link is NVLINK else link
