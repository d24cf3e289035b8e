"""Blocks that leave a GPU: in their turn, and within what the plans of all products allow."""

from __future__ import annotations

import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads, soon
from commands import python
from distributed import Client
from labels import tasks_of
from linked import at_rest, held_up, plan_for_little
from small import integers

import multimm
from multimm.graph.label import Kind
from multimm.graph.tasks import host_offload
from multimm.graph.tasks.host_offload import Room, download


class Sent:
    """Blocks that go through a room, a thread for each; each stays inside until it is let go."""

    def __init__(self, pool):
        self.room, self.done, self._pool = Room(), [], pool

    def send(self, nbytes, limit, error=None):
        """Send a block; it is inside, or has its place in the queue, when this returns."""
        done = threading.Event()
        self.done.append(done)

        def leave():
            with self.room.room(nbytes, limit):
                assert done.wait(30)
                if error is not None:
                    raise error

        before = len(blocks_of(self.room))
        thread = self._pool.submit(leave)
        soon(lambda: len(blocks_of(self.room)) > before)

        def let_go():
            done.set()
            return thread.result(timeout=30)

        return let_go

    @property
    def inside(self):
        return [block.nbytes for block in blocks_of(self.room) if block.inside]

    @property
    def queue(self):
        return [block.nbytes for block in blocks_of(self.room) if not block.inside]


def blocks_of(room):
    """Those inside and those that wait, at a time at which nobody comes or goes."""
    with room._changed:
        return [replace(block) for block in room.blocks]


@pytest.fixture
def sent():
    with ThreadPoolExecutor(8) as pool:
        sent = Sent(pool)
        yield sent
        for done in sent.done:  # where a test has failed
            done.set()


