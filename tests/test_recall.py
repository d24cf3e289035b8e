"""Products of a kind that was seen before. No GPU: NumPy arrays stand in for CuPy's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from multimm.gpu import recall


class Array:
    """What is read of a CuPy array."""

    def __init__(self, shape, dtype="f4", strides=None, ptr=0x1000, device=0):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.strides = strides or np.empty(shape, dtype).strides
        self.data = SimpleNamespace(ptr=ptr, device_id=device)


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    module = ModuleType("cupy")
    module.device = 0
    module.ndarray = Array
    module.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: module.device))
    monkeypatch.setitem(sys.modules, "cupy", module)
    recall.forget()
    yield module
    recall.forget()


@pytest.fixture
def runs():
    """A product of 3 x 4 by 4 x 5 is kept; the addresses that it runs with."""
    addresses = []
    recall.keep(
        Array((3, 4)), Array((4, 5)), False, False, (3, 5), lambda *given: addresses.append(given)
    )
    return addresses


def test_same_kind_runs_with_its_own_addresses(runs):
    a, b = Array((3, 4), ptr=0x2000), Array((4, 5), ptr=0x3000)
    out = recall.product(a, b)
    assert isinstance(out, Array)
    assert (out.shape, out.dtype) == ((3, 5), np.float32)
    assert runs == [(0x2000, 0x3000, out.data.ptr)]


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
    assert recall.product(a, b, **sides) is None
    assert runs == []


def test_arrays_on_another_than_the_current_device_are_left_to_others(runs, cupy):
    cupy.device = 1
    assert recall.product(Array((3, 4)), Array((4, 5))) is None
    assert runs == []


def test_nothing_is_imported_before_the_first_product(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert recall.product(Array((3, 4)), Array((4, 5))) is None


def test_what_is_kept_is_bounded(monkeypatch, runs):
    monkeypatch.setattr(recall, "CAPACITY", 3)
    for m in range(1, 10):
        recall.keep(Array((m, 4)), Array((4, 5)), False, False, (m, 5), lambda *_: None)
        assert len(recall._recipes) <= 3
    assert recall.product(Array((9, 4)), Array((4, 5))) is not None
    assert recall.product(Array((3, 4)), Array((4, 5))) is None
