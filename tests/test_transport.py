"""The plugins that make blocks travel while products run, on stand-ins and on CPU clusters."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest
from clusters import forked, in_threads, soon
from distributed import Client
from distributed.comm import utils

import multimm.cluster as mc
from multimm.cluster.client import obstacles, set_up_cluster
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins import ucxx_overlap, warmup
from multimm.cluster.plugins.ucxx_overlap import Overlap
from multimm.cluster.plugins.warmup import WarmUp, wait_until_warm

GIB = 2**30

#: Workers in this process. Without a limit: it is the process that would be measured, with all that
#: other tests have left in it, and workers above their limit stop taking tasks.
OVER_TCP = {"protocol": "tcp", "memory_limit": 0}


def wide_wait(*_):
    raise AssertionError("only a GPU could wait")


@pytest.fixture
def ucxx(monkeypatch):
    """Stand-ins for UCXX, its transport for Dask and CuPy, as in a worker of a GPU with 80 GiB."""
    package, inner = ModuleType("distributed_ucxx"), ModuleType("distributed_ucxx.ucxx")
    package.__version__, package.ucxx, inner.synchronize_stream = "0.52.00", inner, wide_wait
    ucxx = ModuleType("ucxx")
    ucxx.__version__ = "0.52.00"
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(memGetInfo=lambda: (1, 80 * GIB)))
    for module in (package, inner, ucxx, cupy):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(utils, "OFFLOAD_THRESHOLD", 10)
    return SimpleNamespace(package=package, inner=inner, ucxx=ucxx)


def worker():
    state = SimpleNamespace(transfer_incoming_bytes_limit=GIB, transfer_message_bytes_limit=10)
    return SimpleNamespace(address="ucxx://10.0.0.1:9", state=state, plugins={})


# -------------------------------------------------------------------- the wait


def test_setup_replaces_the_wait(ucxx):
    here, plugin = worker(), Overlap()
    plugin.setup(here)
    assert plugin.reason == ""
    assert ucxx.inner.synchronize_stream is ucxx_overlap.synchronize_stream_0
    assert here.state.transfer_incoming_bytes_limit == 10 * GIB
    assert here.state.transfer_message_bytes_limit == GIB
    assert utils.OFFLOAD_THRESHOLD is False


def test_a_message_takes_no_more_than_a_tenth_of_the_hosts_memory(ucxx):
    here = worker()
    here.state.transfer_incoming_bytes_limit = 200
    Overlap().setup(here)
    assert here.state.transfer_message_bytes_limit == 200


def test_what_is_waited_for_is_stream_0_of_the_workers_device(ucxx, monkeypatch):
    log = []

    class Device:
        def __init__(self, ident):
            self.ident = ident

        def __enter__(self):
            log.append(f"device {self.ident}")

        def __exit__(self, *_):
            log.append("left")

    cuda = sys.modules["cupy"].cuda
    cuda.Device = Device
    null = SimpleNamespace(done=False, synchronize=lambda: log.append("stream 0"))
    cuda.Stream = SimpleNamespace(null=null)
    ucxx_overlap.synchronize_stream_0("CudaStream.Default")
    assert log == ["device 0", "stream 0", "left"]


@pytest.mark.parametrize("package", ["package", "ucxx"])
@pytest.mark.parametrize("version", ["0.53.00", "0.49.1", "1.52.0", "x"])
def test_an_unknown_release_is_left_alone_with_a_warning(ucxx, caplog, package, version):
    getattr(ucxx, package).__version__ = version
    plugin, here = Overlap(), worker()
    plugin.setup(here)
    assert f"{version} is not known to multimm (known: 0.52)" in plugin.reason
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert plugin.reason in record.getMessage()
    assert here.state.transfer_incoming_bytes_limit == GIB
    assert here.state.transfer_message_bytes_limit == 10
    assert utils.OFFLOAD_THRESHOLD == 10
    assert ucxx.inner.synchronize_stream is wide_wait


# ------------------------------------------------------------------- clusters


@pytest.fixture(scope="module")
def client():
    with forked(), mc.start(workers=3, memory_limit="500MB") as client:
        yield client


def everybody(addresses):
    return {address: set(addresses) - {address} for address in addresses}


def met(client):
    return client.run(lambda dask_worker: dask_worker.plugins[warmup.NAME].met)


def test_start_returns_when_all_pairs_have_met(client):
    plugins = client.run(lambda dask_worker: sorted(dask_worker.plugins))
    assert all({ucxx_overlap.NAME, warmup.NAME} <= set(names) for names in plugins.values())
    assert met(client) == everybody(listed(client))  # not waited for
    assert obstacles(client) == {}


def test_a_worker_that_is_started_again_meets_all_and_they_meet_it(client):
    before = set(listed(client))
    victim = max(before)
    os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
    soon(lambda: len(now := set(listed(client))) == 3 and now != before)
    now = set(listed(client))
    (new,) = now - before
    wait_until_warm(client)
    found = met(client)
    assert found[new] == now - {new}
    assert all(new in found[address] for address in now - {new})
    assert obstacles(client) == {}


def test_connect_changes_the_transport_only_when_asked_to():
    with in_threads(2, **OVER_TCP) as cluster:
        with mc.connect(cluster.scheduler_address) as client:
            reasons = obstacles(client)
            assert set(reasons.values()) == {"the plugin is not installed"}
            assert len(reasons) == 2
            installed = client.run(lambda dask_worker: warmup.NAME in dask_worker.plugins)
            assert not any(installed.values())
        with mc.connect(cluster.scheduler_address, overlap=True) as client:
            assert obstacles(client) == {}
            assert met(client) == everybody(reasons)


def test_an_obstacle_on_the_workers_is_said_once_by_the_client(monkeypatch, caplog):
    reason = "ucxx 9.9 is not known to multimm (known: 0.52)"
    # Over TCP the plugin would not even look.
    monkeypatch.setattr(Overlap, "setup", lambda self, worker: setattr(self, "reason", reason))
    with in_threads(2, **OVER_TCP) as cluster, Client(cluster) as client:
        set_up_cluster(client, overlap=True)
        said = [record for record in caplog.records if reason in record.getMessage()]
        assert [record.name for record in said] == ["multimm.cluster.client"]
        assert said[0].levelno == logging.WARNING


def test_a_peer_that_cannot_be_met_stops_nobody(monkeypatch):
    monkeypatch.setattr(warmup, "PEER_SECONDS", 0.2)

    async def peers(worker):
        return ["tcp://127.0.0.1:9", *await real_peers(worker)]

    real_peers = warmup._peers
    monkeypatch.setattr(warmup, "_peers", peers)
    with in_threads(2, **OVER_TCP) as cluster, Client(cluster) as client:
        client.register_plugin(WarmUp())
        wait_until_warm(client)
        assert met(client) == everybody(listed(client))
        assert client.submit(lambda: 42).result() == 42


def test_teardown_stops_a_warm_up_that_is_under_way(monkeypatch):
    async def never(worker):
        import asyncio

        await asyncio.sleep(3600)

    monkeypatch.setattr(warmup, "_peers", never)
    with in_threads(1, **OVER_TCP) as cluster, Client(cluster) as client:
        client.register_plugin(WarmUp())
        (plugin,) = (worker.plugins[warmup.NAME] for worker in cluster.workers.values())
        assert not plugin._running.done()
        client.unregister_worker_plugin(warmup.NAME)
        soon(plugin._running.done)
        assert plugin._running.cancelled()


def test_kernels_are_compiled_by_gpu_workers_and_a_failure_is_only_logged(monkeypatch, caplog):
    import asyncio

    calls = []
    kernels = ModuleType(warmup.TASKS)
    kernels.are_compiled = lambda: False
    kernels.compile_kernels = lambda: calls.append("kernels")
    kernels.run_tasks = lambda: calls.append("tasks")
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    here = worker()
    asyncio.run(warmup._compile(here))
    assert calls == []
    monkeypatch.setattr(warmup, "by_dask_cuda", lambda worker: True)
    asyncio.run(warmup._compile(here))
    assert calls == ["kernels", "tasks"]
    kernels.are_compiled = lambda: True
    asyncio.run(warmup._compile(here))
    assert calls[2:] == ["tasks"]
    kernels.run_tasks = lambda: 1 / 0
    asyncio.run(warmup._compile(here))
    assert "kernels were not compiled beforehand: ZeroDivisionError" in caplog.text


def test_what_host_memory_needs_comes_behind_the_start_and_a_failure_is_only_logged(
    monkeypatch, caplog
):
    import asyncio
    import threading

    calls, may_copy = [], threading.Event()
    tasks = ModuleType(warmup.TASKS)
    tasks.are_compiled = lambda: True
    tasks.run_tasks = lambda: calls.append("tasks")
    tasks.copy_both_ways = lambda: calls.append(may_copy.wait(10))
    monkeypatch.setitem(sys.modules, tasks.__name__, tasks)
    monkeypatch.setattr(warmup, "by_dask_cuda", lambda worker: True)
    monkeypatch.setattr(warmup, "_exempt_what_is_imported", lambda worker: calls.append("exempt"))
    here = worker()

    async def nobody():
        return {here.address: 1}

    async def warmed_up():
        plugin = WarmUp()
        plugin.setup(here)
        await plugin.finished()
        done = [*calls]
        asyncio.get_running_loop().call_later(0.1, may_copy.set)
        await plugin.over()
        return done

    here.scheduler = SimpleNamespace(ncores=nobody)
    assert asyncio.run(warmed_up()) == ["tasks"]
    assert calls == ["tasks", True, "exempt"]
    tasks.copy_both_ways = lambda: 1 / 0
    asyncio.run(warmed_up())
    assert calls[3:] == ["tasks", "exempt"]
    assert "copies to and from host memory were not tried: ZeroDivisionError" in caplog.text
