"""Measuring the rates of workers and links: what counts, and when nothing does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

import multimm
import multimm.cluster as mc
from multimm.cli import main
from multimm.cluster.calibration import probes, store
from multimm.cluster.calibration import run as calibration_run
from multimm.cluster.calibration.probes import Effort, fetch_seconds, product_gflops
from multimm.cluster.calibration.run import measure_rates, neighbours
from multimm.cluster.calibration.store import DeviceRates
from multimm.cluster.inspect import cluster_spec
from multimm.cluster.inspect.cluster_spec import listed
from multimm.errors import ClusterError, OptionError
from multimm.planning.explain import rates_text
from multimm.planning.spec import (
    H200,
    INFINIBAND,
    LOCAL_TCP,
    NVLINK,
    ClusterSpec,
    DeviceSpec,
    MatrixSpec,
)

DAY = "2026-11-21"
CPU = DeviceSpec("cpu", "cpu", 2**31, 30.0, 10.0)


pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("rates_file")]


@pytest.fixture
def quick(monkeypatch):
    """Small blocks, for an instant: what is measured is a rate, if no good one."""
    monkeypatch.setattr(calibration_run, "EFFORT", {"cpu": Effort(64, 0.001, 2**12, 0.001)})


@contextmanager
def workers(count, **options):
    """A client of workers in this process that talk TCP."""
    settings = {"protocol": "tcp", "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(
            n_workers=count, processes=False, memory_limit=0, **settings | options
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def another_process():
    """Forget all but the file, as the next process does."""
    store.forget()


# ------------------------------------------------------------- what is measured


class Clock:
    """Time that passes as it is told to."""

    def __init__(self, *steps):
        self.now, self._steps = 0.0, iter(steps)

    def perf_counter(self):
        return self.now

    def work(self, *_, **__):
        self.now += next(self._steps)


def test_the_rate_counts_products_after_the_first(monkeypatch):
    clock = Clock(100.0, 0.5, 0.5, 0.25)
    monkeypatch.setattr(probes, "time", clock)
    monkeypatch.setattr("multimm.graph.tasks.multiply.multiply", clock.work)
    # Three products of 2 * 10**6 flop in 1.25 s; the one before, with all it loads, is left out.
    assert product_gflops("ieee", 100, 1.2, False) == pytest.approx(3 * 2e6 / 1.25 / 1e9)


def test_products_are_those_of_tasks_and_right(monkeypatch):
    from multimm.graph.tasks import multiply as tasks_multiply

    made, real = [], tasks_multiply.multiply

    def multiply(a, b, partial=None, *, step):
        made.append((a, b, partial, step, real(a, b, partial, step=step)))
        return made[-1][-1]

    monkeypatch.setattr(tasks_multiply, "multiply", multiply)
    product_gflops("tf32", 16, 0.0, False)
    (a, b, none, step, first), (_, _, partial, _, second) = made
    assert none is None
    assert partial is first
    assert step.precision == "tf32"
    assert second == pytest.approx(2 * (a.astype("f8") @ b), abs=1e-4)
    assert 0.5 < a.std() < 1.5
    assert abs(a - b).max() > 0.1


@pytest.mark.parametrize(("precision", "sides"), [("ieee", []), ("float32", ["a", "b"])])
def test_gpus_multiply_operands_that_were_packed_before(monkeypatch, precision, sides):
    packed, multiplied = [], []

    def pack(block, *, role, step):
        assert step.precision == precision
        packed.append(role)
        return f"packed {role}"

    monkeypatch.setattr(probes, "normal", lambda seed, shape, gpu: f"raw {'ab'[seed - 1]}")
    monkeypatch.setattr("multimm.graph.tasks.multiply.pack", pack)
    monkeypatch.setattr(
        "multimm.graph.tasks.multiply.multiply", lambda a, b, *_, **__: multiplied.append((a, b))
    )
    product_gflops(precision, 8, 0.0, True)
    state = "packed" if sides else "raw"
    assert packed == sides
    assert set(multiplied) == {(f"{state} a", f"{state} b")}


class Peer:
    """A worker with one peer whose answers take the clock's time."""

    address = "tcp://me"

    def __init__(self, clock, status="OK"):
        self._clock, self._status = clock, status
        self.asked = []

    def rpc(self, peer):
        self.asked.append(peer)
        return self

    async def run(self, *, function, kwargs):
        self._clock.work()
        return {"status": self._status, "result": None}


