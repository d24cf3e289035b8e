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

from multimm.errors import KernelError, ShapeError
from multimm.gpu.arch import STATIC_SHARED_BYTES, Rules, check, defines
from multimm.gpu.problem import describe
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import (
    TRANSPOSE_SIGNATURE,
    Launches,
    batch_axes,
    kernel_for,
    prepare,
)
from multimm.gpu.strides import Axis, Stack
from multimm.gpu.validate import check_arrays, check_out, common_alignment
from multimm.shapes import Shape

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

    def __post_init__(self) -> None:
        check(self, _numbers(self), _shape(self))

    @property
    def tile(self) -> int:
        """Rows and columns of a tile, in elements."""
        return self.vector * self.slots

    @property
    def entry(self) -> str:
        """Name of the kernel, and of its file in front of ".cu"."""
        return "transpose_skewed" if self.skew else "transpose"

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.vector * self.word_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: a tile, and one bank of padding after `vector` rows."""
        padding = max(1, 4 // self.slot_bytes)
        return self.words * self.slots * (self.tile + padding) * self.slot_bytes

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self) if self.skew else defines(self, "skew")

    def tiles(self, rows: int, cols: int) -> int:
        """Thread blocks that turn a matrix of that many rows and columns."""
        # Skewed, the last elements of a row may be up to skew - 1 further left.
        down = -(-(rows + max(self.skew - 1, 0)) // (self.tile - self.skew))
        return down * -(-cols // self.tile)


def _numbers(c: TransposeConfig) -> Rules:
    return (
        (c.word_bytes in (1, 2, 4, 8, 16), "a word has 1, 2, 4, 8 or 16 bytes"),
        (c.words >= 1, "an element has at least one word"),
        (c.vector in (1, 2, 4, 8, 16), "a slot has 1, 2, 4, 8 or 16 elements"),
        (c.slots in (8, 16, 32, 64, 128), "a row of a tile has 8, 16, 32, 64 or 128 slots"),
        (c.threads in (32, 64, 128, 256, 512, 1024), "a block has 32 to 1024 threads, 2^n"),
        (c.skew >= 0 and c.skew & (c.skew - 1) == 0, "a skew is a power of two, or 0"),
    )


def _shape(c: TransposeConfig) -> Rules:
    return (
        (c.slot_bytes <= 16, f"slots of {c.slot_bytes} bytes: one instruction moves at most 16"),
        (
            c.vector == 1 or (c.words == 1 and c.slot_bytes >= 4),
            "a slot of several elements is made of whole registers and whole elements",
        ),
        (
            c.slots <= c.threads <= c.slots**2,
            "the threads of a block must cover a row of slots, and no more than the tile",
        ),
        (
            c.slots >= 32 or c.slots * c.slot_bytes >= 128,
            "the lanes that are served at a time must lie in one row of the tile",
        ),
        (
            c.skew == 0 or (c.words == 1 and c.skew * c.word_bytes >= 32 and c.skew < c.tile),
            "a skew is made of elements of one word, has at least 32 bytes, and fits the tile",
        ),
        (
            c.shared_bytes <= STATIC_SHARED_BYTES,
            f"{c.shared_bytes} bytes of shared memory: {STATIC_SHARED_BYTES} are allowed, use "
            "elements of at most 40 bytes",
        ),
    )


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

    Raises
    ------
    KernelError
        Elements of more than 40 bytes.
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


def transpose(a: Array, *, out: Array = None, config: TransposeConfig | None = None) -> Array:
    """Swap the last two axes of a CuPy array, in memory.

    Parameters
    ----------
    a : cupy.ndarray, shape (..., m, n)
        Any dtype, any layout.
    out : cupy.ndarray of the same dtype, shape (..., n, m), optional
        Written to and returned; its rows are contiguous and overlap no element of `a`.
    config : TransposeConfig, optional
        By default `config_for` decides. The result does not depend on it.

    Returns
    -------
    cupy.ndarray, shape (..., n, m)
        On the device of `a`; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Fewer than 2 dimensions, or an `out` that cannot be written to.
    KernelError
        Elements of more than 40 bytes, or a configuration that does not fit the operands.
    """
    if config is None and (done := launch_cache.again("transpose", (a,), out)) is not None:
        return done
    given = {"a": a} if out is None else {"a": a, "out": out}
    check_arrays(given, a.dtype)
    if a.ndim < 2:
        raise ShapeError(f"a has shape {a.shape}: a matrix or a stack of them is needed")
    shape = _turned(a.shape)
    if out is not None and check_out(given, shape).transposed:
        raise ShapeError("out has contiguous columns: transpose writes contiguous rows")
    import cupy

    with a.device:
        result = cupy.empty(shape, a.dtype) if out is None else out
        source, target = describe(a), describe(result)
        if isinstance(source, str) or source.transposed or 1 in a.shape[-2:]:
            # Rows of the result lie in memory already, or nothing does: a strided copy. (Tiles of
            # one column could be more than a grid has.)
            logger.debug("transpose copies: %s", source)
            cupy.copyto(result, a.swapaxes(-1, -2))
        elif result.size and isinstance(target, Stack):
            launches = _decided(a, source, result, target, config)
            launches((a.data.ptr, result.data.ptr))
            if config is None:
                launch_cache.keep("transpose", (a,), out, result=result, run=launches)
    return result


def _turned(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _decided(
    a: Array, source: Stack, out: Array, target: Stack, config: TransposeConfig | None
) -> Launches:
    rows, cols = a.shape[-2:]
    axes = batch_axes(a.shape[:-2], [(a, source), (out, target)])
    aligned = _alignment((source, target), axes, a.itemsize)
    best = config_for(a.itemsize, aligned, rows, cols)
    if config is None:
        config = best
    elif not _fits(config, a.itemsize, aligned):
        raise KernelError(
            f"{config} does not fit elements of {a.itemsize} bytes in rows that begin at multiples "
            f"of {aligned} bytes: use {best}"
        )
    kernel = kernel_for(
        a.device.id, f"{config.entry}.cu", config.entry, tuple(config.defines().items())
    )
    return prepare(
        kernel, config.tiles(rows, cols), config.threads, (rows, cols), (source, target), axes,
        TRANSPOSE_SIGNATURE, a.itemsize,
    )  # fmt: skip


def _fits(config: TransposeConfig, itemsize: int, alignment: int) -> bool:
    """Whether rows begin where the kernel may read and write them; skewed, that is anywhere."""
    needed = config.word_bytes if config.skew else config.slot_bytes
    return config.word_bytes * config.words == itemsize and alignment % needed == 0


def _alignment(stacks: Sequence[Stack], axes: Sequence[Axis], itemsize: int) -> int:
    """What divides the address of every row's first element, in bytes and up to 16."""
    steps = [stack.ld for stack in stacks]
    steps += [step for axis in axes if axis.size > 1 for step in axis.strides]
    return common_alignment(
        *(stack.pointer for stack in stacks), *(step * itemsize for step in steps)
    )
