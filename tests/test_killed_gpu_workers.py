"""What a killed GPU worker's memory waits for, on stand-ins: `multigpu` tests kill real ones."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from clusters import soon
from distributed import Client
from gpu_pools import pool_of, waiting

from multimm.cluster.inspect.devices import Gpu
from multimm.cluster.plugins import peer_memory, pool_memory
from multimm.cluster.plugins.peer_memory import PeerMemory

GB = 10**9


class Runtime:
    """CUDA's counts of how often this process has opened a pool; of one that is gone, an error."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, opened):
        self.opened = opened

    def ipcOpenMemHandle(self, handle):
        if not self.opened:
            raise self.CUDARuntimeError("invalid argument")
        self.opened += 1
        return 0x7F0000000000

    def ipcCloseMemHandle(self, address):
        if not self.opened:
            raise self.CUDARuntimeError("invalid argument")
        self.opened -= 1


@pytest.fixture
def runtime(monkeypatch):
    """CuPy, in a process where the transport has mapped the memory of one peer, in two ways."""
    cupy, runtime = ModuleType("cupy"), Runtime(opened=2)
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=lambda number: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(peer_memory, "SECONDS", 0.01)
    return runtime


@pytest.fixture
def process():
    with waiting() as child:
        yield child


def watching():
    return any(thread.name.startswith(peer_memory.NAME) for thread in threading.enumerate())


def test_a_pool_is_let_go_once_its_process_has_ended(runtime, process):
    peer_memory.when_ended(pool_of(process), peer_memory.unmap_all)
    peer_memory.when_ended(pool_of(process), peer_memory.unmap_all)  # whoever else says so
    time.sleep(0.1)
    assert runtime.opened == 2
    process.kill()
    soon(lambda: runtime.opened == 0)
    soon(lambda: not watching())


def test_a_pool_that_nobody_maps_here_is_left_alone(runtime, process):
    runtime.opened = 0
    peer_memory.when_ended(pool_of(process), peer_memory.unmap_all)
    process.kill()
    soon(lambda: not watching())
    assert runtime.opened == 0


@pytest.mark.parametrize("other", [{"boot": "another host"}, {"started": "1"}, {"pid": 2**22 + 1}])
def test_a_pool_of_no_process_here_is_not_waited_for(runtime, process, other):
    peer_memory.when_ended(replace(pool_of(process), **other), peer_memory.unmap_all)
    assert not watching()
    assert runtime.opened == 2


def test_a_process_that_nobody_has_waited_for_has_ended(process):
    pool = pool_of(process)
    assert pool.started == peer_memory._started(process.pid) != ""
    process.kill()
    soon(lambda: peer_memory._started(process.pid) == "")


class Peer:
    """A peer that says which pool it has."""

    def __init__(self, pool):
        self.pool = pool

    def __call__(self, address):
        return self

    async def run(self, function):
        return {"status": "OK", "result": self.pool}


@pytest.mark.parametrize("has_pool", [True, False])
def test_a_worker_lets_go_of_the_pool_of_a_peer_that_it_has_met(runtime, process, has_pool):
    worker = SimpleNamespace(rpc=Peer(pool_of(process) if has_pool else None))
    asyncio.run(PeerMemory().meet(worker, "ucxx://127.0.0.1:2"))
    assert watching() == has_pool
    process.kill()
    soon(lambda: not watching())
    assert runtime.opened == (0 if has_pool else 2)


def test_a_client_lets_go_of_pools_of_earlier_and_later_workers(runtime, process, monkeypatch):
    own = pool_of(process)
    monkeypatch.setattr(peer_memory, "_pool_of", lambda dask_worker: own)
    with Client(n_workers=1, processes=False, dashboard_address=":0") as client:
        client.register_plugin(PeerMemory())
        peer_memory.let_go_in(client)  # the worker was there before
        soon(watching)
        process.kill()
        soon(lambda: runtime.opened == 0)
        soon(lambda: not watching())
        with waiting() as later:
            runtime.opened = 1
            monkeypatch.setattr(peer_memory, "_pool_of", lambda dask_worker: pool_of(later))
            client.cluster.scale(2)
            soon(watching)
            later.kill()
            soon(lambda: runtime.opened == 0)


# ---------------------------------------------------- the worker in its place


@pytest.fixture
def starting(monkeypatch):
    """A worker that is to get a pool of 60 GB on a GPU of 80, which has as much free as it says."""
    utils = ModuleType("dask_cuda.utils")
    utils.parse_device_bytes = lambda size, alignment_size: size
    monkeypatch.setitem(sys.modules, "dask_cuda", ModuleType("dask_cuda"))
    monkeypatch.setitem(sys.modules, "dask_cuda.utils", utils)
    monkeypatch.setattr(pool_memory, "visible_gpus", lambda: (Gpu("0", "H100", 80 * GB),))
    monkeypatch.setattr(pool_memory, "GLANCE", 0.001)
    pool = SimpleNamespace(initial_pool_size=60 * GB, maximum_pool_size=None)

    def start(*free):
        answers = iter(free)
        last = [free[-1]]
        monkeypatch.setattr(pool_memory, "free_bytes", lambda gpu: next(answers, last[0]))
        worker = SimpleNamespace(_pending_plugins=(SimpleNamespace(), pool))
        asyncio.run(pool_memory.dask_setup(worker))
        return pool.initial_pool_size, pool.maximum_pool_size, len(list(answers))

    return start


def test_a_worker_waits_for_the_memory_of_its_pool(starting):
    assert starting(15 * GB, 15 * GB, 79 * GB, 0) == (60 * GB, None, 1)


def test_a_worker_that_waits_in_vain_begins_with_what_there_is(starting, monkeypatch, caplog):
    monkeypatch.setattr(pool_memory, "SECONDS", 0.05)
    initial, most, _ = starting(15 * GB)
    assert 10 * GB < initial < 15 * GB
    assert initial % 256 == 0
    assert most == 60 * GB
    assert "has 15.0 GB free, and its pool is to take 60.0 GB" in caplog.text


def test_nothing_is_waited_for_where_nvml_does_not_say(starting):
    assert starting(None) == (60 * GB, None, 0)


def test_a_worker_without_a_pool_waits_for_nothing():
    asyncio.run(pool_memory.dask_setup(SimpleNamespace(_pending_plugins=())))
