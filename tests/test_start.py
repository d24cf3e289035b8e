"""From the call to the first block product: planning, graph and scheduler, beside stock Dask."""

from __future__ import annotations

import statistics
import time

import dask.array as da
import numpy as np
import pytest
from clusters import forked
from distributed import WorkerPlugin, wait

import multimm

pytestmark = pytest.mark.alone

#: Seconds that 512 block products may begin later than stock Dask's.
LATER = 0.025
N, EDGE = 1024, 128


class Begin(WorkerPlugin):
    """When each of a worker's tasks began."""

    name = "begin"

    def setup(self, worker):
        self.times = []

    def transition(self, key, start, finish, **kwargs):
        if finish == "executing":
            self.times.append(time.time())


def begun(dask_worker):
    """Runs on a worker: when its tasks began since it was asked last."""
    plugin = dask_worker.plugins["begin"]
    times, plugin.times = plugin.times, []
    return times


def ours(a, b):
    return multimm.matmul(a, b, blocks=EDGE, slabs=EDGE)


@pytest.mark.slow
def test_512_block_products_begin_no_later_than_stock_dasks():
    waited = {ours: [], da.matmul: []}
    counts = {}
    with forked(), multimm.cluster.start(workers=2) as client:
        client.register_plugin(Begin())
        rng = da.random.default_rng(0)
        for _ in range(4):
            for product, seconds in waited.items():
                a, b = (rng.standard_normal((N, N), chunks=EDGE, dtype="f4").persist()
                        for _ in range(2))  # fmt: skip
                wait([a, b])
                client.run(begun)
                called = time.time()
                c = product(a, b).persist()
                wait(c)
                times = np.concatenate(list(client.run(begun).values()))
                seconds.append(times.min() - called)
                counts[product] = len(times)
    # The first ones also make connections and import what they need.
    first = {product: statistics.median(seconds[1:]) for product, seconds in waited.items()}
    print({product.__name__: round(1e3 * seconds, 1) for product, seconds in first.items()}, "ms")
    assert counts[ours] == 512 <= counts[da.matmul]
    assert first[ours] <= first[da.matmul] + LATER
