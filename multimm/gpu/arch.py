"""The limits of the chips that kernels run on, and what configurations of kernels have in common.

Values only: nothing in this module knows of CUDA, CuPy or a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from multimm.errors import KernelError

#: Floats that one shared read fetches.
STRIP = 4
#: Statically declared shared memory ends here on every chip.
STATIC_SHARED_BYTES = 49_152
#: What a block may not have of a multiprocessor's shared memory.
RESERVED_BYTES = 1024
#: Parts that one launch of add_partials.cu adds; a power of two, so that longer sums keep the shape
#: of the tree.
MAX_PARTS = 64
#: Residuals that a block may have; with more it keeps its source instead. Normal data has a handful
#: in 16384 x 16384, lognormal data of sigma 1 some 100. Arbitrary, but so many still cost little
#: beside the product: they are one of at most 1024 rows and 1024 terms.
RESIDUAL_CAP = 1024

#: Compile-time parameters that say when a kernel is to do nothing, or what it leaves out.
Guard = tuple[tuple[str, int], ...]
#: Compile a kernel so that it does nothing unless an operand is refused, or if one is, or unless
#: the range of a row is too wide: its last argument is the address of what packing has counted. See
#: common/refused.cuh.
IF_REFUSED: Guard = (("GUARDED", RESIDUAL_CAP), ("REFUSED", 1))
UNLESS_REFUSED: Guard = (("GUARDED", RESIDUAL_CAP), ("REFUSED", 0))
IF_BROAD: Guard = (("GUARDED", RESIDUAL_CAP), ("REFUSED", 2))
#: Compile a kernel of products so that it leaves out tiles above the diagonal of a square D.
LOWER: Guard = (("LOWER", 1),)


def tiles_of(m: int, n: int, height: int, width: int, lower: bool = False) -> int:
    """Return how many tiles an m x n matrix has; or how many reach its diagonal or lie below it.

    >>> tiles_of(300, 300, 100, 100), tiles_of(300, 300, 100, 100, lower=True)
    (9, 6)
    """
    rows, cols = -(-m // height), -(-n // width)
    if not lower:
        return rows * cols
    return sum(min(cols, -(-(row + 1) * height // width)) for row in range(rows))


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """What one streaming multiprocessor of a GPU architecture holds."""

    capability: int  #: compute capability, 90 for sm_90
    shared_bytes: int  #: shared memory per multiprocessor
    threads: int  #: resident threads per multiprocessor
    registers: int = 65_536  #: 32-bit registers per multiprocessor
    blocks: int = 16  #: resident thread blocks per multiprocessor

    @property
    def name(self) -> str:
        """As compilers call the architecture."""
        return f"sm_{self.capability}"


#: From the table of compute capabilities in NVIDIA's CUDA C++ programming guide.
ARCHITECTURES: tuple[ArchLimits, ...] = (
    ArchLimits(75, 65_536, 1024),
    ArchLimits(80, 167_936, 2048, blocks=32),
    ArchLimits(86, 102_400, 1536),
    ArchLimits(89, 102_400, 1536, blocks=24),
    ArchLimits(90, 233_472, 2048, blocks=32),
    ArchLimits(100, 233_472, 2048, blocks=32),
    ArchLimits(120, 102_400, 1536, blocks=24),
)


def limits_for(capability: int) -> ArchLimits:
    """Return the limits of a compute capability, or of the nearest older one that is known.

    Raises
    ------
    KernelError
        If the GPU is older than the oldest that the kernels are built for.
    """
    known = [limits for limits in ARCHITECTURES if limits.capability <= capability]
    if not known:
        raise KernelError(
            f"compute capability {capability / 10:.1f}: the kernels need "
            f"{ARCHITECTURES[0].capability / 10:.1f} or newer; use a newer GPU or CPU blocks"
        )
    return known[-1]


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU that a product runs on."""

    limits: ArchLimits
    multiprocessors: int


def defines(config: Any, *left_out: str) -> dict[str, int]:
    """The fields of a configuration, a dataclass, by the kernel's names of them."""
    names = [field.name for field in fields(config) if field.name not in left_out]
    return {name.upper(): getattr(config, name) for name in names}
