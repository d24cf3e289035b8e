"""K-tiles that a worker has at home are multiplied by one task, not by one after another."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads, scattered
from distributed import Client, wait
from labels import block_tasks

import multimm
from multimm.cluster.inspect.cluster_spec import listed

K_TILES, LENGTH, SIDE = 8, 30, 24


@pytest.fixture(scope="module", params=[1, 2])
def client(request):
    with in_threads(request.param) as cluster, Client(cluster) as client:
        yield client


def products(array):
    return [task for task in block_tasks(array).values() if "before" in task.kwargs]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("added", [None, SIDE, 7])
def test_the_result_is_that_of_one_task_a_k_tile(client, symmetric, added):
    x, y = np.random.default_rng(1).standard_normal((2, K_TILES * LENGTH, SIDE)).astype("float32")
    p_k = len(listed(client))
    owners = [0] * (K_TILES // 2) + [p_k - 1] * (K_TILES // 2)

    def product(a, b):
        fixed = {"blocks": SIDE, "slabs": LENGTH, "p_k": p_k}
        if added is None:
            return multimm.matmul(a.T, b, **fixed)
        c = da.from_array(np.arange(SIDE**2, dtype="float32").reshape(SIDE, SIDE), chunks=added)
        return multimm.gemm(3.0, a.T, b, 2.0, c, **fixed)

    a = scattered(client, x, LENGTH, owners)
    fused = product(a, a if symmetric else scattered(client, y, LENGTH, owners))
    on_host = da.from_array(x, chunks=(LENGTH, SIDE))
    one_by_one = product(on_host, on_host if symmetric else da.from_array(y, chunks=(LENGTH, SIDE)))
    assert len(products(fused)) == p_k
    assert not products(one_by_one)
    np.testing.assert_array_equal(fused.compute(), one_by_one.compute())


def test_a_product_of_no_elements_is_planned_in_k_tiles(client):
    """Nothing is in use, of which several k-tiles at once would take so many bytes."""
    x = da.zeros((100, 0), chunks=(10, 1)).persist()
    wait(x)
    for a, b in ((x.T, x), (x.T, da.zeros((100, 0), chunks=(20, 1)))):
        c = multimm.matmul(a, b, slabs=10)
        assert c.compute().shape == (0, 0)
