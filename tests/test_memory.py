"""What workers hold, counted on workers, against what the plan said they would."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import dask
import dask.array as da
import numpy as np
import pytest
from by_plan import FLOAT, by_plan, spec_of
from clusters import in_threads
from distributed import Client, wait
from distributed.diagnostics.plugin import WorkerPlugin
from labels import block_tasks
from paper import cpus
from repeated import others_slow
from small import integers

import multimm
from multimm.graph.data_location import block_keys, where_blocks_lie
from multimm.graph.lowering import symmetric
from multimm.graph.lowering.rechunk import cut_out
from multimm.graph.scheduler.plugin import BlockPlacement
from multimm.graph.tasks import multiply
from multimm.io import open_array
from multimm.planning.choice import plan_matmul
from multimm.planning.cost.memory import IN_FLIGHT, download_limit
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

#: Bytes of what has been released while the worker has not heard of it yet: a few of its blocks,
#: which here are multiplied in milliseconds.
UNHEARD = 4 * 50 * 50 * 4


class Ledger(WorkerPlugin):
    """Bytes of the blocks that each worker holds, by kind: the most there ever were.

    All workers of this process write into one book.
    """

    name = "ledger"
    held: ClassVar[Counter[tuple[str, str]]] = Counter()
    peak: ClassVar[Counter[tuple[str, str]]] = Counter()
    sizes: ClassVar[dict[tuple[str, object], int]] = {}

    def setup(self, worker):
        self.worker = worker

    def transition(self, key, start, finish, **kwargs):
        here = (self.worker.address, key)
        if finish == "memory" and here not in self.sizes:
            self.sizes[here] = self.worker.state.tasks[key].nbytes or 0
            self.count(key, self.sizes[here])
        elif start == "memory" and here in self.sizes:
            self.count(key, -self.sizes.pop(here))

    def count(self, key, size):
        for kind in (kind_of(key), "all"):
            at = self.worker.address, kind
            self.held[at] += size
            self.peak[at] = max(self.peak[at], self.held[at])

    @classmethod
    def clear(cls):
        for book in (cls.held, cls.peak, cls.sizes):
            book.clear()

    @classmethod
    def most(cls, kind):
        return max((size for (_, of), size in cls.peak.items() if of == kind), default=0)


def kind_of(key):
    name = key[0] if isinstance(key, tuple) else str(key)
    role = name.split("-")[1] if name.startswith("multimm-") else name.split("-")[0]
    return "operands" if role in ("a", "b", "left", "right") else role


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Products take some time, as large ones do: what is released is gone before the next ends."""

    def slow(block):
        time.sleep(0.005)
        return block

    for module in (multiply, symmetric):
        monkeypatch.setattr(module, "finished", slow)


