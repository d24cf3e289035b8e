"""Elements that packed parts do not carry, in NumPy: gathered, multiplied, added."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from multimm.gpu import launch
from multimm.gpu.packed import Residuals
from multimm.gpu.residuals import add_residuals
from multimm.gpu.split_reference import split


@pytest.fixture(autouse=True)
def numpy_for_cupy(monkeypatch):
    def gemm(a, b, *, alpha, beta, c, trans_b):
        assert trans_b
        return np.float32(alpha) * (a @ b.T) + np.float32(beta) * c

    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(launch, "gemm", gemm)


def packed(x):
    """What `PackedBlock` says of rows x k."""
    rest = split(x).rest
    rows, ks = np.nonzero(rest)
    residuals = Residuals(rows, ks, rest[rows, ks]) if rows.size else None

    def columns(at, *, residuals):
        assert (np.diff(at) > 0).all()
        return (x if residuals else x - rest)[:, at]

    return SimpleNamespace(residuals=residuals, carried=x - rest, columns=columns)


def with_tiny_elements(rows, k, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-1000, 1001, (rows, k)).astype("f4")
    x[rng.integers(0, rows, 5), rng.integers(0, k, 5)] = np.float32(1.2345678e-8)
    x[2, 7] = np.float32(2.3456789e-8)
    return x


@pytest.mark.parametrize("alpha", [1.0, -2.0])
def test_every_term_of_the_product_is_there(alpha):
    x, y = with_tiny_elements(70, 90, 2), with_tiny_elements(50, 90, 3)
    y[11] = 0
    y[11, 7] = 1.5  # meets the tiny element of x alone
    x[9], y[9] = 0, 0
    x[9, [4, 5]], y[9, [4, 6]] = [np.float32(1.2345678e-9), 900], [np.float32(1.2345678e-9), 900]
    a, b = packed(x), packed(y)
    assert a.residuals is not None
    assert b.residuals is not None
    d = (alpha * a.carried.astype("f8") @ b.carried.T.astype("f8")).astype("f4")
    assert d[2, 11] == d[9, 9] == 0
    add_residuals(d, a, b, alpha=alpha)
    exact = alpha * (x.astype("f8") @ y.T.astype("f8"))
    scale = np.abs(x.astype("f8")) @ np.abs(y.T.astype("f8"))
    assert (np.abs(d - exact) <= 90 * 2.0**-24 * scale).all()
    assert d[9, 9] == np.float32(alpha) * np.float32(1.2345678e-9) ** 2


def test_most_blocks_have_none():
    d = np.ones((3, 4), "f4")
    add_residuals(d, packed(np.ones((3, 5), "f4")), packed(np.ones((4, 5), "f4")), alpha=1.0)
    assert (d == 1).all()
