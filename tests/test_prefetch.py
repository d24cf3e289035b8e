"""Operand blocks are fetched during the step before the one that needs them, and not earlier."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from clusters import counting, soon
from distributed import Event, secede, wait

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.graph.scheduler import plugin as scheduler_plugin
from multimm.graph.scheduler import prefetch
from multimm_benchmarks.peers.trace import NAME, Trace

pytestmark = pytest.mark.alone

SIDE, K_TILES = 600, 6


@pytest.fixture(scope="module")
def client():
    with counting(2) as client:
        client.register_plugin(Trace())
        yield client


def operands(client, seed):
    """Two block rows of A, one block column of B: each worker has one chain."""
    shapes = (2 * SIDE, K_TILES * SIDE), (K_TILES * SIDE, SIDE)
    a, b = client.persist(
        [
            da.random.default_rng(seed).integers(-4, 5, shape, chunks=SIDE).astype("float32")
            for shape in shapes
        ]
    )
    wait([a, b])
    return a, b


def run(client, a, b, **fixed):
    client.run(lambda dask_worker: dask_worker.plugins[NAME].intervals.clear())
    c = multimm.matmul(a, b, blocks=SIDE, slabs=SIDE, **fixed).persist()
    wait(c)
    return c, client.run(lambda dask_worker: dask_worker.plugins[NAME].intervals)


def test_a_worker_of_one_chain_fetches_during_its_products(client):
    """Dask alone would begin when the product is over: the next one needs its sum."""
    a, b = operands(client, 1)
    reset_received_bytes(client)
    c, timelines = run(client, a, b)
    plan = multimm.plan(a, b, blocks=SIDE, slabs=SIDE)
    assert tuple(plan.grid) == (2, 1, 1)
    assert sum(received_bytes(client).values()) == plan.bytes_received > 0
    fetched = idle = 0
    for intervals in timelines.values():
        products = sorted((start, end) for kind, _, start, end in intervals if kind == "multiply")
        assert len(products) == K_TILES
        first, _ = products[0]
        for kind, _, start, end in intervals:
            if kind == "transfer" and start > first:
                fetched += 1
                idle += not any(begun < end and start < over for begun, over in products)
    assert idle <= 1 < fetched
    np.testing.assert_array_equal(c.compute(), a.compute() @ b.compute())


def test_what_was_fetched_ahead_is_let_go(client):
    a, b = operands(client, 2)
    c, _ = run(client, a, b)
    soon(lambda: {len(those) for those in client.who_has([a, b]).values()} == {1})
    np.testing.assert_array_equal(c.compute(), a.compute() @ b.compute())


def test_blocks_that_come_late_are_fetched_when_they_are_there(client, monkeypatch):
    """Those of the step at hand and of the next one: not of all that wait."""
    asked = []
    original = prefetch.fetch_for

    def noted(scheduler, user, place, progress, stimulus_id):
        before = len(progress.asked)
        original(scheduler, user, place, progress, stimulus_id)
        if len(progress.asked) > before:
            asked.append((place.order[1], min((step for _, step in progress.left))))

    monkeypatch.setattr(prefetch, "fetch_for", noted)
    shapes = (2 * SIDE, K_TILES * SIDE), (K_TILES * SIDE, SIDE)
    a, b = (da.random.default_rng(7).integers(-4, 5, s, chunks=SIDE).astype("f4") for s in shapes)
    c, _ = run(client, a, b)
    assert asked
    assert all(first <= step <= first + 1 for step, first in asked)
    np.testing.assert_array_equal(c.compute(), a.compute() @ b.compute())


def test_a_product_that_is_asked_for_twice_is_counted_once(client):
    """Another graph of the same blocks lists those that are done as well."""
    a, b = operands(client, 8)
    held = Event()
    late = b.map_blocks(_late, held, dtype=b.dtype, meta=b._meta)
    c = multimm.matmul(a, late, blocks=SIDE, slabs=SIDE)
    futures = [client.compute(c.sum())]
    try:
        soon(lambda: (left := _left(client)) and (0, 0) not in {step for _, step in left})
        counted = _left(client)
        futures.append(client.compute(c.max()))
        soon(lambda: futures[1].key in client.cluster.scheduler.tasks)
        assert _left(client) == counted
    finally:
        held.set()
    assert [future.result(timeout=60) for future in futures]
    soon(lambda: not _left(client))


def _late(block, held, block_id=None):
    if block_id[0] > 0:
        secede()
        held.wait(60)
    return block


def _left(client):
    """Products and sums that are not done, by worker and step."""
    return client.run_on_scheduler(_counted)


def _counted(dask_scheduler):
    plugin = dask_scheduler.plugins[scheduler_plugin.NAME]
    return {
        (rank, step): count
        for product in plugin.products.values()
        for rank, progress in product.progress.items()
        for step, count in progress.left.items()
        if count
    }
