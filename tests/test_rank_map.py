"""Workers are numbered as operands lie on them: planned, counted, right."""

from __future__ import annotations

import itertools
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, scattered
from distributed import wait
from small import integers

import multimm
from multimm.cluster.inspect import cluster_spec
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.graph.data_location import owners_of
from multimm.planning.candidates.rank_map import renumbered
from multimm.planning.choice import plan_matmul
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, Link, MatrixSpec


def gpus(workers, per_node=0):
    addresses = tuple(f"ucxx://host:{rank}" for rank in range(workers))
    paper = ClusterSpec.homogeneous(H200, workers)
    return replace(paper, addresses=addresses, per_node=per_node)


def in_rows(owners, shape):
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=tuple(owners))


def symmetric_of(spec):
    return Problem(spec.T, spec, pack="tf32", symmetric=True)


# ------------------------------------------------------------------ the numbers


def test_c_is_numbered_with_the_others():
    """It lies with the same workers, and travels no further than they do."""
    a, c = in_rows((1,) * 4, (16384, 16384)), in_rows((1,) * 4, (16384, 16384))
    cluster = gpus(2)
    problem, anew = renumbered(Problem(a, a, c=c), cluster)
    assert anew.numbers == (1, 0)
    assert problem.c.owners == (0,) * 4
    plan = plan_matmul(Problem(a, a, c=c, pack="tf32"), cluster)
    assert plan.cluster.numbers[0] == 1
    assert plan.grid.workers == 1
    assert plan.bytes_received == plan.bytes_recut == plan.bytes_added == 0


# ------------------------------------------------------------------ the plan


def test_workers_keep_their_devices():
    """Data on the fast one of two is multiplied there."""
    slow = replace(H200, name="slow", gflops=H200.gflops / 2, memory_bytes=H200.memory_bytes // 2)
    cluster = replace(gpus(2), devices=(slow, H200))
    square = MatrixSpec((16384,) * 2, chunks=((4096,) * 4,) * 2, owners=(1,) * 16)
    plan = plan_matmul(Problem(square, square, pack="tf32"), cluster)
    assert plan.grid.workers == 1
    assert plan.cluster.devices == (H200, slow)
    assert plan.cluster.addresses == ("ucxx://host:1", "ucxx://host:0")


def test_the_order_of_k_does_not_depend_on_numbers():
    """So neither do the bits."""
    found = set()
    for names in itertools.permutations(range(3)):
        owners = [names[at] for at in (0, 1, 1, 2, 0, 2) * 4]
        plan = plan_matmul(symmetric_of(in_rows(owners, (2**21 * 3, 2048))), gpus(3))
        found.add(plan.layout)
    (layout,) = found
    assert layout.k_order


# ----------------------------------------------------------------- on workers


client = counting_client(4)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Plans reckon with a link on which copies are worth avoiding."""
    monkeypatch.setattr(cluster_spec, "SHARED_MEMORY", Link("slow", 0.1, 1e-3))


def held(client, array):
    """The one worker of each block, by its place among the workers' addresses."""
    ranks = sorted(listed(client))
    where = {str(key): at for key, at in client.who_has(array).items()}
    lie = (where[str((array.name, *index))] for index in np.ndindex(array.numblocks))
    return tuple(ranks.index(at) for (at,) in lie)


def counted(client, product):
    """The product, computed, and what workers received."""
    reset_received_bytes(client)
    done = product.persist()
    wait(done)
    return done, sum(received_bytes(client).values())


@pytest.mark.parametrize("owners", [(1, 2, 3, 0) * 2, (2, 0, 3, 1) * 2, (2, 0, 3, 1)])
def test_rows_stay_where_they_lie(client, owners):
    x, y = integers((72000, 256), 1), integers((256, 256), 2)
    a = scattered(client, x, 72000 // len(owners), owners)
    b = scattered(client, y, 256, owners[:1])
    plan = multimm.plan(a, b)
    assert plan.cluster.numbers == owners[:4]
    assert plan.cluster.addresses[0] == sorted(listed(client))[owners[0]]
    c = multimm.matmul(a, b)
    done, received = counted(client, c)
    assert received == plan.bytes_received == 3 * y.nbytes
    assert owners_of(c, 4) == held(client, done)
    assert {owner for owner, _ in zip(held(client, done), owners, strict=False)} == {0, 1, 2, 3}
    np.testing.assert_array_equal(done.compute(), x @ y)


def test_elsewhere_it_is_right_as_well(client):
    """On other workers than it was planned for."""
    x, y = integers((72000, 256), 7), integers((256, 256), 8)
    a = scattered(client, x, 9000, (1, 2, 3, 0) * 2)
    product = multimm.matmul(a, da.from_array(y))
    graph = dict(product.dask)
    places = {task.place.numbers for task in graph.values() if hasattr(task, "place")}
    assert places == {(1, 2, 3, 0)}
    np.testing.assert_array_equal(product.compute(scheduler=client), x @ y)
