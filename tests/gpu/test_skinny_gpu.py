"""Skinny products on a GPU: every way of them, stacks, and bits. More is in `test_kernels`."""

from __future__ import annotations

import itertools
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import AWKWARD, SKINNY, assert_exact, padded

from multimm.gpu import product
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.simt.configs import REGISTRY, slices_of_k
from multimm.gpu.simt.thin import way_for
from multimm.gpu.strides import GemmSizes

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

ieee = partial(product.gemm, precision="ieee")

CANARY = -12345.0
transposes = pytest.mark.parametrize(
    ("trans_a", "trans_b"), list(itertools.product((False, True), repeat=2))
)


def integers(rng, *shape: int) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float32)


def stored(values: np.ndarray, transposed: bool) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(-1, -2) if transposed else values)


def is_skinny(m: int, n: int, k: int, trans_a: bool, trans_b: bool, batch: int = 1) -> bool:
    device = device_of(cupy.cuda.runtime.getDevice())
    return way_for(GemmSizes(m, n, k, batch, not trans_a, trans_b), device) is not None


@transposes
def test_most_shapes_are_skinny(trans_a, trans_b):
    found = [is_skinny(*shape, trans_a, trans_b) for shape in SKINNY]
    assert sum(found) >= len(SKINNY) - 2  # not those of many columns that lie along m


@transposes
def test_small_integers_are_exact_in_padded_unaligned_memory(trans_a, trans_b):
    rng = np.random.default_rng(7)
    for m, n, k in (*SKINNY, *AWKWARD):
        a, b, c, p = (integers(rng, *size) for size in ((m, k), (k, n), (m, n), (m, n)))
        exact = a.astype(np.float64) @ b
        for extra, offset in (
            (rng.integers(1, 6, 5), rng.integers(0, 4, 5)),
            (4 - np.array([k, n, n, n, n]) % 4, np.zeros(5, int)),
        ):
            (ga, _), (gb, _), (gc, _), (gp, _) = (
                padded(x, int(e), int(o))
                for x, e, o in zip(
                    (stored(a, trans_a), stored(b, trans_b), c, p), extra, offset, strict=False
                )
            )
            canvas, whole = padded(np.zeros_like(c), int(extra[4]), int(offset[4]), fill=CANARY)
            result = ieee(ga, gb, trans_a=trans_a, trans_b=trans_b, alpha=2, beta=-1, c=gc,
                                 partial=gp, out=canvas)  # fmt: skip
            assert result is canvas
            assert_exact(result, 2 * (exact + p) - c, f"{m=} {n=} {k=} {trans_a=} {trans_b=}")
            canvas[...] = CANARY
            assert bool((whole == CANARY).all()), f"{m=} {n=} {k=}: written outside of D"


@transposes
def test_bits_depend_on_nothing_but_sizes_and_order(trans_a, trans_b):
    rng = np.random.default_rng(43)
    for m, n, k in SKINNY:
        a, b = (stored(rng.standard_normal(size).astype(np.float32), flag)
                for size, flag in (((m, k), trans_a), ((k, n), trans_b)))  # fmt: skip
        results = []
        for extra, offset in ((0, 0), (0, 0), (3, 1), (4, 4), (1, 2)):
            (ga, _), (gb, _) = (padded(x, extra, offset) for x in (a, b))
            out, _ = padded(np.zeros((m, n), np.float32), extra, offset)
            results.append(ieee(ga, gb, trans_a=trans_a, trans_b=trans_b))
            results.append(ieee(ga, gb, trans_a=trans_a, trans_b=trans_b, out=out).copy())
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.wait_event(cupy.cuda.Stream.null.record())
            results.append(ieee(ga, gb, trans_a=trans_a, trans_b=trans_b))
            stream.synchronize()
        # Columns that are no neighbours, with k in slices, are the documented exception.
        same = results[::2] if n == 1 and k > 100_000 else results
        first = same[0].view(cupy.uint32)
        for other in same[1:]:
            assert bool((first == other.view(cupy.uint32)).all()), f"{m=} {n=} {k=}"


def test_thin_products_have_the_bits_of_the_tiled_kernel():
    rng = np.random.default_rng(47)
    for k in (1, 5, 12):
        a, b = (cupy.asarray(rng.standard_normal(shape).astype(np.float32))
                for shape in ((1000, k), (k, 1001)))  # fmt: skip
        thin, tiled = ieee(a, b), ieee(a, b, config="small")
        assert bool((thin.view(cupy.uint32) == tiled.view(cupy.uint32)).all())


@transposes
@pytest.mark.parametrize(
    ("left", "right"), [((3,), ()), ((), (4,)), ((2, 1), (3,)), ((40,), (40,))]
)
def test_stacks_broadcast(left, right, trans_a, trans_b):
    rng = np.random.default_rng(19)
    for m, n, k in ((1, 300, 90), (300, 1, 90), (200, 5, 64), (7, 333, 50), (400, 500, 3)):
        assert is_skinny(m, n, k, trans_a, trans_b, batch=40)
        a, b = integers(rng, *left, m, k), integers(rng, *right, k, n)
        ga, _ = padded(stored(a, trans_a), 3)
        gb, _ = padded(stored(b, trans_b), 1, offset=1)
        c = integers(rng, m, n)
        shape = (*np.broadcast_shapes(left, right), m, n)
        result = ieee(ga, gb, trans_a=trans_a, trans_b=trans_b, beta=2,
                             c=cupy.broadcast_to(cupy.asarray(c), shape))  # fmt: skip
        assert_exact(result, a.astype(float) @ b + 2 * c, f"{left} {right} {m=} {n=} {k=}")


def test_a_captured_product_runs_again_with_other_values():
    for m, n, k in ((1, 900, 80), (20, 1, 150_000), (750, 751, 5)):
        rng = np.random.default_rng(41)
        a, b = (cupy.asarray(integers(rng, *shape)) for shape in ((m, k), (k, n)))
        out = cupy.zeros((m, n), np.float32)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            ieee(a, b, out=out)  # compiled outside of the capture
            stream.synchronize()
            stream.begin_capture()
            ieee(a, b, out=out)
            graph = stream.end_capture()
            a[...] = cupy.asarray(integers(rng, m, k))
            for _ in range(2):
                graph.launch(stream)
            stream.synchronize()
        exact = cupy.asnumpy(a).astype(float) @ cupy.asnumpy(b)
        assert_exact(out, exact, f"{m=} {n=} {k=}")


# Sizes that no tile divides: what slices of k promise, and what graphs keep -------------


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
