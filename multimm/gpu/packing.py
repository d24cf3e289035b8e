"""Packing float32 operands for the tensor cores: kernels/split_pack.cu and its launch.

One launch packs an operand, or both of a product. What it counted is read back afterwards, in one
small copy: `start_pack` leaves time for other work in between.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multimm.errors import OptionError, ShapeError
from multimm.gpu.compiled import kernel_for
from multimm.gpu.layout import Stack, stack_of
from multimm.gpu.operands import check_arrays, describe, is_broadcast
from multimm.gpu.pack_config import BLOCKS, PANEL, Cut, cut_for
from multimm.gpu.packed import (
    PARTS,
    RESIDUAL_CAP,
    ROW_ALIGN,
    SLAB,
    PackedBlock,
    Residuals,
    check_pair,
    register_with_dask,
)

logger = logging.getLogger(__name__)

Array = Any

__all__ = [
    "PARTS", "RESIDUAL_CAP", "ROW_ALIGN", "SLAB", "PackedBlock", "Residuals", "Started",
    "check_pair", "pack", "start_pack",
]  # fmt: skip

_THREADS = 256
_MAX_TASKS = 2**31 - 1
_COUNTS = 16  # bytes: how many elements are not finite, how many are not carried
_RESIDUAL = 12  # bytes: row * 2^32 + k, and the value
_MEMBERS = 15  # of the kernel's struct for an operand, 8 bytes each
_STRUCT = np.dtype((np.void, 2 * _MEMBERS * 8))


class _Source(NamedTuple):
    """An operand before it is packed."""

    x: Array  #: what is read: the array that was given, or a copy that a kernel can walk
    side: str
    rows: int
    k: int
    stack: Stack  #: how x lies
    along_k: bool  #: whether neighbours in memory are neighbours along k
    turned: bool  #: whether x is rows x k or, turned, k x rows

    @property
    def cut(self) -> Cut:
        """How it is cut into tasks."""
        return cut_for(self.rows, self.k)

    def members(self) -> tuple[int, ...]:
        """The first members of the kernel's struct: where it reads, and in which order."""
        stack, cut = self.stack, self.cut
        wide = stack.pointer % 16 == 0 and (stack.ld % 4 == 0 or stack.rows <= 1)
        return (
            stack.pointer, stack.ld, self.rows, self.k, int(self.along_k), int(wide),
            cut.span, cut.run, cut.ahead,
        )  # fmt: skip


class Unchecked(NamedTuple):
    """A packed operand of which nobody has looked yet what its parts do not carry."""

    rows: int
    k: int
    side: str
    scheme: str
    tiles: Array
    exponents: Array


class Started:
    """Operands whose packing was launched. Made by `start_pack`."""

    def __init__(
        self, sources: Sequence[_Source], operands: Sequence[Unchecked], work: Array, lists: int,
        keep_raw: bool,
    ) -> None:  # fmt: skip
        #: For work on the same stream; their elements are right unless `finish` says otherwise.
        self.operands = tuple(operands)
        self._sources, self._keep_raw = sources, keep_raw
        self._work, self._lists = work, lists  # counts first, residuals from byte `lists` on

    def clean(self) -> bool:
        """Wait for the current stream; whether the parts carry every element, as for most data."""
        return not any(self._counts)

    @functools.cached_property
    def _counts(self) -> list[int]:
        """Of each operand: how many elements are not finite, and how many are not carried."""
        import cupy

        with cupy.cuda.Device(self.operands[0].tiles.data.device_id):
            counts = cupy.asnumpy(self._work[: _COUNTS * len(self.operands)]).view(np.uint64)
        return [int(count) for count in counts]

    def finish(self) -> tuple[PackedBlock, ...]:
        """Wait for the current stream, read what was counted, and return the blocks.

        Returns
        -------
        tuple of PackedBlock
            In the order of the operands.
        """
        import cupy

        register_with_dask()
        with cupy.cuda.Device(self.operands[0].tiles.data.device_id):
            return tuple(
                self._block(i, *self._counts[2 * i : 2 * i + 2]) for i in range(len(self.operands))
            )

    def _block(self, i: int, nonfinite: int, uncarried: int) -> PackedBlock:
        rows, k, side, scheme, tiles, exponents = self.operands[i]
        if nonfinite or uncarried > RESIDUAL_CAP:
            logger.debug("operand %s keeps its source: %d elements are not finite, %d not carried",
                         side, nonfinite, uncarried)  # fmt: skip
            raw = _raw(self._sources[i], copy=self._keep_raw)
            return PackedBlock(
                rows, k, side, scheme, nonfinite=nonfinite, uncarried=uncarried, raw=raw
            )
        residuals = self._residuals(i, uncarried) if uncarried else None
        return PackedBlock(rows, k, side, scheme, tiles, exponents, 0, uncarried, residuals)

    def _residuals(self, i: int, count: int) -> Residuals:
        """By row and k, so that sums over them have one order."""
        first = self._lists + i * RESIDUAL_CAP * _RESIDUAL
        values = first + 8 * RESIDUAL_CAP
        at = self._work[first : first + 8 * count].view(np.uint64)
        order = at.argsort()
        at = at[order]
        return Residuals(
            (at >> 32).astype(np.int32), (at & 0xFFFFFFFF).astype(np.int32),
            self._work[values : values + 4 * count].view(np.float32)[order],
        )  # fmt: skip


