"""Blocks that are not what their arrays declare: rounded at most, or refused."""

from __future__ import annotations

from dataclasses import replace

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from by_plan import by_plan
from labels import block_tasks

import multimm
from multimm.errors import ArrayTypeError, DTypeError
from multimm.failures import told
from multimm.graph.lowering.rechunk import cut_out, join
from multimm.graph.lowering.symmetric import link_diagonal, link_symmetric
from multimm.graph.tasks import multiply
from multimm.graph.tasks.dtype_check import as_declared
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

SIZE, BLOCK = 24, 12
#: Elements that float32 has no room for.
WIDE = np.float64(1) + np.random.default_rng(0).integers(1, 9, (SIZE, SIZE)) * 2.0**-40


def nothing(block):
    return None


def huge(block):
    return block.astype("float64") * 1e39


def narrowed(block):
    return block.astype("float32")


def spoilt(chunks, change, dtype="float32", at=(0, 0)):
    """An array of which one block is changed."""

    def block(own, block_info=None):
        return change(own) if block_info[0]["chunk-location"] == at else own

    whole = da.from_array(WIDE.astype(dtype), chunks=chunks)
    meta = np.empty((0, 0), dtype)
    return whole.map_blocks(block, name=f"spoilt-{change.__name__}-{dtype}-{chunks}", meta=meta)


def fine(chunks, dtype="float32"):
    return da.from_array(WIDE.astype(dtype), chunks=chunks, name=f"fine-{dtype}-{chunks}")


def product(role, own, chunks, workers, dtype="float32", symmetric=False, p_k=1):
    """2 A B + 3 C, of which one is given and the others are as they should be."""
    given = {name: fine(chunks, dtype) for name in "abc"} | {role: own}
    a, b, c = given.values()
    b = a if symmetric else b
    step = Step(dtype, dtype, trans_b=symmetric, alpha=2, beta=3)
    spec, item = MatrixSpec((SIZE, SIZE), dtype, c.dtype.itemsize, c.chunks), own.chunks
    of_a, of_c = (replace(spec, chunks=item if role == x else c.chunks) for x in "ac")
    problem = Problem(of_a, of_a, dtype, dtype, c=of_c, symmetric=symmetric)
    cluster, fixed = ClusterSpec.homogeneous(H200, workers), Options(BLOCK, BLOCK, p_k)
    plan = plan_matmul(problem, cluster, options=fixed)
    return by_plan(plan, a, b, c, step)


#: By name: chunks, workers, and the rest of `product`.
WAYS = {
    "as they are": ((BLOCK, BLOCK), 4, {}),
    "parts of k": ((BLOCK, BLOCK), 4, {"p_k": 2}),
    "coalesced": ((8, 8), 4, {}),
    "coalesced parts of k": ((8, 8), 4, {"p_k": 2}),
    "pieces": ((8, 8), 1, {}),
    "pieces, parts of k": ((8, 8), 1, {"p_k": 2}),
    "one chunk": ((SIZE, SIZE), 4, {}),
    "one chunk in pieces": ((SIZE, SIZE), 1, {}),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


#: What is not as declared, and whether A is both operands.
ROLES = [("a", False), ("b", False), ("c", False), ("a", True), ("c", True)]


@pytest.mark.parametrize(("role", "symmetric"), ROLES)
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (huge, DTypeError, "is float64, its array says float32"),
        (nothing, ArrayTypeError, "is None, its array says float32"),
    ],
)
def test_what_would_lose_something_is_refused(way, role, symmetric, change, error, said):
    chunks, workers, more = way
    at = (1, 0) if chunks[0] < SIZE else (0, 0)  # on the diagonal only if there is no other one
    own = spoilt(chunks, change, at=at)
    lazy = product(role, own, chunks, workers, symmetric=symmetric, **more)
    with pytest.raises(error, match=said) as caught:
        lazy.compute(scheduler="sync")
    assert "\n" not in str(caught.value)
    assert f"'{own.name}'" in told(caught.value)


def unrounded(block):
    return block.astype("float64") + 2.0**-30


def zeros(block):
    return np.zeros(block.shape)


@pytest.mark.filterwarnings("ignore:a block is float64")
@pytest.mark.parametrize(("role", "symmetric"), ROLES)
@pytest.mark.parametrize(
    ("change", "dtype", "rtol"),
    [
        (narrowed, "float64", 1e-15),  # the first block: others must not be made as narrow
        (unrounded, "float32", 1e-6),
        (zeros, "int16", 0),  # they are the same in any dtype
    ],
)
def test_what_loses_no_more_than_rounding_is_as_declared(way, role, symmetric, change, dtype, rtol):
    chunks, workers, more = way
    own = spoilt(chunks, change, dtype)
    lazy = product(role, own, chunks, workers, dtype, symmetric=symmetric, **more)
    whole = WIDE.astype(dtype)
    x = whole.copy()
    x[: chunks[0], : chunks[1]] = change(x[: chunks[0], : chunks[1]])
    a, b, c = (x if role == name else whole for name in "abc")
    result = lazy.compute(scheduler="sync")
    assert result.dtype == dtype
    np.testing.assert_allclose(result, 2 * a @ (a.T if symmetric else b) + 3 * c, rtol=rtol)


