"""Blocks go where the plan wants them, on real schedulers: in threads of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads, soon
from distributed import Client, futures_of, get_client, get_worker, secede
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from labels import block_tasks, tasks_of
from repeated import others_slow

import multimm
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.transfer_counter import TransferCounter
from multimm.errors import ClusterError
from multimm.graph.block_task import BlockTask
from multimm.graph.scheduler import failover
from multimm.graph.scheduler import install as installed
from multimm.graph.scheduler import plugin as scheduler_plugin
from multimm.graph.scheduler.install import install
from multimm.graph.scheduler.lost_peers import LostPeers
from multimm.graph.scheduler.product_state import Product
from multimm.planning.tiling.grid import Grid

SIZE, BLOCK = 60, 12
COUNT = SIZE // BLOCK


class Recorder(SchedulerPlugin):
    """Notes where each task ran, and its priority."""

    name = "recorder"

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.ran = {}
        self.priority = {}

    def transition(self, key, start, finish, *args, worker=None, **kwargs):
        if start == "released" and key in self.scheduler.tasks:
            self.priority[key] = self.scheduler.tasks[key].priority
        if finish == "memory" and worker is not None:
            self.ran[key] = worker

    def clear(self):
        self.ran.clear()


@pytest.fixture(scope="module")
def cluster():
    config = {
        "distributed.scheduler.work-stealing": True,
        "distributed.scheduler.work-stealing-interval": "10ms",
    }
    with dask.config.set(config), in_threads() as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture
def recorder(cluster, client):
    recorder = Recorder(cluster.scheduler)
    cluster.scheduler.add_plugin(recorder)
    yield recorder
    cluster.scheduler.remove_plugin(recorder.name)


def matrix(seed, shape=(SIZE, SIZE), chunks=BLOCK):
    """Small integers, so that every order of summation gives the same bits."""
    x = np.random.default_rng(seed).integers(-8, 9, shape).astype("float32")
    return x, da.from_array(x, chunks=chunks, name=f"x-{seed}-{shape}-{chunks}", inline_array=True)


def misplaced(recorder, collection, grid, workers):
    """Block tasks that ran off their owner, of those that ran at all."""
    ranks = sorted(workers)
    seen = {
        key: task.place
        for key, task in dict(collection.dask).items()
        if isinstance(task, BlockTask) and key in recorder.ran
    }
    assert seen
    return {
        key: recorder.ran[key]
        for key, place in seen.items()
        if recorder.ran[key] != ranks[grid.rank(place.owner) % len(ranks)]
    }


def workers_of(client):
    return sorted(listed(client))


def compute_and_listen(collection):
    """Compute, and give the scheduler's warnings the time to arrive: they travel on their own."""
    result = Client.current().compute(collection).result(timeout=30)
    time.sleep(0.2)
    return result


@pytest.mark.parametrize(
    "follow",
    [
        lambda c: c,
        pytest.param(lambda c: c + 1, marks=pytest.mark.slow),
        pytest.param(lambda c: c.T, marks=pytest.mark.slow),
        lambda c: c[:30],
        lambda c: (c + 1).sum(axis=0),
        pytest.param(lambda c: da.concatenate([c, c * 2]), marks=pytest.mark.slow),
    ],
)
def test_every_block_runs_on_its_owner_whatever_follows(client, recorder, follow):
    (x, a), (y, b) = matrix(1), matrix(2)
    c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
    grid = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK).grid
    result = follow(c)
    np.testing.assert_array_equal(result.compute(), follow(da.from_array(x @ y)).compute())
    assert not misplaced(recorder, c, grid, workers_of(client))


