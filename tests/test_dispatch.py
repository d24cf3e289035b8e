"""Which calls `accelerate()` takes, and what becomes of the others."""

from __future__ import annotations

import logging
import operator
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from accelerating import ours
from dask.blockwise import Blockwise

import multimm
from multimm.errors import ShapeError
from multimm.graph.block_dots import dot


@pytest.fixture
def x():
    return da.from_array(np.arange(20.0).reshape(5, 4), chunks=2)


PRODUCTS = {
    "dask @ dask": lambda x, y: x @ y,
    "dask @ numpy": lambda x, y: x @ y.compute(),
    "numpy @ dask": lambda x, y: x.compute() @ y,
    "list @ dask": lambda x, y: x.compute().tolist() @ y,
    "operator.matmul": operator.matmul,
    "da.matmul": lambda x, y: da.matmul(x, y),
    "da.matmul of numpy and dask": lambda x, y: da.matmul(x.compute(), y),
    "da.dot": lambda x, y: da.dot(x, y),
    "x.dot": lambda x, y: x.dot(y),
    "np.matmul": np.matmul,
    "np.matmul of numpy and dask": lambda x, y: np.matmul(x.compute(), y),
    "np.dot": np.dot,
    "np.dot of numpy and dask": lambda x, y: np.dot(x.compute(), y),
    "np.dot of a vector": lambda x, y: np.dot(x, y[:, 0]),
    "vector.dot": lambda x, y: x[0].dot(y[:, 0]),
    "stacks": lambda x, y: da.stack([x, x]) @ y,
    "da.dot of stacks": lambda x, y: da.dot(da.stack([x, x]), da.stack([y, y, y])),
    "dot of stacks": lambda x, y: da.stack([x, x]).dot(y),
    "dot of a stack and a vector": lambda x, y: np.dot(da.stack([x, x]), y[:, 0]),
    "da.tensordot": lambda x, y: da.tensordot(x, y, 1),
    "da.tensordot by name": lambda x, y: da.tensordot(lhs=x, rhs=x, axes=((0,), (0,))),
    "np.tensordot": lambda x, y: np.tensordot(x, x, axes=([0, 1], [0, 1])),
    "np.tensordot of numpy and dask": lambda x, y: np.tensordot(x.compute(), y, 1),
    "da.einsum": lambda x, y: da.einsum("ij,jk->ki", x, y),
    "da.einsum of lists": lambda x, y: da.einsum(x, [0, 1], y, [1, 2], [2, 0]),
    "np.einsum": lambda x, y: np.einsum("ij,jk,kl->il", x, y, x, optimize=True),
    "np.einsum of numpy and dask": lambda x, y: np.einsum("ij,jk", x.compute(), y),
    "einsum with a dtype": lambda x, y: da.einsum("ij,jk", x, y, dtype="c16", split_every=2),
    "da.vdot": lambda x, y: da.vdot(x, x),
    "da.cov": lambda x, y: da.cov(x),
}
#: Dask has none of these: NumPy computes them at once, with a warning.
COMPUTED = {
    "np.inner": lambda x, y: np.inner(x, x),
    "np.inner of stacks": lambda x, y: np.inner(x[None], x),
    "np.inner with a number": lambda x, y: np.inner(x, 2),
    "np.linalg.multi_dot": lambda x, y: np.linalg.multi_dot([x, y, x, y[:, 0]]),
    "np.linalg.multi_dot of two": lambda x, y: np.linalg.multi_dot([x[0], y]),
    "np.linalg.matmul": lambda x, y: np.linalg.matmul(x, y),
    "np.linalg.tensordot": lambda x, y: np.linalg.tensordot(x, y, axes=1),
    "np.linalg.vecdot": lambda x, y: np.linalg.vecdot(x, x),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_way_to_a_product_is_taken(x, name):
    product = PRODUCTS[name]
    expected = product(x, x.T)
    assert not ours(expected)
    with multimm.accelerate():
        result = product(x, x.T)
    assert ours(result)
    assert isinstance(result, da.Array)
    assert (result.chunks, result.dtype) == (expected.chunks, expected.dtype)
    np.testing.assert_array_equal(result.compute(), expected.compute())
    assert not ours(product(x, x.T))


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
@pytest.mark.parametrize("name", ["da.dot", "np.dot", "x.dot", "da.vdot", "@", "da.tensordot"])
def test_of_two_vectors_comes_what_comes_of_dasks_product(x, name, dtype):
    v, product = x[:, 0].astype(dtype), {**PRODUCTS, "@": operator.matmul}[name]
    with multimm.accelerate():
        found = product(v, v)
    theirs = product(v, v)
    assert ours(found)
    assert type(found.compute()) is type(theirs.compute())  # a scalar, but of matmul
    np.testing.assert_array_equal(found, theirs)


def test_matmul_takes_a_dtype_which_dask_has_none_for(x):
    y = x.astype("int8")
    with multimm.accelerate() as report:
        result = np.matmul(y * 40, y.T, dtype="int32")
    expected = np.matmul(y.compute() * np.int8(40), y.compute().T, dtype="int32")
    assert len(report.taken) == 1
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result.compute(), expected)


