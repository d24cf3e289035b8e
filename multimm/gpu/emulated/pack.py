"""Packing float32 operands for the tensor cores: kernels/split_pack.cu and its launch.

One launch packs an operand, or both of a product; two do where k is long. They work in a head,
memory that says afterwards what packing has found: see `Packing`. Figures are what was fastest on
an H200.
"""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from multimm.errors import OptionError, ShapeError
from multimm.gpu.arch import RESERVED_BYTES, RESIDUAL_CAP, ArchLimits
from multimm.gpu.emulated.configs import PANEL, PARTS, SLAB, SPLIT_K, tiles_for
from multimm.gpu.emulated.packed import PackedBlock, register_with_dask
from multimm.gpu.problem import check_matrix, operand, walkable
from multimm.gpu.runtime.launch import device_of, kernel_for
from multimm.gpu.runtime.workspace import fill
from multimm.gpu.strides import Stack
from multimm.shapes import Shape

logger = logging.getLogger(__name__)

Array = Any

_THREADS = 256
_MAX_TASKS = 2**31 - 1
_COUNTS = 16  # bytes: how many elements are not finite, how many are not carried
#: Bytes that a head begins with: that of two operands, and what kernels/broad_pack.cu leaves.
COUNTED = 3 * _COUNTS
_RESIDUAL = 12  # bytes: row * 2^32 + k, and the value
_STRUCT = struct.Struct("28Q")  # of the kernel: 14 members for each of two operands
_ALL, _LEAVE, _TAKE = (np.int32(stage) for stage in range(3))  # of the kernel
_BY_VALUE = np.dtype((np.void, _STRUCT.size))
#: Thread blocks that share a multiprocessor, and the float32 tiles that each may hold: more blocks
#: of fewer tiles are slower.
BLOCKS, MOST_HELD = 2, 6
#: Shared memory for a tile, and for all else, in bytes.
_TILE_BYTES, _OTHER_BYTES = 4 * SLAB * SLAB, 4 * 9 * SLAB
#: Times that a block looks for the others' maxima, about 1 ms, before it finds them alone, which
#: takes 0.2 ms by an estimate. Of large squares 95 of 100 blocks wait for 8 us or less (H200).
PATIENCE = 2**10