def test_operands_are_made_where_their_blocks_belong(client, recorder):
    a = da.random.default_rng(0).random((SIZE, SIZE), chunks=BLOCK)
    b = (da.random.default_rng(1).random((SIZE, SIZE), chunks=BLOCK) * 2 - 1) ** 2
    c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
    plan = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK)
    with dask.config.set({"optimization.fuse.active": False}):
        c.compute()
    ranks = workers_of(client)
    for i, s in product(range(COUNT), range(COUNT)):
        owner_a = plan.grid.rank(plan.layout.tiles.owner("a", 0, i, s))
        owner_b = plan.grid.rank(plan.layout.tiles.owner("b", 0, s, i))
        assert recorder.ran[(a.name, i, s)] == ranks[owner_a]
        assert recorder.ran[(b.name, i, s)] == ranks[owner_b]
    chain = [k for k in recorder.ran if isinstance(k, tuple) and k[0] not in (a.name, b.name)]
    upstream = [key for key in chain if key not in tasks_of(c)]
    assert upstream  # the tasks that b is made from
    for key in upstream:
        assert recorder.ran[key] == recorder.ran[(b.name, *key[1:])]


def test_idle_workers_do_not_steal(client, recorder):
    """One of the four workers has nothing to do and a scheduler that steals every 10 ms."""

    def slow(block):
        time.sleep(0.05)  # of what a worker ends in less than 0.2 s nothing is stolen
        return block

    (x, a), (y, b) = matrix(5), matrix(6)
    a = a.map_blocks(slow, dtype=a.dtype, meta=a._meta)
    c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK, p_k=3)
    assert multimm.plan(a, b, p_k=3).grid == Grid(1, 1, 3)
    made, seen = c.persist(), 0
    while not all(future.done() for future in futures_of(made)):
        pinned, free = client.run_on_scheduler(_that_could_be_stolen)
        assert not free
        seen += pinned
    assert seen
    np.testing.assert_array_equal(made.compute(), x @ y)
    assert not misplaced(recorder, c, Grid(1, 1, 3), workers_of(client))


def _that_could_be_stolen(dask_scheduler):
    """How many tasks on their way have a worker of their own, and which Dask would move.

    It moves those that another worker may run, and those whose restrictions are loose.
    """
    pinned, free = 0, []
    for ts in dask_scheduler.tasks.values():
        if ts.processing_on is not None and ts.worker_restrictions:
            pinned += 1
            others = dask_scheduler.valid_workers(ts) - {ts.processing_on}
            if others or ts.loose_restrictions:
                free.append(str(ts.key))
    return pinned, free


def test_priorities_go_k_tile_by_k_tile(client, recorder):
    (x, a), (y, b) = matrix(7), matrix(8)
    c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
    np.testing.assert_array_equal(c.compute(), x @ y)
    tasks = block_tasks(c)
    by_priority = sorted(tasks, key=lambda key: recorder.priority[key])
    steps = [tasks[key].place.order for key in by_priority]
    assert steps == sorted(steps)
    assert len(set(steps)) == COUNT**3
    # What makes an operand block comes right before the first product that uses it.
    for task in tasks.values():
        for key, _ in task.place.blocks:
            assert recorder.priority[key] < recorder.priority[task.key]


def test_two_products_in_one_compute_and_a_product_of_products(client, recorder):
    (x, a), (y, b) = matrix(9), matrix(10)
    c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
    d = multimm.matmul(b, a, blocks=BLOCK, slabs=BLOCK)
    e = multimm.matmul(c, d, blocks=BLOCK, slabs=BLOCK)
    for got, expected in zip(dask.compute(c, d, e), (x @ y, y @ x, (x @ y) @ (y @ x)), strict=True):
        np.testing.assert_array_equal(got, expected)
    grid = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK).grid
    assert not misplaced(recorder, e, grid, workers_of(client))


def test_restrictions_of_the_user_are_left_alone(client, recorder):
    (x, a), (y, b) = matrix(15), matrix(16)
    mine = workers_of(client)[2]
    c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
    np.testing.assert_array_equal(client.compute(c, workers=[mine]).result(), x @ y)
    assert set(recorder.ran.values()) == {mine}