WHY = {
    "ii": "one operand",
    "iij->j": "one operand",
    "ij,kj->ikj": "no axis of two operands is summed over",
    "ij,kl->ik": "no axis of two operands is summed over",
    "ij,ij->i": "the result has no axis of one operand alone",
    "ij,ij,ij->j": "the result has no axis of one operand alone",
}


@pytest.mark.parametrize("subscripts", WHY)
def test_the_report_says_why_a_sum_is_no_product(subscripts):
    terms = subscripts.partition("->")[0].split(",")
    arrays = [da.ones((3,) * len(term), chunks=2) for term in terms]
    with multimm.accelerate() as report:
        result = da.einsum(subscripts, *arrays)
    assert [call.note for call in report.left] == [f"no product of matrices: {WHY[subscripts]}"]
    np.testing.assert_array_equal(
        result.compute(), np.einsum(subscripts, *(x.compute() for x in arrays))
    )


@pytest.mark.parametrize("name", COMPUTED)
def test_what_dask_has_none_of_is_lazy_inside(x, name):
    product = COMPUTED[name]
    expected = product(x.compute(), x.T.compute())
    with multimm.accelerate() as report:
        result = product(x, x.T)
    assert isinstance(result, da.Array)
    assert len(report.taken) == 1
    np.testing.assert_array_equal(result.compute(), expected)
    with pytest.warns(FutureWarning, match="not implemented by Dask"):
        assert not isinstance(product(x, x.T), da.Array)


def test_vecdot_needs_no_single_chunk_inside(x):
    with multimm.accelerate() as report:
        result = np.vecdot(x, x[0])
        along = np.vecdot(x, x, axis=0)
    y = x.compute()
    np.testing.assert_array_equal(result.compute(), y @ y[0])
    np.testing.assert_array_equal(along.compute(), (y * y).sum(0))
    assert [call.function for call in report.taken] == ["vecdot"] * 2
    with pytest.raises(ValueError, match="multiple chunks"):
        np.vecdot(x, x[0])


