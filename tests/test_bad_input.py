from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager

import dask
import dask.array as da
import dask.bag as db
import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from commands import python

import multimm
from multimm import io
from multimm.errors import (
    ArrayTypeError,
    DTypeError,
    MultimmError,
    OptionError,
    ShapeError,
    kind_of,
)
from multimm.gpu.problem import product_shape
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec

pytestmark = pytest.mark.usefixtures("no_compute")


def gemm(a, b, **options):
    return multimm.gemm(1, a, b, **options)


@contextmanager
def refused(error, *said):
    """Expect the error, in one line that says every one of `said`."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert isinstance(caught.value, MultimmError)
    assert "\n" not in message
    for word in said:
        assert word in message


class Lines:
    """As an xarray.Dataset, it is shown in several lines."""

    def __repr__(self):
        return "one\n  two"


@pytest.mark.parametrize("scalar", [3, 2.5, np.float64(3), np.array(3), da.from_array(np.array(3))])
def test_scalars(scalar):
    x = da.ones((3, 3), chunks=2)
    for operands in ((x, scalar), (scalar, x), (scalar, scalar)):
        with refused(ShapeError, "()", "dimension"):
            multimm.matmul(*operands)
    with refused(ShapeError, "()"):
        gemm(x, scalar)
    with refused(ShapeError, "()"):
        multimm.transpose(scalar)


@pytest.mark.parametrize("given", [dask.delayed(2.0), np.zeros(3, "datetime64[s]"), Lines(), "2"])
def test_factors_that_are_no_numbers(given):
    x = da.ones((3, 3), chunks=2)
    for factors in ((given, x, x), (1, x, x, given, x)):
        with refused(OptionError, "alpha and beta are numbers", type(given).__name__):
            multimm.gemm(*factors)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.ones((3, 3), object), "object"),
        (np.full((3, 3), "a"), "<U1"),
        (np.full((3, 3), b"a"), "|S1"),
        (np.full((3, 3), "a", np.dtypes.StringDType()), "String"),
        (np.zeros((3, 3), "datetime64[s]"), "datetime64[s]"),
        (np.zeros((3, 3), "timedelta64[ns]"), "timedelta64[ns]"),
        (np.zeros((3, 3), [("x", "f4"), ("y", "f4")]), "'x'"),
        (np.zeros((3, 3), "V4"), "V4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dtypes_without_a_product(array, named, lazy):
    if lazy:
        array = da.from_array(array, chunks=2, meta=array[:0, :0])
    other = np.ones((3, 3), np.float32)
    for call in (multimm.matmul, gemm, multimm.plan):
        for operands in ((array, other), (other, array), (array, array)):
            with refused(DTypeError, named):
                call(*operands)
    with refused(DTypeError, named):
        multimm.transpose(array)


def test_what_is_nearly_allowed():
    """An integer, and a letter, of another kind."""
    x = np.ones((3, 3), "i1")
    with refused(DTypeError, "int4", "integers of 8 to 64 bits"):
        multimm.matmul(x.astype(ml_dtypes.int4), x)
    with refused(OptionError, "'ä'", "a to z, A to Z"):
        multimm.einsum("iä,äk->ik", x, x)


class ndarray:
    """As much of a CuPy array as the checks may look at."""

    def __init__(self, shape, dtype="float32"):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.ndim = len(self.shape)

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("an array on a GPU was looked at before its kind was known to fit")

    def __array_function__(self, function, types, args, kwargs):
        if function is np.empty_like:
            return ndarray(kwargs.get("shape", self.shape), kwargs.get("dtype", self.dtype))
        return NotImplemented

    def __getitem__(self, index):
        return ndarray((0,) * self.ndim, self.dtype)


ndarray.__module__ = "cupy"


def test_operands_on_different_devices():
    gpu, cpu = (da.ones((4, 4), chunks=2, dtype="float32") for _ in "gc")
    gpu._meta = ndarray((0, 0))
    for operands in ((gpu, cpu), (cpu, gpu), (gpu, np.ones((4, 4))), (ndarray((4, 4)), cpu)):
        for call in (multimm.matmul, gemm):
            with refused(ArrayTypeError, "GPU", "CPU", "cupy.asarray"):
                call(*operands)
    with refused(ArrayTypeError, "GPU", "CPU"):
        multimm.gemm(1, cpu, cpu, 1, gpu)
    with refused(ArrayTypeError, "GPU", "CPU"):
        multimm.verify(cpu, cpu, gpu)


def test_unknown_chunk_sizes():
    x = da.ones((6, 6), chunks=3)
    unknown = x[x[:, 0] > 0]
    for operands in ((unknown, x), (x, unknown.T)):
        for call in (multimm.matmul, gemm, multimm.plan):
            with refused(ShapeError, "unknown chunk sizes", "compute_chunk_sizes()"):
                call(*operands)
    with refused(ShapeError, "compute_chunk_sizes()"):
        multimm.transpose(unknown)
    with refused(ShapeError, "compute_chunk_sizes()"):
        multimm.gemm(1, x, x, 1, unknown)


def refusal(array, name="a"):
    """What each call says about it."""
    dense = np.ones((3, 3))
    calls = {
        "a": [
            lambda: multimm.matmul(array, dense),
            lambda: gemm(array, da.ones((3, 3))),
            lambda: multimm.transpose(array),
            lambda: multimm.plan(array, dense),
            lambda: multimm.verify(array, dense, dense),
        ],
        "b": [lambda: multimm.matmul(dense, array)],
        "c": [lambda: multimm.gemm(1, dense, dense, 1, array)],
    }
    messages = set()
    for call in calls[name]:
        with pytest.raises(ArrayTypeError) as caught:
            call()
        messages.add(str(caught.value))
    assert len(messages) == 1
    return messages.pop()


def advised(array):
    """The operand as the message for it says to convert it."""
    advice = re.split(", with |, if ", refusal(array).rpartition("; pass ")[2])[0]
    return eval(advice, {"a": array, "dask": dask, "numpy": np, "value": 7})


def test_masked_blocks():
    eager = np.ma.masked_less(np.arange(9.0).reshape(3, 3), 4)
    lazy = da.ma.masked_less(da.arange(9.0, chunks=9).reshape(3, 3), 4)
    for name in "abc":
        assert f"{name} is a numpy.ma.MaskedArray" in refusal(eager, name)
        assert f"{name}.filled(value)" in refusal(eager, name)
        assert f"a block of {name} is a numpy.ma.MaskedArray" in refusal(lazy, name)
        assert f"dask.array.ma.filled({name}, value)" in refusal(lazy, name)
    for array in (eager, lazy):
        assert "asarray" not in refusal(array)  # it drops the mask, and hidden values count
        with dask.config.set(scheduler="synchronous"):
            filled = np.asarray(multimm.matmul(advised(array), np.eye(3)))
        np.testing.assert_array_equal(filled, [[7, 7, 7], [7, 4, 5], [6, 7, 8]])


@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array", "coo_array"])
def test_sparse_matrices(kind):
    kind = getattr(pytest.importorskip("scipy.sparse"), kind)
    eager = kind(np.eye(3))
    lazy = da.eye(3, chunks=2).map_blocks(kind, meta=kind(np.zeros((0, 0))))
    for array in (eager, lazy):
        for name in "abc":
            assert kind.__name__ in refusal(array, name)
        with dask.config.set(scheduler="synchronous"):
            dense = np.asarray(multimm.matmul(advised(array), np.eye(3)))
        np.testing.assert_array_equal(dense, np.eye(3))


def test_sparse_arrays_of_pydata_are_refused_before_they_are_converted():
    class GCXS:
        """As much as the checks look at."""

        shape, ndim, dtype = (3, 3), 2, np.dtype(float)

        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("Cannot convert a sparse array to dense automatically")

    GCXS.__module__ = "sparse.numba_backend._compressed.compressed"
    assert "GCXS" in refusal(GCXS())
    assert "a.todense()" in refusal(GCXS())


class Metres(np.ndarray):
    """Elements that mean something else than their numbers."""


def test_other_array_types():
    lengths = np.eye(3).view(Metres)
    assert "Metres" in refusal(lengths)
    assert type(advised(lengths)) is np.ndarray
    for nothing in (None, "text", {1: 2}, object()):
        with refused((ArrayTypeError, DTypeError)):
            multimm.matmul(nothing, np.ones((3, 3)))


class DataArray:
    """As xarray's, or a Dask DataFrame: Dask computes it, NumPy can convert it, no dask.array."""

    def __init__(self, data):
        self.data, self.shape, self.dtype, self.ndim = data, data.shape, data.dtype, data.ndim

    def __dask_graph__(self):
        return self.data.__dask_graph__() if isinstance(self.data, da.Array) else None

    def __array__(self, dtype=None, copy=None):
        assert isinstance(self.data, np.ndarray), "a lazy operand was computed"
        return self.data


