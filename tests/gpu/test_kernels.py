"""The kernels on a GPU: indexing exactly, rounding within the bound, memory to the byte."""

from __future__ import annotations

import itertools
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import AWKWARD, SKINNY, assert_exact, padded

from multimm.gpu import library_gemm, product
from multimm.gpu.dtypes import result_dtype
from multimm.gpu.elementwise.transpose import transpose
from multimm.gpu.simt.configs import REGISTRY

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

ieee = partial(product.gemm, precision="ieee")

GRID = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 1000)
CANARY = -12345.0
U = 2.0**-24
NAMES = [entry.name for entry in REGISTRY]
transposes = pytest.mark.parametrize(
    ("trans_a", "trans_b"), list(itertools.product((False, True), repeat=2))
)


def sampled_shapes(count: int) -> list[tuple[int, int, int]]:
    """Each size of the grid in each place at least once, otherwise by chance."""
    rng = np.random.default_rng(2026)
    columns = [np.concatenate([rng.permutation(GRID) for _ in range(count // len(GRID))])
               for _ in range(3)]  # fmt: skip
    return [tuple(int(size) for size in row) for row in zip(*columns, strict=True)]


def integers(rng, *shape: int) -> np.ndarray:
    return rng.integers(-8, 9, shape).astype(np.float32)


def case(rng, m, n, k, trans_a, trans_b):
    """Small-integer operands: float32 is exact in any order, the result must match bit for bit."""
    a, b = (
        integers(rng, *((k, m) if trans_a else (m, k))),
        integers(rng, *((n, k) if trans_b else (k, n))),
    )
    exact = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b)
    return a, b, integers(rng, m, n), integers(rng, m, n), exact


@transposes
@pytest.mark.parametrize("name", NAMES)
def test_small_integers_are_exact_in_padded_unaligned_memory(name, trans_a, trans_b):
    rng = np.random.default_rng(7)
    for m, n, k in sampled_shapes(2 * len(GRID)):
        a, b, c, p, exact = case(rng, m, n, k, trans_a, trans_b)
        extra, offset = rng.integers(1, 6, 5), rng.integers(0, 2, 5)
        (ga, _), (gb, _), (gc, _), (gp, _) = (
            padded(x, int(e), int(o)) for x, e, o in zip((a, b, c, p), extra, offset, strict=False)
        )
        canvas, whole = padded(np.zeros_like(c), int(extra[4]), int(offset[4]), fill=CANARY)
        result = ieee(ga, gb, trans_a=trans_a, trans_b=trans_b, alpha=2, beta=-1, c=gc,
                             partial=gp, out=canvas, config=name)  # fmt: skip
        assert result is canvas
        assert_exact(result, 2 * (exact + p) - c, f"{name} {m=} {n=} {k=} {trans_a=} {trans_b=}")
        canvas[...] = CANARY
        assert bool((whole == CANARY).all()), f"{name} {m=} {n=} {k=}: written outside of D"


@transposes
def test_random_inputs_meet_the_bound(trans_a, trans_b):
    rng = np.random.default_rng(11)
    alpha, beta = np.float32(0.7), np.float32(-1.3)
    for m, n, k in [*sampled_shapes(len(GRID)), (65, 33, 20_000), *SKINNY, *AWKWARD]:
        a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(np.float32)
        b = rng.random((n, k) if trans_b else (k, n)).astype(np.float32)
        c = rng.standard_normal((m, n)).astype(np.float32)
        result = ieee(cupy.asarray(a), cupy.asarray(b), trans_a=trans_a, trans_b=trans_b,
                             alpha=alpha, beta=beta, c=cupy.asarray(c))  # fmt: skip
        left, right = ((a.T if trans_a else a).astype(float), (b.T if trans_b else b).astype(float))
        product, addend = float(alpha) * (left @ right), float(beta) * c.astype(float)
        bound = abs(float(alpha)) * ((k + 2) * U * (abs(left) @ abs(right)) + k * 2.0**-149)
        bound += 2 * U * (abs(product) + abs(addend)) + U * abs(product + addend)
        error = abs(cupy.asnumpy(result).astype(float) - (product + addend))
        assert (error <= bound).all(), f"{m=} {n=} {k=}: {np.nanmax(error / bound)} of the bound"


def test_every_configuration_and_run_gives_the_same_bits():
    rng = np.random.default_rng(43)
    a, b = (
        cupy.asarray(rng.standard_normal(shape).astype(np.float32))
        for shape in ((300, 777), (777, 200))
    )
    results = [ieee(a, b, config=name) for name in NAMES for _ in range(3)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(cupy.cuda.Stream.null.record())
        results.append(ieee(a, b))
        stream.synchronize()
    first = results[0].view(cupy.uint32)
    for other in results[1:]:
        assert bool((first == other.view(cupy.uint32)).all())


@pytest.mark.parametrize(
    ("m", "n", "k"), [(70, 70, 70), (1, 900, 80), (900, 3, 80), (750, 751, 5), (3, 3, 10**6)]
)
def test_what_is_multiplied_by_zero_is_never_read(m, n, k):
    ones = [cupy.ones(shape, np.float32) for shape in ((m, k), (k, n), (m, n))]
    nans = [cupy.full_like(x, np.nan) for x in ones]
    result = ieee(ones[0], ones[1], beta=0, c=nans[2])
    assert_exact(result, np.full((m, n), float(k)), "beta 0")
    result = ieee(nans[0], nans[1], alpha=0, beta=3, c=ones[2], partial=nans[2])
    assert_exact(result, np.full((m, n), 3.0), "alpha 0")
    nothing = ieee(ones[0][:, :0], ones[1][:0], alpha=np.inf, beta=2, c=ones[2])
    assert_exact(nothing, np.full((m, n), 2.0), "k 0")


@transposes
def test_every_order_is_read_as_it_is(trans_a, trans_b, monkeypatch):
    rng = np.random.default_rng(13)
    monkeypatch.setattr(cupy, "ascontiguousarray", lambda x: pytest.fail("copied"))
    for m, n, k in ((65, 40, 33), (3, 900, 100), (900, 1, 100), (800, 700, 6)):
        a, b, _, _, exact = case(rng, m, n, k, trans_a, trans_b)
        for order_a, order_b, order_d in itertools.product("CF", repeat=3):
            out = cupy.empty((m, n), np.float32, order=order_d)
            ieee(cupy.asarray(a, order=order_a), cupy.asarray(b, order=order_b),
                        trans_a=trans_a, trans_b=trans_b, out=out)  # fmt: skip
            assert_exact(out, exact, f"{order_a}{order_b}->{order_d}")


@pytest.mark.parametrize(
    ("left", "right"),
    [((3,), ()), ((), (4,)), ((2, 1), (3,)), ((2, 3), (2, 3)), ((2, 1, 2), (3, 1)), ((0,), (1,))],
)
def test_stacks_broadcast(left, right):
    rng = np.random.default_rng(19)
    a, b = integers(rng, *left, 35, 20), integers(rng, *right, 20, 70)
    ga, _ = padded(a, 3)
    shape = (*np.broadcast_shapes(left, right), 35, 70)
    c = integers(rng, 35, 70)
    result = ieee(ga, cupy.asarray(b), beta=2, c=cupy.broadcast_to(cupy.asarray(c), shape))
    assert_exact(result, a.astype(float) @ b + 2 * c, f"{left} {right}")


def test_more_batches_than_the_grid_is_deep():
    a = cupy.arange(70_001, dtype=np.float32).reshape(-1, 1, 1)
    assert bool((ieee(a, cupy.full((1, 1), 2, np.float32)) == 2 * a).all())
    assert bool((transpose(cupy.broadcast_to(a, (70_001, 2, 3))) == a).all())


@transposes
@pytest.mark.parametrize(("m", "n", "k"), [(40, 60, 50), (900, 3, 90), (3, 900, 90), (750, 751, 9)])
def test_infinities_and_nans_spread_as_in_ieee(m, n, k, trans_a, trans_b):
    rng = np.random.default_rng(23)
    a, b = integers(rng, m, k), integers(rng, k, n)
    a[m // 2, 7], a[1, 8], b[5, n // 2] = np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        expected = a.astype(float) @ b.astype(float)
    stored = (cupy.asarray(np.ascontiguousarray(x.T if flag else x))
              for x, flag in ((a, trans_a), (b, trans_b)))  # fmt: skip
    result = ieee(*stored, trans_a=trans_a, trans_b=trans_b)
    np.testing.assert_array_equal(cupy.asnumpy(result), expected)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 2), (40, 60, 50), (1, 900, 128), (900, 1, 128), (750, 751, 8)]
)
def test_subnormals_are_kept(m, n, k):
    # Copied from the host: a kernel of CuPy's that fills an array would flush them.
    a, b = np.zeros((m, k), np.float32), np.full((k, n), 0.5, np.float32)
    a[:, :2] = 2.0**-130
    tiny, half = cupy.asarray(a), cupy.asarray(b)
    c, p = (cupy.asarray(np.full((m, n), x, np.float32)) for x in (1, 2.0**-130))
    one, unit = cupy.asarray(np.ones((m, k), np.float32)), cupy.asarray(b * 0)
    unit[:1] = 1
    turned = cupy.asarray(np.ascontiguousarray(a.T))
    for result, expected in (
        (ieee(tiny, half), 2.0**-130),
        (ieee(turned, half, trans_a=True), 2.0**-130),
        (ieee(one, unit, alpha=2.0**-130), 2.0**-130),
        (ieee(tiny, half, beta=2.0**-131, c=c, partial=p), 2.5 * 2.0**-130),
    ):
        assert (cupy.asnumpy(result) == expected).all()


def test_result_of_more_than_2_to_31_elements():
    m, n, k = 46_341, 46_349, 3
    if cupy.cuda.Device().mem_info[0] < 3 * m * n * 4:
        pytest.skip("needs 26 GB of free GPU memory")
    a = cupy.asarray(integers(np.random.default_rng(29), m, k))
    b = cupy.asarray(integers(np.random.default_rng(31), k, n))
    d = ieee(a, b)
    turned = transpose(d)
    for i in (0, 1, m // 2, m - 1):
        row = cupy.asnumpy(a[i]).astype(float) @ cupy.asnumpy(b).astype(float)
        assert_exact(d[i], row, f"row {i}")
        assert_exact(turned[:, i], row, f"column {i} of the transpose")
    del turned
    # Read back beyond 2^31: the last rows of D, and all of it at a leading dimension of n.
    e = ieee(d[-40:], d[-40:, :70].copy(), trans_a=True)
    tail = cupy.asnumpy(d[-40:]).astype(float)
    assert_exact(e, tail.T @ tail[:, :70], "large leading dimension")


def test_rows_2_to_31_elements_apart():
    if cupy.cuda.Device().mem_info[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    far = cupy.zeros((3, 2**31 + 5), np.float32)[:, -7:]
    far[...] = cupy.arange(21, dtype=np.float32).reshape(3, 7)
    near = np.arange(21, dtype=np.float64).reshape(3, 7)
    for trans, expected in ((False, near @ near.T), (True, near.T @ near)):
        result = ieee(far, far, trans_a=trans, trans_b=not trans)
        assert_exact(result, expected, f"{trans=}")
    assert_exact(transpose(far), near.T, "transpose")
    del far
    far = cupy.zeros((3, 2**31 + 5), np.float32)[:, -2000:]
    values = integers(rng := np.random.default_rng(29), 3, 2000)
    far[...] = cupy.asarray(values)
    near, tall = integers(rng, 2000, 3), integers(rng, 800, 3)
    assert_exact(ieee(far, cupy.asarray(near)), values.astype(float) @ near, "along k")
    assert_exact(ieee(cupy.asarray(tall), far), tall.astype(float) @ values, "thin")


def test_reference_runs_on_gpu_arrays():
    rng = np.random.default_rng(41)
    for dtype in ("f2", "f4", "f8", "c8", "i4", "?"):
        a, b = (rng.integers(0, 2, s).astype(dtype) for s in ((5, 7), (7, 3)))
        result = library_gemm.gemm(cupy.asarray(a), cupy.asarray(b), alpha=1, partial=None)
        assert isinstance(result, cupy.ndarray)
        assert_exact(result, a @ b, dtype)
        assert result.dtype == result_dtype(dtype, dtype)
    parts = [cupy.full((2, 2), i, np.float32) for i in range(5)]
    assert_exact(library_gemm.add_partials(parts), np.full((2, 2), 10.0), "parts")
