"""Worker processes that die in mid-run: the product is right, nothing hangs, nobody else moves.

Nor does anybody else do his work again: what a loss costs is bounded by what was lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from by_plan import by_plan
from clusters import in_threads
from distributed import Client, LocalCluster
from distributed.comm.core import CommClosedError
from distributed.worker_state_machine import AcquireReplicasEvent
from killing import Killer, Record, forget, workers

import multimm
from multimm.graph.label import Kind
from multimm.graph.scheduler import plugin as scheduler_plugin
from multimm.graph.scheduler.install import install
from multimm.graph.scheduler.product_state import Product
from multimm.graph.tasks import multiply
from multimm.io import open_array
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec
from multimm.planning.tiling.grid import Grid

SIZE, BLOCK = 150, 30  # 5 x 5 x 5 block products


def slow(block):
    time.sleep(0.02)
    return block


def drawn():
    """Lazy, so that lost blocks can be made again; integers, so that the result is exact."""
    rngs = map(da.random.default_rng, (0, 1))
    return [x.integers(-8, 9, (SIZE, SIZE), chunks=BLOCK).astype("float32") for x in rngs]


def operands():
    return [x.map_blocks(slow, meta=x._meta) for x in drawn()]


def expected():
    x, y = (operand.compute(scheduler="sync") for operand in drawn())
    return x @ y


def start_product(client):
    return client.compute(multimm.matmul(*operands(), blocks=BLOCK, slabs=BLOCK))


@pytest.mark.parametrize("restarts", [False, True], ids=["worker lost", "worker restarted"])
def test_a_killed_worker_does_not_change_the_product(restarts):
    with workers(3) as (cluster, client):
        killer = Killer(cluster, client, [12], for_good=not restarts)
        future = start_product(client)
        np.testing.assert_array_equal(future.result(timeout=120), expected())
        if restarts:
            killer.thread.join()
            assert killer.victims, "the product was over before the worker was killed"
        else:
            killer.check(1)
            assert len(cluster.scheduler.workers) == 2
        plugin = cluster.scheduler.plugins[scheduler_plugin.NAME]
        assert all(killer.victims[0] not in product.workers for product in plugin.products.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "fixed", "after", "only", "once"),
    [
        # Bundles and joined blocks that went with a worker are made again.
        (3, {"blocks": 20, "slabs": 40}, [12], {Kind.CUT, Kind.JOIN}, False),
        (4, {"blocks": BLOCK, "slabs": BLOCK}, [12, 50], {*Kind}, True),  # one after the other
        (3, {"blocks": BLOCK, "slabs": BLOCK, "p_k": 3}, [8], {Kind.ADD}, True),  # the last sums
    ],
)
def test_workers_killed_at_other_moments(count, fixed, after, only, once):
    with workers(count) as (cluster, client):
        killer = Killer(cluster, client, after, only=lambda label: label.kind in only)
        future = client.compute(multimm.matmul(*operands(), **fixed))
        np.testing.assert_array_equal(future.result(timeout=120), expected())
        killer.check(len(after), once=once)
        assert len(cluster.scheduler.workers) == count - len(after)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [512, 300])
def test_a_worker_killed_while_partial_products_of_c_are_made(columns):
    """What is joined of them, or added, and what they are made of, is made again."""
    with workers(3) as (cluster, client):
        a = da.random.default_rng(0).integers(-8, 9, (18000, 512), chunks=(200, columns))
        b = da.random.default_rng(1).integers(-8, 9, (512, 16))  # no BLAS: slow
        large = MatrixSpec(a.shape, "int64", 8, a.chunks, owners=(0, 1, 2) * 30 * len(a.chunks[1]))
        problem = Problem(large, MatrixSpec(b.shape, "int64", 8), "int64", "int64")
        spec = ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 400_000_000, 50.0, 20.0), 3)
        found = (x for x in in_partial_products(problem, spec) if x.work.adds == (columns < 512))
        plan = replace(plan_matmul(problem, spec), layout=next(found))
        install(client)
        killer = Killer(cluster, client, [2], only=lambda x: x.kind is Kind.PARTIAL)
        step = multiply.Step("int64", "int64")
        c = client.compute(by_plan(plan, a, b, step=step))
        wanted = a.compute(scheduler="threads") @ b.compute(scheduler="threads")
        np.testing.assert_array_equal(c.result(timeout=120), wanted)
        killer.thread.join()
        assert killer.victims, "the product was over before the worker was killed"
        assert len(cluster.scheduler.workers) == 2


def die_in_transfer(requests, who, pid, dask_worker):
    """Kill `pid` when the worker `who` (None: anybody) asks for blocks for the nth time."""
    original = dask_worker.handlers["get_data"]
    seen = 0

    async def get_data(comm, *args, **kwargs):
        nonlocal seen
        if who in (None, kwargs.get("who")):
            seen += 1
            if seen == requests:
                os.kill(pid, signal.SIGKILL)
        return await original(comm, *args, **kwargs)

    dask_worker.handlers["get_data"] = get_data


@pytest.mark.parametrize("role", ["sender", pytest.param("receiver", marks=pytest.mark.slow)])
def test_a_worker_killed_during_a_transfer(role):
    with workers(3) as (cluster, client):
        killer = Killer(cluster, client, [])
        victim = max(killer.pids)
        killer.victims = [victim]
        forget(cluster, victim)
        if role == "sender":
            # It dies when it is asked, and the other side has only its connection.
            client.run(die_in_transfer, 5, None, killer.pids[victim], workers=[victim])
        else:
            others = sorted(set(killer.pids) - {victim})
            client.run(die_in_transfer, 3, victim, killer.pids[victim], workers=others)
        future = start_product(client)
        np.testing.assert_array_equal(future.result(timeout=120), expected())
        assert victim not in cluster.scheduler.workers, "nobody was killed"


def test_a_killed_worker_does_not_change_a_symmetric_product():
    x = drawn()[0].compute(scheduler="sync")
    with workers(3) as (cluster, client):
        a, _ = operands()
        c = multimm.matmul(a.T, a, blocks=BLOCK, slabs=BLOCK)
        killer = Killer(cluster, client, [8])
        result = client.compute(c).result(timeout=120)
        np.testing.assert_array_equal(result, x.T @ x)
        killer.thread.join()
        assert killer.victims, "the product was over before the worker was killed"


async def fetch_from_the_lost(lost, dask_worker):
    """Seconds that a fetch lasts whose order comes in one message with the worker's loss."""
    order = AcquireReplicasEvent(who_has={"x": [lost]}, nbytes={"x": 1}, stimulus_id="order")
    dask_worker.handle_stimulus(order)
    dask_worker.stream_handlers["remove-worker"](worker=lost, stimulus_id="loss")
    started = time.monotonic()
    while dask_worker.state.in_flight_workers:
        await asyncio.sleep(0.01)
    return time.monotonic() - started


