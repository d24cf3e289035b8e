"""Blocks that leave a GPU: one bound in bytes for all products of a worker process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from multimm.graph.host import Room


def most_at_once(products, threads=8):
    """Bytes in the room at most, while products of (bytes of a block, most) send many each."""
    room, lock, inside, seen = Room(), threading.Lock(), 0, []

    def leave(nbytes, most):
        nonlocal inside
        with room.room(nbytes, most):
            with lock:
                inside += nbytes
                seen.append(inside)
            threading.Event().wait(0.001)
            with lock:
                inside -= nbytes

    with ThreadPoolExecutor(threads) as pool:
        sent = [pool.submit(leave, *product) for product in products * 20]
        for one in sent:
            one.result(timeout=30)
    return seen


@pytest.mark.parametrize("other", [(10, 30), (7, 21), (5, 60), (40, 40)])
def test_products_share_one_bound(other):
    seen = most_at_once([(10, 30), other])
    assert len(seen) == 40
    assert max(seen) <= max(30, other[1])


def test_a_block_beyond_its_bound_leaves_alone():
    assert max(most_at_once([(50, 20), (1, 1)])) == 50


def test_a_block_without_a_bound_waits_for_none_and_counts():
    room, entered = Room(), threading.Event()

    def leave():
        with room.room(8, 12):
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with room.room(10, 10), room.room(5, None):
            waiting = pool.submit(leave)
            assert not entered.wait(0.05)
            with pytest.raises(ZeroDivisionError), room.room(1, None):
                raise ZeroDivisionError
            assert not entered.wait(0.05)
        waiting.result(timeout=10)
    assert entered.is_set()
