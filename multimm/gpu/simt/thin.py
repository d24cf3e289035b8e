"""Skinny products: which they are, which kernel in which configuration computes them, its launches.

A product is skinny if a side of D is short, so that it reads a large operand for few results, or
if k is thin, so that it writes a large D for few multiply-adds. Memory bounds it then, and tiles
that are as wide as they are high would be mostly padding. kernels/sgemm_dot.cu, sgemm_axpy.cu and
sgemm_outer.cu take the arguments of sgemm_ffma.

What is chosen depends on sizes and how operands lie, not on addresses or leading dimensions, so
that a product of the same sizes gives the same bits wherever it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from multimm.gpu.arch import MAX_PARTS, Device, defines
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import kernel_for, prepare
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt.load_paths import Loads
from multimm.gpu.simt.split_k import can_be_added, in_slices
from multimm.gpu.strides import Axis, GemmSizes

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


#: The most columns (or rows) of D that are few: where the large operand lies along k, and else.
NARROW_DOT, NARROW_AXPY = 16, 8
#: Below these, lanes are idle or a launch takes longer than reading: words of the large operand in
#: a product, in all of a batch, its long side in a batch, and k.
MIN_WORDS, MIN_BATCH_WORDS, MIN_SIDE, MIN_K = 1024, 2**16, 64, 32
#: The same for products of more than `NARROW_AXPY` columns.
MIN_WIDE_WORDS, MIN_WIDE_K = 2**20, 512
#: Words of D, and its sides, below which outer products are not worth a kernel of their own.
MIN_RESULTS, MIN_THIN_SIDE = 2**19, 128
#: Bytes that a multiprocessor must have on their way to keep memory busy, and with how few it is
#: worth another launch to cut k into slices; words of the large operand in a slice; and the length
#: that all slices but the last are multiples of.
ENOUGH_BYTES, FEW_BYTES, MIN_SLICE_WORDS, SLICE_UNIT = 2**16, 3 * 2**13, 2**15, 512


class Way(NamedTuple):
    """How a skinny product is computed."""

    kernel: str  #: the name of the kernel, and of its file
    config: DotConfig | AxpyConfig | OuterConfig
    turned: bool  #: whether D has few rows, so that D' = op(B)' op(A)' is what is computed
    slices: int = 1  #: of k, summed on their own
    length: int = 0  #: of all slices but the last, if there are several

    def blocks(self, m: int, n: int) -> int:
        """Thread blocks for each product."""
        if isinstance(self.config, OuterConfig):
            return -(-m // self.config.block_rows) * -(-n // self.config.BLOCK_COLS)
        return -(-(n if self.turned else m) // self.config.span)


def way_for(sizes: GemmSizes, device: Device) -> Way | None:
    """Return how to compute a product if it is skinny, else None.

    Parameters
    ----------
    sizes : GemmSizes
    device : Device
    """
    m, n, k, batch = sizes.m, sizes.n, sizes.k, sizes.batch
    if 1 <= k <= THIN and min(m, n) >= MIN_THIN_SIDE and m * n * batch >= MIN_RESULTS:
        return Way("sgemm_outer", OuterConfig(k, 64 if k <= 4 else 128 if k <= 8 else 256), False)
    turned = m < n
    side, few = max(m, n), min(m, n)
    along_k = sizes.scattered_b if turned else sizes.scattered_a
    words = side * k
    if words < MIN_WORDS or words * batch < MIN_BATCH_WORDS or (batch > 1 and side < MIN_SIDE):
        return None
    if k < MIN_K or (few > NARROW_AXPY and (k < MIN_WIDE_K or words < MIN_WIDE_WORDS)):
        return None
    if not 1 <= few <= (NARROW_DOT if along_k else NARROW_AXPY):
        return None
    cols = 1 << (few - 1).bit_length()
    config = (_dot if along_k else _axpy)(cols, side, batch, k, device)
    way = Way("sgemm_dot" if along_k else "sgemm_axpy", config, turned)
    if batch > 1:
        return way
    length = _slice_length(config, side, k, device)
    return way._replace(slices=-(-k // length), length=length)


# The shapes of both are the fastest of about ten each that were timed on an H200, with 1 to 16
# columns and k from 32 to 100 000.
def _dot(cols: int, side: int, batch: int, k: int, device: Device) -> DotConfig:
    steps = 1 << (-(-k // 32) - 1).bit_length()  # of 32 lanes along a row
    if cols <= 2:
        sharing = min(4, 32 * device.multiprocessors // (side * batch), k // 1024)
        if sharing >= 2:  # too few rows for a warp each
            return DotConfig(cols, 1, 8, 1 << (sharing.bit_length() - 1), 16 // cols, 4)
        unroll = min(16 // cols, steps)
        return DotConfig(cols, min(8, 16 // unroll), 8, 1, unroll, 4)
    if cols <= 8:
        unroll = min(8, steps)
        blocks = {4: {8: 3, 4: 3, 2: 2, 1: 3}, 8: {8: 2, 4: 3, 2: 2, 1: 2}}[cols][unroll]
        return DotConfig(cols, 4 if unroll >= 4 else 8, 8, 1, unroll, blocks)
    return DotConfig(16, 4, 16, 1, 4, 1)


def _axpy(cols: int, side: int, batch: int, k: int, device: Device) -> AxpyConfig:
    width = 32
    while width < 128 and side * batch >= 3.6 * device.multiprocessors * width:
        width *= 2
    while width > 8 and 2 * side <= width:  # a D of few values altogether
        width //= 2
    if cols == 1 and width <= 32:
        return AxpyConfig(1, width, 16, 4, 8, 2)
    return AxpyConfig(cols, width, 8, 4, 8, {1: 4, 2: 3, 4: 3, 8: 2}[cols])


def _slice_length(config: DotConfig | AxpyConfig, side: int, k: int, device: Device) -> int:
    """Cut k where too few blocks would be reading."""
    blocks = -(-side // config.span)
    loading = blocks * config.loading_bytes
    if loading >= FEW_BYTES * device.multiprocessors:
        return k
    wanted = min(
        ENOUGH_BYTES * device.multiprocessors // loading,
        min(config.span, side) * k // MIN_SLICE_WORDS,
        MAX_PARTS - 1,
    )
    return -(-k // (max(1, wanted) * SLICE_UNIT)) * SLICE_UNIT


def prepared(way: Way, problem: Problem, axes: Sequence[Axis], loads: Loads) -> Run:
    """Return what launches a skinny product.

    Parameters
    ----------
    way : Way
        Of `way_for`.
    problem : Problem
        Addressable.
    axes : sequence of Axis
        Of `launch.batch_axes`.
    loads : Loads
        Of `load_paths`.

    Returns
    -------
    callable
        Takes the addresses of A, B, C, P and D, and launches on the current stream. It may be
        called again for other operands of the same kind.
    """
    stacks = problem.stacks
    config, (_, m, n, _) = way.config, problem.shape
    kernel = _kernel(way, problem.device, loads)
    launches = functools.partial(
        prepare, kernel, way.blocks(m, n), config.threads, shared_bytes=config.shared_bytes
    )
    if way.slices > 1 and problem.alpha != 0 and can_be_added(problem):
        return in_slices(launches, problem, way.slices, way.length, loads)
    return launches(problem.head, stacks, axes)


def _kernel(way: Way, device: int, loads: Loads) -> Any:
    config = way.config
    given = {**config.defines(), "TRANS_A": loads["TRANS_A"], "TRANS_B": loads["TRANS_B"]}
    if way.kernel != "sgemm_outer":
        given["TURNED"] = int(way.turned)
    if way.kernel == "sgemm_axpy":
        given["WIDE"] = loads["WIDE_B" if way.turned else "WIDE_A"]
    return kernel_for(
        device, f"{way.kernel}.cu", way.kernel, tuple(given.items()),
        shared_bytes=config.shared_bytes,
    )  # fmt: skip
