"""Data whose range within a row FP16 parts do not carry: still on the tensor cores, in promise."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import placed
from pack_reference import row_exponents
from wgmma_model import broad_model

import multimm
from multimm.gpu.emulated import broad, configs
from multimm.gpu.emulated.configs import SLAB
from multimm.gpu.kernel_selection import last_choice
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import device_of

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

    from multimm.gpu import pack
    from multimm.gpu.product import gemm

pytestmark = pytest.mark.gpu

U = 2.0**-24
M, N, K = 1100, 1060, 1200  # large enough for the tensor cores, and neither 128 nor 64 divides
precisions = pytest.mark.parametrize("precision", ["float32", "tf32"])


@pytest.fixture(autouse=True)
def wgmma(monkeypatch):
    """Also products of this size are made ready for data of a wide range."""
    if device_of(0).limits.capability != 90:
        pytest.skip("needs wgmma")
    monkeypatch.setattr(configs, "BROAD_SECONDS", 0)
    configs.broad_pays.cache_clear()
    launch_cache.forget()
    yield
    configs.broad_pays.cache_clear()
    launch_cache.forget()


def graded(rng, *shape):
    """Along k, whichever axis that is: the other operand makes it good."""
    grades = 10.0 ** np.linspace(-9, 9, K)
    x = rng.standard_normal(shape)
    return x * grades if shape[1] == K else x / grades[:, None]


WIDE_RANGE = {
    "graded along k": graded,
    "lognormal 4": lambda rng, *shape: np.exp(4 * rng.standard_normal(shape)),
    "any exponents": lambda rng, *shape: (
        rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 41, shape)
    ),
    "one large element": lambda rng, *shape: np.where(
        rng.random(shape) < 1 / K, 2.0**60, rng.standard_normal(shape)
    ),
    "near the ends": lambda rng, *shape: (
        rng.standard_normal(shape)
        * 2.0 ** rng.integers(-40, 41, shape)
        * np.where(shape[1] == K, 2.0 ** rng.choice([-100, 0, 20], (shape[0], 1)), 1)
    ),
}


def room(x, y, precision):
    """How far an element may be off, and what the smallest numbers cost anyone."""
    x, y = (cupy.asarray(v).astype("f8") for v in (x, y))
    k = x.shape[1]
    share = (k + 2) * U if precision == "float32" else 2.0**-9 + 2 * k * U
    return share * (cupy.abs(x) @ cupy.abs(y)) + k * 2.0**-149


def product_of(x, y):
    return cupy.asarray(x).astype("f8") @ cupy.asarray(y).astype("f8")


@precisions
@pytest.mark.parametrize("kind", WIDE_RANGE)
def test_data_of_a_wide_range_stays_on_the_tensor_cores(kind, precision):
    rng = np.random.default_rng(3)
    x, y = (WIDE_RANGE[kind](rng, *shape).astype("f4") for shape in ((M, K), (K, N)))
    c, p = (rng.standard_normal((M, N), "f4") for _ in "cp")
    for turned in (False, True):
        a, b = placed(x, turned), placed(y, turned)
        result = multimm.matmul(a, b, precision=precision)
        choice = last_choice()
        assert choice.kernel == "sgemm_split"
        assert "elements that FP16 parts do not carry: " in choice.reason
        assert bool((abs(result - product_of(x, y)) <= room(x, y, precision)).all())
        again = gemm(pack(a, side="a", scheme=precision), b, precision=precision)
        assert cupy.array_equal(result, again)
        assert last_choice() == choice
        much = cupy.float32(float(abs(result).max()) / 64)
        gc, gp = cupy.asarray(c) * much, cupy.asarray(p) * much
        out = cupy.full((M, N), np.nan, "f4")
        gemm(a, b, alpha=-0.5, beta=2.0, c=gc, partial=gp, out=out, precision=precision)
        exact = -0.5 * (product_of(x, y) + gp) + 2.0 * gc.astype("f8")
        more = 4 * U * (abs(gp.astype("f8")) + 2 * abs(gc.astype("f8")))
        assert bool((abs(out - exact) <= 0.5 * room(x, y, precision) + more).all())


@precisions
def test_symmetric_products_and_slices_of_k_of_a_wide_range(precision):
    rng = np.random.default_rng(5)
    x = WIDE_RANGE["any exponents"](rng, 30_001, 520).astype("f4")
    a, exact, near = placed(x), product_of(x.T, x), room(x.T, x, precision)
    for right, lower in ((a, True), (placed(x), False)):
        found = gemm(a, right, trans_a=True, lower=lower, precision=precision)
        choice = last_choice()
        assert choice.kernel == "sgemm_split"
        assert "elements that FP16 parts do not carry: " in choice.reason
        assert bool((cupy.tril(abs(found - exact)) <= near).all())
        assert lower or bool((abs(found - exact) <= near).all())


@precisions
@pytest.mark.parametrize("bad", ["beyond", "infinite", "infinite late"])
def test_what_no_parts_carry_is_computed_from_the_source(bad, precision):
    rng = np.random.default_rng(7)
    x, y = (WIDE_RANGE["any exponents"](rng, *shape).astype("f4") for shape in ((M, K), (K, N)))
    if bad == "beyond":
        x[5, 3:7] = 2.0**127, 2.0**-100, 2.0**-126, 2.0**-149
        y[3, :9] = 0
    else:
        x[-1 if "late" in bad else 5, -3] = np.inf
    result = multimm.matmul(placed(x), placed(y), precision=precision)
    assert last_choice().kernel == "sgemm_ffma"
    plain = multimm.matmul(placed(x), placed(y), precision="ieee")
    near = abs(result - plain) <= (2 * K + 4) * U * (cupy.abs(placed(x)) @ cupy.abs(placed(y)))
    same = (result == plain) | (cupy.isnan(result) & cupy.isnan(plain))
    assert bool((near | same).all())


@precisions
@pytest.mark.parametrize(("rows", "cols", "k"), [(130, 70, 700), (9, 5, 20_000)])
def test_every_bit_is_that_of_the_model(rows, cols, k, precision):
    """The model is slow: the last rows and columns of a larger product, in two halves of k."""
    rng = np.random.default_rng(11)
    x, y = (WIDE_RANGE["any exponents"](rng, *shape).astype("f4") for shape in ((M, k), (k, N)))
    result = multimm.matmul(placed(x), placed(y), precision=precision)
    assert "elements that FP16 parts do not carry: " in last_choice().reason
    a, b = x[-rows:], np.ascontiguousarray(y.T)[-cols:]
    middle, parts = -(-k // SLAB // 2) * SLAB, broad.BROAD_PARTS[precision]
    expected = np.zeros((rows, cols), np.float32)
    for of_k in (slice(middle), slice(middle, k)):
        expected = expected + broad_model(
            a[:, of_k], b[:, of_k], parts, (row_exponents(a), row_exponents(b))
        )
    found = cupy.asnumpy(result)[-rows:, -cols:]
    np.testing.assert_array_equal(found.view("u4"), expected.view("u4"))
