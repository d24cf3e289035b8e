"""Memory between one launch and the next, on streams that are captured too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from multimm.errors import KernelError
from multimm.shapes import Shape

Array = Any
Take = Callable[[Shape], Array]  #: makes an array: see `workspaces`

_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


def workspace(shape: Shape, device: int) -> tuple[Array, Callable[[], None]]:
    """Return an array for what is launched next on the current stream, and what gives it back.

    CuPy's pool hands memory to others as soon as nobody refers to it, in the order of the stream.
    A captured graph refers to nothing, and would write to it in every replay: while a stream is
    captured, nodes of the graph allocate the memory and free it.

    Parameters
    ----------
    shape : tuple of int
    device : int
        The current one.

    Returns
    -------
    array : cupy.ndarray of float32
        C-contiguous, on the device; it begins on 256 bytes and holds anything.
    release : callable
        To be called after the last launch that uses the array, with the same current stream.
    """
    import cupy

    if not capturing():
        return cupy.empty(shape, np.float32), nothing
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
    size = math.prod(shape) * np.dtype(np.float32).itemsize
    address = runtime.mallocAsync(size, stream)
    memory = cupy.cuda.UnownedMemory(address, size, None, device)
    array = cupy.ndarray(shape, np.float32, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return array, lambda: runtime.freeAsync(address, stream)


@contextmanager
def workspaces(device: int) -> Iterator[Take]:
    """Within it, what is given makes arrays as `workspace` does; all are given back at its end."""
    releases: list[Callable[[], None]] = []

    def take(shape: Shape) -> Array:
        array, release = workspace(shape, device)
        releases.append(release)
        return array

    yield take
    for release in releases:
        release()


def nothing() -> None:
    """In the place of what gives memory back, where none was taken."""


def fill(address: int, byte: int, size: int) -> None:
    """Set so many bytes of device memory, in the order of the current stream."""
    import cupy

    cupy.cuda.runtime.memsetAsync(address, byte, size, cupy.cuda.get_current_stream().ptr)


def copy(to: int, source: int, size: int) -> None:
    """Copy so many bytes within a device's memory, in the order of the current stream."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(to, source, size, _ON_DEVICE, stream)


def capturing() -> bool:
    """Whether a CUDA graph is captured from the current stream."""
    import cupy

    captured: bool = cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr)
    return captured


def not_captured(what: str, instead: str) -> None:
    """Raise `KernelError` where memory of CuPy's pool would be a captured graph's.

    Parameters
    ----------
    what, instead : str
        What takes the memory, and what to do where a stream is captured.
    """
    if capturing():
        raise KernelError(
            f"{what}, into memory that is another's by the time at which the CUDA graph that is "
            f"being captured runs: {instead}"
        )
