"""What a killed GPU worker's memory waits for, on stand-ins: `multigpu` tests kill real ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from multimm.cluster.inspect.devices import Gpu
from multimm.cluster.plugins import peer_memory, pool_memory
from multimm.cluster.plugins.peer_memory import PeerMemory, Pool

GB = 10**9
PEER, OWN = "ucxx://127.0.0.1:2", "ucxx://127.0.0.1:1"


class Runtime:
    """CUDA's counts of how often this process has opened a peer's memory."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, opened):
        self.opened = opened

    def ipcOpenMemHandle(self, handle):
        self.opened += 1
        return 0x7F0000000000

    def ipcCloseMemHandle(self, address):
        if not self.opened:
            raise self.CUDARuntimeError("invalid argument")
        self.opened -= 1


class Device:
    def __init__(self, number):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def runtime(monkeypatch):
    """CuPy, in a process where the transport has mapped the memory of one peer."""
    cupy, runtime = ModuleType("cupy"), Runtime(opened=1)
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=Device)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(peer_memory, "SECONDS", 0.01)
    return runtime


class Rpc:
    """A peer that says which pool it has."""

    def __init__(self, pool):
        self.pool, self.asked = pool, 0

    def __call__(self, address):
        return self

    async def run(self, function):
        self.asked += 1
        return {"status": "OK", "result": self.pool}


class Tasks(list):
    def call_soon(self, function, *args):
        self.append(asyncio.ensure_future(function(*args)))


def worker(pool, heard):
    handlers = {"remove-worker": lambda **message: heard.append(message["worker"])}
    return SimpleNamespace(
        address=OWN, rpc=Rpc(pool), stream_handlers=handlers, _ongoing_background_tasks=Tasks()
    )


async def met_and_lost(pool, *, ended, meanwhile=lambda: None):
    """A worker that has met a peer and hears of its loss; what it has heard, and itself."""
    heard = []
    here, plugin = worker(pool, heard), PeerMemory()
    plugin.setup(here)
    await plugin.meet(here, PEER)
    await plugin.meet(here, PEER)
    assert here.rpc.asked == 1
    here.stream_handlers["remove-worker"](worker=PEER, stimulus_id="x")
    await asyncio.sleep(0.05)
    meanwhile()
    ended()
    await asyncio.wait_for(asyncio.gather(*here._ongoing_background_tasks), 5)
    plugin.teardown(here)
    return heard, here


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def pool_of(process):
    return Pool(process.pid, peer_memory._started(process.pid), b"handle")


def test_memory_of_a_peer_is_let_go_once_its_process_has_ended(runtime, process):
    def still_mapped():
        assert runtime.opened == 2

    heard, here = asyncio.run(
        met_and_lost(pool_of(process), ended=process.kill, meanwhile=still_mapped)
    )
    assert runtime.opened == 0
    assert heard == [PEER]
    here.stream_handlers["remove-worker"](worker=PEER)  # distributed's own again
    assert heard == [PEER, PEER]


def test_memory_of_a_peer_that_lives_stays_mapped(runtime, process, monkeypatch):
    monkeypatch.setattr(peer_memory, "LOOKS", 10)
    asyncio.run(met_and_lost(pool_of(process), ended=lambda: None))
    assert runtime.opened == 2


def test_what_the_transport_has_not_mapped_is_closed_once(runtime, process):
    runtime.opened = 0
    asyncio.run(met_and_lost(pool_of(process), ended=process.kill))
    assert runtime.opened == 0


def test_a_number_that_another_process_has_now_is_no_process_that_lives(process):
    pool = pool_of(process)
    assert pool.started == peer_memory._started(process.pid) != ""
    process.kill()
    time.sleep(0.1)  # it has ended, and nobody has asked for its status yet
    assert peer_memory._started(process.pid) == ""


@pytest.mark.parametrize(("pool", "peer"), [(None, PEER), (Pool(1, "1", b""), "ucxx://10.0.0.2:7")])
def test_peers_without_a_pool_and_on_other_hosts_are_left_alone(runtime, pool, peer):
    async def met():
        here, plugin = worker(pool, []), PeerMemory()
        plugin.setup(here)
        await plugin.meet(here, peer)
        here.stream_handlers["remove-worker"](worker=peer)
        return here

    assert not asyncio.run(met())._ongoing_background_tasks
    assert runtime.opened == 1


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
