"""Symmetric products that are written with separate, but equal, operands."""

from __future__ import annotations

import operator
import sys
import tracemalloc

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from dask.array.chunk import getitem
from dask.highlevelgraph import HighLevelGraph

import multimm
from multimm.graph.same_values import same_values
from multimm.planning.spec import MatrixSpec
from multimm.products import NOTHING_FIXED, checked


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    with dask.config.set(scheduler="sync"):
        yield


def data(dtype="float64"):
    x = np.random.default_rng(0).integers(-4, 5, (12, 7)).astype(dtype)
    return da.from_array(x, chunks=(5, 3))


def is_symmetric(a, b):
    return checked(
        a, b, stacks=True, precision="float32", options=NOTHING_FIXED, chunks="auto"
    ).gram


SYMMETRIC = {
    "the same step": lambda x, m: (np.exp(x.T), np.exp(x)),
    "written twice": lambda x, m: ((x - m).T, x - m),
    "centred on both sides": lambda x, m: (x.T - m[:, None], x - m),
    "centred, rows": lambda x, m: (x - m, x.T - m[:, np.newaxis]),
    "axes of length 1": lambda x, m: (x.T - m[:, None], x - m[None, :]),
    "a mean that keeps its axis": lambda x, m: (
        x.T - x.mean(0, keepdims=True).T, x - x.mean(0, keepdims=True)
    ),
    "scaled": lambda x, m: ((x.T - m[:, None]) / m[:, None] * 2, (x - m) / m * 2),
    "cast": lambda x, m: (x.T.astype("float32"), x.astype("float32")),
    "missing values": lambda x, m: (
        da.where(da.isnan(x.T), 0, x.T), da.where(da.isnan(x), 0, x)
    ),
    "a mask": lambda x, m: ((x.T > 1).astype(float), (x > 1).astype(float)),
    "conj of real numbers": lambda x, m: (x.T.conj(), x),
    "conj of a step": lambda x, m: ((x + 1).T.conj(), x + 1),
    "a number of its own": lambda x, m: (x.T * x.max(), x * x.max()),
    "a vector of NumPy": lambda x, m: ((x * np.arange(7.0)).T, x * np.arange(7.0)),
    "a stack": lambda x, m: (
        np.abs(da.stack([x, x]).swapaxes(1, 2)), np.abs(da.stack([x, x]))
    ),
}  # fmt: skip

NOT_SYMMETRIC = {
    "another step": lambda x, m: (np.exp(x.T), np.sin(x)),
    "another number": lambda x, m: (x.T * 2, x * 3),
    "another order": lambda x, m: (1 - x.T, x - 1),
    "another dtype": lambda x, m: (x.T.astype("float32"), x),
    "another array": lambda x, m: (x.T, x + 0),
    "not centred": lambda x, m: (x.T, x - m),
    "another axis": lambda x, m: (
        square(x).T - square(x).max(0)[:, None], square(x) - square(x).max(0)[:, None]
    ),
    "the same twice": lambda x, m: (square(x) * 2, square(x).T.T * 2),
    "blocks by themselves": lambda x, m: (
        x.T.map_blocks(np.cumsum, axis=0), x.map_blocks(np.cumsum, axis=0)
    ),
    "a function of blocks": lambda x, m: (
        x.T.map_blocks(by_rows), x.map_blocks(by_rows)
    ),
    "a vector for each block": lambda x, m: (
        x[:5, :5].rechunk(5).T.map_blocks(np.add, np.arange(5.0)),
        x[:5, :5].rechunk(5).map_blocks(np.add, np.arange(5.0)),
    ),
    "a lazy vector for each block": lambda x, m: (
        square(x).T.map_blocks(np.add, dask.delayed(np.arange, pure=True)(3.0), dtype=float),
        square(x).map_blocks(np.add, dask.delayed(np.arange, pure=True)(3.0), dtype=float),
    ),
    "transposed blocks": lambda x, m: (square(x).map_blocks(np.transpose).T, square(x)),
    "swapped blocks": lambda x, m: (
        square(x).map_blocks(np.swapaxes, axis1=0, axis2=1).T, square(x)
    ),
    "blocks of the other side": lambda x, m: (
        da.blockwise(operator.add, "ij", square(x), "ij", square(x) * 2, "ji", dtype=float).T,
        square(x) + (square(x) * 2).T,
    ),
    "other blocks of a vector": lambda x, m: (
        square(x).T - few(m).rechunk(3)[None, :6], square(x) - few(m).rechunk(3)[6:, None]
    ),
    "a block and all of them": lambda x, m: (
        square(x).rechunk(1).T - few(m).rechunk(1)[None, :1],
        square(x).rechunk(1) - few(m).rechunk(1)[:6, None],
    ),
    "blocks in another order": lambda x, m: (
        square(x).T - WEIGHTS[None, :], square(x) - backwards(WEIGHTS)
    ),
    "other blocks in a stack": lambda x, m: (rows(x)[None, :6].swapaxes(1, 2), rows(x)[None, 6:]),
    "sorted": lambda x, m: (x.T.map_blocks(np.sort), x.map_blocks(np.sort)),
    "random numbers": lambda x, m: (da.random.random((7, 12)), da.random.random((12, 7))),
    "conj of complex numbers": lambda x, m: ((x * 1j).T + (x * 2j).T.conj(), x * 1j + x * 2j),
}  # fmt: skip


