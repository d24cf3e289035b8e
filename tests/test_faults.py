"""Worker processes that die in mid-run: the product is right, nothing hangs, nobody else moves."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.core import Status

import multimm
from multimm.graph import placement
from multimm.graph.tasks import BlockTask

SIZE, BLOCK = 150, 30  # 5 x 5 x 5 block products


def slow(block):
    time.sleep(0.02)
    return block


def operands():
    """Lazy, so that lost blocks can be made again; integers, so that the result is exact."""
    a = da.random.default_rng(0).integers(-8, 9, (SIZE, SIZE), chunks=BLOCK).astype("float32")
    b = da.random.default_rng(1).integers(-8, 9, (SIZE, SIZE), chunks=BLOCK).astype("float32")
    return a.map_blocks(slow, meta=a._meta), b.map_blocks(slow, meta=b._meta)


@contextmanager
def workers(count):
    """Worker processes, under nannies that start a lost one again."""
    with (
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            memory_limit="500MB",
            dashboard_address=":0",
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(count, timeout=60)
        yield cluster, client


class KillOne:
    """Kill a worker process while `after` results of block products are in memory."""

    def __init__(self, cluster, client, after, for_good):
        self.cluster = cluster
        self.scheduler = cluster.scheduler
        self.for_good = for_good
        self.pids = client.run(os.getpid)
        self.after = after
        self.victim = None
        self.owners = {}
        self.thread = threading.Thread(target=self.watch)

    def watch(self):
        deadline = time.time() + 60
        while time.time() < deadline:
            tasks = list(self.scheduler.tasks.values())
            blocks = [ts for ts in tasks if isinstance(ts.run_spec, BlockTask)]
            if sum(ts.state == "memory" for ts in blocks) >= self.after:
                self.owners = {ts.key: set(ts.worker_restrictions or ()) for ts in blocks}
                self.victim = max(self.pids)
                if self.for_good:
                    self.forget()
                os.kill(self.pids[self.victim], signal.SIGKILL)
                return
            time.sleep(0.005)

    def forget(self):
        """Neither the worker's nanny nor the cluster is to start another one."""
        for name, nanny in self.cluster.workers.items():
            if nanny.worker_address == self.victim:
                nanny.status = Status.closing_gracefully
                del self.cluster.worker_spec[name]
                return


@pytest.mark.parametrize("restarts", [False, True], ids=["worker lost", "worker restarted"])
@pytest.mark.parametrize("p_k", [1, 3])
def test_a_killed_worker_does_not_change_the_product(restarts, p_k):
    x, y = (operand.compute(scheduler="threads") for operand in operands())
    with workers(3) as (cluster, client):
        a, b = operands()
        c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK, p_k=p_k)
        killer = KillOne(cluster, client, after=12, for_good=not restarts)
        killer.thread.start()
        future = client.compute(c)
        np.testing.assert_array_equal(future.result(timeout=120), x @ y)
        killer.thread.join()
        assert killer.victim is not None, "the product was over before the worker was killed"
        moved = [
            key
            for key, before in killer.owners.items()
            if (ts := cluster.scheduler.tasks.get(key)) is not None
            and before
            and killer.victim not in before
            and ts.worker_restrictions != before
        ]
        assert restarts or not moved
        if not restarts:
            assert len(cluster.scheduler.workers) == 2
        plugin = cluster.scheduler.plugins[placement.NAME]
        assert all(killer.victim not in product.workers for product in plugin.products.values())


@pytest.mark.parametrize("restarts", [False, True], ids=["worker lost", "worker restarted"])
def test_a_killed_worker_does_not_change_a_gram_product(restarts):
    x = operands()[0].compute(scheduler="threads")
    with workers(3) as (cluster, client):
        a, _ = operands()
        c = multimm.matmul(a.T, a, blocks=BLOCK, slabs=BLOCK)
        killer = KillOne(cluster, client, after=8, for_good=not restarts)
        killer.thread.start()
        result = client.compute(c).result(timeout=120)
        np.testing.assert_array_equal(result, x.T @ x)
        killer.thread.join()
        assert killer.victim is not None, "the product was over before the worker was killed"


def test_losing_every_worker_is_survived():
    with workers(2) as (_, client):
        x, y = (operand.compute(scheduler="threads") for operand in operands())
        a, b = operands()
        future = client.compute(multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK))
        time.sleep(0.5)
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(future.result(timeout=120), x @ y)
