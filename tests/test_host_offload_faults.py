"""Workers that are lost while NumPy blocks go up to GPUs, are multiplied, and come back.

The workers have no GPU: a copy is a wait, and all else is as on one (`linked`).
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads, scattered, soon
from distributed import Client
from distributed.client import FutureCancelledError
from killing import Killer, Record, workers
from labels import tasks_of
from linked import Link, at_rest, link, plan_for
from small import integers

import multimm
from multimm.graph.label import Kind
from multimm.planning.cost import time as planned_time
from multimm.planning.spec import H200

pytestmark = pytest.mark.slow

SIZE, BLOCK = 250, 50
FIXED = {"blocks": BLOCK, "slabs": BLOCK}
#: Blocks of a third of the operands and of C fit in this memory, and not all of them.
SMALL = replace(H200, memory_bytes=300_000, gflops=1e6)
#: What tasks cost is as little as blocks of this size take.
LITTLE = {"task_overhead_s": 1e-6, "call_s": 1e-4}


def slow(block):
    time.sleep(0.01)
    return block


def lazy(seed):
    """A matrix, and an array of it whose blocks can be made again."""
    x = integers((SIZE, SIZE), seed)
    blocks = da.from_array(x, chunks=BLOCK)
    return x, blocks.map_blocks(slow, meta=blocks._meta)


def made(kind, monkeypatch):
    """A lazy product of a kind, and what it should be."""
    streams = kind.startswith("streamed")
    plan_for(monkeypatch, SMALL if streams else H200, **(LITTLE if streams else {}))
    if streams:  # rather than to spill
        monkeypatch.setitem(planned_time.SPILL_RATE, "gpu", 1e5)
    (x, a), (y, b), (z, c) = lazy(1), lazy(2), lazy(3)
    if kind.endswith("symmetric"):
        product, wanted = multimm.matmul(a.T, a, **FIXED), x.T @ x
    elif kind == "gemm":
        product, wanted = multimm.gemm(2, a, b, 3, c, **FIXED), 2 * (x @ y) + 3 * z
    elif kind == "chain":
        product = multimm.matmul(multimm.matmul(a, b, **FIXED), c, **FIXED)
        wanted = (x @ y) @ z
    else:
        product, wanted = multimm.matmul(a, b, **FIXED), x @ y
    assert bool(tasks_of(product, Kind.WAIT)) == streams
    assert bool(tasks_of(product, Kind.UPLOAD)) != streams
    assert tasks_of(product, Kind.DOWNLOAD)
    return product, wanted


@pytest.mark.parametrize(
    ("kind", "while_they", "after", "restarts"),
    [
        ("plain", Kind.UPLOAD, 10, False),
        ("plain", Kind.MULTIPLY, 110, False),  # when blocks of C have come back
        ("gemm", Kind.UPLOAD, 53, False),  # the last ones bring C
        ("chain", Kind.MULTIPLY, 160, False),
        ("streamed", Kind.READ, 20, False),
        ("streamed", Kind.MULTIPLY, 50, True),
        ("streamed symmetric", Kind.MULTIPLY, 25, False),
        ("streamed", Kind.DOWNLOAD, 4, False),
    ],
)
def test_a_worker_killed_at_any_moment(monkeypatch, kind, while_they, after, restarts):
    with workers(3) as (cluster, client):
        client.register_plugin(Link(0.01))
        product, wanted = made(kind, monkeypatch)
        only = {"only": lambda label: label.kind is while_they}
        killer = Killer(cluster, client, [after], **only, for_good=not restarts)
        future = client.compute(product)  # while it is there, the scheduler knows who did what
        np.testing.assert_array_equal(future.result(timeout=60), wanted)
        # The survivors of a chain make blocks of its first product again for the heirs; those of
        # a stream, when they are through, what the barriers of other blocks wait for.
        once = kind != "chain" and (kind, while_they) != ("streamed", Kind.DOWNLOAD)
        if restarts:
            killer.thread.join()
            assert killer.victims, "the product was over before the worker was killed"
        else:
            killer.check(1, once=once)


@pytest.fixture
def cluster(monkeypatch):
    """Three workers in threads of this process, which bring blocks to GPUs and back."""

    def copy(block):
        time.sleep(0.005)
        return block.copy()

    link(monkeypatch, copy, copy)
    with in_threads(3, memory_limit=0, silence_logs=50) as cluster:
        yield cluster


def lose(cluster):
    """The scheduler misses a worker."""
    scheduler = cluster.scheduler
    cluster.sync(scheduler.remove_worker, max(scheduler.workers), stimulus_id="lost")


def wait_for(record, count):
    while len(record.made) < count:
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["chain", "streamed symmetric"])
@pytest.mark.filterwarnings("ignore:a product was planned for")
def test_workers_come_and_go_after_planning(cluster, monkeypatch, kind):
    with Client(cluster) as client:
        product, wanted = made(kind, monkeypatch)
        lose(cluster)
        np.testing.assert_array_equal(client.compute(product).result(timeout=30), wanted)
        record = Record(cluster.scheduler)
        product, wanted = made(kind, monkeypatch)
        cluster.scheduler.add_plugin(record)
        cluster.scale(4)
        future = client.compute(product)
        wait_for(record, 40)
        cluster.scale(5)
        np.testing.assert_array_equal(future.result(timeout=30), wanted)


@pytest.mark.parametrize("kind", ["gemm", "streamed"])
def test_a_product_that_is_given_up_in_mid_run(cluster, monkeypatch, kind):
    """By its own client, which asks again, and by one that is closed: nobody works on for it."""
    record = Record(cluster.scheduler)
    cluster.scheduler.add_plugin(record)
    with Client(cluster) as client:
        product, wanted = made(kind, monkeypatch)
        future = client.compute(product)
        wait_for(record, 15)
        future.cancel()
        np.testing.assert_array_equal(client.compute(product).result(timeout=30), wanted)
        record.made.clear()
        future = client.compute(product)
        wait_for(record, 15)
    soon(lambda: at_rest(cluster) and not cluster.scheduler.tasks)
    # The workers hear of it a few milliseconds after the scheduler.
    soon(lambda: not any(worker.data for worker in cluster.workers.values()))
    assert sum(record.made.values()) < len(product.__dask_graph__()) / 2


@pytest.mark.parametrize("device", [H200, SMALL], ids=["uploaded", "streamed"])
def test_blocks_that_cannot_be_made_again_end_a_product_at_once(cluster, monkeypatch, device):
    """And what is computed next on the same workers is right."""
    plan_for(monkeypatch, device, **LITTLE)
    record = Record(cluster.scheduler)
    cluster.scheduler.add_plugin(record)
    with Client(cluster) as client:
        x, y = integers((SIZE, SIZE), 4), integers((SIZE, SIZE), 5)
        a, b = (scattered(client, z, (BLOCK, BLOCK), ([0, 1, 2] * 9)[:25]) for z in (x, y))
        future = client.compute(multimm.matmul(a, b, **FIXED))
        wait_for(record, 15)
        lose(cluster)
        with pytest.raises(FutureCancelledError):
            future.result(timeout=10)
        del future, a, b
        gc.collect()
        soon(lambda: at_rest(cluster))
        again = multimm.matmul(*(da.from_array(z, chunks=BLOCK) for z in (x, y)), **FIXED)
        np.testing.assert_array_equal(client.compute(again).result(timeout=30), x @ y)