def test_plugin_is_registered_once_and_forgets(client, cluster):
    _, a = matrix(22)
    for _ in range(3):
        multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK).compute()
    names = [name for name in cluster.scheduler.plugins if name.startswith("multimm")]
    assert names.count(scheduler_plugin.NAME) == 1
    plugin = cluster.scheduler.plugins[scheduler_plugin.NAME]
    soon(lambda: not plugin.products)
    assert not plugin.owners


def test_a_failing_plugin_says_so_and_lets_dask_go_on(client, cluster, monkeypatch):
    pin_tasks, pinned = scheduler_plugin.pin_tasks, []

    def broken(scheduler, product, *args):
        pin_tasks(scheduler, product, *args)
        pinned.extend(product.pinned)
        raise RuntimeError("planned failure")

    x, a = matrix(17)
    monkeypatch.setattr(scheduler_plugin, "pin_tasks", broken)
    c = multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK)
    with pytest.warns(RuntimeWarning, match="planned failure"):
        done = compute_and_listen(kept := c.persist())
    np.testing.assert_array_equal(done, x @ x)
    left = [ts for key in pinned if (ts := cluster.scheduler.tasks.get(key)) is not None]
    assert pinned
    assert len(left) >= kept.npartitions  # what is kept is still there
    assert not any(ts.worker_restrictions for ts in left)


@pytest.mark.parametrize(
    ("plugin", "hook"), [(scheduler_plugin.BlockPlacement, "start"), (LostPeers, "setup")]
)
def test_a_scheduler_or_worker_that_cannot_load_plugins_is_an_error_each_time(plugin, hook):
    def refuse(self, *args, **kwargs):
        raise ModuleNotFoundError("No module named 'multimm'")

    _, a = matrix(29)
    with in_threads(2, memory_limit=0) as cluster, Client(cluster):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plugin, hook, refuse, raising=False)
            for _ in range(2):
                with pytest.raises(ClusterError, match=r"No module named .* same versions"):
                    multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK)
        multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK)
        assert scheduler_plugin.NAME in cluster.scheduler.plugins
        assert all(LostPeers.name in worker.plugins for worker in cluster.workers.values())


def test_a_worker_that_does_not_answer_keeps_nobody_waiting(monkeypatch):
    """As one that is stopped, or holds Python's lock for minutes."""
    monkeypatch.setattr(installed, "WAIT", 0.2)
    x, a = matrix(31)
    with in_threads(2, memory_limit=0) as cluster, Client(cluster):
        go = threading.Event()
        late = next(iter(cluster.workers.values()))
        given = late.handlers["plugin-add"]

        async def held(**message):
            while not go.is_set():
                await asyncio.sleep(0.01)
            return await given(**message)

        late.handlers["plugin-add"] = held
        with pytest.warns(RuntimeWarning, match="a worker has not answered for"):
            c = multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK)
        np.testing.assert_array_equal(c.compute(), x @ x)
        go.set()
        soon(lambda: LostPeers.name in late.plugins)


def test_a_scheduler_that_was_started_again_is_given_the_plugins_again():
    options = {"workers": 2, "memory_limit": 0, "protocol": "tcp", "host": "127.0.0.1"}
    x, a = matrix(30)
    with in_threads(**options) as cluster:
        address = cluster.scheduler_address
        client = Client(address)
        install(client, TransferCounter())
        multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK).compute()
    with client, in_threads(**options, scheduler_port=int(address.rpartition(":")[2])) as cluster:
        soon(lambda: client.status == "running" and len(workers_of(client)) == 2)
        result = multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK).compute()
        np.testing.assert_array_equal(result, x @ x)
        assert scheduler_plugin.NAME in cluster.scheduler.plugins
        for worker in cluster.workers.values():
            assert {LostPeers.name, TransferCounter.name} <= set(worker.plugins)