@pytest.fixture(scope="module")
def client():
    # Dask's own removal of copies would move the blocks that are counted.
    with (
        dask.config.set({"distributed.scheduler.active-memory-manager.start": False}),
        in_threads() as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(BlockPlacement())
        client.register_plugin(Ledger())
        yield client


def compute(a, b, step, problem, memory, added=None, **options):
    plan = plan_matmul(problem, cpus(4, memory), options=Options(**options))
    c = by_plan(plan, a, b, added, step)
    assert sum(task.func is not cut_out for task in block_tasks(c).values()) == plan.tasks
    Ledger.clear()
    done = c.persist()
    wait(done)
    return plan, done


def operand(shape, name):
    """Blocks that tasks make, each from a number that its graph holds."""
    x = da.full(shape, 2.0, chunks=(50, 50), dtype="float32")
    return x.map_blocks(np.copy, name=f"{name}-{shape}", dtype="float32", meta=x._meta)


def assert_as_planned(plan):
    stay, spill = plan.memory_terms, plan.spill_terms
    sums = sum(stay.get(name, 0) for name in ("partial sums", "sums being made", "sums received"))
    assert 0 < Ledger.most("part") <= sums + UNHEARD
    assert Ledger.most("all") <= sum(stay.values()) + sum(spill.values()) + UNHEARD


SYMMETRIC = replace(FLOAT, trans_b=True)


@pytest.mark.parametrize(
    ("memory", "p_k", "symmetric"),
    others_slow(
        itertools.product([10**9, 152_000], [1, 2], [False, True]),
        *((10**9, 1, False), (10**9, 2, True), (152_000, 1, True), (152_000, 2, False)),
    ),
)
def test_workers_hold_no_more_than_planned(client, symmetric, p_k, memory):
    a, b = operand((300, 300), "left"), operand((300, 300), "right")
    problem = Problem(*(spec_of(x) for x in (a, a.T if symmetric else b)),
                      symmetric=symmetric)  # fmt: skip
    plan, c = compute(
        a,
        a if symmetric else b,
        SYMMETRIC if symmetric else FLOAT,
        problem,
        memory,
        blocks=50,
        slabs=50,
        p_k=p_k,
    )
    assert plan.layout.mirrors == symmetric
    assert (plan.layout.row_panels > 1) == (memory < 10**9)
    assert_as_planned(plan)
    np.testing.assert_array_equal(c.compute(), np.full((300, 300), 1200.0))


@pytest.mark.parametrize(
    ("chunk", "known", "p_k"),
    others_slow(
        [(50, True, 1), (75, False, 1), (75, True, 2), (150, False, 2), (150, True, 1)],
        *((50, True, 1), (75, True, 2), (150, False, 2)),
    ),
)
def test_what_is_added_is_planned_for(client, chunk, known, p_k):
    """However large its chunks are, each worker has its part, what it sends, and its own blocks."""
    a, b = operand((300, 300), "left"), operand((300, 300), "right")
    added = da.full((300, 300), 5.0, chunks=chunk, dtype="float32")
    added = added.map_blocks(np.copy, name=f"added-{chunk}", dtype="float32", meta=added._meta)
    spec = MatrixSpec(added.shape, chunks=added.chunks)
    if known:
        added = added.persist()
        wait(added)
        spec = replace(
            spec, owners=in_place(client, added, sorted(client.cluster.scheduler.workers))
        )
    problem = Problem(*(spec_of(x) for x in (a, b)), c=spec)
    fixed = {"blocks": 50, "slabs": 50, "p_k": p_k}
    plan, c = compute(a, b, replace(FLOAT, beta=1), problem, 10**9, added, **fixed)
    assert_as_planned(plan)
    most = plan.memory_terms["C in use"]
    most += sum(plan.spill_terms.get(f"C {at}", 0) for at in ("as it comes", "on its way"))
    assert (chunk != 50) <= (Ledger.most("cut") > 0)
    in_place_there = spec.fullest * known  # the ledger begins when these are there
    assert Ledger.most("cut") + Ledger.most("added") <= most - in_place_there + UNHEARD
    np.testing.assert_array_equal(c.compute(), np.full((300, 300), 1205.0))


@pytest.mark.parametrize("symmetric", [False, True])
def test_streamed_operands_are_alive_for_a_few_k_tiles(client, tmp_path, symmetric):
    x, y = integers((300, 600), 0), integers((600, 300), 1)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    a, b = (open_array(tmp_path / f"{name}.npy") for name in "xy")
    specs = MatrixSpec(x.shape), MatrixSpec(y.shape)
    problem = Problem(*specs, rereadable=(True, True), symmetric=symmetric)
    step = SYMMETRIC if symmetric else FLOAT
    plan, c = compute(a, a if symmetric else b, step, problem, 562_500, blocks=50, slabs=50)
    assert plan.layout.stream
    assert plan.peak_bytes <= plan.budget_bytes
    assert_as_planned(plan)
    flight = sum(size for name, size in plan.memory_terms.items() if name.endswith("in flight"))
    assert 0 < Ledger.most("operands") <= flight + UNHEARD
    # Everything at once would be four times as much on each worker.
    assert flight < (x.nbytes + y.nbytes * (not symmetric)) / 4
    np.testing.assert_array_equal(c.compute(), x @ (x.T if symmetric else y))


def in_place(client, x, addresses):
    held = client.who_has()
    return where_blocks_lie([held[key] for key in block_keys(x)], addresses)


def test_blocks_that_are_fetched_are_let_go_k_tile_by_k_tile(client):
    """Operands lie where they were made; what a worker holds beyond its own is a few k-tiles."""
    a, b = (
        operand(shape, name).persist()
        for shape, name in (((300, 600), "left"), ((600, 300), "right"))
    )
    wait([a, b])
    ranks = sorted(client.cluster.scheduler.workers)
    specs = [
        MatrixSpec(x.shape, chunks=x.chunks, owners=in_place(client, x, ranks)) for x in (a, b)
    ]
    problem = Problem(*specs)
    plan, c = compute(a, b, FLOAT, problem, 10**9, blocks=50, slabs=50)
    flight = sum(size for name, size in plan.memory_terms.items() if name.endswith("in flight"))
    assert 0 < Ledger.most("operands") <= flight + UNHEARD
    np.testing.assert_array_equal(c.compute(), np.full((300, 300), 2400.0))


@pytest.mark.parametrize("threads", others_slow([1, 2, 3], 2))
@pytest.mark.parametrize("memory", [3, 6])
def test_blocks_that_leave_a_gpu_have_room_beside_those_that_its_threads_make(threads, memory):
    a = da.zeros((32768, 32768), chunks=4096, dtype="float32")
    gpu = replace(H200, memory_bytes=memory * 10**9)
    plan = multimm.plan(a, a, cluster=ClusterSpec.homogeneous(gpu, 1, threads=threads))
    limit = download_limit(plan.layout, plan.used)
    block = 4 * np.prod([max(sizes) for sizes in plan.chunks])
    assert 0 < block <= limit
    in_flight = max(threads, IN_FLIGHT) + plan.layout.overlaps
    assert limit + in_flight * block <= plan.memory_terms["C coming back"]
