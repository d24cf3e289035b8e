"""float64 products by residues on a GPU: right within their bound, exact for integers, refused."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import padded

import multimm
from multimm.gpu import last_choice
from multimm.gpu.residues.gemm import gemm
from multimm.gpu.runtime.launch import device_of
from multimm.graph.lowering.symmetric import link_diagonal
from multimm.graph.tasks.multiply import Step

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

U = 2.0**-53


@pytest.fixture(autouse=True)
def on_hopper():
    if device_of(0).limits.capability != 90:
        pytest.skip("INT8 products of four warps are of compute capability 9.0 alone")


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def some(size):
    """Few places: the ends, the edges of tiles, and others."""
    edges = {0, 63, 64, 127, 128, 255, 256, size - 1, size // 2, size // 3}
    return sorted(x for x in edges if 0 <= x < size)


def assert_within(found, x, y, *, alpha=1.0, beta=0.0, c=None, p=None):
    """Every column of some rows, and every row of some columns."""
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == np.float64
    got = cupy.asnumpy(found)
    assert got.shape == (x.shape[0], y.shape[1])
    assert np.isfinite(got).all()
    every = slice(None)
    for at in ((some(got.shape[0]), every), (every, some(got.shape[1]))):
        left, right = x[at[0]], y[:, at[1]]
        exact = left.astype(np.longdouble) @ right.astype(np.longdouble)
        sizes = abs(left) @ abs(right)
        bound = (x.shape[1] + 2) * sizes
        if p is not None:
            exact, bound = exact + p[at], bound + abs(p[at]) + sizes
        exact, bound = alpha * exact, abs(alpha) * bound
        if c is not None:
            exact, bound = exact + np.longdouble(beta) * c[at], bound + abs(beta * c[at])
        if alpha != 1 or c is not None:
            bound = bound + 2 * abs(exact).astype("f8")
        wrong = np.argwhere(abs(got[at] - exact) > U * bound)
        assert not len(wrong), f"{len(wrong)} wrong, first at {wrong[0]}"


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 300), (128, 256, 512), (129, 257, 513), (127, 255, 1000), (300, 1000, 2049),
     (1000, 3, 777), (5, 1300, 640), (2300, 2500, 1111), (2176, 2560, 4096)],
)  # fmt: skip
def test_odd_sizes(m, n, k):
    x, y = normal((m, k)), normal((k, n), 1)
    assert_within(gemm(cupy.asarray(x), cupy.asarray(y), (m, n)), x, y)
    assert last_choice().kernel == "residues"
    assert last_choice().precision == "float64"


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("extra", "offset"), [(0, 0), (3, 1), (8, 5)])
def test_transposes_and_strided_views(trans_a, trans_b, extra, offset):
    x, y = normal((333, 900)), normal((900, 410), 1)
    given = [
        padded(np.ascontiguousarray(z.T if trans else z), extra, offset)
        for z, trans in ((x, trans_a), (y, trans_b))
    ]
    before = [whole.copy() for _, whole in given]
    found = gemm(given[0][0], given[1][0], (333, 410), trans=(trans_a, trans_b))
    assert_within(found, x, y)
    for (_, whole), old in zip(given, before, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(whole), cupy.asnumpy(old))


def test_views_of_every_kind():
    x, y = normal((400, 600)), normal((600, 300), 1)
    for left in (cupy.asarray(np.asfortranarray(x)), cupy.asarray(x[::-1].copy())[::-1],
                 cupy.asarray(np.repeat(x, 2, axis=1))[:, ::2]):  # fmt: skip
        assert_within(gemm(left, cupy.asarray(np.asfortranarray(y)), (400, 300)), x, y)
    column = cupy.broadcast_to(cupy.asarray(y[:, :1]), y.shape)
    assert_within(gemm(cupy.asarray(x), column, (400, 300)), x, np.broadcast_to(y[:, :1], y.shape))


@pytest.mark.parametrize("alpha", [1.0, -0.3])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.7])
@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("with_c", [False, True])
def test_scalars_c_and_partial_results(alpha, beta, with_p, with_c):
    x, y = normal((260, 700)), normal((700, 391), 1)
    c, p = (normal((260, 391), seed) * 50 if there else None
            for seed, there in ((2, with_c), (3, with_p)))  # fmt: skip
    on_gpu = {
        name: None if z is None else padded(z, 3, 1)[0] for name, z in (("c", c), ("partial", p))
    }
    found = gemm(cupy.asarray(x), cupy.asarray(y), (260, 391), alpha=alpha, beta=beta, **on_gpu)
    assert_within(found, x, y, alpha=alpha, beta=beta, c=c, p=p)


def test_stacks():
    x, y, c = normal((2, 3, 150, 400)), normal((3, 400, 200), 1), normal((150, 200), 2)
    found = gemm(cupy.asarray(x), cupy.asarray(y), (2, 3, 150, 200), beta=2.0, c=cupy.asarray(c))
    assert found.shape == (2, 3, 150, 200)
    for i, j in np.ndindex(2, 3):
        assert_within(found[i, j], x[i, j], y[j], beta=2.0, c=c)


@pytest.mark.parametrize("k", [2**15, 2**15 + 1, 70_000])
def test_a_long_k(k):
    x, y, c = normal((140, k)), normal((k, 300), 1), normal((140, 300), 2) * 500
    found = gemm(cupy.asarray(x), cupy.asarray(y), (140, 300), alpha=0.7, beta=-1.5,
                 c=cupy.asarray(c), partial=cupy.asarray(c))  # fmt: skip
    assert_within(found, x, y, alpha=0.7, beta=-1.5, c=c, p=c)


@pytest.mark.parametrize("trans", [(False, True), (True, False)])
@pytest.mark.parametrize("size", [(300, 2000), (1000, 300)])
def test_the_same_array_on_both_sides(trans, size):
    x = normal(size)
    y = x if trans[1] else x.T
    given = cupy.asarray(x)
    found = gemm(given, given, (len(y),) * 2, trans=trans)
    assert_within(found, y, y.T)
    np.testing.assert_array_equal(cupy.asnumpy(found), cupy.asnumpy(found.T))
    square = normal((500, 500))
    given = cupy.asarray(square)
    assert_within(gemm(given, given, (500, 500)), square, square)


@pytest.mark.parametrize("most", [1, 9, 100, 2**20])
def test_integers_are_exact(most):
    rng = np.random.default_rng(most)
    x = rng.integers(-most, most, (700, 2000), endpoint=True).astype(float)
    y = rng.integers(-most, most, (2000, 900), endpoint=True).astype(float)
    x[3], y[:, 5] = 0, most
    exact = x.astype(np.int64) @ y.astype(np.int64)
    found = gemm(cupy.asarray(x * 2.0**-30), cupy.asarray(y * 2.0**7), (700, 900))
    np.testing.assert_array_equal(cupy.asnumpy(found), exact * 2.0**-23)
    assert last_choice().precision == "exact"


def test_sums_of_float32_numbers_are_rounded_once():
    x, y = (normal(size).astype("f4").astype("f8") for size in ((300, 900), (900, 200)))
    found = cupy.asnumpy(gemm(cupy.asarray(x), cupy.asarray(y), (300, 200)))
    whole = np.vectorize(int, otypes=[object])
    exact = whole(x[:9] * 2.0**80) @ whole(y * 2.0**80)  # of Python's integers
    np.testing.assert_array_equal(found[:9], exact.astype(float) * 2.0**-160)
    assert last_choice().precision == "exact"


@pytest.mark.parametrize("scales", ["rows", "whole"])
def test_rows_of_any_scale(scales):
    rng = np.random.default_rng(4)
    x, y = normal((300, 1500)), normal((1500, 400), 1)
    if scales == "rows":
        x *= 10.0 ** rng.uniform(-90, 90, (300, 1))
        y *= 10.0 ** rng.uniform(-20, 20, (1, 400))
    else:
        x, y = x * 2.0**390, y * 2.0**-390
    x[7], y[:, 9] = 0, 0
    assert_within(gemm(cupy.asarray(x), cupy.asarray(y), (300, 400)), x, y)


@pytest.mark.parametrize(("kind", "count"), [("skewed", 15), ("many zeros", 16)])
def test_harder_data_takes_more_moduli(kind, count):
    rng = np.random.default_rng(5)
    x, y = (
        np.exp(rng.standard_normal(size)) if kind == "skewed"
        else rng.standard_normal(size) * (rng.random(size) < 0.6)
        for size in ((300, 1500), (1500, 400))
    )  # fmt: skip
    assert_within(gemm(cupy.asarray(x), cupy.asarray(y), (300, 400)), x, y)
    assert last_choice().reason == f"{count} products of bytes"


@pytest.mark.parametrize(
    "odd", ["nan", "inf", "-inf", "1e-300", "1e300", "graded", "graded column"]
)
@pytest.mark.parametrize("trans", [False, True])
def test_refused(odd, trans):
    x, y = normal((300, 700)), normal((700, 400), 1)
    if odd == "graded":
        x = np.exp(12 * x)
    elif odd == "graded column":
        y[1:, 37] *= 1e-14
    elif odd == "1e-300":
        x[299] *= 1e-300
    else:
        x[299, 699] = float(odd)
    left, right = (cupy.asarray(z.T.copy()).T if trans else cupy.asarray(z) for z in (x, y))
    for more in ({}, {"partial": cupy.zeros((300, 400))}):
        assert gemm(left, right, (300, 400), **more) is None
    stack = cupy.stack([cupy.asarray(normal((300, 700))), left])
    assert gemm(stack, right, (2, 300, 400)) is None


def test_the_same_bits_every_time():
    x, y = cupy.asarray(normal((1100, 1300))), cupy.asarray(normal((1300, 900), 1))
    first, again = gemm(x, y, (1100, 900)), gemm(x, y, (1100, 900))
    np.testing.assert_array_equal(cupy.asnumpy(first), cupy.asnumpy(again))


def test_large_products_of_users_run_so_and_none_that_asks_for_fp64():
    x, y = normal((4096, 2300)), normal((2300, 4096), 1)
    a, b = cupy.asarray(x), cupy.asarray(y)
    found = multimm.matmul(a, b)
    assert_within(found, x, y)
    assert last_choice().kernel == "residues"
    by_name = multimm.matmul(a, b, precision="float64")
    np.testing.assert_array_equal(cupy.asnumpy(by_name), cupy.asnumpy(found))
    exact = multimm.matmul(a, b, precision="ieee")
    np.testing.assert_allclose(cupy.asnumpy(exact), cupy.asnumpy(found), rtol=0, atol=1e-10)
    np.testing.assert_array_equal(cupy.asnumpy(exact), cupy.asnumpy(a @ b))


@pytest.mark.parametrize("trans_a", [True, False])
def test_of_a_block_and_its_transpose_one_triangle_is_computed_and_mirrored(trans_a):
    x = normal((9000, 2100) if trans_a else (2100, 9000))
    step = Step("float64", "float64", trans_a=trans_a, trans_b=not trans_a)
    found = link_diagonal(cupy.asarray(x), step=step, complete=True)
    left = x.T if trans_a else x
    assert_within(found, left, left.T)
    np.testing.assert_array_equal(cupy.asnumpy(found), cupy.asnumpy(found.T))
    assert last_choice().kernel == "residues"


@pytest.mark.parametrize("beyond", [np.inf, np.nan, 1e200])
def test_products_of_other_numbers_are_those_of_cublas(beyond):
    x, y = normal((4096, 2300)), normal((2300, 4096), 1)
    x[7, 8] = beyond
    a, b = cupy.asarray(x), cupy.asarray(y)
    np.testing.assert_array_equal(cupy.asnumpy(multimm.matmul(a, b)), cupy.asnumpy(a @ b))