@pytest.mark.skipif(not hasattr(np, "vecmat"), reason="NumPy has it from 2.2 on")
@pytest.mark.parametrize("dtype", ["f8", "c16", "i4", "?"])
@pytest.mark.parametrize("shapes", [((4, 6), (6,)), ((3, 4, 6), (6,)), ((3, 4, 6), (1, 6))])
def test_matrices_and_vectors_of_a_stack(shapes, dtype):
    """Whatever the chunks along k; the vector before a matrix is conjugated."""
    rng = np.random.default_rng(0)
    x, v = ((rng.integers(-5, 6, s) + 1j * rng.integers(-5, 6, s)) for s in shapes)
    x, v = (z.astype(dtype) if dtype == "c16" else z.real.astype(dtype) for z in (x, v))
    a, w = (da.from_array(z, chunks=tuple(-(-n // 2) for n in z.shape)) for z in (x, v))
    with multimm.accelerate() as report:
        found = np.matvec(a, w), np.vecmat(w, a.swapaxes(-1, -2)), np.matvec(a, v)
    expected = np.matvec(x, v), np.vecmat(v, x.swapaxes(-1, -2)), np.matvec(x, v)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.compute(), other)
    assert [call.function for call in report.taken] == ["matvec", "vecmat", "matvec"]


@pytest.mark.skipif(not hasattr(np, "vecmat"), reason="NumPy has it from 2.2 on")
@pytest.mark.parametrize(
    "call",
    [
        lambda one, x: np.matvec(one, x),
        lambda one, x: np.matvec(x, one[0]),
        lambda one, x: np.vecmat(one[0], x),
        lambda one, x: np.vecmat(x, one),
        lambda one, x: np.linalg.multi_dot([one, x]),
        lambda one, x: np.linalg.multi_dot([x, x.T, one, x]),
    ],
)
def test_an_axis_of_length_1_is_not_broadcast_where_numpy_refuses_it(x, call):
    """einsum has it broadcast, which the rest is made with."""
    one = da.ones((1, 1))
    with pytest.raises(ValueError, match=r"mismatch|not aligned"):
        call(np.ones((1, 1)), x.compute())
    with multimm.accelerate(), pytest.raises(ShapeError, match="of one length"):
        call(one, x)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "float32"])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_dask_has_none_of_has_numpys_dtype(name, dtype):
    x = np.random.default_rng(0).integers(0, 2, (5, 4)).astype(dtype)
    y = da.from_array(x, chunks=2)
    expected = COMPUTED[name](x, x.T)
    with multimm.accelerate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of narrow sums, and NumPy's of what it computes
        found = COMPUTED[name](y, y.T)
    np.testing.assert_array_equal(np.asarray(found), expected, strict=True)


def test_a_chain_that_numpy_refuses_is_left_to_it(x):
    with multimm.accelerate() as report, pytest.warns(FutureWarning), pytest.raises(ValueError):  # noqa: PT011
        np.linalg.multi_dot([x])
    assert "vectors at its ends" in report.left[0].note


@pytest.mark.parametrize("kinds", ["??f", "i??", "?f?", "f?d", "???"])
def test_a_chain_of_bools_and_numbers_has_numpys_elements(kinds):
    arrays = [np.ones((4, 4), dtype) for dtype in kinds]
    expected = np.linalg.multi_dot(arrays)
    with multimm.accelerate() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NumPy's own
        found = np.linalg.multi_dot([da.from_array(x, chunks=2) for x in arrays])
    assert len(report.left) == (1 < kinds.count("?") < 3)
    np.testing.assert_array_equal(np.asarray(found), expected, strict=True)


@pytest.mark.parametrize("name", ["solve", "inv", "cholesky", "lu", "qr", "svd", "lstsq"])
def test_blocks_are_multiplied_inside_of_dasks_algorithms(name):
    rng = np.random.default_rng(0)
    square = da.from_array(rng.random((12, 12)) + 12 * np.eye(12), chunks=4)
    tall = da.from_array(rng.random((24, 3)), chunks=(6, 3))
    calls = {
        "solve": lambda: da.linalg.solve(square, square[:, :4]),
        "inv": lambda: da.linalg.inv(square),
        "cholesky": lambda: da.linalg.cholesky(square @ square.T, lower=True),
        "lu": lambda: da.linalg.lu(square)[2],
        "qr": lambda: da.linalg.qr(tall)[0],
        "svd": lambda: da.linalg.svd(tall)[0],
        "lstsq": lambda: da.linalg.lstsq(tall, tall[:, 0])[0],
    }
    right = calls[name]()
    with multimm.accelerate() as report:
        found = calls[name]()
    assert found.chunks == right.chunks
    np.testing.assert_allclose(found.compute(), right.compute(), rtol=1e-12, atol=1e-14)
    assert any("product of blocks" in call.note for call in report.taken)
    called = [x for layer in found.dask.layers.values() for x in called_in(layer)]
    assert dot in called
    assert np.dot not in called


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_solving_in_single_precision(dtype):
    """Dask's lu has blocks of zeros in double precision whatever its matrix is."""
    square = np.random.default_rng(0).random((12, 12)).astype(dtype) + 12 * np.eye(12, dtype=dtype)
    lazy = da.from_array(square, chunks=4)
    calls = [
        lambda: da.linalg.inv(lazy) @ lazy,
        lambda: da.linalg.solve(lazy, lazy[:, :4]),
        lambda: multi(da.linalg.lu(lazy)),
    ]

    def multi(factors):
        p, lower, upper = factors
        return p @ lower @ upper

    for call in calls:
        right = call().compute()
        with multimm.accelerate() as report:
            found = call()
        assert report.taken
        np.testing.assert_allclose(found.compute(), right, rtol=1e-5, atol=1e-5)


def called_in(layer):
    if isinstance(layer, Blockwise):
        return [layer.task.func]
    return [found for task in layer.mapping.values() for found in functions(task)]


def functions(task):
    """All functions that a task calls, as Dask writes tasks by hand."""
    if isinstance(task, tuple | list):
        return [found for part in task for found in functions(part)]
    return [task] if callable(task) else []


def test_the_tasks_of_operands_are_left_alone():
    blocks = {("mine", 0, 0): (np.dot, np.eye(3), 2 * np.eye(3))}
    x = da.Array(blocks, "mine", ((3,), (3,)), dtype=float)
    with multimm.accelerate():
        u = da.linalg.solve(x, x)
    assert np.dot in functions(u.dask.layers["mine"]["mine", 0, 0])
    np.testing.assert_array_equal(u.compute(), np.eye(3))


def test_dataarrays_are_taken_below_opt_einsums_table(x):
    import opt_einsum
    import xarray as xr

    a, b = xr.DataArray(x, dims=("i", "k")), xr.DataArray(x.T, dims=("k", "j"))
    c = xr.DataArray(x, dims=("j", "l"))
    opt_einsum.contract("ij,jk", x, x.T)  # it keeps Dask's own functions
    products = (lambda: a @ b, lambda: a.dot(b), lambda: xr.dot(a, b, c))
    for product in products:
        expected = product()
        with multimm.accelerate() as report:
            found = product()
        assert isinstance(found, xr.DataArray)
        assert report.taken
        assert not report.left
        assert ours(found.data)
        assert found.chunks == expected.chunks
        xr.testing.assert_identical(found.compute(), expected.compute())
        assert not ours(product().data)


def test_the_report_says_what_was_taken_and_what_was_left_and_why(x):
    with multimm.accelerate() as report:
        x @ x.T
        with multimm.accelerate() as inner:
            da.tensordot(x, x, ((0,), (0,)))
            da.tensordot(x, x, ((0,), (0,)))
        da.einsum("ij->i", x)
    assert [call.function for call in report.taken] == ["matmul", "tensordot", "tensordot"]
    assert [call.function for call in inner.taken] == ["tensordot"] * 2
    assert inner.left == []
    assert [call.operands for call in report.left] == [("5x4 float64",)]
    assert report.left[0].note == "no product of matrices: one operand"
    assert "tensordot of 5x4 float64 and 5x4 float64: 1 x product (2 times)" in str(report)
    assert repr(report) == "<accelerate(): 3 calls taken, 1 left to Dask>"
    da.tensordot(x, x, ((0,), (0,)))
    assert len(report.taken) == 3


def with_mask(x):
    return da.ma.masked_greater(x, 100)


LEFT_TO_DASK = {
    "objects": lambda x: x.astype(object) @ x.T.astype(object),
    "objects in memory": lambda x: x.compute().astype(object) @ x.T,
    "no objects in memory": lambda x: x[:, :0] @ np.empty((0, 3), object),
    "masked blocks": lambda x: with_mask(x) @ with_mask(x.T),
    "unknown chunks": lambda x: x[x[:, 0] > 0] @ x.T,
    "sums of one operand": lambda x: da.einsum("ij->j", x),
    "products of elements": lambda x: np.einsum("ij,ij->ij", x, x),
    "outer products": lambda x: da.tensordot(x, x, 0),
    "einsum of objects": lambda x: da.einsum("ij,jk", x.astype(object), x.T.astype(object)),
    "tensordot of unknown chunks": lambda x: da.tensordot(x[x[:, 0] > 0], x.T, 1),
    "an order of NumPy's": lambda x: da.einsum("ij,jk", x, x.T, order="F"),
    "keywords": lambda x: da.matmul(a=x, b=x.T),
}


@pytest.mark.parametrize("name", LEFT_TO_DASK)
@pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning")
def test_the_rest_is_left_to_dask(x, name, caplog):
    product = LEFT_TO_DASK[name]
    expected = product(x).compute()
    with multimm.accelerate(), caplog.at_level(logging.DEBUG, "multimm.dispatch"):
        result = product(x)
    assert not ours(result)
    assert "left to Dask" in caplog.text
    np.testing.assert_array_equal(np.asarray(result.compute()), np.asarray(expected))


@pytest.mark.parametrize("product", [np.inner, lambda *both: np.linalg.multi_dot(both)])
@pytest.mark.filterwarnings("ignore:.*not implemented by Dask:FutureWarning")
def test_a_delayed_value_is_left_to_numpy(x, product):
    """Its attributes are delayed, too: nobody can tell its shape for the report."""
    square = x[:4].compute()
    with multimm.accelerate() as report:
        result = product(x, dask.delayed(square))
    assert "lazy but no Dask array" in report.left[0].note
    np.testing.assert_array_equal(result, product(x.compute(), square))


@pytest.mark.parametrize(
    "product",
    [
        lambda x: da.matmul(x, 3),
        lambda x: np.matmul(x, 3),
        lambda x: np.matmul(x, x.T, out=x),
        lambda x: da.matmul(x),
        lambda x: da.matmul(x, x.T, x),
    ],
)
def test_dask_refuses_as_before(x, product):
    def outcome():
        with pytest.raises((TypeError, ValueError)) as caught:
            product(x)
        return type(caught.value), str(caught.value)

    expected = outcome()
    with multimm.accelerate():
        assert outcome() == expected


OF_INTEGERS = {
    "@": operator.matmul,
    "dot": lambda x, y: da.dot(x, y),
    "method": lambda x, y: x.dot(y),
    "tensordot": lambda x, y: da.tensordot(x, y, axes=1),
    "einsum": lambda x, y: da.einsum("ij,jk->ik", x, y),
    "three operands": lambda x, y: da.einsum("ij,jk,kl->il", x, y, y),
    "dot of a stack": lambda x, y: da.dot(x[None], y),
}


@pytest.mark.parametrize("chunks", [(10, 30), (30, 30), (10, 10)])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64"])
@pytest.mark.parametrize("name", [*OF_INTEGERS, "vectors", "with NumPy's"])
def test_sums_of_integers_have_dasks_dtype_and_are_exact_in_it(name, dtype, chunks):
    def product(x, y):
        if name == "with NumPy's":
            return x @ np.full((30, 30), 11, x.dtype)
        return x[0] @ y[:, 0] if name == "vectors" else OF_INTEGERS[name](x, y)

    x, y = (da.full((30, 30), 11, chunks=own, dtype=dtype) for own in (chunks, chunks[::-1]))
    with multimm.accelerate():
        result = product(x, y)
    theirs, wide = product(x, y), product(x.astype("int64"), y.astype("int64"))
    assert ours(result)
    assert result.dtype == theirs.dtype == result.compute().dtype
    wraps = chunks[1] == 30 and name in ("@", "vectors", "with NumPy's")  # as Dask's does
    np.testing.assert_array_equal(result.compute(), (theirs if wraps else wide).compute())


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_sums_of_bools_are_dasks(name):
    y, product = da.ones((30, 30), chunks=10, dtype=bool), OF_INTEGERS[name]
    with multimm.accelerate() as report:
        result = product(y, y)
    assert "sums of bool" in report.left[0].note
    np.testing.assert_array_equal(result.compute(), product(y, y).compute())


def test_nothing_is_computed(x):
    def refuse(*args, **kwargs):
        raise AssertionError("computed while the graph is built")

    y = x.compute()
    with dask.config.set(scheduler=refuse), multimm.accelerate():
        assert ours(x @ x.T)
        assert ours(y @ x.T)
        assert ours(np.dot(x, x.T))
