"""Complex products on a GPU: exact on small integers, within the bound elsewhere, odd values."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import dask.array as da
import numpy as np
import pytest
from gpu_arrays import padded
from small import op

import multimm
from multimm.gpu import complex_gemm, last_choice
from multimm.gpu.elementwise import complex_parts
from multimm.graph.lowering import symmetric
from multimm.graph.tasks.multiply import Step

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

U = 2.0**-24
#: Of each part, in units of |A| |B| of the real numbers in them: of FP16 parts, and of 11 bits.
PROMISES = {"float32": 24 * U, "tf32": 2.0**-9}
BOTH = (False, True)
M, K, N = 1100, 900, 1300


def gaussian(shape, seed=0, dtype="c8"):
    rng = np.random.default_rng(seed)
    values = rng.integers(-9, 10, shape) + 1j * rng.integers(-9, 10, shape)
    return (values if np.dtype(dtype).kind == "c" else values.real).astype(dtype)


def normal(shape, seed=0):
    """Rows of sizes of their own: each has another exponent when it is packed."""
    sizes = 2.0 ** (np.arange(shape[0], dtype="f4") % 9 - 4)
    parts = np.random.default_rng(seed).standard_normal((*shape, 2), dtype="f4")
    return (parts * sizes[:, None, None]).view("c8")[..., 0]


def assert_within(found, a, b, promise, added=0):
    """Each part of each element; NaN is wrong."""
    x, y = (cupy.asarray(z).astype("c16") for z in (a, b))
    exact, found = x @ y + added, cupy.asarray(found)
    real = abs(x.real) @ abs(y.real) + abs(x.imag) @ abs(y.imag) + abs(cupy.asarray(added).real)
    imag = abs(x.real) @ abs(y.imag) + abs(x.imag) @ abs(y.real) + abs(cupy.asarray(added).imag)
    assert bool((abs(found.real - exact.real) <= (promise + 2 * U) * real).all())
    assert bool((abs(found.imag - exact.imag) <= (promise + 2 * U) * imag).all())


@pytest.mark.parametrize("kinds", [("c8", "c8"), ("f4", "c8"), ("c8", "f4"), ("f2", "c8")], ids=str)
@pytest.mark.parametrize(
    ("trans_a", "trans_b", "conj_a", "conj_b"), [*itertools.product(BOTH, BOTH, BOTH, BOTH)]
)
def test_small_integers_are_exact(kinds, trans_a, trans_b, conj_a, conj_b):
    a, b = gaussian((M, K), 1, kinds[0]), gaussian((K, N), 2, kinds[1])
    p, c = (cupy.asarray(gaussian((M, N), seed)) for seed in (3, 4))
    x, y = (cupy.asarray(np.ascontiguousarray(op(z, trans, False)))
            for z, trans in ((a, trans_a), (b, trans_b)))  # fmt: skip
    exact = cupy.asarray(op(a, False, conj_a)).astype("c16") @ cupy.asarray(op(b, False, conj_b))
    flags = {"trans_a": trans_a, "trans_b": trans_b, "conj_a": conj_a, "conj_b": conj_b}
    assert complex_gemm.takes(x, y, accumulate="complex64", dtype="complex64",
                              precision="float32", trans_a=trans_a, trans_b=trans_b)  # fmt: skip
    assert bool((complex_gemm.gemm(x, y, **flags) == exact).all())
    assert last_choice().kernel == "sgemm_split"
    found = complex_gemm.gemm(x, y, alpha=0.5, beta=-2, partial=p, c=c, **flags)
    assert bool((found == 0.5 * (exact + p) - 2 * c).all())
    found = complex_gemm.gemm(x, y, alpha=1 + 2j, beta=1j, partial=p, c=c, **flags)
    assert bool((found == (1 + 2j) * (exact + p) + 1j * c).all())


@pytest.mark.parametrize("trans", BOTH)
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_that_lie_further_apart(trans, offset):
    a, b, c = gaussian((M, K), 1), gaussian((K, N), 2), gaussian((M, N), 3)
    x, y = (padded(np.ascontiguousarray(op(z, trans, False)), 3, offset)[0] for z in (a, b))
    p, (out, whole) = padded(c, 1, offset)[0], padded(np.zeros_like(c), 5, offset)
    exact = cupy.asarray(a).astype("c16") @ cupy.asarray(b) + cupy.asarray(c)
    found = complex_gemm.gemm(x, y, trans_a=trans, trans_b=trans, partial=p, out=out)
    assert found is out
    assert bool((out == exact).all())
    assert int(cupy.isnan(whole).sum()) == whole.size - out.size
    real = padded(b.real.copy(), 3, offset)[0]
    found = complex_gemm.gemm(x, real, trans_a=trans, partial=p)
    exact = cupy.asarray(a).astype("c16") @ cupy.asarray(b.real) + cupy.asarray(c)
    assert bool((found == exact).all())


@pytest.mark.parametrize("precision", PROMISES)
@pytest.mark.parametrize("shape", [(M, K, N), (2048, 5000, 1024), (300, 20000, 260)], ids=str)
def test_both_parts_keep_the_bound(precision, shape):
    m, k, n = shape
    a, b = normal((m, k)), normal((n, k), 1).T
    x, y = cupy.asarray(a), cupy.asarray(np.ascontiguousarray(b))
    found = multimm.matmul(x, y, precision=precision)
    assert found.dtype == np.complex64
    assert last_choice().kernel == "sgemm_split"
    assert_within(found, a, b, PROMISES[precision])
    assert multimm.verify(x, y, found, precision=precision)
    again = multimm.matmul(x, y, precision=precision)
    assert bool((found == again).all())


def test_the_error_is_no_larger_than_that_of_cublas():
    a, b = (cupy.asarray(normal((2048, 2048), seed)) for seed in (1, 2))
    exact = a.astype("c16") @ b.astype("c16")
    ours, theirs = (float(abs(c - exact).max()) for c in (multimm.matmul(a, b), a @ b))
    rms = [float(cupy.sqrt((abs(c - exact) ** 2).mean())) for c in (multimm.matmul(a, b), a @ b)]
    assert rms[0] <= rms[1]
    assert ours <= 2 * theirs


@pytest.mark.parametrize(("trans", "conj_a", "conj_b"), [*itertools.product(BOTH, BOTH, BOTH)])
@pytest.mark.parametrize("rows", [97, 1025, 2500])
def test_one_triangle_makes_all_of_it(trans, conj_a, conj_b, rows):
    x = gaussian((rows, K))
    a = cupy.asarray(np.ascontiguousarray(x.T) if trans else x)
    step = Step("complex64", "complex64", trans, not trans, conj_a=conj_a, conj_b=conj_b)
    exact = cupy.asarray(op(x, False, conj_a)).astype("c16") @ cupy.asarray(op(x, True, conj_b))
    found = symmetric.link_diagonal(a, step=step, complete=True)
    assert bool((found == exact).all())
    more = symmetric.link_diagonal(a, found, step=step, complete=True)
    assert bool((more == 2 * exact).all())


def test_a_hermitian_product_is_so_bit_by_bit_and_keeps_the_bound():
    x = normal((3000, 2900))
    a = cupy.asarray(x)
    step = Step("complex64", "complex64", trans_b=True, conj_b=True)
    found = symmetric.link_diagonal(a, step=step, complete=True)
    assert bool((found == found.conj().T).all())
    assert not bool(found.diagonal().imag.any())
    # Two sums whose difference is rounded once more.
    assert_within(found, x, x.conj().T, PROMISES["float32"] + U)


def test_lazy_products_of_blocks_on_the_gpu():
    x = gaussian((2100, 1500))
    a = da.from_array(cupy.asarray(x), chunks=(700, 750), asarray=False)
    exact = cupy.asarray(x).astype("c16")
    for left, right, wanted in (
        (a.conj().T, a, exact.conj().T @ exact),
        (a, a.conj().T, exact @ exact.conj().T),
        (a, a.T, exact @ exact.T),
        (a.conj(), a.T, exact.conj() @ exact.T),
    ):
        for options in ({}, {"blocks": 1100, "slabs": 700}, {"blocks": 1100, "p_k": 2}):
            found = multimm.matmul(left, right, **options).compute(scheduler="sync")
            assert isinstance(found, cupy.ndarray)
            assert bool((found == wanted).all())


def test_complex_scalars_of_real_operands():
    a, b = gaussian((M, K), 1, "f4"), gaussian((K, N), 2, "f4")
    x, y, c = cupy.asarray(a), cupy.asarray(b), cupy.asarray(gaussian((M, N), 3))
    exact = x.astype("f8") @ y
    assert bool((multimm.gemm(2j, x, y) == 2j * exact).all())
    assert last_choice().kernel == "sgemm_split"
    assert bool((multimm.gemm(2 + 0j, x, y) == 2 * exact).all())
    assert bool((multimm.gemm(2, x, y, 1 - 1j, c) == 2 * exact + (1 - 1j) * c).all())


def test_stacks_of_large_matrices():
    a, b = gaussian((2, 1, 2048, 2048), 1), gaussian((2, 2048, 1100), 2)
    x, y = cupy.asarray(a), cupy.asarray(b)
    found = multimm.matmul(x, y)
    assert last_choice().kernel == "sgemm_split"
    assert bool((found == x.astype("c16") @ y).all())


@pytest.mark.parametrize("odd", [np.inf, np.nan, complex(0, np.inf), complex(3, np.nan)])
def test_odd_values_are_those_of_the_formula(odd):
    a, b = gaussian((M, K), 1), gaussian((K, N), 2)
    a[7, 11] = odd
    found = cupy.asnumpy(multimm.matmul(cupy.asarray(a), cupy.asarray(b)))
    with np.errstate(all="ignore"):
        real = a.real @ b.real - a.imag @ b.imag
        imag = a.real @ b.imag + a.imag @ b.real
    for part, exact in ((found.real, real), (found.imag, imag)):
        np.testing.assert_array_equal(np.isfinite(part), np.isfinite(exact))
    assert np.isfinite(found[8:]).all()


@pytest.mark.parametrize("wide", [2.0**-20, 2.0**-40])
def test_imaginary_parts_far_below_the_real_ones(wide):
    """What FP16 parts do not carry of a row: then FP32 multiply-adds compute it."""
    a, b = normal((M, K)), normal((N, K), 1).T
    a.imag *= np.float32(wide)
    found = multimm.matmul(cupy.asarray(a), cupy.asarray(np.ascontiguousarray(b)))
    assert_within(found, a, b, (2 * K + 2) * U)


def test_in_a_captured_graph():
    a, b = (cupy.asarray(gaussian((1024, 1024), seed)) for seed in (1, 2))
    out = cupy.empty((1024, 1024), "c8")
    multimm.matmul(a, b)  # kernels are compiled
    exact = a.astype("c16") @ b
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        complex_gemm.gemm(a, b, out=out)
        graph = stream.end_capture()
        for factor in (1, 2):
            graph.launch(stream)
            stream.synchronize()
            assert bool((out == factor * exact).all())
            a *= 2
            stream.synchronize()


def test_more_than_32_bits_of_elements():
    if cupy.cuda.Device().mem_info[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    x = cupy.zeros((2, 2**30 + 5), "c8")
    x[1, -3:] = cupy.asarray([1 + 2j, 3 - 1j, 5j])
    y = cupy.empty((2, 2, 2**30 + 5), "f4")
    complex_parts.split(x, y, -1.0)
    assert y[1, :, -3:].tolist() == [[1, 3, 0], [-2, 1, -5]]
    complex_parts.join(y, x, sign=1.0, alpha=2.0)
    assert x[1, -3:].tolist() == [2 - 4j, 6 + 2j, -10j]
    assert not bool(x[0].any())
