from __future__ import annotations

import itertools
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repeated import others_slow
from small import same_bits

import multimm
from multimm import products
from multimm.errors import DTypeError, OptionError, ShapeError
from multimm.gpu import library_gemm
from multimm.graph.label import Kind
from multimm.planning.spec import MatrixSpec


def integers(rng, shape, dtype="f4"):
    return rng.integers(-3, 4, shape).astype(dtype)


@given(
    sizes=st.tuples(*[st.integers(0, 12)] * 3),
    edges=st.tuples(*[st.integers(1, 13)] * 3),
    trans=st.tuples(st.booleans(), st.booleans()),
    alpha=st.sampled_from([0, 1, -2, 3.0]),
    beta=st.sampled_from([0, 1, -1, 2.0]),
    dtype=st.sampled_from(["float32", "float64", "complex64", "float16"]),
    options=st.sampled_from([{}, {"slabs": 2}, {"slabs": 2, "p_k": 2}, {"blocks": 5, "p_k": 3}]),
    seed=st.integers(0, 2**32),
)
def test_small_integers_are_exact(sizes, edges, trans, alpha, beta, dtype, options, seed):
    rng = np.random.default_rng(seed)
    m, k, n = sizes
    a, b, c = (integers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    right = alpha * (a.astype("c16") @ b.astype("c16")) + beta * c.astype("c16")
    right = right.astype(dtype) if dtype == "complex64" else right.real.astype(dtype)
    a, b = (x.T if flip else x for x, flip in zip((a, b), trans, strict=True))
    flags = {"trans_a": trans[0], "trans_b": trans[1], "beta": beta, **options}
    eager = multimm.gemm(alpha, a, b, c=c, **flags)
    same_bits(eager, right)
    assert eager.flags.c_contiguous
    lazy = [da.from_array(x, edge) for x, edge in zip((a, b, c), edges, strict=True)]
    result = multimm.gemm(alpha, *lazy[:2], c=lazy[2], **flags)
    assert isinstance(result, da.Array)
    assert result.dtype == right.dtype
    same_bits(result.compute(scheduler="sync"), right)


@pytest.mark.parametrize("lazy", [False, True])
def test_beta_zero_never_reads_c(lazy):
    x, c = np.ones((4, 4), np.float32), np.full((4, 4), np.nan, np.float32)
    if lazy:
        x, c = da.from_array(x, 2), da.from_array(c, 2, name="not-to-be-read")
    result = multimm.gemm(1, x, x, 0, c)
    if lazy:
        assert "not-to-be-read" not in str(dict(result.__dask_graph__()))
        result = result.compute()
    assert (result == 4).all()


@pytest.mark.parametrize("lazy", [False, True])
def test_alpha_zero_never_reads_a_and_b(lazy):
    x, c = np.full((4, 4), np.nan, np.float32), np.ones((4, 4), np.float32)
    if lazy:
        x, c = da.from_array(x, 2), da.from_array(c, 2)
    result = np.asarray(multimm.gemm(0, x, x, 3, c, slabs=2))
    assert (result == 3).all()
    assert (np.asarray(multimm.gemm(0, x, x)) == 0).all()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64"])
def test_integers_stay_integers_and_wrap(dtype):
    rng = np.random.default_rng(2)
    info = np.iinfo(dtype)
    shapes = ((9, 8), (8, 7), (9, 7))
    a, b, c = (rng.integers(info.min, info.max, s, dtype, endpoint=True) for s in shapes)
    right = a.dtype.type(3) * (a @ b) + a.dtype.type(5) * c
    same_bits(multimm.gemm(3, a, b, 5, c), right)
    lazy = [da.from_array(x, 4) for x in (a, b, c)]
    same_bits(multimm.gemm(3, *lazy[:2], 5, lazy[2], slabs=3).compute(), right)
    half = multimm.gemm(0.5, *lazy[:2])
    assert half.dtype == (0.5 * (a @ b)).dtype
    same_bits(half.compute(), 0.5 * (a @ b))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "dtype",
    others_slow(
        ["bool", "int8", "uint16", "int64", "f2", "f4", "f8", "F", "D"],
        *("bool", "uint16", "f2", "f4", "D"),
    ),
)
def test_the_result_dtype_depends_on_types_not_on_values(dtype, lazy):
    a, b = np.array([[1, 0], [2, 1]]).astype(dtype), np.array([[1, 3], [0, 1]]).astype(dtype)
    whole = (0, 1, True, np.int64(1), np.uint8(0)) + (() if dtype == "bool" else (2, np.int8(3)))
    scalars = {int: whole, float: (0.0, 1.0, 0.5, np.float32(1)), complex: (0j, 1 + 0j, 2j)}
    x, y = (da.from_array(a, 1), da.from_array(b, 1)) if lazy else (a, b)
    for kind, values in scalars.items():
        right = np.dtype(dtype) if kind is int else (kind(2) * (a @ b)).dtype
        for alpha in values:
            same_bits(multimm.gemm(alpha, x, y), (np.asarray(alpha).item() * (a @ b)).astype(right))
            for c in (a, a.real.astype("f4"), a.astype("c16")):
                added = c.dtype if kind is int else (kind(2) * c).dtype
                both = np.result_type(dtype, added)
                z = da.from_array(c, 1) if lazy else c
                assert multimm.gemm(1, x, y, alpha, z).dtype == both
                assert np.asarray(multimm.gemm(1, x, y, alpha, z)).dtype == both


