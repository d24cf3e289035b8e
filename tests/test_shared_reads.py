"""Two products of one array in a file read it once, where each row of it serves both at once."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, received
from dask.graph_manipulation import clone
from labels import tasks_of
from repeated import others_slow
from small import integers

import multimm
from multimm.graph.label import Kind
from multimm.io import open_array

ROWS, COLUMNS, WIDTH = 1200, 60, 7
FIXED = {"blocks": 150, "slabs": 150}  # rows of X, in both products


@pytest.fixture
def x(tmp_path):
    values = integers((ROWS, COLUMNS), 1)
    np.save(tmp_path / "x.npy", values)
    return values, open_array(tmp_path / "x.npy", chunks=(100, COLUMNS))


def q(rows=COLUMNS):
    values = integers((rows, WIDTH), 2)
    return values, da.from_array(values, chunks=-1)


def reads(array):
    return len(tasks_of(array, Kind.READ))


def first(x):
    """X Q, and in how many blocks it reads X."""
    y = multimm.matmul(x[1], q()[1], **FIXED)
    assert reads(y) == ROWS // 150
    return y


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
@pytest.mark.parametrize(
    "second",
    [
        lambda x, y: (x.T, y),
        lambda x, y: (y.T, x),
        lambda x, y: (x.T, 2 * y + 1),
        lambda x, y: (x.T, y - da.ones(WIDTH)),
    ],
)
def test_rows_that_are_read_serve_both_products(x, second, scheduler):
    z = multimm.matmul(*second(x[1], first(x)), **FIXED)
    assert reads(z) == ROWS // 150
    left, right = second(x[0], x[0] @ q()[0])
    np.testing.assert_array_equal(z.compute(scheduler=scheduler), np.asarray(left @ right))


@pytest.mark.parametrize(
    "follow",
    [
        lambda y: y.rechunk((ROWS, WIDTH)),  # needs all of X first
        lambda y: y - y.mean(axis=0, keepdims=True) * np.ones((ROWS, 1)),
        lambda y: da.linalg.tsqr(y)[0],
        lambda y: y[::-1],
    ],
)
def test_what_needs_all_rows_first_reads_them_again(x, follow):
    z = multimm.matmul(x[1].T, follow(first(x)), **FIXED)
    assert reads(z) == 2 * ROWS // 150
    expected = x[0].T @ follow(da.from_array(x[0] @ q()[0], chunks=(150, WIDTH))).compute()
    # An orthonormal basis may have other signs.
    np.testing.assert_allclose(abs(z.compute()), abs(expected), rtol=1e-4, atol=1e-3)


def test_another_axis_reads_its_own_blocks(tmp_path):
    values = integers((300, 300), 3)
    np.save(tmp_path / "square.npy", values)
    square, (w, b) = open_array(tmp_path / "square.npy", chunks=100), q(300)
    y = multimm.matmul(square, b, **FIXED)
    z = multimm.matmul(square, y, **FIXED)
    assert reads(z) > reads(y)
    np.testing.assert_array_equal(z.compute(), values @ (values @ w))


def test_results_in_longer_chunks_read_again(x):
    y = multimm.matmul(x[1], q()[1], chunks=(400, WIDTH), **FIXED)
    z = multimm.matmul(x[1].T, y, **FIXED)
    assert reads(z) == 2 * ROWS // 150
    np.testing.assert_array_equal(z.compute(), x[0].T @ (x[0] @ q()[0]))


def test_both_products_at_once_slices_and_copies(x):
    y = first(x)
    z = multimm.matmul(x[1].T, y, **FIXED)
    exact = x[0] @ q()[0]
    for found in (dask.compute(y, z), dask.compute(*clone(y, z))):
        np.testing.assert_array_equal(found[0], exact)
        np.testing.assert_array_equal(found[1], x[0].T @ exact)
    np.testing.assert_array_equal(z[:5].compute(), x[0].T[:5] @ exact)


def test_a_chain_of_passes(x):
    """As a power iteration has it: each pass reads X once, for both of its products."""
    exact, lazy = q()
    for _ in range(3):
        y = multimm.matmul(x[1], lazy, **FIXED)
        lazy = multimm.matmul(x[1].T, y, **FIXED) / 1e4
        exact = x[0].T @ (x[0] @ exact) / 1e4
    assert reads(lazy) == 3 * ROWS // 150
    np.testing.assert_allclose(lazy.compute(), exact, atol=1e-5 * abs(exact).max())


client = counting_client(2)


@pytest.mark.parametrize("columns", others_slow([600, 250], 250))
def test_workers_read_and_keep_their_own_rows(client, tmp_path, columns):
    """The second product sums what each worker has read, wherever that is: little travels."""
    values, (w, b) = integers((60_000, 600), 4), q(600)
    np.save(tmp_path / "long.npy", values)
    long = open_array(tmp_path / "long.npy", chunks=(5000, columns))
    y = multimm.matmul(long, b, chunks="operands")
    z = multimm.matmul(long.T, y)
    assert reads(z) == reads(y) > 2
    exact = values.T.astype("f8") @ (values @ w)
    done, moved = received(client, z)
    np.testing.assert_allclose(done.compute(), exact, atol=1e-5 * abs(exact).max())
    assert moved < values.nbytes / 20
