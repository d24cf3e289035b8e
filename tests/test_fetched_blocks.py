"""Clusters whose processes read each other's NumPy blocks: results, losses, and where none may."""

from __future__ import annotations

import errno
import itertools
import logging
import os

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import forked

import multimm
from multimm.cluster.plugins import host_memory

pytestmark = pytest.mark.skipif(
    host_memory._library() is None, reason="this system reads no other process"
)


@pytest.fixture(scope="module")
def client():
    with (
        forked(),
        multimm.cluster.start(workers=2, memory_limit="1GB", dashboard_address=None) as client,
    ):
        yield client


def count_reads(dask_worker):
    """On a worker: note what is read from now on."""
    from multimm.cluster.plugins import families, host_memory

    count = itertools.count()

    def read(*args):
        next(count)
        return host_memory.read(*args)

    families.answer(host_memory.NAME, host_memory.say_where, read)
    dask_worker.multimm_reads = count


def reads(dask_worker):
    return next(dask_worker.multimm_reads)


def test_workers_read_blocks_of_each_other(client):
    client.run(count_reads)
    one, two = sorted(client.scheduler_info()["workers"])
    for count in (10**5, 10**6):
        block = client.submit(np.full, count, 3.0, workers=[one], pure=False)
        assert client.submit(np.sum, block, workers=[two]).result() == 3.0 * count
    assert client.run(reads) == {one: 0, two: 2}


def test_a_result_comes_from_the_workers_themselves(client, monkeypatch):
    """The scheduler, in this process as well, would have its bytes sent."""
    read = []

    def fill(x, *args):
        read.append(x.nbytes)
        original(x, *args)

    original = host_memory._fill
    monkeypatch.setattr(host_memory, "_fill", fill)
    x = da.random.default_rng(1).random((600, 600), chunks=300).persist()
    a, c = x.compute(), multimm.matmul(x, x).compute()
    np.testing.assert_allclose(c, a @ a, rtol=1e-12)
    assert sum(read) == a.nbytes + c.nbytes


def test_a_killed_worker_is_no_obstacle(client):
    x = da.random.default_rng(2).random((1200, 1200), chunks=300)
    expected = (x @ x).compute(scheduler="threads")
    y = multimm.matmul(x, x).persist()
    victim, _ = sorted(client.scheduler_info()["workers"])
    client.run(os._exit, 1, workers=[victim], on_error="ignore", nanny=False)
    np.testing.assert_allclose(y.compute(), expected, rtol=1e-12)
    client.wait_for_workers(2)
    a, b = (da.from_array(np.full((600, 600), v), chunks=300) for v in (1.0, 2.0))
    assert (multimm.matmul(a, b).compute() == 1200).all()


def is_direct(dask_worker):
    return dask_worker.plugins[host_memory.NAME].direct


def test_where_none_may_read_others_blocks_are_sent(caplog):
    """As in a container: products are right, and there is nothing to say."""
    small = {"workers": 2, "memory_limit": "1GB", "dashboard_address": None}
    forbidden = dask.config.set({"distributed.worker.preload": [FORBID]})
    with forbidden, forked(), multimm.cluster.start(**small) as client:
        assert not any(client.run(is_direct).values())
        x = da.ones((600, 600), chunks=200).persist()
        assert (multimm.matmul(x, x).compute() == 600).all()
        assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []


FORBID = f"""
import ctypes
from multimm.cluster.plugins import host_memory

class Library:
    prctl = staticmethod(lambda *args: -1)

    @staticmethod
    def process_vm_readv(*args):
        ctypes.set_errno({errno.EPERM})
        return -1

host_memory._library = lambda: Library
"""