ALL = slice(None)
#: In two blocks.
WEIGHTS = da.from_array(np.arange(6.0), chunks=3)


def backwards(vector):
    """Its blocks as a column, the last one first: all of them, which no slice takes so."""
    name, last = "backwards", vector.numblocks[0] - 1
    tasks = {
        (name, i, 0): Task((name, i, 0), getitem, TaskRef((vector.name, last - i)), (ALL, None))
        for i in range(last + 1)
    }
    graph = HighLevelGraph.from_collections(name, tasks, [vector])
    return da.Array(graph, name, (vector.chunks[0], (1,)), vector.dtype)


def square(x):
    return x[:6, :6].rechunk(3)


def few(m):
    return da.concatenate([m[:6], m[:6] + m[1:7]])


def rows(x):
    return x[:, :6].rechunk((6, 6))


def by_rows(block):
    return block - block.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_products_are_found(name):
    x = data()
    a, b = SYMMETRIC[name](x, x.max(axis=0) + 1)
    assert is_symmetric(a, b)
    found, left, right = multimm.matmul(a, b).compute(), a.compute(), b.compute()
    np.testing.assert_allclose(found, left @ right, rtol=1e-12)


@pytest.mark.parametrize("name", NOT_SYMMETRIC)
def test_others_are_not_taken_for_symmetric(name):
    x = data()
    a, b = NOT_SYMMETRIC[name](x, x.max(axis=0) + 1)
    assert not is_symmetric(a, b)
    found = multimm.matmul(a, b).compute()
    np.testing.assert_allclose(found, a.compute() @ b.compute(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "complex128"])
@pytest.mark.parametrize("function", [da.cov, da.corrcoef])
@pytest.mark.parametrize("rowvar", [True, False])
def test_covariances_are_symmetric_products(dtype, function, rowvar, monkeypatch):
    x, seen = data(dtype), []
    x = x * (1 + 2j) + x**2 if dtype == "complex128" else x
    build = multimm.products.build
    monkeypatch.setattr(
        multimm.products, "build", lambda plan, *rest: seen.append(plan) or build(plan, *rest)
    )
    expected = function(x, rowvar=rowvar)
    with multimm.accelerate() as report:
        found = function(x, rowvar=rowvar)
    assert [call.function for call in report.taken] == ["dot"]
    assert [plan.layout.problem.symmetric for plan in seen] == [True]
    assert found.dtype == expected.dtype
    assert found.chunks == expected.chunks
    np.testing.assert_allclose(found.compute(), expected.compute(), rtol=1e-12, atol=1e-12)


def test_weighted_covariances_are_no_symmetric_products():
    x = data()
    with multimm.accelerate():
        found = da.cov(x, fweights=np.arange(1, 8))
    expected = np.cov(x.compute(), fweights=np.arange(1, 8))
    np.testing.assert_allclose(found.compute(), expected, rtol=1e-12)


def test_of_shapes_alone_nothing_is_compared():
    x = data()
    assert not multimm.plan(x, MatrixSpec((7, 12), "float64")).layout.problem.symmetric


def test_what_many_steps_share_is_looked_at_once():
    def grown(x):
        for _ in range(60):  # 2^60 ways lead down
            x = x + x * 2
        return x

    x = data()
    assert same_values(grown(x), grown(x.T), turned=True)
    assert not same_values(grown(x), grown(x.T) + 1, turned=True)


def test_sums_over_any_axes_are_symmetric_products_too(monkeypatch):
    x, seen = da.from_array(np.arange(60.0).reshape(5, 4, 3), chunks=2), []
    build = multimm.products.build
    monkeypatch.setattr(
        multimm.products, "build", lambda plan, *rest: seen.append(plan) or build(plan, *rest)
    )
    centred = x - x.mean(0)
    found = multimm.einsum("tij,tkl->ijkl", centred, centred)
    np.testing.assert_allclose(
        found.compute(), np.einsum("tij,tkl->ijkl", *[centred.compute()] * 2)
    )
    assert [plan.layout.problem.symmetric for plan in seen] == [True]
    multimm.einsum("tij,tkl->ijkl", x, centred)
    assert not seen[1].layout.problem.symmetric


@pytest.mark.slow
def test_operands_of_more_layers_than_python_takes_calls_are_multiplied():
    a, b = da.ones((4, 4), chunks=2), da.zeros((4, 4), chunks=2)
    for _ in range(sys.getrecursionlimit() + 200):
        a, b = a + 1, b + 1
    assert not same_values(a, b, turned=False)
    assert multimm.matmul(a, b).shape == (4, 4)


def test_operands_that_are_added_to_themselves_again_and_again_are_looked_at_once():
    a = da.ones((4, 4), chunks=2)
    for _ in range(60):  # 2^60 ways down
        a = a + a
    assert multimm.matmul(a, a + 1).shape == (4, 4)


def test_chunks_below_a_new_axis_are_counted_and_not_listed():
    x = da.ones(10**5, chunks=1)[:4, None]
    tracemalloc.start()
    try:
        assert not same_values(x, x + 0, turned=False)
        assert tracemalloc.get_traced_memory()[1] < 10**6  # their keys take 14 MB
    finally:
        tracemalloc.stop()
