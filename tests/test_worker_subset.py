"""A grid may have fewer places than workers: where that is faster, and what is fetched."""

from __future__ import annotations

import warnings
from dataclasses import replace
from uuid import uuid4

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, wait

from multimm.cluster.plugins.transfer_counter import (
    TransferCounter,
    received_bytes,
    reset_received_bytes,
)
from multimm.graph.array import build
from multimm.graph.data_location import owners_of
from multimm.graph.scheduler.install import install
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.plan import MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.spec import (
    H200,
    INFINIBAND,
    LOCAL_TCP,
    NVLINK,
    ClusterSpec,
    DeviceSpec,
    MatrixSpec,
)
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.grid import Grid

CPUS = ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 10**9, 50.0, 20.0), 4, LOCAL_TCP)


# On workers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    with in_threads() as cluster, Client(cluster) as client:
        install(client, TransferCounter())
        yield client


def integers(seed, chunks):
    shape = tuple(map(sum, chunks))
    x = np.random.default_rng(seed).integers(-4, 5, shape).astype("float32")
    return x, da.from_array(x, chunks=chunks, name=f"fewer-{uuid4()}", inline_array=True)


def kept_on(client, x, owners):
    """The array in memory, each block on the worker of that number, and its spec."""
    ranks = sorted(client.cluster.scheduler.workers)
    rows = [client.persist(x.blocks[i], workers=ranks[at]) for i, at in enumerate(owners)]
    wait(rows)
    return da.concatenate(rows), MatrixSpec(x.shape, chunks=x.chunks, owners=owners)


def planned(grid, a, b, blocks=24):
    layout, _ = lay_out(Problem(a, b), CPUS, grid, Options(blocks=blocks, slabs=48))
    return MatmulPlan(layout, CPUS, "float32", "by hand", "")


def product(plan, a, b):
    return build(plan, a, b, None, Step("float32", "float32"), np.empty((0, 0), "float32"))


@pytest.mark.parametrize("grid", [Grid(1, 1, 1), Grid(2, 1, 1), Grid(1, 2, 1), Grid(3, 1, 1)])
@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (0, 0, 0, 0), (3, 3, 2, 0)])
def test_some_of_the_workers_compute_it_and_fetch_what_is_planned(client, grid, owners):
    (x, a), (y, b) = integers(1, ((24,) * 4, (48,))), integers(2, ((48,), (24,) * 4))
    a, spec = kept_on(client, a, owners)
    plan = planned(grid, spec, MatrixSpec((48, 96), chunks=b.chunks))
    assert plan.layout.operands.in_place == {"a": owners}
    ranks = sorted(client.cluster.scheduler.workers)
    reset_received_bytes(client)
    c = product(plan, a, b)
    done = c.persist()
    wait(done)
    received = received_bytes(client)
    assert {ranks.index(at) for at, size in received.items() if size} == set(plan.received)
    assert sum(received.values()) == plan.bytes_received
    where = {str(key): at for key, at in client.who_has(done).items()}
    lie = [where[str((done.name, *index))] for index in np.ndindex(4, 4)]
    assert [ranks.index(at) for (at,) in lie] == list(owners_of(c, 4))
    assert set(owners_of(c, 4)) == set(range(grid.workers))
    np.testing.assert_array_equal(done.compute(), x @ y)


@pytest.mark.parametrize("there", [2, 3, 5])
def test_as_many_as_it_needs_do_it_when_others_came_or_went(there):
    (x, a), (y, b) = integers(3, ((24,) * 4, (48,))), integers(4, ((48,), (24,) * 4))
    plan = planned(Grid(2, 1, 1), *(MatrixSpec(z.shape, chunks=z.chunks) for z in (a, b)))
    assert plan.cluster.workers == 4
    with in_threads(there) as cluster, Client(cluster) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was planned for four
        install(client, TransferCounter())
        done = client.persist(product(plan, a, b))
        wait(done)
        ranks = sorted(cluster.scheduler.workers)
        assert {at for own in client.who_has(done).values() for at in own} == set(ranks[:2])
        np.testing.assert_array_equal(done.compute(), x @ y)


#: For two of many workers, in `float32`: measured on four.
MEDIUM = (12288, 12288, 12288)


def gpus(workers, per_node=0):
    return ClusterSpec((H200,) * workers, NVLINK, per_node=per_node, between=INFINIBAND)


def problem(m, k, n, pack="float32", **options):
    return Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), pack=pack, **options)


@pytest.mark.parametrize("workers", [3, 4, 6, 8, 24, 64, 1024])
def test_a_small_product_takes_no_longer_on_many_workers(workers):
    two = plan_matmul(problem(*MEDIUM), gpus(2))
    plan = plan_matmul(problem(*MEDIUM), gpus(workers))
    assert plan.grid.workers == 2
    assert plan.seconds == two.seconds
    assert plan.memory_terms == two.memory_terms
    assert plan.received == two.received
    assert plan.bytes_bound == two.bytes_bound


def test_fewer_workers_that_lack_memory_are_not_taken():
    # Each of two would hold half of A and C, one GB, and sums on top.
    small = replace(H200, memory_bytes=890_000_000, spills=False)
    cluster = ClusterSpec((small,) * 8, NVLINK)
    plan = plan_matmul(problem(*MEDIUM), cluster)
    assert plan.grid.workers > 2
    assert plan.check()
