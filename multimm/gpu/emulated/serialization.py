"""What Dask must know of a `PackedBlock`: its size, and how it travels and is spilled.

Without this a packed block would count as a few bytes of host memory and travel by pickle, through
the host. `register` is called where packed blocks are made or arrive in a process that uses
distributed; nothing is imported before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from multimm.errors import ArrayTypeError
from multimm.gpu.emulated.packed import PackedBlock, Residuals

Array = Any
Header = dict[str, Any]

_PARTS = ("tiles", "exponents", "raw")
_FORMAT = 1  # of headers


@functools.cache
def register() -> None:
    """Register sizeof and the serialisers "dask" (host frames) and "cuda" (device frames)."""
    from dask.sizeof import sizeof
    from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    sizeof.register(PackedBlock)(size_of)
    dask_serialize.register(PackedBlock)(to_host)
    dask_deserialize.register(PackedBlock)(from_host)
    cuda_serialize.register(PackedBlock)(to_frames)
    cuda_deserialize.register(PackedBlock)(from_frames)
    if sys.modules.get("dask_cuda"):  # as in every worker that it has started
        from dask_cuda.is_device_object import is_device_object

        is_device_object.register(PackedBlock)(lambda block: True)


def size_of(block: PackedBlock) -> int:
    """Bytes that a worker's limits count."""
    return block.nbytes


def to_frames(block: PackedBlock) -> tuple[Header, list[Array]]:
    """Return what describes a block, and its memory: device arrays of bytes."""
    plain = {
        field.name: getattr(block, field.name) for field in fields(block)
        if field.name not in (*_PARTS, "residuals")
    }  # fmt: skip
    header: Header = {"format": _FORMAT, "block": plain, "arrays": []}
    frames = []
    for name, x in block.arrays().items():
        turned = bool(x.flags.f_contiguous and not x.flags.c_contiguous)  # only `raw` may be
        flat = (x.swapaxes(0, 1) if turned else x).reshape(-1)
        header["arrays"].append((name, x.dtype.str, x.shape, turned))
        if x.nbytes:  # transports do not carry empty frames
            frames.append(flat.view(np.uint8))
    return header, frames


def from_frames(header: Header, frames: Sequence[Any]) -> PackedBlock:
    """Return the block of `to_frames`.

    Raises
    ------
    ArrayTypeError, OptionError, ShapeError
        If what has arrived is no packed block.
    """
    import cupy

    return _rebuilt(header, frames, cupy.asarray)


def to_host(block: PackedBlock) -> tuple[Header, list[memoryview]]:
    """As `to_frames`, in host memory."""
    import cupy

    header, frames = to_frames(block)
    return header, [memoryview(cupy.asnumpy(frame)) for frame in frames]


def from_host(header: Header, frames: Sequence[Any]) -> PackedBlock:
    """Return the block of `to_host`, on the current device.

    Raises
    ------
    ArrayTypeError, OptionError, ShapeError
        If what has arrived is no packed block.
    """
    import cupy

    return _rebuilt(header, frames, lambda frame: cupy.asarray(np.frombuffer(frame, np.uint8)))


def _rebuilt(header: Header, frames: Sequence[Any], array: Callable[[Any], Array]) -> PackedBlock:
    import cupy

    if header.get("format") != _FORMAT:
        raise ArrayTypeError(
            f"a packed block of format {header.get('format')} arrived where {_FORMAT} is known: "
            "all workers must run one version of multimm"
        )
    left = list(frames)
    parts: dict[str, Array] = {}
    for name, kind, shape, turned in header["arrays"]:
        dtype, size = np.dtype(kind), int(np.prod(shape, dtype=np.int64))
        if size == 0:
            parts[name] = cupy.empty(shape, dtype)
            continue
        if not left or frame_bytes(left[0]) != size * dtype.itemsize:
            raise ArrayTypeError(
                f"packed block: {name} of shape {tuple(shape)} and dtype {dtype} arrived as "
                f"{frame_bytes(left[0]) if left else 'no'} bytes"
            )
        flat = array(left.pop(0)).view(dtype)
        parts[name] = flat.reshape(shape[::-1]).swapaxes(0, 1) if turned else flat.reshape(shape)
    if left:
        raise ArrayTypeError(f"packed block: {len(left)} frames arrived that nothing is known of")
    lists = [parts.pop(name) for name in Residuals._fields if name in parts]
    if len(lists) not in (0, len(Residuals._fields)):
        raise ArrayTypeError("packed block: some lists of residuals did not arrive")
    residuals = Residuals(*lists) if lists else None
    return PackedBlock(**header["block"], **parts, residuals=residuals)


def frame_bytes(frame: Any) -> int:
    """Bytes of a frame: of host memory, or of a device buffer of any library."""
    size = getattr(frame, "nbytes", None)
    return int(len(frame) if size is None else size)
