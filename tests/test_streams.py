"""Streams of tasks and their memory, on a stand-in for CuPy that records what is done in order."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from multimm.graph import streams

HOST_CHUNK = 256


class Pool:
    """Memory by the sub-block; `log` says what happened to it, and to the streams."""

    def __init__(self, capacity=100):
        self.log, self.free, self.taken = [], capacity, 0

    def take(self, size):
        if size > self.free:
            self.log.append(f"no {size}")
            raise MemoryError
        self.free -= size
        self.taken += 1
        self.log.append(f"take {size} on {current().name}")
        return SimpleNamespace(ptr=HOST_CHUNK * self.taken, mem=Memory(self, size))


class Memory:
    def __init__(self, pool, size):
        self.pool, self.size = pool, size

    def __del__(self):
        self.pool.free += self.size
        self.pool.log.append(f"back {self.size}")


class Stream:
    def __init__(self, non_blocking=False, name="S", ptr=7):
        assert non_blocking or ptr == 0
        self.name, self.ptr = name, ptr

    def __enter__(self):
        _local.stack.append(self)

    def __exit__(self, *_):
        _local.stack.pop()

    def synchronize(self):
        _pool.log.append(f"{self.name} done")

    def wait_event(self, event):
        _pool.log.append(f"{self.name} waits for {event.recorded}")


class Event:
    def __init__(self, **_):
        self.recorded = None

    def record(self, stream):
        self.recorded = stream.name


class Local(threading.local):
    def __init__(self):
        self.stack, self.allocators = [NULL], []


NULL = Stream(non_blocking=True, name="0", ptr=0)
_local = Local()
_pool = Pool()


def current():
    return _local.stack[-1]


@pytest.fixture
def pool(monkeypatch):
    """A fresh pool behind a stand-in for CuPy."""
    global _pool
    _pool = Pool()

    @contextlib.contextmanager
    def using_allocator(allocate):
        _local.allocators.append(allocate)
        try:
            yield
        finally:
            _local.allocators.pop()

    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        Device=lambda ident: contextlib.nullcontext(),
        Stream=type("Stream", (Stream,), {"null": NULL}),
        Event=Event,
        get_current_stream=current,
        get_allocator=lambda: _pool.take,
        using_allocator=using_allocator,
        UnownedMemory=lambda pointer, size, owner, device: SimpleNamespace(
            ptr=pointer, owner=owner
        ),
        MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory, ptr=memory.ptr),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(streams, "_local", threading.local())
    streams._begin()
    return _pool


def allocate(size):
    """What `cupy.empty` does within a task."""
    return _local.allocators[-1](size)


def test_memory_comes_from_stream_0_and_the_stream_follows_it(pool):
    with streams.own_stream(0):
        assert current().name == "S"
        held = allocate(10)
    assert pool.log == ["S waits for 0", "take 10 on 0", "S waits for 0", "S done"]
    assert current() is NULL
    del held
    assert pool.log[-1] == "back 10"


def test_what_a_task_drops_goes_back_when_its_stream_is_done(pool):
    with streams.own_stream(0):
        scratch, result = allocate(10), allocate(20)
        del scratch
        assert "back 10" not in pool.log
    assert pool.log[-2:] == ["S done", "back 10"]
    assert pool.free == 80
    del result
    assert pool.free == 100


def test_a_task_takes_again_what_it_has_dropped(pool):
    """Whatever it launches comes later on its stream: neither the pool nor stream 0 is asked."""
    with streams.own_stream(0):
        small, large, other = allocate(10), allocate(40), allocate(30)
        places = {"small": small.ptr, "large": large.ptr, "other": other.ptr}
        before = len(pool.log)
        del large, other
        again = allocate(20)  # the smallest one that it fits in
        assert again.ptr == places["other"]
        assert len(pool.log) == before
        del again
        assert allocate(30).ptr == places["other"], "all of it, though less was asked for"
        del small
        assert allocate(4).ptr not in places.values(), "10 are more than twice as much"
        assert allocate(11).ptr not in places.values(), "30 more than twice as much as 11"
    given_back = {"back 40", "back 30", "back 10", "back 4", "back 11"}
    assert pool.log[-6] == "S done"
    assert set(pool.log[-5:]) == given_back
    assert pool.free == 100


def test_a_dry_pool_makes_the_task_wait_and_give_back(pool):
    with streams.own_stream(0):
        scratch = allocate(60)
        del scratch
        result = allocate(70)
    assert pool.log[3:] == [
        "no 70", "S done", "back 60", "take 70 on 0", "S waits for 0", "S done",
    ]  # fmt: skip
    assert result.mem.owner is not None


def test_memory_that_is_not_there_is_an_error(pool):
    with streams.own_stream(0):
        held = allocate(60)
        with pytest.raises(MemoryError):
            allocate(70)
    assert pool.free == 40
    del held


def test_a_task_that_fails_waits_for_its_stream_too(pool):
    def fail():
        scratch = allocate(10)
        raise ValueError(scratch.ptr)

    with pytest.raises(ValueError, match="256"), streams.own_stream(0):
        fail()
    assert pool.log[3] == "S done"
    assert current() is NULL
    assert not _local.allocators


def test_a_stream_that_somebody_chose_is_kept(pool):
    with Stream(non_blocking=True, name="mine"), streams.own_stream(0):
        assert current().name == "mine"
        assert not _local.allocators
    assert pool.log == []


def test_every_thread_has_its_own_stream_and_keeps_it(pool):
    seen = {}

    def look(name):
        found = []
        for _ in range(2):
            with streams.own_stream(0):
                found.append(current())
        seen[name] = found

    threads = [threading.Thread(target=look, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen["a"][0] is seen["a"][1]
    assert seen["b"][0] is seen["b"][1]
    assert seen["a"][0] is not seen["b"][0]


def test_one_task_computes_on_a_gpu_at_a_time_and_others_may_copy(pool):
    inside, most, first, copied = 0, 0, threading.Event(), threading.Event()
    lock = threading.Lock()

    def compute():
        nonlocal inside, most
        with streams.computing(0), streams.computing(0):  # within it, it does not wait for itself
            with lock:
                inside, most = inside + 1, max(most, inside + 1)
            first.set()
            assert copied.wait(30)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert first.wait(30)
    with streams.own_stream(0):
        copied.set()
    for thread in threads:
        thread.join(30)
    assert (inside, most) == (0, 1)


def test_tasks_in_order_are_launched_while_others_run_and_follow_them_on_the_gpu(pool):
    def launch(name):
        with streams.own_stream(0), streams.in_order(0):
            pool.log.append(name)

    with streams.own_stream(0):
        with streams.in_order(0):
            pool.log.append("first")
        other = threading.Thread(target=launch, args=("second",), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive()
    first, follow, second = (pool.log.index(x) for x in ("first", "S waits for S", "second"))
    assert first < follow < second
    assert pool.log.count("S waits for S") == 1


def test_while_one_is_launched_none_computes(pool):
    """Neither when its launch fails is the next one's turn lost."""
    computed = threading.Event()

    def compute():
        with streams.computing(0):
            computed.set()

    def fail():
        with streams.own_stream(0), streams.in_order(0):
            other.start()
            assert not computed.wait(0.1)
            raise MemoryError

    other = threading.Thread(target=compute, daemon=True)
    with pytest.raises(MemoryError):
        fail()
    assert computed.wait(30)
    other.join(30)
    assert not other.is_alive()