@pytest.mark.parametrize("change", others_slow([-1, 2], -1))
def test_cluster_resized_between_call_and_compute(change, caplog):
    with in_threads(3) as cluster, Client(cluster) as client:
        x, a = matrix(19)
        c = multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK)
        cluster.scale(3 + change)
        soon(lambda: len(workers_of(client)) == 3 + change)
        said = f"planned for 3 workers .* runs on {3 + change}"
        with pytest.warns(RuntimeWarning, match=said) as warned:
            result = compute_and_listen(c)
        np.testing.assert_array_equal(result, x @ x)
        # The scheduler is in this process: what it logs would be said a second time.
        loud = [r for r in caplog.records if r.name.startswith("multimm") and r.levelno > 20]
        assert (len(warned), loud) == (1, [])


def test_planned_before_there_was_a_worker():
    with in_threads(0) as cluster, Client(cluster) as client:
        x, a = matrix(20)
        future = client.compute(multimm.matmul(a, a, blocks=BLOCK, slabs=BLOCK))
        time.sleep(0.2)
        cluster.scale(2)
        np.testing.assert_array_equal(future.result(timeout=60), x @ x)


def test_a_worker_that_joins_concerns_products_that_have_room_for_it_alone(monkeypatch):
    """Whatever is pinned of the others need not be looked at: 0.1 s for 100,000 tasks."""
    followed = []
    monkeypatch.setattr(
        scheduler_plugin, "follow", lambda _, products, __: followed.extend(products)
    )
    full = Product("full", Grid(2, 2, 1), ["w0", "w1", "w2", "w3"])
    crowded = Product("crowded", Grid(2, 2, 1), ["w0", "w1", "w0", "w1"])
    plugin = scheduler_plugin.BlockPlacement()
    plugin.products = {"full": full, "crowded": crowded}
    plugin.add_worker(SimpleNamespace(workers=dict.fromkeys(["w0", "w1", "w2", "w3", "w4"])), "w4")
    assert followed == [crowded]
    assert full.workers == ["w0", "w1", "w2", "w3"]
    assert crowded.workers == ["w0", "w1", "w0", "w4"]
    plugin.add_worker(SimpleNamespace(workers={"w5": None}), "w5")  # all others are gone
    assert followed == [crowded, full, crowded]
    assert full.workers == crowded.workers == ["w5"] * 4


# Workers that take no tasks ----------------------------------------------------------------


def set_status(client, addresses, status):
    """As the worker's own memory monitor does it; returns when the scheduler knows."""

    def change(dask_worker):
        dask_worker.status = status

    client.run(change, workers=addresses)
    workers = client.cluster.scheduler.workers
    soon(lambda: all(workers[address].status is status for address in addresses))


def test_a_paused_worker_s_part_goes_to_others_and_nobody_else_s_does():
    with in_threads(3, memory_limit=0) as cluster, Client(cluster) as client:
        recorder = Recorder(cluster.scheduler)
        cluster.scheduler.add_plugin(recorder)
        (x, a), (y, b) = matrix(23), matrix(24)
        c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
        grid = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK).grid
        first, *others = workers_of(client)
        set_status(client, [first], Status.paused)
        with pytest.warns(RuntimeWarning, match=rf"take no tasks: {first} \(paused\)"):
            result = compute_and_listen(c)
        np.testing.assert_array_equal(result, x @ y)
        assert set(recorder.ran.values()) == set(others)
        off = misplaced(recorder, c, grid, [first, *others])
        assert {grid.rank(c.dask[key].place.owner) for key in off} == {0}


@pytest.mark.parametrize(
    "status", others_slow([Status.paused, Status.closing_gracefully], Status.paused)
)
@pytest.mark.filterwarnings("ignore:workers that take no tasks")
def test_a_worker_that_is_paused_for_good_in_mid_run(status, monkeypatch):
    """What it has been sent goes to others as well."""
    monkeypatch.setattr(scheduler_plugin, "PATIENCE", 0.3)
    monkeypatch.setattr(scheduler_plugin, "GLANCE", 0.05)

    def slow(block):
        time.sleep(0.01)
        return block

    with in_threads(3, memory_limit=0) as cluster, Client(cluster) as client:
        (x, a), (y, b) = matrix(25), matrix(26)
        a = a.map_blocks(slow, dtype=a.dtype, meta=a._meta)
        scheduler, victim = cluster.scheduler, workers_of(client)[0]
        future = client.compute(multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK))
        soon(lambda: victim in scheduler.workers and scheduler.workers[victim].processing)
        set_status(client, [victim], status)
        np.testing.assert_array_equal(future.result(timeout=30), x @ y)
        # What looks for such workers stops with the last product.
        assert scheduler_plugin.NAME in scheduler.periodic_callbacks
        del future
        soon(lambda: scheduler_plugin.NAME not in scheduler.periodic_callbacks)


