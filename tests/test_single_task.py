"""Small products of NumPy blocks on GPU workers: one task brings them there and back."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, received, scattered
from labels import tasks_of
from linked import link, plan_for
from small import integers

import multimm
from multimm.graph.label import Kind
from multimm.graph.tasks import host_offload
from multimm.io import open_array
from multimm.planning.spec import H200

client = counting_client(2)


@pytest.fixture(autouse=True)
def gone(monkeypatch):
    """Blocks that were sent to a GPU, and that were fetched from one."""
    sent, fetched = [], []
    plan_for(monkeypatch, H200)
    link(monkeypatch, send=lambda block: sent.append(block.shape) or np.copy(block))
    monkeypatch.setattr(
        host_offload, "to_numpy", lambda block: fetched.append(block.shape) or block
    )
    return sent, fetched


def blocks_of(*arrays):
    return sorted(
        shape for x in arrays for shape in (x.blocks[i].shape for i in np.ndindex(*x.numblocks))
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex64", "float16", "bool"])
@pytest.mark.parametrize("chunks", [-1, 16])
def test_each_block_goes_up_once_and_the_result_comes_back_once(client, gone, dtype, chunks):
    x, y = integers((40, 30), 3).astype(dtype), integers((30, 20), 4).astype(dtype)
    a, b = (da.from_array(z, chunks=chunks) for z in (x, y))
    c = multimm.matmul(a, b)
    assert multimm.plan(a, b).layout.problem.in_one
    assert len(tasks_of(c)) == 1
    assert type(c._meta) is np.ndarray
    np.testing.assert_array_equal(c.compute(), x @ y)
    sent, fetched = gone
    assert sorted(sent) == blocks_of(a, b)
    assert fetched == [(40, 20)]


@pytest.mark.parametrize("chunks", [-1, 16])
def test_transposes_symmetric_products_addends_stacks_and_vectors(client, gone, chunks):
    x, y = integers((40, 30), 5), integers((40, 20), 6)
    a, b = (da.from_array(z, chunks=chunks) for z in (x, y))
    c = da.from_array(x.T @ y, chunks=chunks)
    stack = integers((3, 20, 30), 7)
    cases = [
        (multimm.matmul(a.T, b), x.T @ y),
        (multimm.matmul(a.T, a), x.T @ x),
        (multimm.gemm(2.0, a, b, 3.0, c, trans_a=True), 5 * (x.T @ y)),
        (multimm.matmul(da.from_array(stack, chunks=chunks), a.T), stack @ x.T),
        (multimm.matmul(a, da.from_array(x[0], chunks=chunks)), x @ x[0]),
    ]
    for found, expected in cases:
        assert len(tasks_of(found)) == 1
        np.testing.assert_array_equal(found.compute(), expected)
    assert len(gone[1]) == len(cases)


def test_what_lies_on_several_workers(client):
    x, y = integers((60, 50), 8), integers((50, 40), 9)
    a = scattered(client, x, (20, 50), (0, 1, 0))
    b = scattered(client, y, (50, 40), (1,))
    plan = multimm.plan(a, b)
    assert plan.layout.problem.in_one
    c, moved = received(client, multimm.matmul(a, b))
    assert moved <= plan.bytes_moved
    np.testing.assert_array_equal(c.compute(), x @ y)


def test_of_a_product_that_is_still_on_gpus(client, gone):
    x, y = integers((40, 30), 10), integers((30, 20), 11)
    a, b = (da.from_array(z, chunks=16) for z in (x, y))
    c = multimm.matmul(multimm.matmul(a, b, blocks=16), b.T)
    assert tasks_of(c, Kind.UPLOAD)
    assert not tasks_of(c, Kind.DOWNLOAD)
    np.testing.assert_array_equal(c.compute(), x @ y @ y.T)


def test_files(client, gone, tmp_path):
    x = integers((64, 48), 12)
    np.save(tmp_path / "x.npy", x)
    a = open_array(tmp_path / "x.npy", chunks=16)
    np.testing.assert_array_equal(multimm.matmul(a.T, a).compute(), x.T @ x)
    assert gone == ([(64, 48)], [(48, 48)])


def test_wrong_blocks_are_named(client):
    x = da.from_array(integers((40, 40), 13), chunks=20)
    wrong = x.map_blocks(lambda block: block[:5], dtype="float32", meta=x._meta)
    with pytest.raises(multimm.errors.ShapeError, match="has shape"):
        multimm.matmul(wrong, x).compute()