def test_a_transfer_takes_the_median_after_the_first(monkeypatch):
    clock = Clock(9.0, 0.25, 0.5, 4.0, 0.25, 0.5, 7.0)
    monkeypatch.setattr(probes, "time", clock)
    worker = Peer(clock)
    options = {"peers": {"tcp://me": "tcp://you"}, "nbytes": 4, "seconds": 5.1, "gpu": False}
    assert asyncio.run(fetch_seconds(worker, **options)) == 0.5
    assert worker.asked == ["tcp://you"] * 6
    with pytest.raises(ClusterError, match="tcp://you did not send a block"):
        asyncio.run(fetch_seconds(Peer(Clock(1.0), "error"), **options))


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 1), (2, 2), (3, 1), (8, 8, 8), (1, 5, 2)])
def test_neighbours_are_of_one_host_or_of_two(counts):
    hosts = {f"w{h}.{i}": f"h{h}" for h, count in enumerate(counts) for i in range(count)}
    inside, outside = (neighbours(hosts, between=between) for between in (False, True))
    assert set(inside) == {w for w, h in hosts.items() if counts[int(h[1:])] > 1}
    assert all(hosts[w] == hosts[peer] and w != peer for w, peer in inside.items())
    assert len(set(inside.values())) == len(inside)
    assert set(outside) == (set(hosts) if len(counts) > 1 else set())
    assert all(hosts[w] != hosts[peer] for w, peer in outside.items())
    if len(set(counts)) == 1:
        assert len(set(outside.values())) == len(outside)


def test_the_slowest_of_a_kind_counts_and_kinds_are_apart(monkeypatch):
    spec = ClusterSpec((H200, H200, CPU), NVLINK, ("a", "b", "c"), between=INFINIBAND)
    said = {
        "ieee": {"a": 50_000.0, "b": 40_000.0, "c": 20.0},
        "float32": {"a": 160_000.0, "b": 170_000.0},
        "tf32": {"a": 450_000.0, "b": 440_000.0},
    }
    asked = {}

    def on_workers(client, function, addresses, *, precision, efforts):
        asked[precision] = list(addresses)
        return said[precision]

    monkeypatch.setattr(calibration_run, "_on_workers", on_workers)
    monkeypatch.setattr(calibration_run, "_today", lambda: DAY)
    assert calibration_run._devices(None, spec) == (
        DeviceRates(H200.name, H200.gflops, 4e4, (("float32", 1.6e5), ("tf32", 4.4e5)), DAY),
        DeviceRates("cpu", 30.0, 20.0, (), DAY),
    )
    assert asked == {"ieee": ["a", "b", "c"], "float32": ["a", "b"], "tf32": ["a", "b"]}


def test_links_within_hosts_and_between_them_are_apart(monkeypatch):
    addresses = ("ucxx://x:1", "ucxx://x:2", "ucxx://y:1", "ucxx://y:2")
    hosts = {address: address[7] for address in addresses}
    spec = ClusterSpec((H200,) * 4, NVLINK, addresses, per_node=2)

    def on_workers(client, function, workers, *, peers, nbytes, seconds, gpu):
        assert gpu
        far = any(hosts[w] != hosts[p] for w, p in peers.items())
        whole = (8 if far else 1) * (1 if len(workers) == 1 else 2) * nbytes / 100e9
        slower = 2 if len(workers) > 1 else 1
        return {w: whole * (slower if i else 1) for i, w in enumerate(workers)}

    monkeypatch.setattr(calibration_run, "_on_workers", on_workers)
    monkeypatch.setattr(calibration_run, "_today", lambda: DAY)
    inside, outside = calibration_run._links(None, spec, hosts)
    assert inside.key == ("ucxx", H200.name, False)
    assert outside.key == ("ucxx", H200.name, True)
    assert (inside.pair_gbps, outside.pair_gbps) == (100.0, 12.5)
    # The slowest worker takes four times as long while all receive.
    assert (inside.gbps, outside.gbps) == (25.0, pytest.approx(3.125))
    assert outside.latency_s == pytest.approx(8 * calibration_run.SMALL_BYTES / 100e9, rel=1e-3)