@pytest.mark.parametrize("lazy", [False, True])
def test_a_float_scalar_of_one_widens_before_c_is_added(lazy):
    """127 + 127 and 2 * 100 wrap in int8, and not in float64."""
    x, y = np.full((2, 2), 127, np.int8), np.eye(2, dtype=np.int8)
    a, b, c = (da.from_array(z, 1) if lazy else z for z in (x, y, x))
    for alpha, beta in ((1.0, 1), (1, 1.0), (1.0, 1.0)):
        same_bits(multimm.gemm(alpha, a, b, beta, c), np.full((2, 2), 254.0))
    same_bits(multimm.gemm(1, a, b, 1, c), np.full((2, 2), -2, np.int8))
    wide = np.zeros((2, 2))
    same_bits(multimm.gemm(2, a, b, 1, wide), np.full((2, 2), -2.0))
    same_bits(multimm.gemm(2.0, a, b, 1, wide), np.full((2, 2), 254.0))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "alpha", "beta", "said"),
    [
        ("int8", 300, 0, "300 does not fit int8, the dtype of the product"),
        ("uint8", -1, 0, "-1 does not fit uint8"),
        ("int64", 2**70, 0, "does not fit int64"),
        ("float32", 10**400, 0, "does not fit float32"),
        ("bool", 2, 0, "2 does not fit bool"),
        ("int8", 1, -129, "-129 does not fit int8, the dtype of c"),
        ("bool", 1, 3, "3 does not fit bool, the dtype of c"),
    ],
)
def test_integer_scalars_that_do_not_fit(dtype, alpha, beta, said, lazy):
    x = np.ones((4, 4), dtype)
    a = da.from_array(x, 2) if lazy else x
    with pytest.raises(OptionError, match=f"{said}.*astype"):
        multimm.gemm(alpha, a, a, beta, x)