def pack(a: Array, *, side: str, trans: bool = False, scheme: str = "float32") -> PackedBlock:
    """Pack an operand once, for many products.

    Parameters
    ----------
    a : cupy.ndarray of float32
        C order, F order and slices of either are read as they are, other layouts are copied
        first. For side "a" of shape (m, k), or (k, m) if `trans`; for side "b" of shape (k, n), or
        (n, k) if `trans`.
    side : {"a", "b"}
        Which operand of a product it will be.
    trans : bool, optional
    scheme : {"float32", "tf32"}, optional
        The precision of the products.

    Returns
    -------
    PackedBlock
        Of op(a), on the device of `a`. It holds no reference to `a`; one with elements that the
        parts cannot stand for holds a copy of it. The current stream is synchronised.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
    """
    return start_pack([(a, side, trans)], scheme=scheme).finish()[0]


def start_pack(
    operands: Sequence[tuple[Array, str, bool]],
    *,
    scheme: str = "float32",
    keep_raw: bool = True,
) -> Started:
    """Launch the packing of one operand, or of both of a product, on the current stream.

    Parameters
    ----------
    operands : sequence of (array, side, trans)
        One or two, as for `pack`; on one device.
    scheme : {"float32", "tf32"}, optional
    keep_raw : bool, optional
        Whether a block that keeps its source copies it. Without, it is a view of the array.

    Returns
    -------
    Started
        Its `operands` can be used on the same stream, its `finish` waits.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
    """
    if scheme not in PARTS:
        raise OptionError(f"scheme is {scheme!r}: it must be one of {', '.join(PARTS)}")
    for _, side, _ in operands:
        if side not in ("a", "b"):
            raise OptionError(f'side is {side!r}: it must be "a" or "b"')
    check_arrays({side: x for x, side, _ in operands}, np.float32)
    for x, side, _ in operands:
        _check(x, side)
    sources = [_source(*operand) for operand in operands]
    import cupy

    with cupy.cuda.Device(sources[0].x.device.id):
        return _launch(sources, scheme, keep_raw)


def _check(x: Array, side: str) -> None:
    if x.ndim != 2:
        raise ShapeError(f"{side} has shape {x.shape}: one matrix is packed at a time")
    if is_broadcast(x):
        raise ShapeError(
            f"{side} has strides {x.strides}: it repeats elements by broadcasting; copy it first"
        )


def _source(x: Array, side: str, trans: bool) -> _Source:
    stack = describe(x)
    if isinstance(stack, str):
        import cupy

        logger.debug("operand of shape %s is copied: %s", x.shape, stack)
        with cupy.cuda.Device(x.device.id):
            x = cupy.ascontiguousarray(x)
        stack = stack_of(x.data.ptr, x.shape, x.strides, x.itemsize)
        assert isinstance(stack, Stack), "a C-contiguous array has contiguous rows"
    turned = (side == "b") != bool(trans)
    rows, k = x.shape[::-1] if turned else x.shape
    return _Source(x, side, rows, k, stack, stack.transposed == turned, turned)


def _launch(sources: Sequence[_Source], scheme: str, keep_raw: bool) -> Started:
    import cupy

    cuts = [source.cut for source in sources]
    tasks = sum(cut.tasks for cut in cuts)
    if tasks > _MAX_TASKS:
        raise ShapeError(f"{tasks} tasks for shapes {[s.x.shape for s in sources]}: use blocks")
    # Zeros: 2 counts for each operand, a ticket, what maxima were found. Then the residuals.
    head = _COUNTS * len(sources)
    zeros = head + 8 + sum(4 * PANEL * cut.panels * cut.spans for cut in cuts)
    work = cupy.empty(zeros + RESIDUAL_CAP * _RESIDUAL * len(sources), np.uint8)
    start = work.data.ptr
    cupy.cuda.runtime.memsetAsync(start, 0, zeros, cupy.cuda.get_current_stream().ptr)
    maxima, lists = start + head + 8, start + zeros
    operands, members = [], np.zeros((2, _MEMBERS), np.uint64)
    for i, (source, cut) in enumerate(zip(sources, cuts, strict=True)):
        tiles = cupy.empty((cut.panels, cut.slabs, PARTS[scheme], SLAB, SLAB), np.float16)
        exponents = (cupy.empty if cut.tasks else cupy.zeros)(cut.panels * PANEL, np.int32)
        members[i] = (
            *source.members(), tiles.data.ptr, exponents.data.ptr, maxima, start + _COUNTS * i,
            lists, lists + 8 * RESIDUAL_CAP,
        )  # fmt: skip
        maxima += 4 * PANEL * cut.panels * cut.spans
        lists += RESIDUAL_CAP * _RESIDUAL
        operands.append(Unchecked(source.rows, source.k, source.side, scheme, tiles, exponents))
    if tasks:
        defines = (("PARTS", PARTS[scheme]), ("BLOCKS", BLOCKS), ("CAP", RESIDUAL_CAP))
        kernel = kernel_for(sources[0].x.data.device_id, "split_pack.cu", "split_pack", defines)
        struct = members.reshape(-1).view(_STRUCT)
        kernel((tasks, 1, 1), (_THREADS, 1, 1), (struct, start + head))
    return Started(sources, operands, work, zeros, keep_raw)


def _raw(source: _Source, copy: bool) -> Array:
    """op(x): a view, or a copy with contiguous rows or columns, as x has them."""
    import cupy

    turned, x = source.turned != (source.side == "b"), source.x
    if copy and source.stack.transposed:
        x = cupy.array(x.swapaxes(-1, -2), order="C", copy=True).swapaxes(-1, -2)
    elif copy:
        x = cupy.array(x, order="C", copy=True)
    return x.swapaxes(-1, -2) if turned else x
