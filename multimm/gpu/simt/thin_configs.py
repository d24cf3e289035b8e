"""How sgemm_dot.cu, sgemm_axpy.cu and sgemm_outer.cu cut their work: values and their rules."""

from __future__ import annotations

from dataclasses import dataclass

from multimm.gpu.arch import STATIC_SHARED_BYTES
from multimm.gpu.config import check, defines

#: The longest k that is thin.
THIN = 12


@dataclass(frozen=True, slots=True)
class DotConfig:
    """How sgemm_dot.cu cuts its work.

    Parameters
    ----------
    cols : int
        Columns of the narrow operand, zeros included.
    rows : int
        Rows of the wide operand that a warp takes.
    warps : int
        Of a block.
    warps_k : int
        Of them, those that share their rows, each with its part of k.
    unroll : int
        Words of a row that a lane loads at once.
    min_blocks : int
        Thread blocks that must fit a multiprocessor together; bounds the registers.
    """

    cols: int
    rows: int
    warps: int
    warps_k: int
    unroll: int
    min_blocks: int

    def __post_init__(self) -> None:
        check(self, (
            (self.cols in (1, 2, 4, 8, 16), "columns are a power of two, up to 16"),
            (min(self.unroll, self.min_blocks) >= 1, "there is at least one of each"),
            (_is_power_of_two(self.rows), "a warp's sums are halved until one is left"),
            (1 <= self.warps <= 32, "a block has 1 to 32 warps"),
            (1 <= self.warps_k <= self.warps and self.warps % self.warps_k == 0,
             "a row has all of its warps in one block"),
            (self.static_shared_bytes <= STATIC_SHARED_BYTES,
             f"two chunks of k take more than {STATIC_SHARED_BYTES} bytes"),
        ))  # fmt: skip

    @property
    def span(self) -> int:
        """Rows of the wide operand that a block takes."""
        return self.warps // self.warps_k * self.rows

    @property
    def chunk(self) -> int:
        """Length of k that a block multiplies at once."""
        return self.warps_k * self.unroll * 32

    @property
    def loading_bytes(self) -> int:
        """What a block has on its way at once."""
        return 4 * self.threads * self.rows * self.unroll

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0

    @property
    def static_shared_bytes(self) -> int:
        """What the kernel declares by itself: two chunks of the narrow operand, and sums."""
        narrow = self.cols * self.chunk + 32
        return 4 * (2 * narrow + self.warps * self.rows * self.cols)

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self)


@dataclass(frozen=True, slots=True)
class AxpyConfig:
    """How sgemm_axpy.cu cuts its work.

    Parameters
    ----------
    cols : int
        Columns of the narrow operand, zeros included.
    width : int
        Values of a column of the result that a block computes.
    warps : int
        Of a block.
    cells : int
        Sums of a column that a thread holds: of neighbours, or of one value.
    unroll : int
        Words that a thread loads at once for each of its sums.
    min_blocks : int
        Thread blocks that must fit a multiprocessor together; bounds the registers.
    """

    cols: int
    width: int
    warps: int
    cells: int
    unroll: int
    min_blocks: int

    def __post_init__(self) -> None:
        check(self, (
            (self.cols in (1, 2, 4, 8, 16), "columns are a power of two, up to 16"),
            (self.cells in (1, 2, 4), "one instruction loads 1, 2 or 4 words"),
            (min(self.unroll, self.min_blocks) >= 1, "there is at least one of each"),
            (1 <= self.warps <= 32, "a block has 1 to 32 warps"),
            (self.width >= self.cells and self.width % self.cells == 0
             and self.threads % self.width == 0, "all threads read as much as any other"),
            (self.shared_bytes <= STATIC_SHARED_BYTES,
             f"sums or two chunks of k take more than {STATIC_SHARED_BYTES} bytes"),
        ))  # fmt: skip

    @property
    def span(self) -> int:
        """Rows of the wide operand that a block takes."""
        return self.width

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def chains(self) -> int:
        """Sums that each value is made of."""
        return self.threads * self.cells // self.width

    @property
    def chunk(self) -> int:
        """Length of k of the narrow operand that is in shared memory at once."""
        return self.chains * self.unroll

    @property
    def loading_bytes(self) -> int:
        """What a block has on its way at once."""
        return 4 * self.threads * self.cells * self.unroll

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: two chunks of the narrow operand, then all sums."""
        return 4 * self.cols * self.chains * max(2 * self.unroll, self.width)

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self)


@dataclass(frozen=True, slots=True)
class OuterConfig:
    """How sgemm_outer.cu cuts its work.

    Parameters
    ----------
    thin : int
        The most k that it multiplies.
    block_rows : int
        Rows of D that a block computes.
    """

    thin: int
    block_rows: int

    #: Columns that a block computes at least: 128, of which the beginning of a row takes up to 7.
    BLOCK_COLS = 121

    def __post_init__(self) -> None:
        check(self, (
            (1 <= self.thin <= THIN, f"k is 1 to {THIN}: a thread keeps 4 values of each"),
            (self.block_rows >= 8 and self.block_rows % 8 == 0, "8 warps have as many rows each"),
        ))  # fmt: skip

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self)


def _is_power_of_two(x: int) -> bool:
    return x >= 1 and x & (x - 1) == 0
