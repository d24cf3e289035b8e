"""Clusters of real worker processes on this machine, and the values read from them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import dask
import distributed
import numpy as np
import psutil
import pytest
from clusters import forked, soon
from commands import python
from distributed import Client, LocalCluster, SchedulerPlugin, Security
from distributed.comm import CommClosedError

import multimm
import multimm.cluster as mc
from multimm.cli.options import Workers
from multimm.cluster import options
from multimm.cluster.inspect import devices
from multimm.cluster.inspect.cluster_spec import listed, spec_of
from multimm.cluster.inspect.devices import Gpu
from multimm.cluster.inspect.workers import Answer
from multimm.cluster.plugins.transfer_counter import (
    received_bytes,
    reset_received_bytes,
)
from multimm.errors import ClusterError, FileFormatError, KernelError, OptionError
from multimm.graph.scheduler.install import install
from multimm.planning.spec import H200, LOCAL_TCP, NVLINK

GIB = 2**30
#: `multimm.cluster.start` is the function.
start_module = sys.modules["multimm.cluster.start"]


@pytest.fixture(scope="module")
def client():
    # A short log, so that a count read from it would be cut off.
    with dask.config.set({"distributed.admin.low-level-log-length": 3}):
        with forked():  # and not what other tests start meanwhile
            client = mc.start(workers=2, memory_limit="1GiB")
        with client:
            yield client


@pytest.fixture
def two_gpus(monkeypatch):
    found = (Gpu("0", "NVIDIA H200", 140 * GIB), Gpu("1", "NVIDIA H200", 140 * GIB))
    monkeypatch.setattr(options, "visible_gpus", lambda: found)


def event_loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "IO loop"}


def block(mebibytes: int, seed: int) -> np.ndarray:
    return np.full(mebibytes * 2**17, seed, dtype=np.float64)


def touch(*blocks: np.ndarray) -> int:
    return sum(x.nbytes for x in blocks)


# ---------------------------------------------------------------------- start


def test_everything_listens_on_loopback_only(client):
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_what_workers_spill_and_import_lies_in_a_folder_of_this_user_alone(client):
    spilled = set(client.run(lambda dask_worker: dask_worker.local_directory).values())
    nodes = [*client.cluster.workers.values(), client.cluster.scheduler]
    for folder in spilled | {node.local_directory for node in nodes}:
        above = os.path.join(folder.partition("dask-scratch-space")[0], "dask-scratch-space")
        assert folder.startswith(f"{above}-")  # /tmp/dask-scratch-space is whoever's made it
        mine = os.stat(os.sep.join(folder.split(os.sep)[: above.count(os.sep) + 1]))
        assert mine.st_uid == os.geteuid()
        assert not mine.st_mode & 0o022


def test_cores_are_divided_among_the_workers_blas(client):
    if "OMP_NUM_THREADS" in os.environ:
        expected = os.environ["OMP_NUM_THREADS"]
    else:
        expected = str(max(1, options.cores() // 2))
    found = client.run(lambda: os.environ["OMP_NUM_THREADS"])
    assert set(found.values()) == {expected}


def test_close_takes_workers_and_threads_down_and_leaves_the_environment_alone(monkeypatch):
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    environment, threads = dict(os.environ), event_loops()
    children = {child.pid for child in multiprocessing.active_children()}
    client = mc.start(workers=1, threads=2, memory_limit=GIB)
    assert client.submit(lambda: 41 + 1).result() == 42
    assert {child.pid for child in multiprocessing.active_children()} > children
    assert dict(os.environ) == environment
    os.environ["MKL_NUM_THREADS"] = "7"  # which stays
    client.close()
    assert os.environ["MKL_NUM_THREADS"] == "7"
    assert client.status == "closed"
    assert {child.pid for child in multiprocessing.active_children()} == children
    assert event_loops() == threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0: at least 1"),
        ({"threads": 0}, "threads=0: at least 1"),
        ({"gpus": -1}, "gpus=-1: at least 0"),
        ({"gpus": 1000}, "gpus=1000: this host has"),
        ({"workers": "2"}, "workers='2': at least 1 is needed, an integer"),
        ({"workers": 1.5}, r"workers=1\.5"),
        ({"gpus": True}, "gpus=True"),
        ({"workers": 1, "threads": None}, "threads=None"),
        ({"workers": 1, "memory_limit": [1]}, r"memory_limit=\[1\]"),
        ({"workers": 1, "dashboard_address": 8787}, "dashboard_address=8787: give text"),
        ({"gpus": 1, "workers": 1}, "not both"),
        ({"gpus": 0, "protocol": "mpi"}, "allowed are tcp and ucxx"),
        ({"gpus": 0, "protocol": "ucxx"}, "for GPU workers"),
        ({"gpus": 0, "memory_limit": "many"}, "memory_limit='many'"),
        ({"gpus": 0, "memory_limit": 0}, "memory_limit=0"),
        ({"gpus": 0, "memory_limit": "100MB"}, "memory_limit='100MB': .* at least 120 MB"),
        ({"workers": 10**6}, "1000000 workers, 0 MB .* fewer"),
        ({"gpus": 0, "security": Security(), "protocol": "ucxx"}, "UCXX has no TLS"),
        ({"workers": 1, "security": Security()}, r"plaintext.*require_encryption=True"),
        ({"workers": 1, "security": Security()}, r"Security\.temporary\(\)"),
        ({"workers": 1, "security": Security(), "protocol": "tcp"}, "plaintext"),
        (
            {"workers": 1, "security": Security(False, tls_ca_file="ca", tls_client_cert="c")},
            "plaintext, with certificates or without",
        ),
        ({"workers": 1, "security": True}, "security=True: give .*temporary"),
        ({"workers": 1, "security": Security(True)}, "without tls_ca_file and tls_scheduler_cert"),
        (
            {
                "workers": 1,
                "security": Security(
                    tls_ca_file="/no",
                    tls_client_cert="/no",
                    tls_worker_cert="/no",
                    tls_scheduler_cert="/no",
                ),
            },
            "certificates cannot be read .*tls_ca_file=/no",
        ),
    ],
)
def test_start_refuses(arguments, message):
    with pytest.raises(OptionError, match=message):
        mc.start(**arguments)


def test_a_folder_that_is_gone_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ClusterError, match="the current folder is gone"):
        mc.start(workers=1)
    for path in ("a.npy", "a.h5:x", "a.zarr/x"):
        with pytest.raises(FileFormatError, match=f"{path}: the current folder is gone"):
            multimm.io.open_array(path)


def test_gpus_are_taken_by_default_and_cpu_workers_when_asked_for(two_gpus):
    assert [gpu.ident for gpu in options.check().gpus] == ["0", "1"]
    assert [gpu.ident for gpu in options.check(gpus=1).gpus] == ["0"]
    assert options.check(gpus=0).gpus == options.check(workers=3).gpus == ()
    assert options.check(workers=3).workers == 3


def test_default_memory_limit_is_a_share_of_what_is_free(two_gpus, monkeypatch):
    memory = SimpleNamespace(total=1000 * GIB, available=800 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("distributed.system.memory_limit", lambda: 1000 * GIB)
    assert options.check().memory_limit == 360 * GIB
    assert options.check(workers=4).memory_limit == 180 * GIB
    assert options.check(memory_limit="3GB").memory_limit == 3 * 10**9


def test_dashboard_without_host_stays_on_loopback(two_gpus):
    assert options.check(dashboard_address=":8787").dashboard_address == "127.0.0.1:8787"
    assert options.check(dashboard_address="10.0.0.1:1").dashboard_address == "10.0.0.1:1"
    assert options.check().dashboard_address is None


@pytest.mark.skipif(bool(devices.visible_gpus()), reason="GPU packages may be installed here")
def test_gpus_without_gpu_packages_say_what_to_install(two_gpus):
    with pytest.raises(ClusterError, match=r"pip install .*\[cuda13\].*gpus=0"):
        mc.start()


@pytest.mark.parametrize(("protocol", "found"), [(None, "tcp"), ("ucxx", "ucxx")])
def test_gpu_workers_come_from_dask_cuda_with_a_shared_pool(
    two_gpus, monkeypatch, caplog, protocol, found
):
    asked = {}

    def cluster(**kwargs):
        asked.update(kwargs)
        raise RuntimeError("no such pool") from OSError("out of\n memory")

    fake = ModuleType("dask_cuda")
    fake.LocalCUDACluster = cluster
    monkeypatch.setitem(sys.modules, "dask_cuda", fake)
    monkeypatch.setattr(start_module, "find_spec", lambda name: True)
    with pytest.raises(ClusterError, match=r"OSError: out of memory.*multimm doctor"):
        mc.start(gpus=1, rmm_pool="1GB", memory_limit=GIB, protocol=protocol)
    assert asked["CUDA_VISIBLE_DEVICES"] == ["0"]
    assert asked["protocol"] == found
    assert asked["rmm_pool_size"] == "1GB"
    assert asked["rmm_allocator_external_lib_list"] == "cupy"
    assert asked["memory_limit"] == GIB
    assert ("all network interfaces, unencrypted" in caplog.text) == (found == "ucxx")


class Compiling:
    """Stands for the processes that compile kernels, and notes what becomes of them."""

    def __init__(self, seen, capability):
        self.seen, self.capability = seen, capability
        seen.append(("begun", capability))

    def is_over(self):
        return self.capability == 100

    def wait(self):
        self.seen.append(("waited", self.capability))
        if self.capability == 100:
            raise KernelError("no compiler")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.seen.append(("left", self.capability))


@pytest.mark.parametrize("starts", [True, False])
def test_kernels_are_compiled_while_gpu_workers_start(monkeypatch, caplog, starts):
    """Once for each kind of GPU; `start` waits for that behind the workers, and says so."""
    seen, found = [], tuple(Gpu(str(i), "?", 80 * GIB, c) for i, c in enumerate((100, 90, 0, 90)))
    monkeypatch.setattr(options, "visible_gpus", lambda: found)
    monkeypatch.setattr(start_module, "find_spec", lambda name: True)
    monkeypatch.setattr(start_module, "Compilation", lambda *asked: Compiling(seen, asked[0]))

    def cluster(**kwargs):
        seen.append("workers")
        if not starts:
            raise OSError
        return LocalCluster(n_workers=1, dashboard_address=":0")

    monkeypatch.setitem(sys.modules, "dask_cuda", ModuleType("dask_cuda"))
    sys.modules["dask_cuda"].LocalCUDACluster = cluster
    with nullcontext() if starts else pytest.raises(ClusterError):
        mc.start(protocol="tcp", memory_limit=GIB).close()
    waited = [("waited", 90), ("waited", 100)] if starts else []
    left = [("left", 100), ("left", 90)]
    assert seen == [("begun", 90), ("begun", 100), "workers", *waited, *left]
    assert ("compute capability 90 are still being compiled" in caplog.text) == starts
    assert "capability 100" not in caplog.text
    assert ("not compiled beforehand: no compiler" in caplog.text) == starts


def test_gpu_workers_import_what_tasks_need_before_they_take_any():
    """Else one that is unpickled meanwhile could find half of a package."""
    preloads = start_module.on_gpus(options.check(workers=1))["preload"]
    with (
        dask.config.set({"distributed.worker.preload": preloads}),
        mc.start(workers=1, memory_limit=GIB) as client,
    ):
        assert client.submit(lambda: 42).result() == 42
        assert all(client.run(lambda: "dask.array" in sys.modules).values())


@pytest.mark.parametrize(
    ("mask", "visible"),
    [(None, ["0", "1"]), ("1", ["1"]), ("", []), ("-1", []), ("0,7,1", ["0"]), ("GPU-a,1", 2)],
)
def test_visible_devices_follow_cudas_rule(mask, visible):
    found = devices.visible_idents(mask, 2)
    assert found == visible if isinstance(visible, list) else len(found) == visible


# ------------------------------------------------------------------- describe


def an_entry(**changes):
    return {"host": "10.0.0.1", "nthreads": 2, "memory_limit": 6 * GIB, **changes}


def test_describe_reads_the_live_cluster(client):
    spec = mc.describe(client)
    assert spec.addresses == tuple(sorted(listed(client)))
    assert [(d.kind, d.memory_bytes, d.spills) for d in spec.devices] == [("cpu", GIB, True)] * 2
    assert spec.link == LOCAL_TCP
    assert spec.threads == 1


def test_what_a_process_holds_for_itself_is_no_part_of_the_budget(client):
    left = GIB - devices.PROCESS_BYTES
    assert [d.budget_bytes for d in mc.describe(client).devices] == [int(0.6 * left)] * 2
    on_paper = Workers(workers=2, memory_limit="1GiB").on_paper()
    assert on_paper.budget_bytes == int(0.6 * left)


def test_describe_of_a_client_without_workers_is_none_and_does_not_wait():
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        started = time.monotonic()
        assert mc.describe(client) is None
        assert time.monotonic() - started < 5
    assert mc.describe(client) is None


def test_gpu_answers_decide_over_the_host_memory_limit():
    workers = {f"ucxx://10.0.0.1:{port}": an_entry(nthreads=3) for port in (9, 8)}
    spec = spec_of(workers, {address: Answer(H200, 1, 64 * GIB) for address in workers})
    assert spec.devices == (H200, H200)
    assert spec.threads == 1  # one task fills a GPU
    assert Workers(gpus=2, threads=3).on_paper().threads == 1
    assert spec.link == NVLINK
    assert spec.addresses == ("ucxx://10.0.0.1:8", "ucxx://10.0.0.1:9")


@pytest.mark.parametrize(
    ("ports", "per_node"), [([(1, 2)], 0), ([(1, 2), (3, 4)], 2), ([(1, 2), (3,)], 0)]
)
def test_hosts_with_equally_many_workers_are_nodes(ports, per_node):
    workers = {
        f"tcp://10.0.0.{i}:{port}": an_entry(host=f"10.0.0.{i}")
        for i, host in enumerate(ports)
        for port in host
    }
    spec = spec_of(workers, {})
    assert spec.per_node == per_node
    assert spec.between == spec.link == LOCAL_TCP


def test_unlimited_memory_is_an_even_share_of_the_host():
    workers = {f"tcp://10.0.0.1:{port}": an_entry(memory_limit=0) for port in (1, 2, 3)}
    workers["tcp://10.0.0.2:1"] = an_entry(host="10.0.0.2", memory_limit=None)
    answers = {address: Answer(None, 2, 30 * GIB) for address in workers}
    spec = spec_of(workers, answers)
    assert [d.memory_bytes // GIB for d in spec.devices] == [10, 10, 10, 30]
    assert not any(d.spills for d in spec.devices)


@pytest.mark.alone  # other processes take memory, too
def test_local_leaves_out_what_the_process_holds(monkeypatch):
    # Coarse steps would be larger than what is held here.
    monkeypatch.setattr(importlib.import_module("multimm.cluster.local"), "STEPS", 2**14)
    before = mc.local().devices[0].budget_bytes
    held = np.ones(2**26)
    # Of what is free a plan takes six tenths.
    assert mc.local().devices[0].budget_bytes < before - held.nbytes // 4


def test_local_has_no_more_memory_than_its_address_space():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2);"
        "import multimm; print(multimm.cluster.local().devices[0].budget_bytes)"
    )
    run = python("-c", code)
    assert 0 < int(run.stdout) < 2 * 2**30


@pytest.mark.parametrize(
    ("configured", "threads"),
    [
        ({"scheduler": "Synchronous"}, 1),
        ({"scheduler": "single-threaded", "num_workers": 3}, 1),
        ({"scheduler": dask.get}, 1),
        ({"scheduler": "threads", "num_workers": 3}, 3),
    ],
)
def test_local_takes_the_threads_of_the_configured_scheduler(configured, threads):
    with dask.config.set(configured):
        assert mc.local().threads == threads
        made = multimm.plan(np.ones((8, 8)), np.ones((8, 8)))
    said = f"{threads} threads each" in str(made)
    assert (made.cluster.threads, said) == (threads, threads > 1)


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "clock_khz", "packs", "float32", "tf32"),
    [
        ((8, 0), 108, 1_410_000, ("float32", "tf32"), 104_000, 312_000),  # A100
        ((8, 9), 128, 2_520_000, ("tf32",), None, 165_000),  # RTX 4090
        ((10, 0), 148, 1_965_000, ("float32", "tf32"), 199_000, 596_000),
        ((7, 5), 40, 1_590_000, (), None, None),
        ((7, 0), 80, 1_530_000, (), None, None),
    ],
)
def test_tensor_cores_of_other_gpus_are_predicted(
    capability, multiprocessors, clock_khz, packs, float32, tf32
):
    """At a half to three quarters of what they do at most; where they are slow, not used."""
    device = devices.gpu_device(
        "one", 5, capability=capability, multiprocessors=multiprocessors, clock_khz=clock_khz,
        memory_khz=1_000_000, bus_bits=5120, spills=True,
    )  # fmt: skip
    assert device.packs == packs
    rates = dict(device.packed_gflops)
    assert set(rates) == set(packs)
    for precision, peak in (("float32", float32), ("tf32", tf32)):
        if peak:
            assert 0.5 < rates[precision] / peak < 0.75


# -------------------------------------------------------------------- connect


def test_a_closed_client_that_is_garbage_does_not_hold_up_the_next_one(monkeypatch):
    client = mc.start(workers=1)
    client.close()
    factory = distributed.utils.get_loop_factory

    def collect():
        """As when garbage is collected in the thread of a new event loop, before that runs."""
        client.close()
        return factory()

    monkeypatch.setattr(distributed.utils, "get_loop_factory", collect)
    started = time.monotonic()
    with pytest.raises(ClusterError):
        mc.connect("tcp://127.0.0.1:9", timeout=0.5)
    assert time.monotonic() - started < 8  # Dask waits 10 s for that thread


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "tcp://no.invalid:8786"])
def test_a_dead_address_is_one_line_in_time_and_leaves_nothing(address, caplog, capfd):
    threads = event_loops()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ClusterError) as caught:
        mc.connect(address, timeout=0.5)
    assert time.monotonic() - started < 8  # Dask's own limit is 30 s
    assert "no scheduler answers at " + address in str(caught.value)
    assert "\n" not in str(caught.value)
    assert event_loops() == threads
    assert caplog.text == ""
    assert "".join(capfd.readouterr()) == ""


def test_a_listener_that_is_no_scheduler_does_not_hang(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        with pytest.raises(ClusterError, match="no scheduler answers"):
            mc.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout=0.5)
        assert time.monotonic() - started < 8
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": 5}, "address 5: give text"),
        ({"address": None}, "address None"),
        ({"address": "tcp://host:1", "timeout": "soon"}, "timeout='soon'"),
        ({"address": ""}, "host and port"),
        ({"address": "somewhere"}, "host and port"),
        ({"address": "tcp://me:hidden@host:1"}, r"tcp://\*\*\*@host:1: Dask takes no user"),
        ({"address": "me:hidden@host"}, r"tcp://\*\*\*@host: Dask takes no user"),
        ({"address": "tcp://host:port"}, "host and port"),
        ({"address": "tls://host:1"}, "security="),
        ({"address": "tcp://host:1", "timeout": 0}, "timeout=0"),
        ({"address": "tcp://host:1", "security": Security()}, "tcp is not encrypted.*tls://host:1"),
        ({"address": "host:1", "security": Security.temporary()}, "connect to tls://host:1"),
        ({"address": "ucxx://host:1", "security": Security.temporary()}, "ucxx is not encrypted"),
    ],
)
def test_connect_refuses(arguments, message):
    with pytest.raises(OptionError, match=message):
        mc.connect(**arguments)


@pytest.mark.parametrize("times", [1, 2])
def test_a_client_connects_while_others_cancel(times):
    class Cancels(SchedulerPlugin):
        """As the first clients connect, all are told that something is cancelled."""

        def add_client(self, scheduler, client):
            nonlocal times
            if times:
                times -= 1
                told = {"op": "cancelled-keys", "keys": []}
                asyncio.get_running_loop().call_soon(scheduler.report, told)

    with LocalCluster(n_workers=1, processes=False, protocol="tcp", dashboard_address=":0") as own:
        own.scheduler.add_plugin(Cancels(), name="cancels")
        with mc.connect(own.scheduler_address) as client:
            assert client.submit(lambda: 42).result() == 42
        assert not times


# -------------------------------------------------------------------- traffic


def move(client, mebibytes: int, seed: int) -> None:
    """Make a block on the first worker and use it on the second."""
    first, second = sorted(listed(client))
    made = client.submit(block, mebibytes, seed, workers=[first], pure=False)
    assert client.submit(touch, made, workers=[second], pure=False).result() == mebibytes * 2**20


def test_received_bytes_are_exact_past_the_length_of_dasks_log(client):
    first, second = sorted(listed(client))
    reset_received_bytes(client)
    for seed in range(12):
        move(client, 1 + seed % 2, seed)
    assert received_bytes(client) == {first: 0, second: 18 * 2**20}
    logged = client.run(lambda dask_worker: len(dask_worker.transfer_incoming_log))
    assert logged[second] == 3
    assert reset_received_bytes(client) == {first: 0, second: 18 * 2**20}
    assert received_bytes(client) == {first: 0, second: 0}


def test_a_worker_that_is_lost_meanwhile_is_no_matter_of_versions(client, monkeypatch):
    def lost(*_, **__):
        raise CommClosedError("in <TCP (closed) Scheduler Broadcast>: Stream is closed")

    from multimm.cluster import client as clients

    said = "lost while .* Stream is closed.*memory_limit="
    monkeypatch.setattr("multimm.cluster.client.obstacles", lost)
    with pytest.raises(ClusterError, match=said):
        clients.set_up_cluster(client, overlap=True)
    with Client(client.scheduler.address) as other:
        monkeypatch.setattr(other, "register_plugin", lost)
        with pytest.raises(ClusterError, match=said):
            install(other)


# ---------------------------------------------------------------- start, when it fails


@pytest.mark.parametrize("size", ["abc", 0, -1, 1.5e15, "200GiB", object()])
def test_pools_that_no_gpu_has(two_gpus, size):
    with pytest.raises(OptionError, match="rmm_pool="):
        options.check(rmm_pool=size)


def test_a_gpu_that_is_not_there_ends_the_list(monkeypatch):
    class Nvml:
        class NVMLError(Exception):
            pass

        def nvmlDeviceGetCount(self):
            return 2

        def nvmlDeviceGetHandleByIndex(self, index):
            return index

        def nvmlDeviceGetHandleByUUID(self, name):
            raise self.NVMLError(name)

        def nvmlDeviceGetMemoryInfo(self, handle):
            return SimpleNamespace(total=GIB)

        def nvmlDeviceGetName(self, handle):
            return f"GPU {handle}"

        def nvmlDeviceGetCudaComputeCapability(self, handle):
            return 9, 0

    monkeypatch.setattr(devices, "nvml", lambda: nullcontext(Nvml()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-of-yesterday,0")
    assert devices.visible_gpus() == (Gpu("1", "GPU 1", GIB, 90),)


def test_a_worker_comes_back_however_long_that_takes_and_leaves_nothing_in_the_environment():
    """Dask stops the nanny where a lost worker is not there again after a certain time.

    The nanny writes the threads of its BLAS there; later clusters would take these.
    """
    before = {name: os.environ.get(name) for name in start_module.BLAS_VARIABLES}
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10ms"}),
        forked(),
        mc.start(workers=1, memory_limit=GIB) as client,
    ):
        ((lost, pid),) = client.run(os.getpid).items()
        os.kill(pid, signal.SIGKILL)
        soon(lambda: (now := listed(client)) and lost not in now)
        assert client.submit(lambda: 42).result(timeout=60) == 42
    assert {name: os.environ.get(name) for name in start_module.BLAS_VARIABLES} == before


def test_a_cluster_that_is_scaled_replaces_workers_that_were_retired():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1s"}),
        forked(), mc.start(workers=2, memory_limit=GIB) as client,
    ):  # fmt: skip
        client.retire_workers([min(listed(client))], close_workers=True)
        soon(lambda: len(client.cluster.workers) == 1)
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=60)


def test_threads_that_start_clusters_leave_no_setting_behind():
    before = dask.config.get("temporary-directory"), dask.config.get("distributed.nanny")
    barrier = threading.Barrier(3)

    def start():
        barrier.wait()
        with mc.start(workers=1, memory_limit=GIB):
            pass

    with forked():
        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    after = dask.config.get("temporary-directory"), dask.config.get("distributed.nanny")
    assert after == before
