"""Calls of a kind that was seen before. No GPU: plain objects stand in for CuPy's arrays."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from multimm.gpu.runtime import launch_cache


class Array:
    """What is read of a CuPy array."""

    def __init__(self, shape, dtype="f4", strides=None, ptr=0x10000, device=0):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.strides = strides or np.empty(shape, dtype).strides
        self.data = SimpleNamespace(ptr=ptr, device_id=device)


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    module = ModuleType("cupy")
    module.device = 0
    module.ndarray = Array
    module.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: module.device))
    monkeypatch.setitem(sys.modules, "cupy", module)
    launch_cache.forget()
    yield module
    launch_cache.forget()


@pytest.fixture
def runs():
    """A product of 3 x 4 by 4 x 5 is kept; the addresses that it runs with."""
    addresses = []
    keep_product((3, 4), (4, 5), addresses)
    return addresses


def keep_product(a, b, addresses):
    launch_cache.keep(
        "float32", (Array(a), Array(b), None, None), None, False, False,
        result=Array((a[0], b[1])), run=lambda given: addresses.append(tuple(given)),
    )  # fmt: skip


# Products


@pytest.mark.parametrize(
    ("a", "b", "sides"),
    [
        (Array((3, 5)), Array((4, 5)), {}),
        (Array((3, 4), strides=(4, 12)), Array((4, 5)), {}),
        (Array((3, 4), "i4"), Array((4, 5)), {}),
        (Array((3, 4)), Array((4, 5), "f8", strides=(20, 4)), {}),
        (Array((3, 4), ptr=0x1004), Array((4, 5)), {}),
        (Array((3, 4)), Array((4, 5), ptr=0x1008), {}),
        (Array((3, 4)), Array((4, 5), device=1), {}),
        (Array((3, 4), device=1), Array((4, 5), device=1), {}),
        (Array((3, 4)), Array((4, 5)), {"trans_a": True}),
        (Array((3, 4)), Array((4, 5)), {"trans_b": True}),
        (np.zeros((3, 4), "f4"), np.zeros((4, 5), "f4"), {}),
        (Array((3, 4)), np.zeros((4, 5), "f4"), {}),
        (None, Array((4, 5)), {}),
    ],
)
def test_any_difference_means_deciding_anew(runs, a, b, sides):
    flags = sides.get("trans_a", False), sides.get("trans_b", False)
    if not any(flags):
        assert launch_cache.product(a, b, "float32") is None
    assert launch_cache.again("float32", (a, b, None, None), None, *flags) is None
    assert runs == []


def test_arrays_on_another_than_the_current_device_are_left_to_others(runs, cupy):
    cupy.device = 1
    assert launch_cache.product(Array((3, 4)), Array((4, 5)), "float32") is None
    assert launch_cache.again("float32", (Array((3, 4)), Array((4, 5)), None, None), None) is None
    assert runs == []


# Whatever else


BYTES = 4 * 3 * 4


@pytest.mark.parametrize(
    ("ptr", "runs_again"),
    [
        (0x1000, False),  # the operand itself
        (0x1000 + BYTES, True),  # right behind it, and right in front
        (0x1000 - BYTES, True),
        (0x1000 + BYTES - 16, False),  # a part of it
        (0x1000 - BYTES + 16, False),
    ],
)
def test_a_result_that_may_overlap_an_operand_is_looked_at_again(ptr, runs_again):
    ran = []
    x, out = Array((3, 4)), Array((3, 4), ptr=0x20000)
    launch_cache.keep("verb", (x,), out, result=out, run=ran.append)
    given = Array((3, 4), ptr=0x1000), Array((3, 4), ptr=ptr)
    found = launch_cache.again("verb", given[:1], given[1])
    assert (found is given[1]) == runs_again
    assert ran == ([[0x1000, ptr]] if runs_again else [])


def test_descending_strides_reach_below_the_address():
    x, out = Array((4,), strides=(-4,)), Array((4,), ptr=0x20000)
    launch_cache.keep("verb", (x,), out, result=out, run=lambda _: None)
    below = Array((4,), strides=(-4,), ptr=0x30000)
    assert launch_cache.again("verb", (below,), Array((4,), ptr=0x30000 - 16)) is None
    assert launch_cache.again("verb", (below,), Array((4,), ptr=0x30000 + 16)) is not None


def test_what_is_kept_is_bounded(monkeypatch, runs):
    monkeypatch.setattr(launch_cache, "CAPACITY", 3)
    for m in range(1, 10):
        keep_product((m, 4), (4, 5), [])
        assert len(launch_cache._known) <= 3
    assert launch_cache.product(Array((9, 4)), Array((4, 5)), "float32") is not None
    assert launch_cache.product(Array((3, 4)), Array((4, 5)), "float32") is None