def test_dasks_other_collections():
    lazy, x = DataArray(da.ones((4, 4), chunks=2)), np.ones((4, 4))
    said = "DataArray", "x.data", "x.to_dask_array(lengths=True)"
    for call in (multimm.matmul, gemm, multimm.plan):
        for operands in ((lazy, x), (x, lazy), (da.ones((4, 4)), lazy)):
            with refused(ArrayTypeError, *said):
                call(*operands)
    with refused(ArrayTypeError, "c is", *said):
        multimm.gemm(1, x, x, 1, lazy)
    with refused(ArrayTypeError, *said):
        multimm.transpose(lazy)
    with refused(ArrayTypeError, "c is", *said):
        multimm.verify(x, x, lazy)
    assert (multimm.matmul(DataArray(x), x) == 4).all()


def test_collections_that_are_no_array_are_not_written(tmp_path):
    """Dask and NumPy made one of Python objects of them, or raised errors of their own."""
    lazy = da.ones((4, 4), chunks=2)
    several = xr.Dataset({"x": (("i", "j"), lazy)})
    for given in (db.from_sequence([1]), several, DataArray(lazy), dask.delayed(1)):
        with refused(ArrayTypeError, f"array is a {kind_of(given)}, lazy but no Dask array"):
            io.save_array(given, tmp_path / "c.npy")
    assert not [*tmp_path.iterdir()]


