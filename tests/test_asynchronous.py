"""Clients in event loops: what a product cannot do there by itself, and what to await. Forks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import dask.array as da
import numpy as np
import pytest
from clusters import forked, in_threads
from commands import python
from distributed import Client, Security

import multimm
from multimm.errors import ClusterError, OptionError
from multimm.graph.scheduler import install, plugin
from multimm.graph.scheduler.lost_peers import LostPeers


def matrix():
    x = np.random.default_rng(18).integers(-3, 4, (60, 60)).astype(np.float64)
    return x, da.from_array(x, chunks=12)


@asynccontextmanager
async def in_a_loop():
    """A cluster and a client that belong to the event loop of a test."""
    async with (
        in_threads(2, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        yield cluster, client


def test_an_asynchronous_client_is_told_what_to_await():
    async def main():
        async with in_a_loop() as (cluster, client):
            x, a = matrix()
            for call in (lambda: a @ a, lambda: multimm.matmul(a, a)):
                with pytest.warns(RuntimeWarning) as said, multimm.accelerate():
                    c = call()
                [warning] = said
                assert warning.filename == __file__  # not a place in multimm or in Dask
                for name in ("await multimm.cluster.prepare", plugin.NAME, LostPeers.name):
                    assert name in str(warning.message)
                install._served.clear()
            await multimm.cluster.prepare(client)
            assert plugin.NAME in cluster.scheduler.plugins
            assert all(LostPeers.name in x.plugins for x in cluster.workers.values())
            return x @ x, await client.compute(c)

    expected, result = asyncio.run(main())
    np.testing.assert_array_equal(result, expected)


def test_synchronous_clients_are_prepared_and_closed_ones_are_not():
    with in_threads(1) as cluster, Client(cluster) as client:
        multimm.cluster.prepare(client)
        assert plugin.NAME in cluster.scheduler.plugins
        asyncio.run(awaited(client))  # as in a notebook, where a loop runs
    for call in (multimm.cluster.prepare, multimm.cluster.connect):
        with pytest.raises(ClusterError, match="the client is closed"):
            call(client)
        with pytest.raises(OptionError, match=r"None.* give .*a distributed\.Client"):
            call(None)


async def awaited(client):
    await multimm.cluster.prepare(client)


def test_connect_takes_a_client_that_is_there():
    with in_threads(1) as cluster, Client(cluster) as client:
        assert multimm.cluster.connect(client) is client
        assert plugin.NAME in cluster.scheduler.plugins
        with pytest.raises(OptionError, match="with security: the client has its own"):
            multimm.cluster.connect(client, security=Security())
        assert client.status == "running"

    async def main():
        async with in_a_loop() as (_, client):
            with pytest.raises(OptionError, match=r"await multimm\.cluster\.prepare\(client\)"):
                multimm.cluster.connect(client)

    asyncio.run(main())


def test_clusters_start_and_multiply_where_a_loop_runs_in_the_main_thread():
    """As in a notebook, of which each cell runs in the event loop of its kernel."""
    x, a = matrix()

    async def cell():
        with forked(), multimm.cluster.start(workers=1, memory_limit="1GB") as client:
            assert not client.asynchronous
            c = multimm.matmul(a, a)
            assert multimm.verify(a, a, c)
            with multimm.cluster.connect(client.scheduler.address) as other:
                multimm.cluster.prepare(other)
                return c.compute()

    np.testing.assert_array_equal(asyncio.run(cell()), x @ x)


def test_verify_says_at_the_call_that_it_waits():
    async def main():
        async with in_a_loop() as (_, client):
            await multimm.cluster.prepare(client)
            _, a = matrix()
            c = multimm.matmul(a, a)
            with pytest.raises(ClusterError, match=r"await asyncio\.to_thread\(multimm\.verify"):
                multimm.verify(a, a, c)
            assert multimm.verify(np.eye(3), np.eye(3), np.eye(3))  # computed in this process
            assert await asyncio.to_thread(multimm.verify, a, a, c)

    asyncio.run(main())


def read(path):
    return multimm.io.open_array(path).compute(scheduler="sync")


@pytest.mark.parametrize("suffix", ["npy", "zarr", "h5"])
def test_what_an_output_stores_is_awaited(tmp_path, suffix):
    async def main():
        async with in_a_loop() as (_, client):
            await multimm.cluster.prepare(client)
            x, a = matrix()
            with multimm.io.Output(tmp_path / f"c.{suffix}") as output:
                await client.compute(output.store(multimm.matmul(a, a)))
                np.testing.assert_array_equal(read(output.commit()), x @ x)

    asyncio.run(main())


def test_save_array_says_at_the_call_that_it_waits(tmp_path):
    async def main():
        async with in_a_loop() as (_, client):
            await multimm.cluster.prepare(client)
            x, a = matrix()
            c, path = multimm.matmul(a, a), tmp_path / "c.h5"
            with pytest.raises(ClusterError, match=r"await asyncio\.to_thread\(multimm\.io\.save_"):
                multimm.io.save_array(c, path)
            assert not [*tmp_path.iterdir()]
            await asyncio.to_thread(multimm.io.save_array, c, path)
            np.testing.assert_array_equal(read(path), x @ x)

    asyncio.run(main())


FORKED = """
import os, signal
import dask.array as da
from distributed import Client
import multimm
with Client(processes=False, n_workers=1, dashboard_address=None):
    if not (child := os.fork()):
        signal.alarm(20)
        x = da.ones((4, 4), chunks=2)
        c = multimm.matmul(x, x).compute(scheduler="sync")
        os._exit(int(c[0, 0]) + multimm.plan(x, x).tasks)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_does_not_ask_the_client_of_its_parent():
    found = python("-c", FORKED)
    assert found.stdout == "5\n", found.stderr
