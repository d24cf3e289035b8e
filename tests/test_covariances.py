"""Covariances, and products of one lazy array on both sides: half of the result is computed."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import multimm
from multimm.products import NOTHING_FIXED, checked


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    with dask.config.set(scheduler="sync"):
        yield


def data(dtype="float64"):
    x = np.random.default_rng(0).integers(-4, 5, (12, 7)).astype(dtype)
    return da.from_array(x, chunks=(5, 3))


ALIKE = {
    "written twice": lambda x, m: ((x - m).T, x - m),
    "conj of real numbers": lambda x, m: (x.T.conj(), x),
    "conj of a step": lambda x, m: ((x + 1).T.conj(), x + 1),
    "a vector of NumPy": lambda x, m: ((x * np.arange(7.0)).T, x * np.arange(7.0)),
}
OTHERS = {
    "another step": lambda x, m: (np.exp(x).T, np.sin(x)),
    "not centred": lambda x, m: (x.T, x - m),
    "random numbers": lambda x, m: (da.random.random((7, 12)), da.random.random((12, 7))),
    "transposed blocks": lambda x, m: (square(x).map_blocks(np.transpose).T, square(x)),
}


def square(x):
    return x[:6, :6].rechunk(3)


@pytest.mark.parametrize("name", [*ALIKE, *OTHERS])
def test_products_of_one_array_are_symmetric(name):
    x = data()
    a, b = (ALIKE | OTHERS)[name](x, x.max(axis=0) + 1)
    made = checked(a, b, stacks=True, precision="float32", options=NOTHING_FIXED, chunks="auto")
    assert made.gram == (name in ALIKE)
    found, left, right = multimm.matmul(a, b).compute(), a.compute(), b.compute()
    np.testing.assert_allclose(found, left @ right, rtol=1e-12, atol=1e-12)


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


def test_operands_thousands_of_layers_deep_are_multiplied():
    a, b = da.ones((4, 4), chunks=2), da.zeros((4, 4), chunks=2)
    for _ in range(3000):
        a, b = a + 1, b + 1
    assert multimm.matmul(a, b).shape == (4, 4)