def test_lazy_objects_of_xarray_are_written(tmp_path):
    lazy = xr.DataArray(da.ones((4, 4), chunks=2))
    for given in (lazy, lazy.variable):
        with io.Output(tmp_path / "c.npy") as output:
            assert output.store(given).numblocks == (2, 2)


@pytest.mark.parametrize("call", [multimm.matmul, gemm, multimm.plan])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"precision": "fp32"}, ("'fp32'", "'float32'", "'ieee'", "'tf32'")),
        ({"precision": 32}, ("32", "'float32'")),
        ({"blocks": 0}, ("blocks=0", "positive")),
        ({"blocks": (1, 2, 3)}, ("blocks=(1, 2, 3)",)),
        ({"blocks": (10,)}, ("blocks=(10,)", "(rows, columns)")),
        ({"blocks": ()}, ("blocks=()",)),
        ({"blocks": (1, True)}, ("blocks=True", "positive")),
        ({"slabs": np.int64(0)}, ("slabs=np.int64(0)", "positive")),
        ({"blocks": "auto"}, ("blocks='auto'",)),
        ({"blocks": np.array([1, 2])}, ("blocks=array([1, 2])", "(rows, columns)")),
        ({"slabs": -1}, ("slabs=-1", "positive")),
        ({"p_k": 1.0}, ("p_k=1.0", "positive")),
    ],
)
def test_options(call, options, named):
    x = da.ones((4, 4), chunks=2)
    with refused(OptionError, *named):
        call(x, x, **options)


X = da.ones((3, 3), chunks=2)


@pytest.mark.parametrize("given", ["foo", -5, 0, None, [1], "1e400"])
@pytest.mark.parametrize(
    "call",
    [
        lambda path: multimm.matmul(X, np.ones((3, 2))),
        lambda path: multimm.matmul(X, X, chunks=("auto", 1)),
        lambda path: multimm.einsum("ij,jk->ik", X, X),
        lambda path: io.open_array(path),
    ],
)
def test_a_broken_size_of_chunks_in_dasks_configuration_is_named(tmp_path, call, given):
    np.save(tmp_path / "x.npy", np.ones((3, 4)))
    with (
        dask.config.set({"array.chunk-size": given}),
        pytest.raises(OptionError, match="DASK_ARRAY__CHUNK_SIZE") as caught,
    ):
        call(tmp_path / "x.npy")
    assert f"array.chunk-size is {given!r}: give bytes" in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, path: multimm.matmul(da.ones((4, 3000), chunks=2000), x),
        lambda x, path: multimm.einsum("ij,jk->ik", *[da.ones((8000, 8000), chunks=4000)] * 2),
        lambda x, path: io.open_array(path),
    ],
)
def test_a_size_of_chunks_that_lacks_its_unit_is_named(tmp_path, call):
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", dtype="f8", shape=(3000, 3000))
    with (
        dask.config.set({"array.chunk-size": "16"}),  # MiB were meant
        pytest.raises(OptionError, match=r"array\.chunk-size is '16', which makes .* chunks"),
    ):
        call(x, tmp_path / "x.npy")