@pytest.mark.parametrize("gives_way", others_slow([False, True], False))
def test_a_task_that_waits_for_its_product_on_its_only_thread(gives_way, monkeypatch):
    """As a task does that computes with `get_client`, and does not secede."""
    monkeypatch.setattr(failover, "HELD", 0.3)
    monkeypatch.setattr(scheduler_plugin, "GLANCE", 0.05)

    def computed(x, y):
        if gives_way:
            secede()
            time.sleep(1)
        c = multimm.matmul(*(da.from_array(z, chunks=BLOCK) for z in (x, y)), blocks=BLOCK)
        return get_client().compute(c).result(timeout=30)

    told = nullcontext()
    if not gives_way:
        told = pytest.warns(RuntimeWarning, match="whose threads other tasks hold: .*secede")
    with in_threads(2, memory_limit=0) as cluster, Client(cluster) as client, told:
        (x, _), (y, _) = matrix(29), matrix(30)
        np.testing.assert_array_equal(client.submit(computed, x, y).result(timeout=30), x @ y)


@pytest.mark.parametrize("slow", others_slow(["makes A", "uses C"], "uses C"))
def test_tasks_around_a_product_hold_up_nobody(slow, monkeypatch):
    """However long they take on one worker, while the other has nothing to do."""
    monkeypatch.setattr(failover, "HELD", 0.1)
    monkeypatch.setattr(scheduler_plugin, "GLANCE", 0.02)

    def slow_at_first(block, at, block_id=(0, 0)):
        if get_worker().address == at and block_id == (0, 0):
            time.sleep(1.5)  # workers say every half second what they run
        return block

    with in_threads(2, memory_limit=0) as cluster, Client(cluster) as client:
        recorder = Recorder(cluster.scheduler)
        cluster.scheduler.add_plugin(recorder)
        (x, a), (y, b) = matrix(29), matrix(30)
        workers = workers_of(client)
        takes = partial(slow_at_first, at=workers[0])
        if slow == "makes A":  # for both workers
            whole = da.from_delayed(dask.delayed(takes)(x), x.shape, x.dtype)
            a = whole.rechunk(a.chunks)
        c = multimm.matmul(a, b, blocks=BLOCK)
        result = c.map_blocks(takes, dtype=c.dtype, meta=c._meta) if slow == "uses C" else c
        np.testing.assert_array_equal(result.compute(), x @ y)
        assert misplaced(recorder, c, multimm.plan(a, b, blocks=BLOCK).grid, workers) == {}


def test_a_product_waits_while_every_worker_is_paused(monkeypatch):
    monkeypatch.setattr(scheduler_plugin, "PATIENCE", 0.05)
    monkeypatch.setattr(scheduler_plugin, "GLANCE", 0.05)
    with in_threads(3, memory_limit=0) as cluster, Client(cluster) as client:
        (x, a), (y, b) = matrix(27), matrix(28)
        everyone = workers_of(client)
        c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
        set_status(client, everyone, Status.paused)
        future = client.compute(c)
        soon(lambda: scheduler_plugin.NAME in cluster.scheduler.periodic_callbacks)
        time.sleep(0.2)
        (product,) = cluster.scheduler.plugins[scheduler_plugin.NAME].products.values()
        assert product.workers == everyone
        set_status(client, everyone, Status.running)
        np.testing.assert_array_equal(future.result(timeout=30), x @ y)
