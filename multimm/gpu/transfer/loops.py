"""What a thread does that copies between host memory and a GPU, without the interpreter.

The event loop of a worker that is connected through UCXX never sleeps, and Python has it give the
interpreter to another thread after 5 ms only. Beside a thread that polls like it, lanes that ask
for the interpreter for each piece carried 4 to 14 GB/s of 50; 29, where threads give way after 10
us. So their loops are compiled, by Numba (`compiled_loops`), in a second or two, once on a machine:
44.

Nor does a lane ask for the interpreter between arrays: it waits for the next one at a semaphore.
Who has an array to copy posts that, and asks for the interpreter once, when all lanes are done.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

_WORD = ctypes.c_size_t  # pointers and handles, too
#: Of threads that want the loops at once, one compiles them.
_compiling = threading.Lock()


class Loops(NamedTuple):
    """Both directions; each returns a CUresult.

    `fetch` takes the addresses of target and source, and the bytes of the array and of a piece.
    `send` takes a table, each row of which is a `Part`; those of an array follow each other. What
    follows is common: which lane this is of how many, two pinned pieces, their events, and a
    stream. Of all pieces, one array's after the other's, lanes take one in turn.

    `serve` is what a lane does until it is told to stop: one job after another, as `Job` says, of
    an array of them that begins anew after its last one. It takes that, the address of the lane's
    semaphore, whether bytes go up, and which lane this is, with what is its own, as above.
    `wait_for` waits for so many posts of a semaphore, without the interpreter.
    """

    send: Callable[..., int]
    fetch: Callable[..., int]
    serve: Callable[..., int]
    wait_for: Callable[..., int]


class Part(NamedTuple):
    """What goes to an array from one place in host memory: addresses, numbers of rows, bytes.

    `compiled_loops` names the columns of a table by these.
    """

    target: int  #: the array on the device
    size: int  #: of it
    step: int  #: of a piece
    width: int  #: of a row of it, or of all where it is none but this part
    first: int  #: of its rows, the part's first one
    last: int  #: and the one behind its last one
    offset: int  #: of a row, where the part begins
    length: int  #: and how much is its own
    source: int
    stride: int  #: from a row of the source to the next one


class Job(NamedTuple):
    """What lanes are told of a copy: addresses, and counts.

    Parameters
    ----------
    lanes : int
        That take part; 0: lanes are to stop.
    ready : int
        A CUDA event that comes before the copy.
    table, parts : int
        As `send` takes it, of so many parts; of `fetch`, what that takes, as one.
    failed : int
        Where each lane writes its CUresult.
    done : int
        A semaphore that each lane posts.
    """

    lanes: int
    ready: int = 0
    table: int = 0
    parts: int = 0
    failed: int = 0
    done: int = 0


#: Bytes of a semaphore, at least: it has 32 in glibc and in musl.
SEMAPHORE_BYTES = 64


def loops() -> Loops:
    """Compile them, or take what an earlier process has compiled; or wait until another thread has.

    Raises
    ------
    OSError
        There is no CUDA driver.
    """
    with _compiling:
        return _compiled()


@cache
def _compiled() -> Loops:
    from llvmlite import binding

    for name, function in _called(_driver()).items():
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    module = importlib.import_module("multimm.gpu.transfer.compiled_loops")
    return Loops(*(getattr(module, way) for way in Loops._fields))


def _called(driver: Any) -> dict[str, Any]:
    """What the loops call, by the names that they have for it."""
    return {
        "multimm_to_device": driver.cuMemcpyHtoDAsync_v2,
        "multimm_to_host": driver.cuMemcpyDtoHAsync_v2,
        "multimm_record": driver.cuEventRecord,
        "multimm_wait": driver.cuEventSynchronize,
        "multimm_order": driver.cuStreamWaitEvent,
        "multimm_finish": driver.cuStreamSynchronize,
        "multimm_pause": _library("sem_wait", 1),
        "multimm_post": _library("sem_post", 1),
        "multimm_copy": ctypes.CDLL(None).memcpy,
    }


class Semaphore:
    """One of the C library's, which compiled loops wait for and post."""

    def __init__(self) -> None:
        self._memory = np.zeros(SEMAPHORE_BYTES, np.uint8)
        self.address = self._memory.ctypes.data
        if _library("sem_init", 3)(self.address, 0, 0):
            raise OSError("the C library has no semaphores between threads")

    def post(self) -> None:
        """Let one go on who waits; this takes no time, so that the interpreter is kept."""
        _library("sem_post", 1)(self.address)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _library(name: str, words: int) -> Any:
    """A function of the C library."""
    function = getattr(ctypes.PyDLL(None), name)
    function.argtypes, function.restype = [_WORD] * words, ctypes.c_int
    return function
