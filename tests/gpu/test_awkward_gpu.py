"""Sizes that no tile divides, on a GPU: what slices of k promise, and what graphs keep."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from multimm.gpu import product
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.simt.configs import REGISTRY, slices_of_k
from multimm.gpu.strides import GemmSizes

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

ieee = partial(product.gemm, precision="ieee")


def sizes_of(m: int, n: int, k: int) -> GemmSizes:
    return GemmSizes(m, n, k, scattered_a=True, ragged_b=n % 4 != 0)


def normal(seed: int, *shape: int):
    rng = cupy.random.default_rng(seed)
    return rng.standard_normal(shape, dtype=np.float32)


def test_layouts_and_configurations_of_a_sliced_product_give_the_same_bits():
    m, n, k = 190, 61, 9001
    assert slices_of_k(sizes_of(m, n, k), device_of(0)) > 1
    a, b = normal(4, m, k), normal(5, k, n)
    expected = ieee(a, b)
    turned = {"a": cupy.ascontiguousarray(a.T), "b": cupy.ascontiguousarray(b.T)}
    for entry in REGISTRY:
        for trans_a, trans_b in ((False, False), (True, False), (False, True), (True, True)):
            got = ieee(turned["a"] if trans_a else a, turned["b"] if trans_b else b,
                              trans_a=trans_a, trans_b=trans_b, config=entry.name)  # fmt: skip
            assert bool((got == expected).all()), f"{entry.name} {trans_a=} {trans_b=}"


def test_a_replayed_graph_writes_to_no_memory_of_others():
    m, n, k = 128, 96, 30_000
    assert slices_of_k(sizes_of(m, n, k), device_of(0)) > 1
    a, b, out = normal(6, m, k), normal(7, k, n), cupy.empty((m, n), np.float32)
    expected = ieee(a, b)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    try:
        ieee(a, b, out=out)  # compiles
        stream.synchronize()
        stream.begin_capture()
        for _ in range(3):
            ieee(a, b, out=out)
        graph = stream.end_capture()
        # All sizes of block that the pool may have kept for the slices.
        others = [cupy.full(2**power, 7, np.float32) for power in range(10, 24) for _ in range(4)]
        for _ in range(2):
            out[...] = np.nan
            graph.launch(stream)
        stream.synchronize()
        assert bool((out == expected).all())
        assert all(bool((x == 7).all()) for x in others)
    finally:
        cupy.cuda.Stream.null.use()