#: Blocks by bytes and limit; who is inside and who waits; and so after each that is let go.
TURNS = {
    "as many bytes as the limit leave at a time": (
        [(10, 30)] * 5, ([10] * 3, [10] * 2),
        [([10] * 3, [10]), ([10] * 3, []), ([10] * 2, []), ([10], [])],
    ),
    "nobody is overtaken by one that would fit": (
        [(6, 10), (7, 10), (1, 10)], ([6], [7, 1]), [([7, 1], []), ([1], [])],
    ),
    # A product whose own limit is larger does not enter above it.
    "the smallest limit inside holds for all": (
        [(10, 20), (9, 100), (8, 100)], ([10, 9], [8]), [([9, 8], []), ([8], [])],
    ),
    "a block beyond its limit leaves alone": (
        [(1, 100), (50, 20), (1, 100)], ([1], [50, 1]), [([50], [1]), ([1], [])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_blocks_leave_in_turn_and_within_their_limits(sent, name):
    given, at_first, later = TURNS[name]
    blocks = [sent.send(*block) for block in given]
    assert (sent.inside, sent.queue) == at_first
    for expected, let_go in zip([*later, ([], [])], blocks, strict=True):
        let_go()
        assert (sent.inside, sent.queue) == expected


def test_an_error_on_the_way_gives_back_what_was_held(sent):
    fails = sent.send(10, 10, ZeroDivisionError("on its way"))
    other = sent.send(10, 10)
    assert sent.queue == [10]
    with pytest.raises(ZeroDivisionError, match="on its way"):
        fails()
    assert (sent.inside, sent.queue) == ([10], [])
    other()
    with pytest.raises(ZeroDivisionError), sent.room.room(10, None):
        raise ZeroDivisionError
    assert not sent.inside


class Interrupted(BaseException):
    pass


@pytest.fixture
def interrupting():
    """What interrupts this thread once, wherever it waits.

    A signal that comes just before the thread begins to wait is seen only after
    the wait, so it is sent until it was seen.
    """
    seen = threading.Event()

    def interrupt(*_):
        if not seen.is_set():
            seen.set()
            raise Interrupted

    def send():
        while not seen.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            seen.wait(0.05)

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield send
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("ahead", [[], [7]])
def test_who_is_interrupted_leaves_the_queue_and_wakes_others(sent, interrupting, ahead):
    first = sent.send(6, 10)
    blocks = [sent.send(nbytes, 10) for nbytes in ahead]

    def follow():
        soon(lambda: sent.queue == [*ahead, 8])
        blocks.append(sent.send(2, 10))  # which would fit
        queues.append(sent.queue)
        interrupting()

    queues, follower = [], threading.Thread(target=follow)
    follower.start()
    with pytest.raises(Interrupted), sent.room.room(8, 10):
        pytest.fail("it entered")
    follower.join()
    assert queues == [[*ahead, 8, 2]]
    if ahead:
        assert (sent.inside, sent.queue) == ([6], [7, 2])
        first()
        assert (sent.inside, sent.queue) == ([7, 2], [])
    else:
        assert (sent.inside, sent.queue) == ([6, 2], [])
        first()
    for let_go in blocks:
        let_go()
    assert not sent.inside


@pytest.mark.parametrize("seed", range(5))
def test_all_get_through_in_any_order_and_within_the_limits(seed):
    """Blocks of seven products, some of which fail, in more threads than may be inside."""
    blocks = [(10, 30), (7, 21), (5, 60), (40, 40), (50, 20), (0, 10), (1, None)] * 60
    random.Random(seed).shuffle(blocks)
    room, wrong = Room(), []

    def leave(number, nbytes, limit):
        with room.room(nbytes, limit):
            inside = [block for block in blocks_of(room) if block.inside]
            total = sum(block.nbytes for block in inside)
            if len(inside) > 1 and total > min(block.limit for block in inside):
                wrong.append(inside)
            if not number % 9:
                raise ZeroDivisionError

    with ThreadPoolExecutor(16) as pool:
        threads = [pool.submit(leave, number, *block) for number, block in enumerate(blocks)]
        failed = [thread.exception(timeout=60) for thread in threads]
    assert [type(error) is ZeroDivisionError for error in failed] == [
        not number % 9 for number in range(len(blocks))
    ]
    assert not wrong
    assert not room.blocks


def test_a_smaller_block_at_the_edge_has_the_limit_of_its_plan(monkeypatch):
    """Not as many times its own size: beside a full block it would wait for nothing."""
    opened = held_up(monkeypatch)
    monkeypatch.setattr(host_offload, "_leaving", room := Room())
    full, edge = np.ones((10, 10)), np.ones((10, 1))
    with ThreadPoolExecutor(2) as pool:
        copies = [pool.submit(download, block, limit=2 * full.nbytes) for block in (full, edge)]
        try:
            soon(lambda: len(blocks_of(room)) == 2)
            assert all(block.inside for block in blocks_of(room))
        finally:
            opened.set()
        for block, copy in zip((full, edge), copies, strict=True):
            np.testing.assert_array_equal(copy.result(timeout=30), block)


def in_row_panels(monkeypatch, n=700, blocks=200):
    """A product of NumPy blocks that a GPU holds a part of at a time; its plan; and the result."""
    plan_for_little(monkeypatch)
    x, y = integers((n, 1200), 5), integers((1200, n), 6)
    a, b = (da.from_array(z, chunks=300).persist() for z in (x, y))
    fixed = {"precision": "ieee", "blocks": blocks, "slabs": 200}
    return multimm.matmul(a, b, **fixed), multimm.plan(a, b, **fixed), x @ y


def test_the_thread_of_a_worker_may_wait_for_blocks_of_several_products(monkeypatch):
    """And products with it: they have threads of their own."""
    opened = held_up(monkeypatch, seconds=60)
    monkeypatch.setattr(host_offload, "_leaving", room := Room())
    with in_threads(1, memory_limit=0) as cluster, Client(cluster) as client:
        products = [in_row_panels(monkeypatch, n, size) for n, size in [(700, 200), (700, 150)]]
        back = [task for c, _, _ in products for task in tasks_of(c, Kind.DOWNLOAD).values()]
        limits = {task.kwargs["limit"] for task in back}
        assert len(limits) == 2
        assert None not in limits
        try:
            found = client.compute([c for c, _, _ in products])
            soon(lambda: sum(not block.inside for block in blocks_of(room)) == 1)
        finally:
            opened.set()
        for one, (_, _, expected) in zip(found, products, strict=True):
            np.testing.assert_array_equal(one.result(timeout=60), expected)
        soon(lambda: at_rest(cluster))


FORKED = """
import os, signal
from multimm.graph.tasks import host_offload as host
with host._leaving.room(10, 10), host._coming_back, host._coming_back:
    if not (child := os.fork()):
        signal.alarm(20)
        with host._leaving.room(10, 10), host._coming_back, host._coming_back:
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_does_not_wait_for_threads_of_its_parent():
    found = python("-c", FORKED)
    assert found.stdout == "7\n", found.stderr
