"""Matrix transposes on a GPU: which kernel, in which configuration, and its launch.

kernels/transpose.cu where the rows of both matrices begin at multiples of 16 bytes and for small
matrices, kernels/transpose_skewed.cu for large ones whose rows begin anywhere.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multimm.gpu.arch import defines
from multimm.gpu.problem import check_arrays, describe
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import (
    TRANSPOSE_SIGNATURE,
    Launches,
    batch_axes,
    kernel_for,
    prepare,
)
from multimm.gpu.strides import Axis, Stack, common_alignment

logger = logging.getLogger(__name__)

Array = Any


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """How transpose.cu, or with a skew transpose_skewed.cu, cuts its work.

    Parameters
    ----------
    word_bytes, words : int
        An element is `words` words of `word_bytes` bytes.
    vector : int, optional
        Elements in a slot, which one instruction moves.
    slots : int, optional
        In a row of a tile.
    threads : int, optional
        Of a block.
    skew : int, optional
        Elements of at least 32 bytes: what each block writes begins and ends at multiples of them.
    """

    word_bytes: int
    words: int = 1
    vector: int = 1
    slots: int = 32
    threads: int = 256
    skew: int = 0

    @property
    def tile(self) -> int:
        """Rows and columns of a tile, in elements."""
        return self.vector * self.slots

    @property
    def entry(self) -> str:
        """Name of the kernel, and of its file in front of ".cu"."""
        return "transpose_skewed" if self.skew else "transpose"

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self) if self.skew else defines(self, "skew")

    def tiles(self, rows: int, cols: int) -> int:
        """Thread blocks that turn a matrix of that many rows and columns."""
        # Skewed, the last elements of a row may be up to skew - 1 further left.
        down = -(-(rows + max(self.skew - 1, 0)) // (self.tile - self.skew))
        return down * -(-cols // self.tile)


#: By bytes of an element, the larger tile first: vector, slots, threads, skew. The fastest that
#: were measured on an H200: where all rows begin at multiples of 16 bytes,
_ALIGNED = {
    1: ((4, 32, 256, 0),),
    2: ((8, 16, 256, 0), (8, 8, 64, 0)),
    4: ((4, 16, 256, 0), (4, 8, 64, 0)),
    8: ((2, 16, 256, 0),),
    16: ((1, 32, 512, 0), (1, 16, 128, 0)),
}
#: anywhere, in matrices that are large both ways,
_SKEWED = {
    1: ((8, 16, 128, 32),),
    2: ((8, 16, 256, 16),),
    4: ((4, 16, 128, 8),),
    8: ((1, 64, 512, 4),),
}
_LARGE = 256  # rows and columns from which on the rows that are read twice are few
#: and in others, where the edges of tiles count for more than parts of sectors.
_SINGLE = {
    1: ((1, 128, 512, 0), (1, 32, 256, 0)),
    2: ((1, 64, 512, 0), (1, 32, 256, 0)),
    4: ((1, 64, 512, 0), (1, 32, 256, 0)),
    8: ((1, 64, 512, 0), (1, 32, 256, 0)),
}


@functools.lru_cache(maxsize=1024)
def config_for(itemsize: int, alignment: int, rows: int, cols: int) -> TransposeConfig:
    """Return the configuration for matrices whose rows all begin on an alignment.

    Parameters
    ----------
    itemsize : int
        Bytes of an element.
    alignment : int
        A power of two that divides every address of a first element of a row, up to 16.
    rows, cols : int
        Of the matrices that are turned.
    """
    word = common_alignment(itemsize, alignment)
    if word != itemsize:
        return TransposeConfig(word, itemsize // word)
    small = min(rows, cols) < _LARGE
    shapes = _ALIGNED if alignment == 16 else _SINGLE if small else _SKEWED
    first, *others = (TransposeConfig(word, 1, *shape) for shape in shapes[word])
    # The larger tile, unless it reaches much further beyond the edges than the smaller one.
    for other in others:
        if _covered(rows, cols, first.tile) > 1.25 * _covered(rows, cols, other.tile):
            return other
    return first


def _covered(rows: int, cols: int, tile: int) -> int:
    return -(-rows // tile) * -(-cols // tile) * tile**2


def transpose(a: Array) -> Array:
    """Swap the last two axes of a CuPy array, in memory.

    Parameters
    ----------
    a : cupy.ndarray, shape (..., m, n)
        Any dtype, any layout.

    Returns
    -------
    cupy.ndarray, shape (..., n, m)
        New and C-contiguous, on the device of `a`.

    Raises
    ------
    ArrayTypeError
        No array of CuPy's.
    KernelError
        Elements of more than 40 bytes.
    """
    if (done := launch_cache.again("transpose", (a,), None)) is not None:
        return done
    check_arrays({"a": a}, a.dtype)
    import cupy

    with a.device:
        result = cupy.empty((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.dtype)
        source, target = describe(a), describe(result)
        if isinstance(source, str) or source.transposed or 1 in a.shape[-2:]:
            # Rows of the result lie in memory already, or nothing does: a strided copy. (Tiles of
            # one column could be more than a grid has.)
            logger.debug("transpose copies: %s", source)
            cupy.copyto(result, a.swapaxes(-1, -2))
        elif result.size and isinstance(target, Stack):
            launches = _decided(a, source, result, target)
            launches((a.data.ptr, result.data.ptr))
            launch_cache.keep("transpose", (a,), None, result=result, run=launches)
    return result


def _decided(a: Array, source: Stack, out: Array, target: Stack) -> Launches:
    rows, cols = a.shape[-2:]
    axes = batch_axes(a.shape[:-2], [(a, source), (out, target)])
    aligned = _alignment((source, target), axes, a.itemsize)
    config = config_for(a.itemsize, aligned, rows, cols)
    kernel = kernel_for(
        a.device.id, f"{config.entry}.cu", config.entry, tuple(config.defines().items())
    )
    return prepare(
        kernel, config.tiles(rows, cols), config.threads, (rows, cols), (source, target), axes,
        TRANSPOSE_SIGNATURE, a.itemsize,
    )  # fmt: skip


def _alignment(stacks: Sequence[Stack], axes: Sequence[Axis], itemsize: int) -> int:
    """What divides the address of every row's first element, in bytes and up to 16."""
    steps = [stack.ld for stack in stacks]
    steps += [step for axis in axes if axis.size > 1 for step in axis.strides]
    return common_alignment(
        *(stack.pointer for stack in stacks), *(step * itemsize for step in steps)
    )