def test_c_without_a_dtype_in_common():
    x = np.ones((4, 4), np.int32)
    with pytest.raises(DTypeError, match="c has dtype bfloat16 and the product int32"):
        multimm.gemm(1, x, x, 1, x.astype(ml_dtypes.bfloat16))
    with pytest.raises(DTypeError, match="c has dtype object"):
        multimm.gemm(1, np.eye(4), np.eye(4), 1, np.eye(4).astype(object))


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        (Fraction(5, 2), 2.5),
        (Decimal("2.5"), 2.5),
        (np.array(2.5, np.float32), 2.5),
        (np.array(2), 2),
        (np.array(True), True),
        (np.array(1j, np.complex64), 1j),
        (np.array(Fraction(5, 2)), 2.5),
        (ml_dtypes.bfloat16(2.5), 2.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_numbers_of_any_library_count_as_pythons(scalar, plain, dtype):
    x = np.eye(3, dtype=dtype)
    right = multimm.gemm(plain, x, x, plain, x)
    same_bits(multimm.gemm(scalar, x, x, scalar, x), right)
    same_bits(multimm.gemm(scalar, da.from_array(x, 2), x, scalar, x).compute(), right)
    options = {"alpha": scalar, "beta": scalar}
    plain_options = {"alpha": plain, "beta": plain}
    assert multimm.plan(x, x, c=x, **options) == multimm.plan(x, x, c=x, **plain_options)
    assert multimm.verify(x, x, right, c0=x, **options)


@pytest.fixture
def made(monkeypatch):
    """The plans of lazy products, in order."""
    plans, build = [], products.build
    here = products.local(gpu=False)  # what memory is free may change meanwhile
    monkeypatch.setattr(products, "local", lambda **_: here)
    monkeypatch.setattr(
        products, "build", lambda made, *rest: plans.append(made) or build(made, *rest)
    )
    return plans


@pytest.mark.parametrize(
    ("dtype", "alpha", "beta", "added"),
    [("f4", 1, 0, None), ("f4", 2, 1, "f4"), ("f4", 1, 0, "f8"), ("i2", 0.5, 0, None)],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_plan_is_what_gemm_does(dtype, alpha, beta, added, symmetric, made):
    a = da.ones((2000, 900), chunks=500, dtype=dtype)
    b = a if symmetric else da.ones((1500, 900), chunks=700, dtype=dtype)
    c = None if added is None else da.ones((2000, b.shape[0]), chunks=900, dtype=added)
    options = {"trans_b": True, "blocks": 500, "slabs": 300}
    result = multimm.gemm(alpha, a, b, beta, c, **options)
    plan = multimm.plan(a, b, alpha=alpha, beta=beta, c=c, **options)
    assert made == [plan]
    kinds = [task.label.kind for task in result.dask.layers[result.name].values()]
    # What brings operands into its blocks comes on top.
    assert sum(kind not in (Kind.CUT, Kind.JOIN) for kind in kinds) == plan.tasks
    if c is not None:
        c = MatrixSpec(c.shape, str(c.dtype), c.dtype.itemsize, c.chunks)
    assert multimm.plan(a, b, alpha=alpha, beta=beta, c=c, **options) == plan
    if beta or added or alpha == 0.5:
        without = multimm.plan(a, b, **options)
        assert plan.peak_bytes > without.peak_bytes


@pytest.mark.parametrize("lazy", list(itertools.product((False, True), repeat=3)))
def test_plan_cuts_arrays_in_memory_as_gemm_does(lazy, made):
    rng = np.random.default_rng(4)
    given = [rng.normal(size=s) for s in ((900, 1100), (1100, 700), (900, 700))]
    with dask.config.set({"array.chunk-size": "100kB"}):
        a, b, c = (
            da.from_array(x, 450) if flag else x for x, flag in zip(given, lazy, strict=True)
        )
        multimm.gemm(1, a, b, 1, c)
        plan = multimm.plan(a, b, beta=1, c=c)
    # What memory is free may change meanwhile. Of arrays in memory alone nothing is planned.
    made = [replace(each, cluster=plan.cluster) for each in made]
    assert made == [plan] * any(lazy)


@pytest.mark.parametrize("call", ["eager", "lazy", "plan"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"b": np.ones((4, 5))}, ShapeError, r"\(4, 5\)"),
        ({"trans_a": True}, ShapeError, r"\(3, 4\)|\(4, 5\)"),
        ({"a": np.ones((2, 3, 4))}, ShapeError, "matri"),
        ({"a": np.ones(3)}, ShapeError, "matri"),
        ({"beta": 1}, OptionError, "beta=1"),
        ({"beta": 1, "c": np.ones((3, 6))}, ShapeError, r"\(3, 6\)"),
        ({"beta": 1, "c": np.ones(5)}, ShapeError, r"\(5,\)"),
        ({"beta": 1, "c": np.full((3, 7), None)}, DTypeError, "object"),
        ({"alpha": np.ones(3)}, OptionError, r"alpha .* of shape \(3,\): .* 0 dimensions"),
        ({"beta": np.ones((3, 7)), "c": np.ones((3, 7))}, OptionError, r"alpha and beta .*\(3, 7"),
        ({"beta": np.ones((3, 7))}, OptionError, r"beta .* \(3, 7\)"),
        ({"alpha": "2"}, OptionError, "alpha"),
        ({"alpha": Fraction(10**400)}, OptionError, "alpha"),
        ({"beta": None, "c": np.ones((3, 7))}, OptionError, "beta"),
        (dict.fromkeys("ab", np.ones((4, 4), "i1")) | {"alpha": 300}, OptionError, "300 does not"),
    ],
)
def test_bad_input_is_refused_at_the_call(change, error, message, call):
    given = {"alpha": 2, "a": np.ones((3, 4)), "b": np.ones((4, 7))} | change
    if call == "lazy":
        given = {
            name: da.from_array(x, 2) if name in "abc" and isinstance(x, np.ndarray) else x
            for name, x in given.items()
        }
    if change == {"b": change.get("b")}:
        given["trans_b"] = True
    with pytest.raises(error, match=message) as caught:
        (multimm.plan if call == "plan" else multimm.gemm)(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize("columns", [library_gemm.COLUMNS, library_gemm.COLUMNS + 1, 3])
def test_long_doubles_have_the_bits_of_numpys_own_loop(dtype, columns):
    """They are multiplied some columns at a time; no sum is made in another order for it."""
    assert np.dtype(dtype).char in library_gemm.WITHOUT_BLAS
    rng = np.random.default_rng(1)
    a, b = (rng.random(shape).astype(dtype) / 3 for shape in ((2, 4, 5), (2, 5, columns)))
    same_bits(library_gemm.gemm(a, b), a @ b)
    turned = {"trans_a": True, "trans_b": True}
    same_bits(library_gemm.gemm(a.swapaxes(1, 2), b.swapaxes(1, 2), **turned), a @ b)