def test_rounding_is_said_where_anything_is_rounded():
    with pytest.warns(UserWarning, match="is float64, its array says float32: it is rounded"):
        as_declared(np.array([0.1, np.nan]), np.dtype("float32"))
    for held in (np.array([0.5, np.nan, np.inf]), np.array([2**24], "int32")):
        np.testing.assert_array_equal(as_declared(held, np.dtype("float32")), held)  # no warning
    with pytest.raises(DTypeError):
        as_declared(np.array([0.1]), np.dtype("float32"), rounded=False)


def test_products_of_code_that_declares_too_little():
    """`map_blocks` that computes in float64, as sums of float32 by weights do, in other's code."""
    x = da.ones((40, 30), "float32", chunks=(10, 30))
    y = x.map_blocks(lambda block: block / np.float64(3), dtype="float32")
    with multimm.accelerate() as report:
        c = y @ y.T
    assert report.taken
    with pytest.warns(UserWarning, match="is rounded"):
        value = c.compute(scheduler="sync")
    with pytest.warns(UserWarning, match="is rounded"), dask.config.set(scheduler="sync"):
        assert multimm.verify(y, y.T, c)
    np.testing.assert_allclose(value, np.full((40, 40), 30 / 9), rtol=1e-6)


def test_the_ways_lead_through_all_tasks():
    seen = set()
    for chunks, workers, more in WAYS.values():
        for symmetric in (False, True):
            lazy = product("a", fine(chunks), chunks, workers, symmetric=symmetric, **more)
            made = block_tasks(lazy).values()
            verbs = (x for task in made for x in (task.func, task.kwargs.get("verb", task.func)))
            seen |= {verb.__name__ for verb in verbs}
    plain = {multiply.multiply, link_symmetric, link_diagonal, multiply.add, cut_out, join}
    assert {task.__name__ for task in plain} | {"scale", "add_diagonal"} <= seen


@pytest.mark.parametrize("role", "ab")
def test_operands_that_are_packed_or_multiplied_in_turn(role):
    block, wide = np.ones((4, 4), "float32"), np.ones((4, 4), complex)
    own = Step("float32", "float32", **{f"dtype_{role}": block.dtype})
    with pytest.raises(DTypeError, match="is complex128"):
        multiply.pack(wide, role=role, step=own)
    with pytest.raises(ArrayTypeError, match="is None"):
        multiply.pack(None, role=role, step=own)
    half = multiply.pack(block.astype("float16"), role=role, step=own)
    assert half.dtype == np.float32
    step = replace(own, dtype_a=block.dtype, dtype_b=block.dtype)
    pair = [wide, block] if role == "a" else [block, wide]
    chain = {"step": step, "inner": step}
    for last, before in ((pair, [block, block]), ([block, block], pair)):
        with pytest.raises(DTypeError, match="is complex128"):
            multiply.multiply(*last, None, before=[before], **chain)


@pytest.mark.parametrize(
    ("held", "declared", "kept"),
    [
        ("float32", "float64", True), ("float64", "float32", True), ("uint8", "float32", True),
        ("int32", "float32", True), ("int64", "int32", True), ("int8", "int64", True),
        ("float32", "int64", False), ("bool", "uint8", True), ("float64", "complex128", True),
        ("complex64", "float64", False), (ml_dtypes.bfloat16, "float32", True),
        ("float16", ml_dtypes.bfloat16, True), (">f4", "float32", True), ("uint8", "int8", True),
        ("int8", "bool", False), ("complex128", "complex64", True), ("float64", "int8", False),
        ("longdouble", "float64", True), ("float64", "complex64", True), ("object", "f8", False),
        (ml_dtypes.bfloat16, "float16", True), ("float32", ml_dtypes.bfloat16, True),
    ],
)  # fmt: skip
def test_dtypes(held, declared, kept):
    held, declared = np.dtype(held), np.dtype(declared)
    block = np.ones((2, 3), held)
    if not kept:
        said = f"is {held}, its array says {declared}.*declare dtype='{held}'.*astype.'{declared}'"
        with pytest.raises(DTypeError, match=said):
            as_declared(block, declared)
        return
    result = as_declared(block, declared)
    assert result.dtype == declared
    assert (result == 1).all()


@pytest.mark.parametrize(
    ("held", "declared", "value"),
    [
        ("int64", "int32", 2**31), ("int64", "uint8", -1), ("uint64", "int64", 2**63),
        ("float64", "float32", 1e39), ("complex128", "complex64", 1e39j), ("int64", "f2", 70000),
        ("float32", ml_dtypes.bfloat16, 3.4e38),
    ],
)  # fmt: skip
def test_values_beyond_what_is_declared(held, declared, value):
    with pytest.raises(DTypeError, match="cannot hold all of it"):
        as_declared(np.array([value], held), np.dtype(declared))


def test_what_is_no_array_is_named():
    with pytest.raises(ArrayTypeError, match=r"is a builtins\.list, its array says float32"):
        as_declared([[1.0]], np.dtype("float32"))


def test_what_is_as_declared_is_no_copy():
    block = np.ones((2, 3))
    assert as_declared(block, block.dtype) is block
    assert as_declared(block, None) is block
    assert as_declared(None, None) is None
