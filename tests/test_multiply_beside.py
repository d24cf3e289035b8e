"""Products of host blocks: launched in order, the next one while one runs, in no worker's thread.

There is no GPU here. A product has been launched when `launch` returns, and is over when `finished`
does; both are held up until a test lets them go on.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads, soon
from distributed import Client, wait
from labels import tasks_of
from linked import at_rest, held_up, link, plan_for
from small import integers

import multimm
from multimm.failures import told
from multimm.graph.label import Kind
from multimm.graph.tasks import host_offload
from multimm.graph.tasks.host_offload import download, multiply_beside
from multimm.graph.tasks.multiply import Step, multiply
from multimm.planning.cost.memory import IN_FLIGHT
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

STEP = Step("float32", "float32")
FIXED = {"blocks": 30, "slabs": 120}  # 16 products of as many blocks, all of k in each


class Gpu:
    """Products that have been launched, and how many of them may be over."""

    def __init__(self, monkeypatch):
        self.launched, self.over, self.may_end = [], 0, threading.Semaphore(0)
        real = host_offload.launch
        changed = threading.Lock()

        def launch(*last, **more):
            self.launched.append(last[0][0, 0])
            return real(*last, **more)

        def finished(block):
            if not threading.current_thread().name.startswith("multimm-multiply"):
                return block  # of a task that only copies
            assert self.may_end.acquire(timeout=30)
            with changed:
                self.over += 1
            return block

        link(monkeypatch)
        monkeypatch.setattr(host_offload, "launch", launch)
        monkeypatch.setattr(host_offload, "finished", finished)

    def end(self, products=999):
        """Let so many more come to their end."""
        self.may_end.release(products)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu(monkeypatch)
    yield gpu
    gpu.end()


@pytest.fixture
def cluster(monkeypatch):
    """One worker, with one thread, and its client."""
    plan_for(monkeypatch, H200)
    with in_threads(1, memory_limit=0, silence_logs=50) as cluster, Client(cluster):
        yield cluster


def numbered(n):
    return np.full((3, 3), n, "float32")


def operands(persisted=True):
    """Two matrices in 16 blocks each, there before the product is."""
    x, y = integers((120, 120), 1), integers((120, 120), 2)
    a, b = (da.from_array(z, chunks=30) for z in (x, y))
    a, b = (a.persist(), b.persist()) if persisted else (a, b)
    wait([a, b])
    return x, y, a, b


def test_the_next_product_is_launched_while_one_runs_and_all_in_order(gpu):
    """Without a worker as well."""
    with ThreadPoolExecutor(8) as threads:
        found, queue = [], host_offload._launching._work_queue
        for n in range(8):
            task = threads.submit(multiply_beside, numbered(n), np.eye(3), None, step=STEP)
            found.append(task)
            soon(lambda n=n: len(gpu.launched) + queue.qsize() == n + 1)
        for over in range(8):
            soon(lambda n=over: (gpu.over, gpu.launched) == (n, [*range(min(n + IN_FLIGHT, 8))]))
            gpu.end(1)
        for n, block in enumerate(found):
            np.testing.assert_array_equal(block.result(30), numbered(n))


def test_while_products_run_the_worker_has_its_thread(cluster, gpu):
    x, y, a, b = operands()
    client = Client.current()
    lazy = multimm.matmul(a, b, **FIXED)
    assert {task.func for task in tasks_of(lazy, Kind.MULTIPLY).values()} == {multiply_beside}
    c = client.compute(lazy)
    soon(lambda: len(gpu.launched) == IN_FLIGHT)
    assert client.submit(sum, [1, 2], pure=False).result(timeout=30) == 3
    assert len(gpu.launched) == IN_FLIGHT
    gpu.end()
    np.testing.assert_array_equal(c.result(timeout=30), x @ y)
    soon(lambda: at_rest(cluster))


def test_more_products_than_may_wait_come_to_their_turn(cluster, gpu, monkeypatch):
    """One too many waits with the worker's thread."""
    monkeypatch.setattr(host_offload, "_multiplying", threading.BoundedSemaphore(3))
    x, y, a, b = operands()
    c = Client.current().compute(multimm.matmul(a, b, **FIXED))
    soon(lambda: host_offload._multiplying._value == 0)
    other = Client.current().submit(sum, [1, 2], pure=False)
    time.sleep(0.1)  # in which it would run, if it could
    assert not other.done()
    gpu.end()
    np.testing.assert_array_equal(c.result(timeout=30), x @ y)
    assert other.result(timeout=30) == 3
    soon(lambda: at_rest(cluster))