@pytest.mark.parametrize("given", ["foo", -2, 2.5, "3"])
def test_a_broken_number_of_threads_in_dasks_configuration_is_named(given):
    with dask.config.set(num_workers=given), pytest.raises(OptionError, match="DASK_NUM_WORKERS"):
        multimm.matmul(X, X)


@pytest.mark.parametrize("cluster", [4, "tcp://host:8786", object()])
def test_plan_takes_a_cluster_as_a_value(cluster):
    x = da.ones((4, 4), chunks=2)
    with refused(OptionError, f"cluster={cluster!r}", "describe(client)"):
        multimm.plan(x, x.T, cluster=cluster)


@pytest.mark.parametrize("shape", [(3.5, 4), (3, -4), (2, "3"), (True, 3), (-1, 3, 4), (None, 3)])
def test_shapes_on_paper(shape):
    with refused(ShapeError, str(shape), "integers, 0 or more"):
        MatrixSpec(shape)
    assert MatrixSpec((np.int64(3), np.uint8(0))).shape == (3, 0)


def test_integers_of_numpy_are_integers():
    x = da.ones((8, 8), chunks=4)
    options = {"blocks": (np.int64(2), np.uint8(4)), "slabs": np.int32(2), "p_k": np.int8(1)}
    assert multimm.matmul(x, x, **options).chunks == ((2,) * 4, (4, 4))
    here = multimm.cluster.local()
    edge = multimm.plan(x, x, blocks=np.int64(2), cluster=here)
    assert edge == multimm.plan(x, x, blocks=2, cluster=here)


def test_every_error_is_the_builtin_a_numpy_user_expects():
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match="columns"):
        multimm.matmul(x, x)
    with pytest.raises(TypeError, match="object"):
        multimm.matmul(x.astype(object), x.T)


QUERY_PLANNING = """
import numpy as np, dask.array as da
x = da.from_array(np.ones((4, 4)), chunks=2)
import multimm
from multimm import io
from multimm.errors import ArrayTypeError
calls = {
    "matmul": lambda: multimm.matmul(x, x),
    "mixed": lambda: multimm.matmul(np.ones((4, 4)), x),
    "gemm": lambda: multimm.gemm(1, x, x),
    "transpose": lambda: multimm.transpose(x),
    "plan": lambda: multimm.plan(x, x),
    "accelerate": lambda: multimm.accelerate().__enter__(),
    "verify": lambda: multimm.verify(x, x, x),
    "verify NumPy": lambda: multimm.verify(*[np.ones((4, 4))] * 3),
}
for name, call in calls.items():
    try:
        call()
    except ArrayTypeError as error:
        assert "query" in str(error) and "False" in str(error), (name, error)
        assert "\\n" not in str(error), name
    else:
        raise SystemExit(name + " was not refused")
assert (multimm.matmul(np.ones((4, 4)), np.ones((4, 4))) == 4).all()
print("refused")
"""


def test_dasks_array_query_planning_is_refused():
    outcome = python("-c", QUERY_PLANNING, env={"DASK_ARRAY__QUERY_PLANNING": "True"})
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "refused"


def test_plan_refuses_what_the_product_would_refuse():
    stack, on_paper = np.ones((2, 3, 3)), multimm.cluster.local()
    for more in ({"trans_a": True}, {"alpha": 2}, {"beta": 1, "c": stack}):
        with pytest.raises(ShapeError, match="gemm takes matrices"):
            multimm.plan(stack, stack, cluster=on_paper, **more)
    with pytest.raises(ShapeError, match=r"c has shape \(7, 3\)"):
        multimm.plan(np.ones((3, 4)), np.ones((4, 7)), c=MatrixSpec((7, 3)), cluster=on_paper)
    given = np.ones((3, 4)), np.ones((5, 2))
    with pytest.raises(ShapeError) as refused:
        multimm.matmul(*given)
    with pytest.raises(ShapeError, match=re.escape(str(refused.value))):
        multimm.plan(*given, cluster=on_paper)
    with pytest.raises(ArrayTypeError, match="different devices"):
        multimm.plan(np.ones((3, 3), "f4"), ndarray((3, 3)), cluster=on_paper)
    assert multimm.plan(MatrixSpec((8, 9)), np.ones(9, "f4"), cluster=on_paper).n == 1


# Shapes that do not fit, in the same words whoever is asked -----------------------------


Call = Callable[..., object]


def said(call: Call, *args: object, **options: object) -> str:
    with pytest.raises(ShapeError) as caught:
        call(*args, **options)
    return str(caught.value)


