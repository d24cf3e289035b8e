"""Products by residues on a GPU: right within their bound, exact for integers, refused."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import padded

import multimm
from multimm.gpu import last_choice
from multimm.gpu.residues.formats import FORMATS
from multimm.gpu.residues.gemm import gemm
from multimm.gpu.runtime.launch import device_of
from multimm.graph.lowering.symmetric import link_diagonal
from multimm.graph.tasks.multiply import Step
from multimm.graph.tasks.multiply import gemm as step_gemm

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

DTYPES = tuple(FORMATS)
COMPLEX = DTYPES[1:]


@pytest.fixture(autouse=True)
def on_hopper():
    if device_of(0).limits.capability != 90:
        pytest.skip("INT8 products of four warps are of compute capability 9.0 alone")


def normal(shape, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(shape)
    return (
        made.astype(dtype)
        if dtype == "float64"
        else (made + 1j * normal(shape, seed + 99)).astype(dtype)
    )


def some(size):
    """Few places: the ends, the edges of tiles, and others."""
    edges = {0, 63, 64, 127, 128, 255, 256, size - 1, size // 2, size // 3}
    return sorted(x for x in edges if 0 <= x < size)


def parts(x):
    """The real numbers of an array, one after another: real parts, or real and imaginary ones."""
    return (x.real, x.imag) if x.dtype.kind == "c" else (x,)


def products(left, right):
    """Of each part of a product: the sum in long doubles, and of sizes."""
    a, b = ([z.astype(np.longdouble) for z in parts(x)] for x in (left, right))
    if len(a) == 1:
        return [(a[0] @ b[0], abs(a[0]) @ abs(b[0]))]
    sizes = [[abs(x) @ abs(y) for y in b] for x in a]
    return [(a[0] @ b[0] - a[1] @ b[1], sizes[0][0] + sizes[1][1]),
            (a[0] @ b[1] + a[1] @ b[0], sizes[0][1] + sizes[1][0])]  # fmt: skip


def assert_within(found, x, y, *, alpha=1.0, beta=0.0, c=None, p=None):
    """Every column of some rows, and every row of some columns: each part of each number."""
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == x.dtype
    got = cupy.asnumpy(found)
    assert got.shape == (x.shape[0], y.shape[1])
    assert np.isfinite(got).all()
    unit = FORMATS[x.dtype.name].unit
    every, terms = slice(None), x.shape[1] * len(parts(x))
    for at in ((some(got.shape[0]), every), (every, some(got.shape[1]))):
        pairs = products(x[at[0]], y[:, at[1]])
        for part, (own, (exact, sizes)) in enumerate(zip(parts(got[at]), pairs, strict=True)):
            bound = (terms + 2) * sizes
            if p is not None:
                given = parts(p[at])[part]
                exact, bound = exact + given, bound + abs(given) + sizes
            exact, bound = alpha * exact, abs(alpha) * bound
            if c is not None:
                given = parts(c[at])[part]
                exact, bound = exact + np.longdouble(beta) * given, bound + abs(beta * given)
            if alpha != 1 or c is not None:
                bound = bound + 2 * abs(exact)
            wrong = np.argwhere(abs(own - exact) > unit * bound)
            assert not len(wrong), f"{len(wrong)} wrong of part {part}, first at {wrong[0]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 300), (128, 256, 512), (129, 257, 513), (127, 255, 1000), (300, 1000, 2049),
     (1000, 3, 777), (5, 1300, 640), (2300, 2500, 1111), (2176, 2560, 4096)],
)  # fmt: skip
def test_odd_sizes(m, n, k, dtype):
    x, y = normal((m, k), dtype=dtype), normal((k, n), 1, dtype)
    assert_within(gemm(cupy.asarray(x), cupy.asarray(y), (m, n)), x, y)
    assert last_choice().kernel == "residues"
    assert last_choice().precision == ("float32" if dtype == "complex64" else "float64")


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("conj", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True)])
def test_conjugates(conj, trans, dtype):
    x, y = normal((210, 500), dtype=dtype), normal((500, 330), 1, dtype)
    given = [cupy.asarray(z.T if turned else z) for z, turned in zip((x, y), trans, strict=True)]
    found = gemm(*given, (210, 330), trans=trans, conj=conj)
    assert_within(
        found, *(z.conj() if turned else z for z, turned in zip((x, y), conj, strict=True))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("extra", "offset"), [(0, 0), (3, 1), (8, 5)])
def test_transposes_and_strided_views(trans_a, trans_b, extra, offset, dtype):
    x, y = normal((333, 900), dtype=dtype), normal((900, 410), 1, dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1.0, -0.3])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.7])
@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("with_c", [False, True])
def test_scalars_c_and_partial_results(alpha, beta, with_p, with_c, dtype):
    x, y = normal((260, 700), dtype=dtype), normal((700, 391), 1, dtype)
    c, p = (normal((260, 391), seed, dtype) * 50 if there else None
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [2**15, 2**15 + 1, 70_000])
def test_a_long_k(k, dtype):
    x, y, c = (
        normal(size, seed, dtype) for seed, size in enumerate(((140, k), (k, 300), (140, 300)))
    )
    c = c * 500
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


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("kind", ["nearly real", "nan", "imaginary inf"])
def test_complex_numbers_that_are_refused(kind, dtype):
    """The imaginary parts of what is nearly real are small beside the bound of the whole."""
    x, y = normal((300, 700), dtype=dtype), normal((700, 400), 1, dtype)
    if kind == "nearly real":
        for z in (x, y):
            z.imag *= 1e-18
    else:
        x[299, 699] = complex(np.nan, 0) if kind == "nan" else complex(0, np.inf)
    assert gemm(cupy.asarray(x), cupy.asarray(y), (300, 400)) is None


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_integers_are_exact(dtype):
    rng = np.random.default_rng(6)
    x, y = (
        (rng.integers(-50, 51, size) + 1j * rng.integers(-50, 51, size)).astype(dtype)
        for size in ((300, 900), (900, 410))
    )
    found = gemm(cupy.asarray(x), cupy.asarray(y), (300, 410))
    np.testing.assert_array_equal(cupy.asnumpy(found), x.astype("c16") @ y.astype("c16"))
    assert last_choice().precision == "exact"


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("trans_a", [True, False])
@pytest.mark.parametrize("conj", [True, False])
def test_of_a_complex_block_and_its_adjoint_one_triangle_is_computed(trans_a, conj, dtype):
    x = normal((4200, 4100) if trans_a else (4100, 4200), dtype=dtype)
    step = Step(dtype, dtype, trans_a=trans_a, trans_b=not trans_a,
                conj_a=conj and trans_a, conj_b=conj and not trans_a)  # fmt: skip
    given = cupy.asarray(x)
    first = link_diagonal(given, step=step)
    found = link_diagonal(given, first, step=step, complete=True)
    left = x.T if trans_a else x
    right = left.T
    left, right = (left.conj(), right) if step.conj_a else (left, right.conj() if conj else right)
    assert_within(found, 2 * left, right)
    turned = found.T.conj() if conj else found.T
    np.testing.assert_array_equal(cupy.asnumpy(found), cupy.asnumpy(turned))
    assert last_choice().kernel == "residues"


@pytest.mark.parametrize("dtype", COMPLEX)
def test_large_complex_products_of_users_run_so_with_any_scalars(dtype):
    x, y, c = (
        normal(size, seed, dtype)
        for seed, size in enumerate(((4096, 4100), (4100, 4096), (4096, 4096)))
    )
    a, b = cupy.asarray(x), cupy.asarray(y)
    found = multimm.matmul(a, b)
    assert_within(found, x, y)
    assert last_choice().kernel == "residues"
    step = Step(dtype, dtype, alpha=1j, beta=2 - 1j)
    scaled = step_gemm(a, b, None, cupy.asarray(c), step=step)
    np.testing.assert_allclose(
        cupy.asnumpy(scaled), 1j * cupy.asnumpy(found) + (2 - 1j) * c, rtol=1e-5, atol=1e-4
    )


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
    x, y = normal((4096, 4100)), normal((4100, 4096), 1)
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
    x = normal((9000, 4200) if trans_a else (4200, 9000))
    step = Step("float64", "float64", trans_a=trans_a, trans_b=not trans_a)
    found = link_diagonal(cupy.asarray(x), step=step, complete=True)
    left = x.T if trans_a else x
    assert_within(found, left, left.T)
    np.testing.assert_array_equal(cupy.asnumpy(found), cupy.asnumpy(found.T))
    assert last_choice().kernel == "residues"


@pytest.mark.parametrize("beyond", [np.inf, np.nan, 1e200])
def test_products_of_other_numbers_are_those_of_cublas(beyond):
    x, y = normal((4096, 4100)), normal((4100, 4096), 1)
    x[7, 8] = beyond
    a, b = cupy.asarray(x), cupy.asarray(y)
    np.testing.assert_array_equal(cupy.asnumpy(multimm.matmul(a, b)), cupy.asnumpy(a @ b))
