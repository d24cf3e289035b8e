"""What is put into streams, with the interpreter kept and given up. No GPU: a stand-in driver."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from multimm.gpu.runtime import driver_launch
from multimm.gpu.runtime.driver_launch import AHEAD, Kernel, capturing, copy, fill, follow, kept
from multimm.gpu.runtime.launch import by_value

STREAM = 0x77
ARGS = (-5, np.float32(1.5), np.float64(-2.5), np.int32(-7), np.uint32(2**32 - 1), 2**62)


class Driver:
    """Its functions, and what they were called with: arguments of kernels as C reads them."""

    def __init__(self):
        self.calls, self.status = [], 0
        self.kinds = [*"qfdiIq"]  #: of a kernel's arguments, as `struct` calls them
        for name in ("cuMemsetD8Async", "cuMemcpyDtoDAsync_v2", "cuEventRecord",
                     "cuStreamWaitEvent"):  # fmt: skip
            setattr(self, name, self._noting(name))

    def _noting(self, name):
        def function(*args):
            self.calls.append((name, *args))
            return self.status

        return function

    def cuLaunchKernel(self, function, *rest):
        *sizes, stream, pointers, extra = rest
        assert extra is None
        values = []
        for pointer, kind in zip(pointers, self.kinds, strict=True):
            values += struct.unpack(kind, ctypes.string_at(pointer, struct.calcsize(kind)))
        self.calls.append((function, tuple(sizes), stream, values))
        return self.status


class Event:
    """One that is over when somebody waits for it."""

    made: ClassVar[list[Event]] = []

    def __init__(self, **_):
        self.waited = 0
        Event.made.append(self)

    def record(self):
        pass

    def synchronize(self):
        self.waited += 1


class Raw:
    """A kernel, as CuPy gives it."""

    kernel = SimpleNamespace(ptr=0xF00)

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **options):
        self.calls.append((*args, options))


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver_launch, "_driver", lambda: found)
    return found


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    module = ModuleType("cupy")
    module.by_cupy = []
    Event.made.clear()

    def noting(name):
        return lambda *args: module.by_cupy.append((name, *args))

    runtime = SimpleNamespace(memsetAsync=noting("memset"), memcpyAsync=noting("memcpy"))
    stream = SimpleNamespace(ptr=STREAM)
    module.cuda = SimpleNamespace(
        runtime=runtime,
        get_current_stream=lambda: stream,
        Event=Event,
        driver=SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {})),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_outside_cupy_does_all_of_it(cupy, driver):
    raw, log = Raw(), []
    Kernel(raw)((1, 2, 3), (4, 5, 6), ARGS, shared_mem=7)
    fill(0x10, 1, 32)
    copy(0x20, 0x10, 16)
    earlier = SimpleNamespace(ptr=1)
    event = SimpleNamespace(record=lambda stream: log.append(stream))
    follow(SimpleNamespace(wait_event=log.append), earlier, event)
    assert raw.calls == [((1, 2, 3), (4, 5, 6), ARGS, {"shared_mem": 7})]
    assert cupy.by_cupy == [("memset", 0x10, 1, 32, STREAM), ("memcpy", 0x20, 0x10, 16, 3, STREAM)]
    assert log == [earlier, event]
    assert driver.calls == []


def test_inside_the_driver_is_called(cupy, driver):
    raw = Raw()
    with kept():
        Kernel(raw)((1, 2, 3), (4, 5, 6), ARGS, shared_mem=7)
        fill(0x10, 1, 32)
        copy(0x20, 0x10, 16)
        follow(*(SimpleNamespace(ptr=x) for x in (1, 2, 3)))
    assert driver.calls == [
        (0xF00, (1, 2, 3, 4, 5, 6, 7), STREAM, [float(x) if i in (1, 2) else int(x)
                                                for i, x in enumerate(ARGS)]),
        ("cuMemsetD8Async", 0x10, 1, 32, STREAM),
        ("cuMemcpyDtoDAsync_v2", 0x20, 0x10, 16, STREAM),
        ("cuEventRecord", 3, 2),
        ("cuStreamWaitEvent", 1, 3, 0),
    ]  # fmt: skip
    assert raw.calls == cupy.by_cupy == []
    Kernel(raw)((1, 1, 1), (1, 1, 1), ())
    assert len(raw.calls) == 1  # it is over


@pytest.mark.parametrize("words", [1, 5, 28])
def test_structs_are_carried_by_value_whatever_their_size(driver, words):
    table = np.arange(words, dtype=np.int64) * 3 - 1
    odd = np.frombuffer(b"abcde", np.dtype((np.void, 5)))
    driver.kinds = ["q", f"{words * 8}s", "5s", "f"]
    with kept():
        for n in (1, 2):
            args = (n, by_value(n * table), odd, np.float32(n))
            Kernel(Raw())((1, 1, 1), (1, 1, 1), args)
    for n, (*_, values) in enumerate(driver.calls, 1):
        assert values == [n, (n * table).tobytes(), b"abcde", n]


def test_threads_lay_arguments_out_apart_and_give_up_by_themselves(cupy, driver):
    """One that is within `kept` says nothing about another one."""
    raw = Raw()
    with kept():
        thread = threading.Thread(target=Kernel(raw), args=((1, 1, 1), (1, 1, 1), ARGS))
        thread.start()
        thread.join()
        assert len(raw.calls) == 1
        own = driver_launch._laid_out(ARGS)
        found = []
        thread = threading.Thread(target=lambda: found.append(driver_launch._laid_out(ARGS)))
        thread.start()
        thread.join()
        assert {*own}.isdisjoint(found[0])
        assert driver_launch._laid_out(ARGS) is own


def test_whether_a_stream_is_captured_is_asked_outside_alone(cupy):
    """Inside none is, and to ask gives the interpreter up."""
    cupy.cuda.runtime.streamIsCapturing = lambda stream: stream == STREAM
    assert capturing()
    with kept():
        assert not capturing()
    assert capturing()
    cupy.cuda.runtime.streamIsCapturing = lambda stream: False
    assert not capturing()


def test_what_the_driver_refuses_is_raised(cupy, driver):
    driver.status = 719
    with kept(), pytest.raises(cupy.cuda.driver.CUDADriverError, match="719"):
        fill(0, 0, 1)


def test_no_queue_is_ever_full(driver):
    """Before it is, somebody waits, and lets others have the interpreter."""
    with kept():
        for n in range(1, 10 * AHEAD):
            fill(0, 0, 1)
            looked = [event for event in Event.made if event.waited]
            behind = n - AHEAD * len(looked)  # calls that nobody knows to be done
            assert behind <= 2 * AHEAD
    assert [event.waited for event in Event.made] == [1] * 8 + [0]
