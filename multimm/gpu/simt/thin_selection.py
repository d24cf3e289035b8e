"""Which products are skinny, and which kernel in which configuration computes them.

A product is skinny if a side of D is short, so that it reads a large operand for few results, or
if k is thin, so that it writes a large D for few multiply-adds. Memory bounds it then, and tiles
that are as wide as they are high would be mostly padding. Pure arithmetic: sizes and how operands
lie in, a configuration out. Nothing in it depends on addresses or leading dimensions, so that a
product of the same sizes gives the same bits wherever it lies.
"""

from __future__ import annotations

from typing import NamedTuple

from multimm.gpu.elementwise.reduce_configs import MAX_PARTS
from multimm.gpu.simt.configs import Device, GemmSizes
from multimm.gpu.simt.thin_configs import THIN, AxpyConfig, DotConfig, OuterConfig

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
