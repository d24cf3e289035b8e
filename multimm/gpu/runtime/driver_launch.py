"""What is put into a stream: kernels, small fills and copies of memory, and what it waits for.

CuPy gives the interpreter up for each of them, for some microseconds. The event loop of a worker
that is connected through UCXX never sleeps: it takes the interpreter then, and gives it back when
it has come round. A product of several launches so takes its thread several times as long, and
where it is small the GPU waits for the thread. Within `kept` the same is done by calls of the
driver that keep the interpreter.

To keep it while others need it to go on would be a deadlock: a full queue, which holds about a
thousand launches, makes whoever launches wait for the GPU, and the GPU may wait for a Python
function that somebody put on stream 0. So no more than `AHEAD` are ever put into a stream without
a look at how far it has come, and whoever waits for that gives the interpreter up.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

Grid = tuple[int, int, int]

#: Calls between two looks; up to twice as many are in the queue.
AHEAD = 256

_POINTER, _WORD = ctypes.c_void_p, ctypes.c_uint
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice
#: Arguments of kernels as `struct` lays them out, each in words of 8 bytes.
_FORMATS: dict[type, str] = {
    int: "q",
    np.float32: "f4x",
    np.float64: "d",
    np.int32: "i4x",
    np.uint32: "I4x",
}


class _Thread(threading.local):
    """Of each thread: what is open, and where arguments are laid out."""

    opened: _Opened | None = None

    def __init__(self) -> None:
        self.frames: dict[Any, _Frame] = {}


_thread = _Thread()


class Kernel:
    """A kernel that is loaded on a device, to be launched as a `cupy.RawKernel` is.

    Parameters
    ----------
    raw : cupy.RawKernel
    """

    __slots__ = ("_function", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw, self._function = raw, 0

    def __call__(
        self, grid: Grid, block: Grid, args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Launch on the current stream, while the kernel's device is the current one.

        Parameters
        ----------
        grid, block : (int, int, int)
        args : tuple
            Python's int for 64 bits, scalars of NumPy, and structs as arrays of one void.
        shared_mem : int, optional
            Dynamic shared memory, in bytes.
        """
        opened = _thread.opened
        if opened is None:
            self.raw(grid, block, args, shared_mem=shared_mem)
            return
        function = self._function
        if not function:
            function = self._function = self.raw.kernel.ptr
        stream = opened.stream().ptr
        opened.call(
            _driver().cuLaunchKernel,
            function,
            *grid,
            *block,
            shared_mem,
            stream,
            _laid_out(args),
            None,
        )


def fill(address: int, byte: int, size: int) -> None:
    """Set so many bytes of device memory, in the order of the current stream."""
    opened = _thread.opened
    if opened is None:
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memsetAsync(address, byte, size, stream)
        return
    opened.call(_driver().cuMemsetD8Async, address, byte, size, opened.stream().ptr)


def copy(to: int, source: int, size: int) -> None:
    """Copy so many bytes within a device's memory, in the order of the current stream."""
    opened = _thread.opened
    if opened is None:
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(to, source, size, _ON_DEVICE, stream)
        return
    opened.call(_driver().cuMemcpyDtoDAsync_v2, to, source, size, opened.stream().ptr)


def follow(stream: Any, earlier: Any, event: Any) -> None:
    """Have a stream wait for what is on another one.

    Parameters
    ----------
    stream, earlier : cupy.cuda.Stream
    event : cupy.cuda.Event
        Is recorded anew.
    """
    opened = _thread.opened
    if opened is None:
        event.record(earlier)
        stream.wait_event(event)
        return
    opened.call(_driver().cuEventRecord, event.ptr, earlier.ptr)
    opened.call(_driver().cuStreamWaitEvent, stream.ptr, event.ptr, 0)


def capturing() -> bool:
    """Whether the current stream is captured; within `kept` none is, and nobody is asked.

    CuPy gives the interpreter up to ask the driver.
    """
    if _thread.opened is not None:
        return False
    import cupy

    captured: bool = cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr)
    return captured


@contextmanager
def kept() -> Iterator[None]:
    """Keep the interpreter for what this thread puts into streams, which are not captured."""
    before = _thread.opened
    _thread.opened = _Opened()
    try:
        yield
    finally:
        _thread.opened = before


class _Opened:
    """How much was put into the current stream since somebody has looked."""

    def __init__(self) -> None:
        import cupy

        self.stream = cupy.cuda.get_current_stream
        self._count = 0
        self._passed: Any = None  # an event that lies AHEAD calls back

    def call(self, function: Any, *args: Any) -> None:
        """Call the driver."""
        self._count += 1
        if self._count == AHEAD:
            self._look()
        if status := function(*args):
            import cupy

            raise cupy.cuda.driver.CUDADriverError(status)

    def _look(self) -> None:
        """Wait until the GPU has done all but the last `AHEAD` calls; others may run meanwhile."""
        import cupy

        if self._passed is not None:
            self._passed.synchronize()
        self._passed, self._count = cupy.cuda.Event(disable_timing=True), 0
        self._passed.record()


class _Frame(NamedTuple):
    """Where arguments of some types are laid out for the driver, which copies them at once."""

    fields: struct.Struct
    memory: Any
    structs: tuple[int, ...]  #: positions of those that are laid out as they are
    pointers: Any  #: to each argument

    @classmethod
    def of(cls, args: Sequence[Any]) -> _Frame:
        formats = [_format(x) for x in args]
        fields = struct.Struct("=" + "".join(formats))
        memory = ctypes.create_string_buffer(fields.size)
        places, at = [], ctypes.addressof(memory)
        for one in formats:
            places.append(at)
            at += struct.calcsize("=" + one)
        structs = tuple(i for i, x in enumerate(args) if type(x) not in _FORMATS)
        return cls(fields, memory, structs, (_POINTER * len(places))(*places))


def _format(arg: Any) -> str:
    if not isinstance(arg, np.ndarray):
        return _FORMATS[type(arg)]
    return f"{arg.nbytes}s{-arg.nbytes % 8}x"


def _laid_out(args: Sequence[Any]) -> Any:
    """Lay arguments out in this thread's memory; return pointers to them."""
    kinds = tuple([type(x) if type(x) in _FORMATS else x.nbytes for x in args])
    frame = _thread.frames.get(kinds)
    if frame is None:
        frame = _thread.frames[kinds] = _Frame.of(args)
    if frame.structs:
        values = list(args)
        for i in frame.structs:
            values[i] = values[i].tobytes()
        args = values
    frame.fields.pack_into(frame.memory, 0, *args)
    return frame.pointers


@functools.cache
def _driver() -> Any:
    """The driver's functions, called with the interpreter kept."""
    driver = ctypes.PyDLL("libcuda.so.1")
    size = ctypes.c_size_t
    for name, types in {
        "cuLaunchKernel": (_POINTER, *(_WORD,) * 7, *(_POINTER,) * 3),
        "cuMemsetD8Async": (_POINTER, ctypes.c_ubyte, size, _POINTER),
        "cuMemcpyDtoDAsync_v2": (_POINTER, _POINTER, size, _POINTER),
        "cuEventRecord": (_POINTER, _POINTER),
        "cuStreamWaitEvent": (_POINTER, _POINTER, _WORD),
    }.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return driver
