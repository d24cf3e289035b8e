"""Compile-time parameters of the kernels, and the limits of the chips they run on.

Every constraint on a tile is stated here once, with its reason. Values only: nothing in this
module knows of CUDA, CuPy or a device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from multimm.errors import KernelError
from multimm.gpu.config import Rules, check, defines

#: A warp's lanes along the side where a thread has more values, and along the other one.
FEW_LANES, MANY_LANES = 4, 8
#: Floats that one shared read fetches.
STRIP = 4
#: Neighbouring floats that fill one 32-byte sector.
K_RUN = 8
#: Statically declared shared memory ends here on every chip.
STATIC_SHARED_BYTES = 49_152
#: What a block may not have of a multiprocessor's shared memory.
RESERVED_BYTES = 1024


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
class TileConfig:
    """How sgemm_ffma.cu cuts its work: the independent integers only.

    Parameters
    ----------
    block_m, block_n : int
        The tile of D that one thread block computes.
    block_k : int
        How much of k one tile of A and B has in shared memory.
    thread_m, thread_n : int
        Values of D that one thread holds in registers.
    stages : int
        Groups of tiles in shared memory; copies run `stages` - 1 of them ahead.
    group : int
        Tiles of k between two barriers.
    order : int
        0: multiply-adds go along rows of a thread's values, 1: along pairs of columns. Which of
        the two suits the register banks better, the compiler decides.
    min_blocks : int
        Thread blocks that must fit a multiprocessor together; bounds the registers.
    """

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int
    group: int
    order: int
    min_blocks: int

    def __post_init__(self) -> None:
        check(self, _positive(self))  # first: others divide by them
        check(self, _divisible(self))
        check(self, _copies(self))

    @property
    def lanes_m(self) -> int:
        """Lanes of a warp along m; the other side has 32 / `lanes_m`."""
        return FEW_LANES if self.thread_m >= self.thread_n else MANY_LANES

    @property
    def lanes_n(self) -> int:
        """Lanes of a warp along n."""
        return FEW_LANES * MANY_LANES // self.lanes_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, both operands padded as if they were stored along k."""
        float_bytes, padding = 4, 4
        words_per_k = (self.block_m + padding) + (self.block_n + padding)
        return self.stages * self.group * self.block_k * words_per_k * float_bytes

    @property
    def registers_per_thread(self) -> int:
        """The most registers the compiler may give a thread."""
        fair_share = 65_536 // (self.min_blocks * self.threads)
        return min(255, fair_share // 8 * 8)

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return {**defines(self), "LANES_M": self.lanes_m}

    def blocks_per_multiprocessor(self, limits: ArchLimits) -> int:
        """Return how many blocks are resident at a time by shared memory, threads, registers."""
        reserved = 1024  # shared memory that the driver keeps for itself, per block
        registers = -(-self.registers_per_thread // 8) * 8  # they are handed out by eights
        return min(
            limits.blocks,
            limits.shared_bytes // (self.shared_bytes + reserved),
            limits.threads // self.threads,
            limits.registers // (registers * self.threads),
        )


def _positive(c: TileConfig) -> Rules:
    return [
        (value > 0, f"{name} must be positive")
        for name, value in asdict(c).items()
        if name != "order"
    ]


def _divisible(c: TileConfig) -> Rules:
    return (
        (c.order in (0, 1), "order must be 0 (along rows) or 1 (along pairs of columns)"),
        (
            c.thread_m % STRIP == 0 and c.thread_n % STRIP == 0,
            f"thread_m and thread_n must be multiples of {STRIP}: shared reads fetch 16 bytes",
        ),
        (
            c.block_m % (c.thread_m * c.lanes_m) == 0,
            f"block_m must be a multiple of thread_m * {c.lanes_m}: whole warps along m",
        ),
        (
            c.block_n % (c.thread_n * c.lanes_n) == 0,
            f"block_n must be a multiple of thread_n * {c.lanes_n}: whole warps along n",
        ),
        (
            c.block_k % K_RUN == 0,
            f"block_k must be a multiple of {K_RUN}: a tile read along k is made of sectors",
        ),
        (c.threads <= 1024, f"{c.threads} threads: a thread block has at most 1024"),
        (c.stages >= 2, "stages must be at least 2: one is read while another is written"),
    )


def _copies(c: TileConfig) -> Rules:
    spans = (c.block_m, c.block_n)
    return (
        (
            all(span * K_RUN % c.threads == 0 for span in spans),
            f"{c.threads} threads must divide {K_RUN} * block_m and {K_RUN} * block_n: copying "
            "along k, every thread takes part in every copy",
        ),
        (
            all(c.threads * floats % span == 0 for span in spans for floats in (1, STRIP)),
            f"{c.threads} threads must be a multiple of block_m and of block_n: copying along "
            "the other side, a copy covers whole rows",
        ),
        (
            all(c.block_k * span % (c.threads * STRIP) == 0 for span in spans),
            f"{STRIP} * {c.threads} threads must divide block_k * block_m and block_k * block_n: "
            "every thread copies as much as any other",
        ),
    )
