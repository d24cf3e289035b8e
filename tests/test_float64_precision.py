"""``precision="float64"``: where it is taken, what it changes, and what refuses it."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

import multimm
from multimm.errors import OptionError
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

DOUBLE = {"precision": "float64"}


def numbers(dtype="float64", seed=0, lazily=False):
    made = np.random.default_rng(seed).integers(-8, 9, (12, 12)).astype(dtype)
    made = made + made.T * 1j if made.dtype.kind == "c" else made
    return da.from_array(made.astype(dtype), chunks=5) if lazily else made.astype(dtype)


#: Ways to ask, of two arrays: each takes `precision`.
CALLS = {
    "matmul": multimm.matmul,
    "gemm": lambda a, b, **asked: multimm.gemm(2.0, a, b, -1.0, a, **asked),
    "einsum": lambda a, b, **asked: multimm.einsum("ij,jk,kl->il", a, b, a, **asked),
    "no product": lambda a, b, **asked: multimm.einsum("ij,ij->i", a, b, **asked),
    "tensordot": lambda a, b, **asked: multimm.tensordot(a, b, 1, **asked),
    "inner": multimm.inner,
    "vecdot": multimm.vecdot,
}
#: The same without numbers.
PLANS = {
    "plan": multimm.plan,
    "of einsum": lambda a, b, **asked: multimm.plan("ij,jk", a, b, **asked),
    "of tensordot": lambda a, b, **asked: multimm.plan(a, b, axes=1, **asked),
}


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("call", CALLS)
def test_numbers_are_those_of_the_default(call, dtype, lazily):
    a, b = (numbers(dtype, seed, lazily) for seed in (1, 2))
    asked, default = (np.asarray(CALLS[call](a, b, **given)) for given in (DOUBLE, {}))
    assert asked.dtype == dtype
    assert np.array_equal(asked, default)


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "int64", "int8", "bool"])
@pytest.mark.parametrize("call", {**CALLS, **PLANS})
def test_products_of_other_dtypes_are_refused(call, dtype, lazily):
    a, b = (numbers(dtype, seed, lazily) for seed in (1, 2))
    with pytest.raises(OptionError, match=r"'float64' of a .* product: it is for float64 and"):
        {**CALLS, **PLANS}[call](a, b, **DOUBLE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "bool"])
def test_a_dtype_that_is_asked_for_keeps_it(dtype):
    a, b = (numbers(dtype, seed) for seed in (1, 2))
    c = multimm.matmul(a, b, dtype="float64", **DOUBLE)
    assert np.array_equal(c, a.astype("float64") @ b.astype("float64"))
    assert multimm.verify(a, b, c, dtype="float64", **DOUBLE)
    with pytest.raises(OptionError, match="dtype='complex128'"):
        multimm.matmul(a, b, dtype="complex64", **DOUBLE)


@pytest.mark.parametrize(
    ("dtype", "alpha", "added"),
    [("float32", 1, "float64"), ("int64", 0.5, None), ("int32", 1, "float64")],
)
def test_a_result_of_float64_whose_sums_are_not_is_refused(dtype, alpha, added):
    a = numbers(dtype)
    c = None if added is None else numbers(added)
    plain = multimm.gemm(alpha, a, a, 1 if added else 0, c)
    assert plain.dtype == "float64"
    with pytest.raises(OptionError, match=f"of a {dtype} product"):
        multimm.gemm(alpha, a, a, 1 if added else 0, c, **DOUBLE)
    with pytest.raises(OptionError, match=f"of a {dtype} product"):
        multimm.verify(a, a, plain, alpha=alpha, beta=1 if added else 0, c0=c, **DOUBLE)


def test_verify():
    a, b = numbers(), numbers(seed=1)
    assert multimm.verify(a, b, a @ b, **DOUBLE)
    assert multimm.verify("ij,jk", a, b, a @ b, **DOUBLE)
    assert not multimm.verify(a, b, a @ b * (1 + 1e-9), **DOUBLE)
    single = [x.astype("float32") for x in (a, b, a @ b)]
    with pytest.raises(OptionError, match="of a float32 product"):
        multimm.verify(*single, **DOUBLE)


def test_kernels_of_float32_do_not_know_it():
    with pytest.raises(OptionError, match=r"allowed are 'float32', 'ieee', 'tf32'$"):
        multimm.gpu.gemm(numbers("float32"), numbers("float32"), **DOUBLE)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_gpus_take_their_fastest_kernels(dtype):
    side, cluster = MatrixSpec((32768, 32768), dtype), ClusterSpec.homogeneous(H200, 2)
    plans = {name: multimm.plan(side, side, precision=name, cluster=cluster)
             for name in ("float64", "float32", "ieee")}  # fmt: skip
    assert str(plans["float64"]) == str(plans["float32"])
    assert plans["float64"].seconds <= plans["ieee"].seconds
    if dtype == "float64":
        assert "residues" in str(plans["float64"])
        assert "residues" not in str(plans["ieee"])