def held_on(limits: ArchLimits) -> int:
    """How many tiles a block holds on a GPU."""
    room = limits.shared_bytes // BLOCKS - RESERVED_BYTES - _OTHER_BYTES
    return max(1, min(MOST_HELD, room // _TILE_BYTES))


def pack_shared_bytes(held: int) -> int:
    """Dynamic shared memory of a block that holds so many tiles."""
    return held * _TILE_BYTES + _OTHER_BYTES


def pack_defines(parts: int, held: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_pack.cu."""
    return (("PARTS", parts), ("BLOCKS", BLOCKS), ("HELD", held), ("CAP", RESIDUAL_CAP))


class Cut(NamedTuple):
    """How kernels/split_pack.cu cuts an operand into tasks."""

    run: int  #: slabs that one block packs
    tasks: int
    at_once: bool  #: whether the blocks of a panel run at one time: no launch has to find maxima


@functools.lru_cache(maxsize=1024)
def cut_for(rows: int, k: int, held: int, multiprocessors: int) -> Cut:
    """Return how an operand of that size is cut on a GPU.

    Every multiprocessor has something to do if that is possible. Half of the blocks that run at one
    time may share a panel: the others copy or write while these wait.
    """
    panels, slabs = tiles_for(rows, k)
    if not panels or not slabs:
        return Cut(1, 0, True)
    places = multiprocessors * BLOCKS
    run = max(1, min(held, -(-panels * slabs // places)))
    blocks = -(-slabs // run)
    return Cut(run, panels * blocks, blocks <= places // 2)


class Source(NamedTuple):
    """How an operand lies before it is packed."""

    side: str
    rows: int
    k: int
    stack: Stack
    along_k: bool  #: whether neighbours in memory are neighbours along k
    turned: bool  #: whether the array is rows x k or, turned, k x rows

    @classmethod
    def of(cls, side: str, trans: bool, shape: Shape, stack: Stack) -> Source:
        """A matrix that is used transposed, or as it is."""
        turned = (side == "b") != bool(trans)
        rows, k = shape[::-1] if turned else shape
        return cls(side, rows, k, stack, stack.transposed == turned, turned)

    def members(self) -> tuple[int, ...]:
        """Members of the kernel's struct: how it reads."""
        stack = self.stack
        wide = stack.pointer % 16 == 0 and (stack.ld % 4 == 0 or stack.rows <= 1)
        return (stack.ld, self.rows, self.k, int(self.along_k), int(wide))

    def tile_shape(self, scheme: str) -> tuple[int, ...]:
        """Shape of the packed tiles, of float16."""
        return (*tiles_for(self.rows, self.k), PARTS[scheme], SLAB, SLAB)

    @property
    def height(self) -> int:
        """Rows with padding: so many exponents, of int32, belong to the tiles."""
        return tiles_for(self.rows, self.k)[0] * PANEL


@dataclass(frozen=True, slots=True)
class Packing:
    """The launches that pack operands, with all decided but where they lie.

    The head begins with two uint64 for each of two operands: how many of its elements are not
    finite, and how many others the parts do not carry. Two more are for kernels/broad_pack.cu:
    whether it has packed, and whether it could not carry something. From `lists` on there are the
    elements that are not carried, for each operand RESIDUAL_CAP places, row * 2^32 + k, and then as
    many values.
    """

    kernel: Any  #: None if there is nothing to pack
    tasks: int
    stages: tuple[Any, ...]  #: of each launch
    shared_bytes: int
    members: tuple[tuple[int, ...], ...]  #: of each operand, those that are no addresses
    #: From the head's beginning, in bytes: of each operand maxima, and how many blocks left them.
    maxima: tuple[tuple[int, int], ...]
    lists: tuple[int, ...]  #: of each operand, likewise
    exact: bool  #: whether all is counted, and packed, of operands that are refused, too

    @property
    def head_bytes(self) -> int:
        """Size of the head."""
        return self.lists[-1] + RESIDUAL_CAP * _RESIDUAL

    def __call__(self, head: int, addresses: Sequence[tuple[int, int, int]]) -> None:
        """Pack on the current stream.

        Parameters
        ----------
        head : int
            The address of the head.
        addresses : sequence of (int, int, int)
            Of each operand, its tiles and its exponents.
        """
        fill(head, 0, self.lists[0])
        if self.kernel is None:
            return
        values: list[int] = []
        for i, (x, tiles, exponents) in enumerate(addresses):
            first = head + self.lists[i]
            values += (x, *self.members[i], tiles, exponents,
                       *(head + at for at in self.maxima[i]),
                       head + _COUNTS * i, first, first + 8 * RESIDUAL_CAP)  # fmt: skip
        values += [0] * (28 - len(values))
        operands = np.frombuffer(_STRUCT.pack(*values), _BY_VALUE)
        for stage in self.stages:
            arguments = operands, stage, np.uint32(PATIENCE), np.int32(self.exact)
            self.kernel((self.tasks, 1, 1), (_THREADS, 1, 1), arguments,
                        shared_mem=self.shared_bytes)  # fmt: skip


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
        parts cannot stand for, or for "float32" one of a k that is shorter than `configs.SPLIT_K`,
        holds a copy of it. The current stream is synchronised.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
    """
    if scheme not in PARTS:
        raise OptionError(f"scheme is {scheme!r}: it must be one of {', '.join(PARTS)}")
    if side not in ("a", "b"):
        raise OptionError(f'side is {side!r}: it must be "a" or "b"')
    x, stack = check_matrix(side, a)
    source = Source.of(side, trans, x.shape, stack)
    import cupy

    register_with_dask()
    with cupy.cuda.Device(x.device.id):
        # In a sum of few terms parts of 22 bits lose too much.
        if scheme == "float32" and source.k < SPLIT_K:
            return PackedBlock(source.rows, source.k, side, scheme, raw=_raw(x, source))
        packing = prepared([source], scheme, x.data.device_id, exact=True)
        head = cupy.empty(packing.head_bytes, np.uint8)
        tiles = cupy.empty(source.tile_shape(scheme), np.float16)
        # Without tasks nobody writes them.
        exponents = (cupy.empty if packing.tasks else cupy.zeros)(source.height, np.int32)
        packing(head.data.ptr, [(source.stack.pointer, tiles.data.ptr, exponents.data.ptr)])
        nonfinite, uncarried = (int(n) for n in cupy.asnumpy(head[:_COUNTS]).view(np.uint64))
        if nonfinite or uncarried > RESIDUAL_CAP:
            logger.debug("operand %s keeps its source: %d elements are not finite, %d not carried",
                         side, nonfinite, uncarried)  # fmt: skip
            return PackedBlock(source.rows, source.k, side, scheme, nonfinite=nonfinite,
                               uncarried=uncarried, raw=_raw(x, source))  # fmt: skip
        residuals = _residuals(head[packing.lists[0] :], uncarried) if uncarried else ()
    return PackedBlock(
        source.rows, source.k, side, scheme, tiles, exponents, 0, uncarried, *residuals
    )


def _residuals(lists: Array, count: int) -> tuple[Array, Array]:
    """Copies of their places and values: the head is freed."""
    values = lists[8 * RESIDUAL_CAP :]
    return lists[: 8 * count].copy().view(np.uint64), values[: 4 * count].copy().view(np.float32)


def source_of(x: Array, side: str, trans: bool) -> tuple[Array, Source]:
    """Return an operand that the kernel can read, a copy if need be, and how it lies."""
    x, stack = walkable(operand(x), dense=True)
    return x, Source.of(side, trans, x.shape, stack)


def prepared(sources: Sequence[Source], scheme: str, device: int, exact: bool = False) -> Packing:
    """Decide how one operand, or both of a product, are packed.

    Parameters
    ----------
    sources : sequence of Source
        One or two.
    scheme : {"float32", "tf32"}
    device : int
    exact : bool, optional
        Count all that is not carried, instead of about as many as it takes to refuse an operand.

    Raises
    ------
    ShapeError
        Operands that are too large for one launch.
    """
    chip = device_of(device)
    held = held_on(chip.limits)
    cuts = [cut_for(x.rows, x.k, held, chip.multiprocessors) for x in sources]
    tasks = sum(cut.tasks for cut in cuts)
    if tasks > _MAX_TASKS:
        shapes = [(source.rows, source.k) for source in sources]
        raise ShapeError(f"{tasks} tasks for shapes {shapes}: use blocks")
    kernel, shared_bytes = None, pack_shared_bytes(held)
    if tasks:
        defines = pack_defines(PARTS[scheme], held)
        kernel = kernel_for(
            device, "split_pack.cu", "split_pack", defines, shared_bytes=shared_bytes
        )
    end = COUNTED
    maxima, lists = [], []
    for source in sources:
        arrived = end + 4 * source.height
        maxima.append((end, arrived))
        end = arrived + 4 * source.height
    for _ in sources:
        lists.append(end)
        end += RESIDUAL_CAP * _RESIDUAL
    stages = (_ALL,) if all(cut.at_once for cut in cuts) else (_LEAVE, _TAKE)
    members = tuple((*x.members(), cut.run) for x, cut in zip(sources, cuts, strict=True))
    return Packing(kernel, tasks, stages, shared_bytes, members, tuple(maxima), tuple(lists), exact)


def _raw(x: Array, source: Source) -> Array:
    """op(x): a copy with contiguous rows or columns, as x has them."""
    import cupy

    if source.stack.transposed:
        x = cupy.array(x.swapaxes(-1, -2), order="C", copy=True).swapaxes(-1, -2)
    else:
        x = cupy.array(x, order="C", copy=True)
    return x.swapaxes(-1, -2) if source.turned != (source.side == "b") else x
