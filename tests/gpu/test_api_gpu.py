"""matmul, gemm and transpose on CuPy arrays and on Dask arrays of CuPy blocks, no cluster."""

from __future__ import annotations

from importlib.util import find_spec

import dask.array as da
import numpy as np
import pytest
from gpu_arrays import chunked, same
from small import integers

import multimm
from multimm.gpu import last_choice

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((130, 70), (70, 50)),
        ((70,), (70, 50)),
        ((130, 70), (70,)),
        ((70,), (70,)),
        ((3, 1, 20, 30), (2, 30, 10)),
        ((5, 0), (0, 4)),
        ((0, 5), (5, 4)),
    ],
)
def test_matmul_follows_numpy(shape_a, shape_b):
    x, y = integers(shape_a, 1), integers(shape_b, 2)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y)), np.matmul(x, y))
    lazy = multimm.matmul(chunked(x, 16), chunked(y, 23), blocks=16, slabs=11)
    assert isinstance(lazy._meta, cupy.ndarray)
    same(lazy.compute(scheduler="sync"), np.matmul(x, y))


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("int32", "int8"), ("float16",) * 2,
                                    ("complex64", "float32")])  # fmt: skip
def test_other_dtypes_follow_numpy(dtypes):
    x, y = integers((60, 50), 3, dtypes[0]), integers((50, 40), 4, dtypes[1])
    expected = np.matmul(x, y)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y)), expected)
    same(multimm.matmul(chunked(x, 16), chunked(y, 23)).compute(scheduler="sync"), expected)


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float16", "float32")])
@pytest.mark.parametrize("p_k", [1, 2])
def test_half_precision_runs_on_tensor_cores_and_is_summed_in_float32(dtypes, p_k):
    """One product of 11 bits has all of a float16; without it FP32 multiply-adds took six times."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((1500, 4096)).astype(dtypes[0])
    y = rng.standard_normal((4096, 1100)).astype(dtypes[1])
    exact, terms = x.astype(float) @ y.astype(float), abs(x).astype(float) @ abs(y).astype(float)
    halves = set(dtypes) == {"float16"}
    rounding = 2.0**-11 * abs(exact) if halves else 0
    direct = multimm.matmul(cupy.asarray(x), cupy.asarray(y))
    chosen = last_choice()
    assert chosen.kernel.startswith("sgemm_split"), chosen
    assert chosen.precision == ("tf32" if halves else "float32")
    lazy = multimm.matmul(chunked(x, 1024), chunked(y, 1024), p_k=p_k, slabs=2048)
    added = multimm.gemm(
        2, cupy.asarray(x.T), cupy.asarray(y), -1, cupy.asarray(exact.astype(dtypes[1])),
        trans_a=True,
    )  # fmt: skip
    for found, want in ((direct, exact), (lazy.compute(scheduler="sync"), exact), (added, exact)):
        assert found.dtype == np.result_type(*dtypes)
        off = abs(cupy.asnumpy(found).astype(float) - want)
        assert not (off > 4096 * 2.0**-24 * 3 * terms + 3 * rounding).any()
    # Within what sums in float32 leave: far below what rounding to 11 bits would.
    in_float32 = cupy.asnumpy(multimm.gemm(1.0, *(cupy.asarray(z) for z in (x, y)), 0.0,
                                           cupy.zeros((1500, 1100), "float32")))  # fmt: skip
    assert in_float32.dtype == np.float32
    assert abs(in_float32 - exact).max() <= 2.0**-18 * terms.max()
    assert multimm.verify(cupy.asarray(x), cupy.asarray(y), direct)


def test_symmetric_products_of_half_precision():
    x = np.random.default_rng(13).integers(-3, 4, (5000, 1300)).astype("float16")
    lazy = multimm.matmul(chunked(x, 1024).T, chunked(x, 1024), slabs=2048)
    result = cupy.asnumpy(lazy.compute(scheduler="sync"))
    want = x.T.astype(float) @ x.astype(float)
    assert (abs(result - want) <= 2.0**-11 * abs(want)).all()
    np.testing.assert_array_equal(result, result.T)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("p_k", [1, 3])
def test_gemm_in_blocks(trans_a, trans_b, p_k):
    x, y, z = integers((130, 70), 5), integers((70, 50), 6), integers((130, 50), 7)
    a = chunked(x.T if trans_a else x, 32)
    b = chunked(y.T if trans_b else y, 32)
    result = multimm.gemm(
        2, a, b, -3, chunked(z, 40), trans_a=trans_a, trans_b=trans_b,
        blocks=33, slabs=16, p_k=p_k,
    )  # fmt: skip
    same(result.compute(scheduler="sync"), (2 * (x @ y) - 3 * z).astype("float32"))


def test_fortran_order_slices_and_lazy_transposes_are_taken_as_they_are():
    x = integers((96, 64), 8)
    a = da.from_array(cupy.asarray(np.asfortranarray(x)), chunks=32, asarray=False)
    same(multimm.matmul(a.T, a, blocks=20).compute(scheduler="sync"), x.T @ x)
    same(multimm.matmul(a[5:, 3:33], a[5:35]).compute(scheduler="sync"), x[5:, 3:33] @ x[5:35])


def test_random_products_keep_the_contract_and_verify_says_so():
    rng = np.random.default_rng(10)
    x, y = (rng.standard_normal(shape, dtype="float32") for shape in ((700, 3000), (3000, 500)))
    a, b = cupy.asarray(x), cupy.asarray(y)
    c = multimm.matmul(a, b)
    bound = (3000 + 2) * 2.0**-24 * (abs(x).astype(float) @ abs(y)) + 2.0**-20
    assert not (abs(cupy.asnumpy(c).astype(float) - x.astype(float) @ y) > bound).any()
    assert multimm.verify(a, b, c)
    c[123, 45] += 50
    assert not multimm.verify(a, b, c)


def test_accelerate_reaches_gpu_blocks():
    x = integers((64, 64), 12)
    a = chunked(x, 32)
    with multimm.accelerate():
        c = a @ a
    assert any(str(name).startswith("multimm-") for name in c.dask.layers)
    same(c.compute(scheduler="sync"), x @ x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("turned", [False, True])
def test_operands_in_other_chunks_are_joined_on_the_gpu(dtype, turned):
    """Whole rows, parts of rows that begin anywhere, and a block of one piece."""
    x, y = integers((130, 75), 5, dtype), integers((75, 90), 6, dtype)
    a, b = chunked(x, (33, (50, 25))), chunked(y.T if turned else y, (26, 31))
    b = b.T if turned else b
    fixed = {"blocks": (100, 90), "slabs": 40}
    same(multimm.matmul(a, b, **fixed).compute(scheduler="sync"), x @ y)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("lazy", [False, True])
def test_which_infinity_or_nan_a_product_holds_is_verified(dtype, lazy):
    """What the kernels make of infinities is what IEEE arithmetic does, and nothing else passes."""
    x, y = integers((130, 70), 1).astype(dtype), integers((70, 50), 2).astype(dtype)
    x[3, 5], x[7, 5], y[8, 9], y[10, 49] = np.inf, np.nan, -np.inf, np.nan
    a, b = (chunked(each, 33) if lazy else cupy.asarray(each) for each in (x, y))
    c = multimm.matmul(a, b)
    c = c.compute(scheduler="sync") if lazy else c
    result = multimm.verify(a, b, c)
    assert result, str(result)
    assert "2 rows and 2 columns non-finite" in str(result)
    for place in ((3, 0), (0, 9)):
        for value in (np.nan, np.inf, -np.inf):
            wrong = c.copy()
            wrong[place] = value
            right = np.array_equal(wrong.get(), c.get(), equal_nan=True)
            assert bool(multimm.verify(a, b, wrong)) == right


def test_cupy_blocks_are_rounded_to_what_their_array_declares():
    x = chunked(integers((60, 40), 1).astype("float32"), 20)
    third = x.map_blocks(lambda own: own.astype("float64") / 3, dtype="float32", meta=x._meta)
    with pytest.warns(UserWarning, match="it is rounded to that"):
        c = multimm.matmul(third, third.T).compute(scheduler="sync")
    assert c.dtype == np.float32
    right = (integers((60, 40), 1) / 3) @ (integers((60, 40), 1) / 3).T
    np.testing.assert_allclose(c.get(), right, rtol=1e-5, atol=1e-5)
