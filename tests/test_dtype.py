"""`dtype=` of products, as `numpy.matmul` has it, and exact products of narrow integers."""

from __future__ import annotations

import time
import warnings

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from clusters import counting_client, received, scattered
from hypothesis import given, settings
from hypothesis import strategies as st
from small import same_bits as same

import multimm
from multimm import products
from multimm.errors import DTypeError, IntegerOverflowWarning, OptionError
from multimm.gpu.integers import float_blas, overflow
from multimm.gpu.integers.bounds import magnitude, sums_fit
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

NARROW = ("bool", "int8", "uint8", "int16", "uint16")
ASKED = ("int32", "int64", "float32", "float64", "complex64")


def numbers(rng, shape, dtype, extreme=False):
    """Of all that the dtype holds, or its ends alone."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if extreme:
        return rng.choice(np.array([low, high], dtype), shape)
    return rng.integers(low, high, shape, dtype, endpoint=True)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NARROW), st.sampled_from(NARROW), st.sampled_from(ASKED),
    st.tuples(*[st.integers(0, 40)] * 2), st.integers(0, 3000), st.booleans(),
    st.tuples(st.booleans(), st.booleans()), st.integers(0, 9),
)  # fmt: skip
def test_any_dtypes_and_shapes(a, b, dtype, sides, k, extreme, trans, seed):
    rng = np.random.default_rng(seed)
    m, n = sides
    x, y = numbers(rng, (m, k), a, extreme), numbers(rng, (k, n), b, extreme)
    stored = [z.T.copy() if flag else z for z, flag in zip((x, y), trans, strict=True)]
    wide = x.astype("i8") @ y.astype("i8")  # no sum of these leaves 64 bits
    found = multimm.gemm(1, *stored, trans_a=trans[0], trans_b=trans[1], dtype=dtype)
    same(found, wide.astype(dtype))
    if m and n and k:
        chunked = [da.from_array(z, chunks=[max(1, s // 2) for s in z.shape]) for z in stored]
        lazy = multimm.gemm(1, *chunked, trans_a=trans[0], trans_b=trans[1], dtype=dtype, slabs=k)
        same(lazy.compute(), wide.astype(dtype))


@pytest.mark.parametrize(
    ("a", "b", "k"), [("int8", "int8", 1025), ("uint8", "uint8", 259), ("int8", "uint8", 515),
                      ("int16", "int16", 300), ("uint16", "uint16", 9000)],
)  # fmt: skip
def test_sums_beyond_2_24_and_2_31(a, b, k):
    """Each element is as large as it can be: sums go beyond what float32, then int32, hold."""
    x = np.full((3, k), np.iinfo(a).min or np.iinfo(a).max, a)
    y = np.full((k, 2), np.iinfo(b).min or np.iinfo(b).max, b)
    whole = int(x[0, 0]) * int(y[0, 0]) * k
    assert abs(whole) > 2**24
    for dtype in ("int64", "float64"):
        assert (multimm.matmul(x, y, dtype=dtype) == whole).all()
    same(multimm.matmul(x, y, dtype="float32"), np.full((3, 2), whole, "f8").astype("f4"))
    same(multimm.matmul(x, y, dtype="int32"), np.full((3, 2), whole, "i8").astype("i4"))


def test_rounding_is_that_of_the_result_alone():
    """2^24 + 1 - 1: sums that float32 rounds on the way come back."""
    x = np.full((1, 1026), 127, "i1")
    y = np.full((1026, 1), 127, "i1")
    y[1024:] = [[1], [-1]]
    x[0, :1024], y[:1024, 0] = -128, -128  # 2^24 so far
    same(multimm.matmul(x, y, dtype="float32"), np.array([[2**24]], "f4"))
    y[1025] = 1
    same(multimm.matmul(x, y, dtype="float32"), np.array([[2**24 + 254]], "f4"))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([("int64", "int64"), ("int64", "int32"), ("int64", "uint8"), ("int32", "int32"),
                     ("uint32", "uint32"), ("uint32", "int32"), ("uint64", "uint64"),
                     ("uint64", "uint16"), ("int16", "int32")]),
    st.tuples(*[st.integers(0, 62)] * 2), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_wide_integers_of_any_size_wrap_around_as_numpys(dtypes, fewer, extreme, seed):
    """Their elements have any number of bits: whole numbers will do, or two or three digits."""
    rng = np.random.default_rng(seed)
    x, y = (numbers(rng, (110, 110), name, extreme) >> np.array(less % np.iinfo(name).bits, name)
            for name, less in zip(dtypes, fewer, strict=True))  # fmt: skip
    x, y = x[:100], y[:, :105]
    same(multimm.matmul(x, y), x @ y)
    same(multimm.gemm(3, x.T, da.from_array(y, 80), trans_a=True, slabs=55).compute(), 3 * (x @ y))


@pytest.mark.parametrize("share", [0, 0.0003, 0.02, 1])
def test_bool_is_an_or_of_ands(share):
    """Of no, few and all terms, in k that is multiplied in several pieces."""
    rng = np.random.default_rng(5)
    x, y = rng.random((40, 9000)) < share, rng.random((9000, 35)) < share
    same(multimm.matmul(x, y), x @ y)
    same(multimm.matmul(da.from_array(x, 5000), da.from_array(y, 5000)).compute(), x @ y)
    c = rng.random((40, 35)) < 0.5
    same(multimm.gemm(1, x, y, 1, c), (x @ y) | c)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["bool", "int32", "int64"])
def test_large_integers_are_multiplied_much_faster_than_by_numpy(dtype):
    rng = np.random.default_rng(3)
    x, y = (numbers(rng, (600, 600), dtype) for _ in range(2))
    if dtype == "bool":  # NumPy looks no further than for a term that is True
        x &= rng.random(x.shape) < 0.001
    seconds = {}
    for multiply in (multimm.matmul, np.matmul):
        begin = time.thread_time()
        multiply(x, y)
        seconds[multiply] = time.thread_time() - begin
    assert 2 * seconds[multimm.matmul] < seconds[np.matmul]


@pytest.mark.parametrize("asked", ["float32", "float64", "complex64", "complex128", "float16"])
@pytest.mark.parametrize("own", ["float32", "float64", "int64", "int8"])
def test_all_other_dtypes_follow_numpy(own, asked):
    rng = np.random.default_rng(2)
    x, y = rng.integers(-3, 4, (20, 9)).astype(own), rng.integers(-3, 4, (9, 8)).astype(own)
    same(multimm.matmul(x, y, dtype=asked), np.matmul(x, y, dtype=asked))
    same(multimm.matmul(da.from_array(x, chunks=6), y, dtype=asked).compute(),
         np.matmul(x, y, dtype=asked))  # fmt: skip


def test_gemm_with_scalars_and_c():
    rng = np.random.default_rng(4)
    x, y = numbers(rng, (30, 1100), "int8"), numbers(rng, (1100, 20), "int8")
    c = rng.integers(-9, 10, (30, 20))
    whole = x.astype("i8") @ y.astype("i8")
    for kind, alpha, beta in (("i1", 1, 1), ("i4", -3, 2), ("i8", 2, -1)):
        same(multimm.gemm(alpha, x, y, beta, c.astype(kind), dtype="int32"),
             (alpha * whole + beta * c).astype("i4"))  # fmt: skip
    for dtype in ("float32", "float64"):
        for kind in ("i4", "f4", "f8"):
            wanted = (0.5 * whole - 1.5 * c).astype(dtype)
            same(multimm.gemm(0.5, x, y, -1.5, c.astype(kind), dtype=dtype), wanted)
            lazy = multimm.gemm(0.5, da.from_array(x, chunks=(9, 500)), y, -1.5,
                                da.from_array(c.astype(kind), chunks=7), dtype=dtype)  # fmt: skip
            same(lazy.compute(), wanted)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "float16", "longdouble", "complex64"])
def test_a_c_of_bfloat16_and_results_that_few_have(dtype):
    x = np.arange(12, dtype="i1").reshape(3, 4)
    whole = x.astype("f8") @ x.T
    same(multimm.matmul(x, x.T, dtype=dtype), whole.astype(dtype))
    c = np.full((3, 3), 1.5, ml_dtypes.bfloat16)
    same(multimm.gemm(2, x, x.T, 0.5, c, dtype=dtype), (2 * whole + 0.75).astype(dtype))
    assert multimm.verify(x, x.T, multimm.matmul(x, x.T, dtype=dtype), dtype=dtype)


def test_whole_scalars_do_not_wrap_a_float_result():
    """The sums are int32; twice as much would leave it."""
    k = 100_000
    x, y = np.full((2, k), -128, "i1"), np.full((k, 2), -128, "i1")
    c = np.full((2, 2), 2**31 - 1, "i4")
    assert (multimm.gemm(2, x, y, dtype="float64") == 2 * k * 2**14).all()
    same(multimm.gemm(2, x, y, dtype="float32"), np.full((2, 2), 2 * k * 2**14, "f8").astype("f4"))
    same(multimm.gemm(1, x, y, 1, c, dtype="float32"),
         np.full((2, 2), k * 2**14 + 2**31 - 1, "f8").astype("f4"))  # fmt: skip


def test_stacks_vectors_and_slices():
    rng = np.random.default_rng(5)
    x, y = numbers(rng, (3, 1, 20, 1500), "uint8"), numbers(rng, (2, 1500, 9), "int8")
    whole = x.astype("i8") @ y.astype("i8")
    same(multimm.matmul(x, y, dtype="int32"), whole.astype("i4"))
    lazy = multimm.matmul(da.from_array(x, chunks=(1, 1, 8, 600)), y, dtype="float32")
    same(lazy.compute(), whole.astype("f4"))
    same(lazy[1:, 0, 3:7].compute(), whole[1:, 0, 3:7].astype("f4"))
    assert multimm.matmul(x[0, 0, 0], y[0, :, 0], dtype="int64") == whole[0, 0, 0, 0]
    strided = numbers(rng, (80, 1500), "int8")[::2, ::-1]
    same(multimm.matmul(strided, y[1], dtype="int32"),
         (strided.astype("i8") @ y[1].astype("i8")).astype("i4"))  # fmt: skip


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_symmetric_product(dtype):
    x = numbers(np.random.default_rng(6), (1300, 90), "int8")
    lazy = da.from_array(x, chunks=(500, 40))
    found = multimm.matmul(lazy.T, lazy, dtype=dtype).compute()
    same(found, (x.T.astype("i8") @ x.astype("i8")).astype(dtype))
    np.testing.assert_array_equal(found, found.T)


def test_big_endian_operands():
    x = numbers(np.random.default_rng(7), (5, 40), "int16").astype(">i2")
    same(multimm.matmul(x, x.T, dtype="int64"), x.astype("i8") @ x.T.astype("i8"))
    assert multimm.matmul(x, x.T, dtype=">i8").dtype == np.dtype("int64")


@pytest.mark.parametrize(
    ("a", "b", "dtype", "words"),
    [
        ("f8", "f8", "int32", "a has dtype float64, whose fractions would be lost"),
        ("i1", "f4", "int32", "b has dtype float32, whose fractions would be lost"),
        ("c8", "f4", "float32", "a has dtype complex64, whose imaginary parts would be lost"),
        ("i1", "i1", "uint32", "a has dtype int8, whose negative numbers would be lost"),
        ("i1", "i1", "bool", "a has dtype int8, which is more"),
        ("i1", "i1", "object", "dtype=object: allowed are"),
        ("i1", "i1", "U3", "dtype=<U3: allowed are"),
        ("i1", "i1", "cat", "there is no dtype 'cat'"),
        ("O", "i1", "int32", "a has dtype object"),
    ],
)
@pytest.mark.parametrize("call", [multimm.matmul, multimm.plan])
def test_what_cannot_be_cast_is_refused_in_one_line(call, a, b, dtype, words):
    x = da.from_array(np.ones((3, 4), a), chunks=2)
    with pytest.raises(DTypeError, match=words) as caught:
        call(x, np.ones((4, 3), b), dtype=dtype)
    assert "\n" not in str(caught.value)


def test_what_gpus_do_not_compute_with_is_refused_at_the_call(monkeypatch):
    monkeypatch.setattr(products, "on_gpu", lambda x: True)
    x = np.ones((3, 3), "i1")
    with pytest.raises(DTypeError, match="GPUs have no such numbers"):
        multimm.matmul(x, x, dtype="longdouble")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"alpha": 0.5}, DTypeError, "dtype=int32: alpha=0.5 makes the result float64"),
        ({"alpha": 1j, "dtype": "float32"}, DTypeError, "makes the result complex64"),
        ({"alpha": 1, "beta": 1, "c": np.ones((2, 2))}, DTypeError, "and a c of float64 make the"),
        ({"alpha": 2**40}, OptionError, "does not fit int32"),
    ],
)
def test_scalars_and_c_that_the_dtype_cannot_hold(options, error, words):
    x = np.ones((2, 2), "i1")
    with pytest.raises(error, match=words):
        multimm.gemm(a=x, b=x, **{"dtype": "int32"} | options)


def test_a_warning_once_where_sums_can_leave_the_dtype(monkeypatch):
    monkeypatch.setattr(overflow, "_warned", set())
    x = np.ones((3, 4), "i1")
    with pytest.warns(
        IntegerOverflowWarning, match="int8 with k = 4 is int8.*dtype='int32' holds"
    ) as found:
        multimm.matmul(x, x.T)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        multimm.matmul(x, x.T)  # said once
        multimm.matmul(x, x.T, dtype="int8")  # meant
        multimm.matmul(x, x.T, dtype="int32")  # cannot
        multimm.matmul(x.astype(bool), x.T.astype(bool))
        multimm.matmul(x.astype("i4"), x.T.astype("i4"))  # not narrow
        multimm.plan(x.astype("u1"), x.T.astype("u1"))  # nothing is computed
        for _ in range(2):  # an error is none that was read
            with pytest.raises(IntegerOverflowWarning):
                multimm.gemm(1, x.astype("i2"), x, trans_b=True)
    labelled = xr.DataArray(x.astype("u1"), dims=("m", "k"))
    with pytest.warns(IntegerOverflowWarning, match="uint8") as found:
        multimm.matmul(labelled, labelled.rename(m="n"))
    assert found[0].filename == __file__
    long = np.zeros((1, 2**17), "i1")
    with pytest.warns(IntegerOverflowWarning, match="k = 131072 is int32.*dtype='int64' holds"):
        multimm.matmul(long, long.T, dtype="int32")


def test_plans_count_narrow_elements_and_a_wide_result():
    a = MatrixSpec((8192, 8192), "int8", chunks=((4096,) * 2,) * 2)
    cluster = ClusterSpec.homogeneous(H200, 4)
    plans = {}
    for name in ("int8", "float32"):
        spec = MatrixSpec(a.shape, name, chunks=a.chunks)
        plans[name] = multimm.plan(spec, spec, dtype="float32", cluster=cluster, blocks=4096)
    narrow, wide = plans["int8"], plans["float32"]
    assert narrow.layout.problem.result_bytes == wide.layout.problem.result_bytes == 4 * 8192**2
    assert 4 * narrow.bytes_moved == wide.bytes_moved > 0
    assert narrow.seconds < wide.seconds
    assert "exact, rounded once to float32, on INT8 tensor cores" in str(narrow)
    assert "operands being packed" in str(narrow)


def test_plans_of_cpu_workers_know_that_blas_multiplies():
    plans = {
        name: multimm.plan(*[MatrixSpec((4000, 4000), name)] * 2, dtype="int64",
                           cluster=multimm.cluster.local())
        for name in ("int8", "int64")
    }  # fmt: skip
    assert 5 * plans["int8"].seconds < plans["int64"].seconds
    assert "exact modulo 2^64, " in str(plans["int8"])
    assert "in digits" in str(plans["int64"])


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 10**6))
def test_stretches_are_exact(most_a, most_b, k):
    cut = float_blas.cut(most_a, most_b, k)
    if cut is not None:
        name, length, *_ = cut
        assert 1 <= length <= max(1, k)
        assert (
            max(most_a, most_b, length * most_a * most_b)
            <= {"float32": 2**24, "float64": 2**53}[name]
        )


@given(st.sampled_from(NARROW), st.sampled_from(NARROW), st.integers(1, 10**6),
       st.sampled_from([*ASKED, "int8", "uint32", "float16"]))  # fmt: skip
def test_sums_that_fit(a, b, k, dtype):
    ends = [[0, 1] if x == "bool" else [int(np.iinfo(x).min), int(np.iinfo(x).max)] for x in (a, b)]
    sums = [k * x * y for x in ends[0] for y in ends[1]]
    kind = np.dtype(dtype)
    if kind.kind in "fc":
        limits = [-(2 ** (np.finfo(kind).nmant + 1)), 2 ** (np.finfo(kind).nmant + 1)]
    else:
        limits = [np.iinfo(kind).min, np.iinfo(kind).max]
    fits = sums_fit(np.dtype(a), np.dtype(b), k, kind)
    assert not fits or (limits[0] <= min(sums) and max(sums) <= limits[1])
    assert magnitude(np.dtype(a)) == max(map(abs, ends[0]))


def test_verify_knows_the_dtype():
    rng = np.random.default_rng(8)
    x, y = numbers(rng, (60, 2000), "int8"), numbers(rng, (2000, 50), "int8")
    c = multimm.matmul(x, y, dtype="int32")
    assert multimm.verify(x, y, c, dtype="int32")
    wrong = c.copy()
    wrong[3, 4] += 1
    assert not multimm.verify(x, y, wrong, dtype="int32")
    with pytest.raises(DTypeError, match="c has dtype int32, which no product with dtype=float64"):
        multimm.verify(x, y, c, dtype="float64")


def test_verify_holds_a_float_product_to_its_sums():
    rng = np.random.default_rng(9)
    x, y = rng.standard_normal((60, 900)).astype("f4"), rng.standard_normal((900, 50)).astype("f4")
    assert multimm.verify(x, y, multimm.matmul(x, y, dtype="float64"), dtype="float64")
    assert not multimm.verify(x, y, (x @ y).astype("f8"), dtype="float64")
    z = x.astype("f8") + 2.0**-26
    assert multimm.verify(z, y, multimm.matmul(z, y, dtype="float32"), dtype="float32")


client = counting_client(2)


def test_a_byte_an_element_travels(client):
    """As planned, and a quarter of what float32 moves."""
    moved, owners = {}, [0, 1] * 8
    values = np.random.default_rng(0).integers(-9, 10, (2, 512, 512))
    for name in ("int8", "float32"):
        x, y = values.astype(name)
        a, b = (scattered(client, z, (128, 128), owners) for z in (x, y))
        options = {"dtype": "float32", "blocks": 128, "slabs": 128}
        plan = multimm.plan(a, b, **options)
        c, moved[name] = received(client, multimm.matmul(a, b, **options))
        assert moved[name] == plan.bytes_moved > 0
        same(c.compute(), (values[0] @ values[1]).astype("f4"))
        assert multimm.verify(a, b, c, dtype="float32")
    assert 4 * moved["int8"] == moved["float32"]


@pytest.mark.parametrize("a", ["complex128", "complex64", "float64", "int32", "int8", "bfloat16"])
@pytest.mark.parametrize("b", ["complex128", "complex64"])
def test_what_is_asked_for_in_complex64(a, b):
    rng = np.random.default_rng(11)
    x, y = rng.integers(-3, 4, (20, 9)).astype(a), (rng.integers(-3, 4, (9, 8)) * 1j).astype(b)
    wanted = (x.astype("c16") @ y.astype("c16")).astype("c8")
    same(multimm.matmul(x, y, dtype="complex64"), wanted)
    same(multimm.matmul(da.from_array(x, chunks=6), y, dtype="complex64").compute(), wanted)
