"""Measuring the rates of workers and links: what counts, and when nothing does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import dask
import pytest
from click.testing import CliRunner
from clusters import forked, in_threads
from distributed import Client

import multimm
import multimm.cluster as mc
from multimm.cli import main
from multimm.cluster.calibration import probes, store
from multimm.cluster.calibration import run as calibration_run
from multimm.cluster.calibration.probes import Effort, product_gflops
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.warmup import WarmUp
from multimm.errors import ClusterError
from multimm.planning.explain.workers import rates as rates_text
from multimm.planning.spec import (
    H200,
    LOCAL_TCP,
    ClusterSpec,
    MatrixSpec,
)

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("rates_file")]


QUICK = {"cpu": Effort(64, 64, 0.1, 2**12, 2**12, 0.001)}


@pytest.fixture
def quick(monkeypatch):
    """Small blocks, for an instant: what is measured is a rate, if no good one."""
    monkeypatch.setattr(calibration_run, "EFFORT", QUICK)


@contextmanager
def workers(count):
    """A client of workers in this process that talk TCP."""
    with in_threads(count, protocol="tcp", memory_limit=0) as cluster, Client(cluster) as client:
        yield client


# ------------------------------------------------------------- what is measured


@pytest.mark.parametrize("adds", [False, True])
def test_products_are_those_of_tasks_and_right(monkeypatch, adds):
    from multimm.graph.tasks import multiply as tasks_multiply

    made, real = [], tasks_multiply.multiply

    def multiply(a, b, partial=None, *, step):
        made.append((a, b, partial, step, real(a, b, partial, step=step)))
        return made[-1][-1]

    monkeypatch.setattr(tasks_multiply, "multiply", multiply)
    product_gflops("tf32", (16, 24), 0.01, False, adds=adds)
    (a, b, none, step, first), (_, _, partial, _, second), *_ = made
    assert none is None
    assert partial is (first if adds else None)
    assert step.precision == "tf32"
    assert a.shape == b.T.shape == (16, 24)
    assert second == pytest.approx((1 + adds) * (a.astype("f8") @ b), abs=1e-4)
    assert 0.5 < a.std() < 1.5
    assert abs(a - b.T).max() > 0.1


def test_no_product_is_measured_beside_a_warm_up(monkeypatch):
    done = []

    class SlowWarmUp(WarmUp):
        def __init__(self):
            super().__init__()
            self._behind = asyncio.ensure_future(asyncio.sleep(0.1))
            self._behind.add_done_callback(lambda task: done.append("warm-up"))

    monkeypatch.setattr(probes, "product_gflops", lambda *given: done.append("product") or 1.0)
    monkeypatch.setattr(probes, "by_dask_cuda", lambda worker: False)

    async def measured():
        with ThreadPoolExecutor(1) as threads:
            worker = SimpleNamespace(
                plugins={WarmUp.name: SlowWarmUp()},
                executors={"default": threads},
                state=SimpleNamespace(nthreads=1),
            )
            return await probes.product_rate(worker, precision="ieee", efforts=QUICK)

    assert asyncio.run(measured()) == 1.0
    assert done == ["warm-up", "product"]


@pytest.fixture
def products(monkeypatch):
    """Have products on CPUs take so many seconds, and so many of their thread, in turn."""
    from multimm.graph.tasks import multiply as tasks_multiply

    clocks = {"perf_counter": 0.0, "thread_time": 0.0}
    taken = []

    def multiply(a, b, partial=None, *, step):
        passed, busy = taken.pop(0)
        clocks["perf_counter"] += passed
        clocks["thread_time"] += busy
        return a @ b

    monkeypatch.setattr(tasks_multiply, "multiply", multiply)
    for name in clocks:
        monkeypatch.setattr(probes.time, name, lambda name=name: clocks[name])
    return taken


@pytest.mark.parametrize(
    ("taken", "longest", "fastest", "counts", "left"),
    [
        ([(5.0, 1.0), (1.0, 1.0), (3.0, 1.0), (1.1, 1.1)], 10.0, True, 1.0, 0),
        ([(5.0, 1.0), (3.0, 1.0)], 8.0, False, 4.0, 0),
        ([(5.0, 5.0), (4.0, 4.0), (2.0, 2.0), (2.1, 2.1), (2.1, 2.1)], 8.0, True, 2.0, 1),
    ],
    ids=["the fastest counts on CPUs", "else the mean", "until two are alike"],
)
def test_which_products_count(products, taken, longest, fastest, counts, left):
    products += [(9.0, 9.0), *taken]
    found = product_gflops("ieee", (100, 100), longest, False, fastest)
    assert found == pytest.approx(2 * 100**3 / counts / 1e9)
    assert len(products) == left


@pytest.mark.parametrize(
    "beside", [[(1.0 + i, 1.0 + i) for i in range(8)], [(5.0, 1.0)] * 8], ids=["uneven", "shared"]
)
def test_cores_that_something_else_uses_are_not_measured(products, beside):
    products += [(9.0, 9.0), *beside]
    with pytest.raises(ClusterError, match=r"equal products took .* else uses the cores"):
        product_gflops("ieee", (100, 100), 10.0, False, True)


# ----------------------------------------------------------------- live workers


@pytest.mark.usefixtures("quick")
def test_describe_measures_when_asked_and_remembers(rates_file):
    with workers(2) as client:
        before = mc.describe(client)
        assert before == mc.describe(client)
        assert not rates_file.exists()
        assert "as shipped" in str(multimm.plan(MatrixSpec((64, 64)), MatrixSpec((64, 64))))
        found = mc.describe(client, measure=True)
        assert rates_file.exists()
        store.forget()  # as another process does
        assert mc.describe(client) == found
        text = str(multimm.plan(MatrixSpec((64, 64)), MatrixSpec((64, 64))))
        assert probes._kept_block.cache_info().currsize == 0  # given back
    (device,) = set(found.devices)
    assert 0 < device.gflops != before.slowest.gflops
    assert 0 < found.link.gbps != LOCAL_TCP.gbps
    assert 0 < found.link.latency_s < 10
    today = time.strftime("%Y-%m-%d")
    assert rates_text(found) in (f"measured {today}", f"measured {device.measured}")
    assert rates_text(found) in text
    assert device.copy_gbps != before.slowest.copy_gbps
    blank = {"gflops": 1.0, "copy_gbps": 1.0, "measured": "", "packed_gflops": ()}
    assert [replace(one, **blank) for one in found.devices] == [
        replace(one, **blank) for one in before.devices
    ]


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
def test_a_worker_that_fails_is_named_and_nothing_is_kept(monkeypatch, rates_file):
    def product_gflops(*_, **__):
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

    with forked(), mc.start(workers=2, memory_limit="1GiB") as client:
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
    assert "as shipped" in run(*plan).output
    measured = run("tune", "--workers", "2", "--memory-limit", "1GiB")
    assert measured.exit_code == 0, measured.output
    assert "GFLOP/s (shipped " in measured.output
    assert "tcp within a host: " in measured.output
    assert f"kept in {rates_file}" in measured.output
    store.forget()  # as another process does
    assert "measured 2" in run(*plan).output
    nodes = run(*plan, "--per-node", "1", "--node-link", "2")
    assert "except for transfers between nodes" in nodes.output


# ------------------------------------------------------------- the first start


@pytest.fixture
def first_start(monkeypatch):
    """CPU workers are measured when they start, in an instant; what was measured, in turn."""
    measured, measure_rates = [], calibration_run.measure_rates

    def measure(client, efforts):
        measured.append(measure_rates(client, QUICK))
        return measured[-1]

    monkeypatch.setattr(calibration_run, "measure_rates", measure)
    with forked(), dask.config.set({calibration_run.SETTING: True}):
        yield measured


def test_cpu_workers_are_measured_when_they_first_start(first_start):
    with mc.start(workers=2, memory_limit="1GiB") as client:
        spec = mc.describe(client)
    today = date.today().isoformat()
    assert {device.measured for device in spec.devices} == {spec.link.measured} == {today}
    store.forget()  # as another process does
    with mc.start(workers=2, memory_limit="1GiB"):
        assert len(first_start) == 1, "measured again"


def test_rates_of_long_ago_are_measured_again(first_start):
    with mc.start(workers=1, memory_limit="1GiB") as client:
        assert len(first_start) == 1
        old = first_start[0].devices[0]._replace(measured="2020-01-01")
        store.keep(store.Rates((old,)))
        calibration_run.measure_at_first_start(client)
        assert len(first_start) == 2
        assert mc.describe(client).devices[0].measured == date.today().isoformat()


@pytest.mark.parametrize(
    ("stored", "known"), [("580.1", True), ("570.2", False), ("", False)], ids=str
)
def test_gpus_with_another_driver_are_measured_again(monkeypatch, stored, known):
    gpus = ClusterSpec.homogeneous(H200, 1)
    monkeypatch.setattr(calibration_run, "driver_version", lambda: "580.1")
    one = store.DeviceRates(H200.name, H200.gflops, 5e4, 4e3, (), date.today().isoformat(), stored)
    store.keep(store.Rates((one,)))
    assert calibration_run._are_known(gpus) is known
    assert not calibration_run._are_known(ClusterSpec.homogeneous(H200, 2)), "no link is known"


def test_a_start_that_cannot_measure_starts(first_start, monkeypatch):
    def lost(client, efforts):
        raise ClusterError("a worker was lost")

    monkeypatch.setattr(calibration_run, "measure_rates", lost)
    with mc.start(workers=1, memory_limit="1GiB") as client:
        assert mc.describe(client).devices[0].measured == ""


def test_nothing_is_measured_where_the_configuration_says_so(first_start):
    with (
        dask.config.set({calibration_run.SETTING: False}),
        mc.start(workers=1, memory_limit="1GiB"),
    ):
        assert first_start == []
