"""Whole products of blocks that lie on a GPU: every kind of task, with NumPy for CuPy.

`stand_in` has what kernels compute; the tasks, and what they hand to each other, are ours. The GPU
is an H200 as plans know it.
"""

from __future__ import annotations

import itertools
from importlib import import_module

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.core import slices_from_chunks
from labels import block_tasks
from repeated import others_slow
from stand_in import GPUArray, gpu
from toy_cupy import toy_cupy

import multimm
from multimm.graph.lowering.symmetric import link_diagonal
from multimm.graph.tasks.multiply import pack
from multimm.planning.spec import H200

DTYPES = ["float32", "float16", "float64", "complex64", "complex128", "int8", "int32", "bool"]


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch, in_this_thread):
    local = import_module("multimm.cluster.local")  # the function hides it
    monkeypatch.setattr(local, "current_gpu", lambda spills: H200)
    with toy_cupy() as cupy:
        cupy.concatenate, cupy.conjugate = np.concatenate, np.conjugate
        for name in ("tri", "arange"):
            setattr(cupy, name, made_there(getattr(np, name)))
        GPUArray.__name__ = "ndarray"  # else it is none of CuPy's own
        yield
        GPUArray.__name__ = "GPUArray"


def made_there(function):
    return lambda *args, **named: gpu(function(*args, **named))


def values(shape, dtype, seed):
    """Small integers, Gaussian ones, or truths: products of them are exact in every dtype."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.1
    real = rng.integers(-1, 2, shape)
    return (real + 1j * rng.integers(-1, 2, shape) if "complex" in dtype else real).astype(dtype)


def lazy(x, chunks):
    """Of blocks on the GPU."""
    meta = gpu(np.empty((0,) * x.ndim, x.dtype))
    return da.from_array(x, chunks=chunks).map_blocks(gpu, dtype=x.dtype, meta=meta)


X, Y = (100, 60), (60, 50)
PRODUCTS = {
    "blocks": (X, Y, lambda x, y: multimm.matmul(lazy(x, 45), lazy(y, 40), blocks=30), np.matmul),
    "k-tiles": (X, Y, lambda x, y: multimm.matmul(lazy(x, 45), lazy(y, 40), blocks=30, slabs=20),
                np.matmul),
    "parts of k": (X, Y, lambda x, y: multimm.matmul(lazy(x, 45), lazy(y, 40), blocks=30, p_k=3),
                   np.matmul),
    "as planned": (X, Y, lambda x, y: multimm.matmul(lazy(x, 45), lazy(y, 40)), np.matmul),
    "a stack": ((3, 20, 30), (3, 30, 10), lambda x, y: multimm.matmul(lazy(x, 15), lazy(y, 15)),
                np.matmul),
    "X X'": (X, Y, lambda x, y: gram(lazy(x, (30, 60))), lambda x, y: x @ x.T),
    "X X' in k-tiles": (X, Y, lambda x, y: gram(lazy(x, (30, 20)), slabs=20), lambda x, y: x @ x.T),
    "X X' in parts of k": (X, Y, lambda x, y: gram(lazy(x, (30, 20)), p_k=3),
                           lambda x, y: x @ x.T),
    "X' X": (X, Y, lambda x, y: gram(lazy(x, 45).T), lambda x, y: x.T @ x),
    "with C": (X, Y, lambda x, y: multimm.gemm(1, lazy(x, 45), lazy(y, 40), 1,
                                               lazy(x[:, :1] * y[:1], 70), blocks=30),
               lambda x, y: x @ y + x[:, :1] * y[:1]),
}  # fmt: skip


def gram(x, **cut):
    return multimm.matmul(x, x.T, blocks=30, **cut)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore::multimm.errors.IntegerOverflowWarning")
def test_a_product_is_numpy_s(name, dtype):
    left, right, product, numpy_s = PRODUCTS[name]
    x, y = values(left, dtype, 1), values(right, dtype, 2)
    c, expected = product(x, y), numpy_s(x, y)
    assert c.dtype == expected.dtype
    np.testing.assert_array_equal(computed(c), expected)


def computed(c):
    """Of blocks on the GPU. Dask would put them together by CuPy, and keep this one for good."""
    blocks = dask.compute(*c.to_delayed().flat)
    assert {(type(block), block.dtype) for block in blocks} == {(GPUArray, c.dtype)}
    found = np.empty(c.shape, c.dtype)
    for at, block in zip(slices_from_chunks(c.chunks), blocks, strict=True):
        found[at] = block
    return found


@pytest.mark.parametrize(
    ("slabs", "precision"),
    others_slow(
        itertools.product([None, 256], ["float32", "tf32"]), (None, "tf32"), (256, "float32")
    ),
)
def test_a_product_of_packed_blocks_is_numpy_s(precision, slabs):
    """Beside each other, and of X X', which is symmetric bit by bit."""
    x, y = values((2100, 512), "float32", 1), values((512, 2100), "float32", 2)
    a, b = lazy(x, (1050, 512)), lazy(y, (512, 1050))
    for right, expected in ((b, x @ y), (a.T, x @ x.T)):
        c = multimm.matmul(a, right, blocks=1050, slabs=slabs, precision=precision)
        tasks = [*block_tasks(c).values()]
        assert any(task.func is pack for task in tasks)
        symmetric = any(task.kwargs.get("verb", task.func) is link_diagonal for task in tasks)
        assert symmetric == (right is not b)
        np.testing.assert_array_equal(computed(c), expected)