def test_a_product_that_fails_does_so_in_its_task(cluster, monkeypatch):
    """The next one is launched all the same."""
    link(monkeypatch)
    real, fails = host_offload.launch, threading.Event()

    def launch(*last, **more):
        if fails.is_set():
            raise MemoryError("no room")
        return real(*last, **more)

    monkeypatch.setattr(host_offload, "launch", launch)
    x, y, a, b = operands()
    fails.set()
    with pytest.raises(MemoryError, match="no room") as caught:
        multimm.matmul(a, b, **FIXED).compute()
    assert "of C" in told(caught.value)
    soon(lambda: at_rest(cluster))
    fails.clear()
    np.testing.assert_array_equal(multimm.matmul(a, b, **FIXED).compute(), x @ y)


def test_a_product_that_is_given_up_leaves_nothing_behind(cluster, gpu):
    x, y, a, b = operands()
    given_up = Client.current().compute(multimm.matmul(a, b, **FIXED))
    soon(lambda: len(gpu.launched) == IN_FLIGHT)
    given_up.cancel()
    gpu.end()
    soon(lambda: at_rest(cluster))
    (worker,) = cluster.workers.values()
    soon(lambda: len(worker.data) == a.npartitions + b.npartitions)
    gpu.end()
    np.testing.assert_array_equal(multimm.matmul(a, b, **FIXED).compute(), x @ y)


def test_without_a_gpu_the_task_s_own_thread_multiplies(monkeypatch):
    """On a cluster that has lost its GPUs."""
    monkeypatch.setattr(host_offload, "_device", lambda: None)
    monkeypatch.setattr(host_offload, "_launching", None)
    x, y = integers((8, 9), 1), integers((9, 7), 2)
    np.testing.assert_array_equal(multiply_beside(x, y, None, step=STEP), x @ y)


def test_no_product_begins_while_a_block_waits_to_leave(monkeypatch, request):
    opened = held_up(monkeypatch)
    block = numbered(1)
    with ThreadPoolExecutor(4) as threads:
        request.addfinalizer(opened.set)
        left = [threads.submit(download, block, limit=block.nbytes) for _ in range(2)]
        soon(lambda: [x.inside for x in host_offload._leaving.blocks] == [True, False])
        product = threads.submit(multiply_beside, block, block, None, step=STEP)
        time.sleep(0.1)  # in which it would be over
        assert not product.done()
        opened.set()
        np.testing.assert_array_equal(product.result(30), block @ block)
        for each in left:
            np.testing.assert_array_equal(each.result(30), block)


def test_plans_count_two_products_at_a_time():
    """Of host blocks: not where one task does all, and not of blocks on GPUs."""
    cluster = ClusterSpec.homogeneous(H200, 1)

    def plan(hosted, n=16384):
        a = MatrixSpec((n, n), chunks=((4096,) * (n // 4096),) * 2, hosted=hosted)
        return multimm.plan(a, a, cluster=cluster, blocks=4096)

    hosted, other = plan(hosted=True), plan(hosted=False)
    assert (hosted.layout.overlaps, other.layout.overlaps) == (True, False)
    made = "sums being made"
    assert hosted.memory_terms[made] == IN_FLIGHT * other.memory_terms[made]
    x = da.ones((60, 60), chunks=30, dtype="float32")
    tasks = tasks_of(multimm.matmul(x, x + 1, blocks=30, slabs=60), Kind.MULTIPLY)
    assert {task.func for task in tasks.values()} == {multiply}
