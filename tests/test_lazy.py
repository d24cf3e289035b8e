from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from dask.base import tokenize
from distributed import Client
from small import integers

import multimm

NUMPY = np.random.default_rng(0).integers(-2, 3, (30, 30)).astype(np.float32)


@pytest.fixture
def x():
    return da.from_array(NUMPY, (8, 11), name="x-operand")


@pytest.fixture
def y():
    return da.from_array(NUMPY.T.copy(), (7, 13), name="y-operand")


def product(x, y, **options):
    return multimm.matmul(x, y, **({"blocks": 10, "slabs": 6} | options))


def check(result, right):
    result = np.asarray(result)
    assert result.shape == right.shape
    np.testing.assert_array_equal(result, right)


@pytest.fixture(params=["sync", "threads", "sync, fusion off"])
def scheduler(request):
    """Each way that a local computation can go."""
    name, _, fusion = request.param.partition(",")
    options = {"scheduler": name}
    if fusion:
        options["optimization.fuse.active"] = False
    with dask.config.set(options):
        yield request.param


@pytest.mark.usefixtures("no_compute")
def test_nothing_is_computed_while_graphs_are_built():
    def refuse(block):
        raise AssertionError("a block was computed")

    meta = np.empty((0, 0), np.float32)
    x = da.from_array(NUMPY, 7).map_blocks(refuse, meta=meta)
    y = da.from_array(NUMPY, 9).map_blocks(refuse, meta=meta)
    c = multimm.matmul(x, y)
    assert c.dtype == np.float32
    multimm.matmul(x, NUMPY)
    multimm.matmul(NUMPY, x.T)
    multimm.matmul(x[3:9], y[:, 2], slabs=4, p_k=2)
    multimm.matmul(da.stack([x, y]), y, blocks=8)
    multimm.matmul(c, c.T)
    multimm.gemm(2, x, y, 3, c, trans_a=True)
    multimm.transpose(x)
    assert str(multimm.plan(x, y))
    repr(c)
    with pytest.raises(multimm.errors.ShapeError):
        multimm.matmul(x, y[1:])


def test_the_same_call_gives_the_same_keys(x, y):
    assert product(x, y).name == product(x, y).name
    assert sorted(map(str, product(x, y).__dask_graph__())) == sorted(
        map(str, product(x, y).__dask_graph__())
    )
    assert tokenize(product(x, y)) == tokenize(product(x, y))
    assert multimm.transpose(x).name == multimm.transpose(x).name


def test_different_products_have_different_keys(x, y):
    twin = da.from_array(NUMPY + 1, (8, 11), name="z-operand")
    made = {
        "plain": product(x, y),
        "precision": product(x, y, precision="ieee"),
        "blocks": product(x, y, blocks=15),
        "slabs": product(x, y, slabs=15),
        "p_k": product(x, y, p_k=2),
        "operands": product(y, x),
        "operand": product(twin, y),
        "alpha": multimm.gemm(2, x, y, blocks=10, slabs=6),
        "beta": multimm.gemm(1, x, y, 2, x, blocks=10, slabs=6),
        "c": multimm.gemm(1, x, y, 2, y, blocks=10, slabs=6),
        "trans_a": multimm.gemm(1, x, y, trans_a=True, blocks=10, slabs=6),
        "trans_b": multimm.gemm(1, x, y, trans_b=True, blocks=10, slabs=6),
    }
    names = {case: set(map(str, c.__dask_keys__()[0])) for case, c in made.items()}
    flat = [key for keys in names.values() for key in keys]
    assert len(flat) == len(set(flat))


def test_an_ordinary_dask_array(x, y, scheduler):
    c, right = product(x, y), NUMPY @ NUMPY.T
    check(c.compute(), right)
    check((c + 1).compute(), right + 1)
    check((2 * c - c).compute(), right)
    check(c.T.compute(), right.T)
    check(c[:3].compute(), right[:3])
    check(c[5:25:3, ::-1].compute(), right[5:25:3, ::-1])
    check(c[[4, 1, 1]].compute(), right[[4, 1, 1]])
    check(c[3, 4].compute(), right[3, 4])
    check(c.sum(axis=0).compute(), right.sum(axis=0))
    check(c.rechunk(4).compute(), right)
    check(np.sqrt(abs(c)).compute(), np.sqrt(abs(right)))
    check(c.blocks[1, 2].compute(), right[10:20, 20:30])
    check(c.map_blocks(np.negative).compute(), -right)
    check(da.concatenate([c, x]).compute(), np.concatenate([right, NUMPY]))
    check(np.asarray(c), right)
    check(c.astype("f8").compute(), right.astype("f8"))


def test_products_of_products(x, y, scheduler):
    c, right = product(x, y), NUMPY @ NUMPY.T
    check((c @ y).compute(), right @ NUMPY.T)
    check(product(c, c).compute(), right @ right)
    check(product(c, c.T).compute(), right @ right.T)
    check(product(c[:, :7], y[:7]).compute(), right[:, :7] @ NUMPY.T[:7])
    check(multimm.gemm(1, x, y, 1, c).compute(), 2 * right)
    check(multimm.matmul(x, c + x).compute(), NUMPY @ (right + NUMPY))


def test_delayed(x, y, scheduler):
    c = product(x, y)
    total = dask.delayed(np.sum)(c)
    assert total.compute() == (NUMPY @ NUMPY.T).sum()
    blocks = c.to_delayed()
    check(blocks[0, 1].compute(), (NUMPY @ NUMPY.T)[:10, 10:20])
    from_delayed = da.from_delayed(dask.delayed(NUMPY), NUMPY.shape, NUMPY.dtype)
    check(product(from_delayed, y).compute(), NUMPY @ NUMPY.T)


def test_transpose_makes_contiguous_blocks(x):
    blocks = multimm.transpose(x).to_delayed().ravel()
    for block in dask.compute(*blocks, scheduler="sync"):
        assert block.flags.c_contiguous
    stack = da.stack([x, x])
    check(multimm.transpose(stack).compute(), np.stack([NUMPY.T, NUMPY.T]))


def test_results_do_not_share_memory_with_operands():
    identity = np.eye(6, dtype=np.float32)
    x = da.from_array(NUMPY[:6, :6].copy(), 6, name=False)
    c = multimm.matmul(x, da.from_array(identity, 6)).persist(scheduler="sync")
    block = c.blocks[0, 0].compute(scheduler="sync")
    block[:] = 7
    check(x.compute(), NUMPY[:6, :6])


def test_a_client_that_is_given_as_the_scheduler_is_the_one_that_is_planned_for():
    """Dask computes with it, whoever is the current one."""
    x = da.from_array(integers((60, 60), 1), chunks=20)
    with in_threads(3) as cluster, Client(cluster, set_as_default=False) as client:
        assert multimm.plan(x, x, blocks=20).cluster.workers == 1
        with dask.config.set(scheduler=client):
            assert multimm.plan(x, x, blocks=20).cluster.workers == 3
            c = multimm.matmul(x, x, blocks=20)
            np.testing.assert_array_equal(c.compute(), x.compute() @ x.compute())
            assert any("multimm" in name for name in cluster.scheduler.plugins)
    with dask.config.set(scheduler="Synchronous"):
        assert multimm.plan(x, x).cluster.workers == 1
