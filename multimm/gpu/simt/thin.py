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
from typing import NamedTuple

from multimm.gpu.arch import MAX_PARTS, Device
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import kernel_for, prepare
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt.load_paths import Loads
from multimm.gpu.simt.split_k import can_be_added, in_slices
from multimm.gpu.strides import Axis, GemmSizes

#: The longest k that is thin.
THIN = 12


class ThinConfig(NamedTuple):
    """How one of the kernels cuts its work."""

    kernel: str  #: its name, and that of its file
    defines: dict[str, int]  #: its compile-time parameters
    threads: int  #: of a block
    span: int  #: rows that a block takes of the wide operand, or of D
    chunk: int = 0  #: length of k that a block multiplies at once
    loading_bytes: int = 0  #: what a block has on its way at once
    shared_bytes: int = 0  #: dynamic shared memory of a block

    def blocks(self, m: int, n: int, turned: bool) -> int:
        """Thread blocks for each product."""
        if self.kernel == "sgemm_outer":
            return -(-m // self.span) * -(-n // OUTER_COLS)
        return -(-(n if turned else m) // self.span)


#: Columns that a block of sgemm_outer.cu computes at least: 128, of which the beginning of a row
#: takes up to 7.
OUTER_COLS = 121


def dot_config(
    cols: int, rows: int, warps: int, warps_k: int, unroll: int, min_blocks: int
) -> ThinConfig:
    """Return a configuration of sgemm_dot.cu.

    Parameters
    ----------
    cols : int
        Columns of the narrow operand, zeros included.
    rows : int
        Rows of the wide operand that a warp takes.
    warps, warps_k : int
        Of a block, and of them those that share their rows, each with its part of k.
    unroll : int
        Words of a row that a lane loads at once.
    min_blocks : int
        Thread blocks that must fit a multiprocessor together; bounds the registers.
    """
    defines = {"COLS": cols, "ROWS": rows, "WARPS": warps, "WARPS_K": warps_k, "UNROLL": unroll,
               "MIN_BLOCKS": min_blocks}  # fmt: skip
    threads = 32 * warps
    return ThinConfig(
        "sgemm_dot", defines, threads, span=warps // warps_k * rows, chunk=warps_k * unroll * 32,
        loading_bytes=4 * threads * rows * unroll,
    )  # fmt: skip


def axpy_config(
    cols: int, width: int, warps: int, cells: int, unroll: int, min_blocks: int
) -> ThinConfig:
    """Return a configuration of sgemm_axpy.cu.

    Parameters
    ----------
    cols, warps, min_blocks : int
        As for `dot_config`.
    width : int
        Values of a column of the result that a block computes.
    cells : int
        Sums of a column that a thread holds: of neighbours, or of one value.
    unroll : int
        Words that a thread loads at once for each of its sums.
    """
    defines = {"COLS": cols, "WIDTH": width, "WARPS": warps, "CELLS": cells, "UNROLL": unroll,
               "MIN_BLOCKS": min_blocks}  # fmt: skip
    threads = 32 * warps
    chains = threads * cells // width  # sums that each value is made of
    return ThinConfig(
        "sgemm_axpy", defines, threads, span=width, chunk=chains * unroll,
        loading_bytes=4 * threads * cells * unroll,
        # Two chunks of the narrow operand, then all sums.
        shared_bytes=4 * cols * chains * max(2 * unroll, width),
    )  # fmt: skip


def outer_config(thin: int, block_rows: int) -> ThinConfig:
    """Return a configuration of sgemm_outer.cu: the most k that it multiplies, rows of a block."""
    return ThinConfig("sgemm_outer", {"THIN": thin, "BLOCK_ROWS": block_rows}, 256, block_rows)


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

    config: ThinConfig
    turned: bool  #: whether D has few rows, so that D' = op(B)' op(A)' is what is computed
    slices: int = 1  #: of k, summed on their own
    length: int = 0  #: of all slices but the last, if there are several


def way_for(sizes: GemmSizes, device: Device) -> Way | None:
    """Return how to compute a product if it is skinny, else None.

    Parameters
    ----------
    sizes : GemmSizes
    device : Device
    """
    m, n, k, batch = sizes.m, sizes.n, sizes.k, sizes.batch
    if 1 <= k <= THIN and min(m, n) >= MIN_THIN_SIDE and m * n * batch >= MIN_RESULTS:
        return Way(outer_config(k, 64 if k <= 4 else 128 if k <= 8 else 256), False)
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
    way = Way(config, turned)
    if batch > 1:
        return way
    length = _slice_length(config, side, k, device)
    return way._replace(slices=-(-k // length), length=length)


# The shapes of both are the fastest of about ten each that were timed on an H200, with 1 to 16
# columns and k from 32 to 100 000.
def _dot(cols: int, side: int, batch: int, k: int, device: Device) -> ThinConfig:
    steps = 1 << (-(-k // 32) - 1).bit_length()  # of 32 lanes along a row
    if cols <= 2:
        sharing = min(4, 32 * device.multiprocessors // (side * batch), k // 1024)
        if sharing >= 2:  # too few rows for a warp each
            return dot_config(cols, 1, 8, 1 << (sharing.bit_length() - 1), 16 // cols, 4)
        unroll = min(16 // cols, steps)
        return dot_config(cols, min(8, 16 // unroll), 8, 1, unroll, 4)
    if cols <= 8:
        unroll = min(8, steps)
        blocks = {4: {8: 3, 4: 3, 2: 2, 1: 3}, 8: {8: 2, 4: 3, 2: 2, 1: 2}}[cols][unroll]
        return dot_config(cols, 4 if unroll >= 4 else 8, 8, 1, unroll, blocks)
    return dot_config(16, 4, 16, 1, 4, 1)


def _axpy(cols: int, side: int, batch: int, k: int, device: Device) -> ThinConfig:
    width = 32
    while width < 128 and side * batch >= 3.6 * device.multiprocessors * width:
        width *= 2
    while width > 8 and 2 * side <= width:  # a D of few values altogether
        width //= 2
    if cols == 1 and width <= 32:
        return axpy_config(1, width, 16, 4, 8, 2)
    return axpy_config(cols, width, 8, 4, 8, {1: 4, 2: 3, 4: 3, 8: 2}[cols])


def _slice_length(config: ThinConfig, side: int, k: int, device: Device) -> int:
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
    given = {**config.defines, "TRANS_A": loads["TRANS_A"], "TRANS_B": loads["TRANS_B"]}
    if config.kernel != "sgemm_outer":
        given["TURNED"] = int(way.turned)
    if config.kernel == "sgemm_axpy":
        given["WIDE"] = loads["WIDE_B" if way.turned else "WIDE_A"]
    kernel = kernel_for(
        problem.device, f"{config.kernel}.cu", config.kernel, tuple(given.items()),
        shared_bytes=config.shared_bytes,
    )  # fmt: skip
    launches = functools.partial(
        prepare, kernel, config.blocks(m, n, way.turned), config.threads,
        shared_bytes=config.shared_bytes,
    )  # fmt: skip
    if way.slices > 1 and problem.alpha != 0 and can_be_added(problem):
        return in_slices(launches, problem, way.slices, way.length, loads)
    return launches(problem.head, stacks, axes)