# ----------------------------------------------------------------- live workers


@pytest.mark.usefixtures("quick")
def test_describe_measures_when_asked_and_remembers(rates_file):
    with workers(2) as client:
        before = mc.describe(client)
        assert before == mc.describe(client)
        assert not rates_file.exists()
        assert "rates as shipped" in str(multimm.plan(MatrixSpec((64, 64)), MatrixSpec((64, 64))))
        found = mc.describe(client, measure=True)
        assert rates_file.exists()
        another_process()
        assert mc.describe(client) == found
        text = str(multimm.plan(MatrixSpec((64, 64)), MatrixSpec((64, 64))))
        assert probes._kept_block.cache_info().currsize == 0  # given back
    (device,) = set(found.devices)
    assert 0 < device.gflops != before.slowest.gflops
    assert 0 < found.link.gbps != LOCAL_TCP.gbps
    assert 0 < found.link.latency_s < 10
    today = time.strftime("%Y-%m-%d")
    assert rates_text(found) in (f"rates measured {today}", f"rates measured {device.measured}")
    assert rates_text(found) in text
    blank = {"gflops": 1.0, "measured": "", "packed_gflops": ()}
    assert [replace(one, **blank) for one in found.devices] == [
        replace(one, **blank) for one in before.devices
    ]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("count", "protocol"), [(1, "tcp"), (2, "inproc")])
def test_no_link_is_measured_where_nothing_travels(count, protocol):
    with workers(count, protocol=protocol) as client:
        found = measure_rates(client)
    assert len(found.devices) == 1
    assert found.links == ()


@pytest.mark.usefixtures("quick")
def test_all_threads_of_a_worker_count(monkeypatch):
    monkeypatch.setattr(probes, "product_gflops", lambda *_: 3.0)
    with workers(1, threads_per_worker=2) as client:
        assert measure_rates(client).devices[0].gflops == 6.0


#: Tasks of workers in this process wait for it.
BARRIER = threading.Event()


def wait_for_barrier():
    return BARRIER.wait(30)


@pytest.fixture
def barrier():
    BARRIER.clear()
    yield BARRIER
    BARRIER.set()


@pytest.mark.usefixtures("quick")
def test_busy_workers_are_not_measured(barrier, rates_file):
    with workers(2) as client:
        blocked = client.submit(wait_for_barrier)
        while not any(client.processing().values()):
            time.sleep(0.01)
        with pytest.raises(ClusterError, match=r"1 tasks run or wait .* when the workers are idle"):
            mc.describe(client, measure=True)
        barrier.set()
        assert blocked.result()
        assert not rates_file.exists()
        assert mc.describe(client).devices[0].measured == ""


@pytest.mark.usefixtures("quick")
def test_tasks_that_come_meanwhile_spoil_the_measurement(monkeypatch, barrier, rates_file):
    real = calibration_run._links
    with workers(1) as client:

        def links(*args):
            late.append(client.submit(wait_for_barrier))
            while not any(client.processing().values()):
                time.sleep(0.01)
            return real(*args)

        late = []
        monkeypatch.setattr(calibration_run, "_links", links)
        with pytest.raises(ClusterError, match="nothing was kept"):
            mc.describe(client, measure=True)
        barrier.set()
    assert not rates_file.exists()


@pytest.mark.usefixtures("quick")
def test_workers_that_join_spoil_the_measurement(monkeypatch, rates_file):
    real = calibration_run._links
    with workers(1) as client:

        def links(*args):
            client.cluster.scale(2)
            client.wait_for_workers(2)
            return real(*args)

        monkeypatch.setattr(calibration_run, "_links", links)
        with pytest.raises(ClusterError, match="joined or left"):
            mc.describe(client, measure=True)
    assert not rates_file.exists()