def specs(call: Call) -> Call:
    """`call` of matrices without values."""
    return lambda a, b, **options: call(MatrixSpec(a.shape), MatrixSpec(b.shape), **options)


def shapes(call: Call) -> Call:
    return lambda a, b, **options: call(a.shape, b.shape, **options)


def lazily(call: Call) -> Call:
    return lambda a, b, **options: call(da.from_array(a), da.from_array(b), **options)


def verify(a: np.ndarray, b: np.ndarray, **options: bool) -> object:
    return multimm.verify(a, b, np.ones((4, 4)), **options)


STACKS = [multimm.matmul, lazily(multimm.matmul), verify, specs(multimm.plan), specs(Problem)]
TRANSPOSING = [gemm, lazily(gemm), verify, specs(multimm.plan)]


@pytest.mark.parametrize("call", [*STACKS, gemm, shapes(product_shape)])
def test_lengths_of_k_that_differ(call):
    assert said(call, np.ones((3, 4)), np.ones((5, 6))) == (
        "a has shape (3, 4) and b has shape (5, 6): the 4 columns of a must equal the 5 rows of b; "
        "transpose one of them or swap them, if that is what is meant"
    )


@pytest.mark.parametrize("call", [*TRANSPOSING, shapes(product_shape)])
def test_what_is_transposed_is_said(call):
    a, b = np.ones((3, 4)), np.ones((5, 6))
    assert said(call, a, b, trans_a=True).startswith(
        "a has shape (3, 4) and is transposed, and b has shape (5, 6): the 3 columns of op(a) must "
        "equal the 5 rows of b; "
    )
    assert said(call, a, b, trans_b=True).startswith(
        "a has shape (3, 4) and b has shape (5, 6) and is transposed: the 4 columns of a must "
        "equal the 6 rows of op(b); "
    )


@pytest.mark.parametrize("call", [*TRANSPOSING, shapes(product_shape)])
@pytest.mark.parametrize("flag", ["N", "T", 2, None])
def test_flags_of_blas_are_no_flags(call, flag):
    """The letter "N" would be true."""
    for name in ("trans_a", "trans_b"):
        with refused(OptionError, f"{name}={flag!r}: ", "True and False", "x.conj()"):
            call(np.ones((4, 4)), np.ones((4, 4)), **{name: flag})


@pytest.mark.parametrize("call", TRANSPOSING)
@pytest.mark.parametrize("given", [np.ones((2, 2)), da.ones(4), np.array(True), [True]])
def test_options_that_are_given_arrays(call, given):
    """An array has no truth, and one of 0 dimensions no hash."""
    for name in ("trans_a", "trans_b", "precision"):
        with refused(OptionError, f"{name}={' '.join(repr(given).split())}: allowed are "):
            call(np.ones((4, 4)), np.ones((4, 4)), **{name: given})


@pytest.mark.parametrize("call", [multimm.plan, multimm.verify])
def test_options_of_sums_over_any_axes_that_are_given_arrays(call):
    x = np.ones((2, 2))
    operands = ["ij,jk->ik", x, x, x][: 3 + (call is multimm.verify)]
    allowed = {"trans_a": "True and False", "precision": "'tf32'", "alpha": "0 dimensions"}
    for name, what in allowed.items():
        with refused(OptionError, name, what):
            call(*operands, **{name: x})


@pytest.mark.parametrize("call", [*STACKS, shapes(product_shape)])
def test_stacks_that_do_not_broadcast(call):
    assert said(call, np.ones((2, 3, 4)), np.ones((3, 4, 5))) == (
        "a has shape (2, 3, 4) and b has shape (3, 4, 5): the dimensions before the last two must "
        "broadcast, each pair from the right equal or with a 1; reshape one so that they do"
    )


@pytest.mark.parametrize("call", [multimm.matmul, lazily(multimm.matmul), verify])
def test_vectors_are_said_as_they_were_given(call):
    for a, b in (((4, 1), (5, 4)), ((3, 4), (5,)), ((3,), (4,)), ((2, 3, 4), (2, 5, 4)),
                 ((0, 3), (0, 3))):  # fmt: skip
        assert said(call, np.ones(a), np.ones(b)).startswith(f"a has shape {a} and b has shape {b}")
    assert "a has shape (3,) and b has shape (4, 5): the 3 columns of a must equal the 4 rows" in (
        said(call, np.ones(3), np.ones((4, 5)))
    )
    assert "of a must equal the 2 rows of b" in said(call, np.ones((2, 3)), np.ones(2))