def test_a_fetch_that_begins_with_the_loss_ends_with_it():
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        multimm.matmul(*operands())  # brings the plugins
        # Nobody listens on this port; connections to it are tried again for 30 s.
        (seconds,) = client.run(fetch_from_the_lost, "tcp://127.0.0.1:9").values()
        assert seconds < 5


def test_a_host_that_takes_its_workers_along_one_after_another():
    """No task is given up because it went from one of them to the next (KilledWorker)."""

    async def lose(scheduler, lost):
        for address in lost:
            await scheduler.remove_worker(address, stimulus_id="lost")
            await asyncio.sleep(0.01)

    with in_threads(8, memory_limit=0) as cluster, Client(cluster) as client:
        future = start_product(client)
        while not any(ts.state == "memory" for ts in list(cluster.scheduler.tasks.values())):
            time.sleep(0.005)
        cluster.sync(lose, cluster.scheduler, sorted(cluster.scheduler.workers)[:6])
        np.testing.assert_array_equal(future.result(timeout=120), expected())


def test_heirs_are_on_another_host_unless_those_have_more_to_do():
    here, there = (
        [f"tcp://10.77.0.{host}:{port}" for port in ports]
        for host, ports in ((2, (1, 2, 3)), (3, (4,)))
    )
    product = Product("T", Grid(2, 2, 1), [*here, *there])
    able = sorted({*here, *there} - {here[0]})
    assert product.replace({here[0]}, able)
    assert product.workers == [*there, *here[1:], *there]
    able.remove(here[1])
    assert product.replace({here[1]}, able)
    assert product.workers == [*there, here[2], here[2], *there]
    assert not product.replace(set(product.workers), [])


def test_survivors_of_a_streamed_product_add_up_nothing_again(tmp_path, monkeypatch):
    """They read blocks again for the heir; the barriers of these reads are still there."""

    def finished(block):
        time.sleep(0.002)
        return block

    monkeypatch.setattr(multiply, "finished", finished)
    x, y = (
        np.random.default_rng(0).integers(-8, 9, s).astype("f4") for s in ((200, 800), (800, 200))
    )
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    a, b = (open_array(tmp_path / f"{name}.npy") for name in "xy")
    problem = Problem(MatrixSpec(x.shape), MatrixSpec(y.shape), rereadable=(True, True))
    spec = ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 400_000, 50.0, 20.0), 4, LOCAL_TCP)
    plan = plan_matmul(problem, spec, options=Options(blocks=50, slabs=25, p_k=1))
    assert plan.layout.stream
    product = by_plan(plan, a, b)
    with in_threads(4, memory_limit=0) as cluster, Client(cluster) as client:
        install(client)
        record = Record(cluster.scheduler)
        cluster.scheduler.add_plugin(record)
        future = client.compute(product)
        while len(record.who) < 0.8 * plan.tasks:
            time.sleep(0.005)
        victim = max(cluster.scheduler.workers)
        theirs = [key for key, worker in list(record.who.items()) if worker != victim]
        cluster.sync(cluster.scheduler.remove_worker, victim, stimulus_id="lost")
        np.testing.assert_array_equal(future.result(timeout=60), x @ y)
    again = {key[0].split("-")[1] for key in theirs if record.made[key] > 1}
    assert again <= {"a", "b"}


def test_losing_every_worker_is_survived():
    with workers(2) as (_, client):
        future = start_product(client)
        time.sleep(0.5)
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(future.result(timeout=120), expected())


def test_a_connection_that_ends_before_its_worker_is_missed_undoes_no_placement():
    """Results that a lost worker sent last are taken in while nothing can be sent to it."""
    asked = []

    def refuse(*messages):
        asked.extend(message["op"] for message in messages if message["op"].endswith("-replicas"))
        if asked:
            raise CommClosedError("already closed")
        send(*messages)

    with in_threads(3, memory_limit=0) as cluster, Client(cluster) as client:
        scheduler, record = cluster.scheduler, Record(cluster.scheduler)
        scheduler.add_plugin(record)
        future = start_product(client)
        while len(record.made) < 12:
            time.sleep(0.005)
        victim = max(scheduler.workers)
        send = scheduler.stream_comms[victim].send
        scheduler.stream_comms[victim].send = refuse
        np.testing.assert_array_equal(future.result(timeout=60), expected())
        assert asked, "the connection was not used by the placement"
        assert victim not in scheduler.workers
        assert not scheduler.get_events("warn")