def test_nobody_to_measure_is_an_error():
    with workers(0) as client:
        with pytest.raises(ClusterError, match="no workers to measure: start some"):
            mc.describe(client, measure=True)
        assert mc.describe(client) is None
    with pytest.raises(ClusterError, match="no workers to measure"):
        mc.describe(client, measure=True)


def test_an_asynchronous_client_cannot_measure():
    async def look():
        settings = {"asynchronous": True, "dashboard_address": "127.0.0.1:0"}
        async with (
            LocalCluster(n_workers=1, processes=False, memory_limit=0, **settings) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            with pytest.raises(OptionError, match="use a synchronous one"):
                mc.describe(client, measure=True)

    asyncio.run(look())


def test_a_worker_that_does_not_say_what_it_is_cannot_be_measured(monkeypatch, rates_file):
    monkeypatch.setattr(cluster_spec, "ask", lambda client, addresses: {})
    with (
        workers(1) as client,
        pytest.raises(ClusterError, match="does not say what it computes with"),
    ):
        mc.describe(client, measure=True)
    assert not rates_file.exists()


@pytest.mark.usefixtures("quick")
def test_a_worker_that_fails_is_named_and_nothing_is_kept(monkeypatch, rates_file):
    def product_gflops(*_):
        raise MemoryError("no room")

    with workers(1) as client:
        (address,) = mc.describe(client).addresses
        with monkeypatch.context() as patch:
            patch.setattr(probes, "product_gflops", product_gflops)
            with pytest.raises(ClusterError, match=f"worker {address} .*no room.*nothing was kept"):
                mc.describe(client, measure=True)
        assert not rates_file.exists()
        assert mc.describe(client, measure=True).slowest.measured


@pytest.mark.usefixtures("quick")
def test_a_worker_that_dies_is_named_and_nothing_is_kept(monkeypatch, rates_file):
    async def die(dask_worker, **_):
        if dask_worker.name == 1:
            os._exit(1)
        return 1.0

    with mc.start(workers=2, memory_limit="1GiB") as client:
        named = {w["name"]: address for address, w in listed(client).items()}
        with monkeypatch.context() as patch:
            patch.setattr(calibration_run, "product_rate", die)
            started = time.monotonic()
            with pytest.raises(ClusterError) as caught:
                mc.describe(client, measure=True)
            assert time.monotonic() - started < 60
        assert f"on worker {named[1]}" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not rates_file.exists()
        client.wait_for_workers(2, timeout=60)  # its nanny starts it again
        assert mc.describe(client, measure=True).slowest.measured
    assert rates_file.exists()


@pytest.mark.usefixtures("quick")
def test_workers_that_stay_silent_are_given_up(monkeypatch, rates_file):
    async def sleep(**_):
        await asyncio.sleep(30)

    monkeypatch.setattr(calibration_run, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(calibration_run, "product_rate", sleep)
    with workers(1) as client, pytest.raises(ClusterError, match=r"did not answer .*nothing was"):
        mc.describe(client, measure=True)
    assert not rates_file.exists()


# ------------------------------------------------------------- the command line


def run(*args):
    return CliRunner().invoke(main, list(args), prog_name="multimm")


@pytest.mark.usefixtures("quick")
def test_tune_measures_a_cluster_and_plan_uses_it(rates_file):
    plan = ("plan", "4096x4096", "4096x4096", "--workers", "2")
    assert "rates as shipped" in run(*plan).output
    measured = run("tune", "--cluster", "--workers", "2", "--memory-limit", "1GiB")
    assert measured.exit_code == 0, measured.output
    assert "GFLOP/s (shipped " in measured.output
    assert "tcp within a host: " in measured.output
    assert f"kept in {rates_file}" in measured.output
    another_process()
    assert "rates measured 2" in run(*plan).output
    nodes = run(*plan, "--per-node", "1", "--node-link", "2")
    assert "except for transfers between nodes" in nodes.output


def test_tune_wants_the_flag_with_options_about_workers():
    result = run("tune", "--workers", "2")
    assert (result.exit_code, "give it as well" in result.output) == (2, True)
