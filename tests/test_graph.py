"""The graph itself: one task per (C block, k-tile), reads in time, sums in a fixed tree."""

from __future__ import annotations

import itertools
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from by_plan import by_plan
from dask.callbacks import Callback
from hypothesis import given, settings
from hypothesis import strategies as st
from labels import block_tasks, tasks_of
from paper import cpus, gpus
from repeated import others_slow
from small import integers

from multimm.graph.label import Kind
from multimm.io import open_array
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import WINDOW
from multimm.planning.spec import MatrixSpec


def plan_of(a, b, workers=1, memory=10**9, rereadable=False, **options):
    specs = [MatrixSpec(x.shape, str(x.dtype), x.dtype.itemsize, x.chunks) for x in (a, b)]
    problem = Problem(*specs, rereadable=(rereadable, rereadable))
    return plan_matmul(problem, cpus(workers, memory), options=Options(**options))


@pytest.mark.parametrize(
    ("fan_in", "sums", "last"),
    [(2, [(0, 1), (0, 3), (0, 4), (2, 3)], 2), (4, [(0, 3), (0, 4)], 2), (8, [(0, 4)], 5)],
)
def test_parts_of_k_are_added_in_a_tree(fan_in, sums, last):
    a = b = da.ones((20, 60), chunks=(20, 10), dtype="float32")
    plan = plan_of(a, b.T, blocks=20, slabs=10, p_k=5)
    plan = replace(plan, layout=replace(plan.layout, fan_in=fan_in))
    c = by_plan(plan, a, b.T)
    tasks = block_tasks(c)
    added = {task.label.parts: task for task in tasks_of(c, Kind.ADD).values()}
    assert sorted(added) == sums
    final = tasks[(c.name, 0, 0)]
    assert len(final.dependencies) == last
    assert len(tasks) == plan.tasks
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((20, 20), 60.0))


@pytest.mark.parametrize(
    ("p_k", "workers"),
    others_slow(itertools.product([1, 2], [1, 2, 4]), (1, 1), (1, 4), (2, 2)),
)
def test_streamed_operands_are_read_in_time_and_no_earlier(tmp_path, workers, p_k):
    """8 MB of operands and 1 MB of C on workers that may use 1.2 MB."""
    x, y = integers((400, 2000)), integers((2000, 600), 1)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    a, b = (open_array(tmp_path / f"{name}.npy") for name in "xy")
    plan = plan_of(a, b, workers, 2_000_000, rereadable=True, blocks=100, slabs=50, p_k=p_k)
    layout = plan.layout
    assert layout.stream
    assert plan.peak_bytes <= plan.budget_bytes
    c = by_plan(plan, a, b)
    tasks = block_tasks(c)
    assert len(tasks) == plan.tasks
    steps = layout.steps
    when = {key: t.place.order[0] * steps + t.place.order[1] for key, t in tasks.items()}
    reads = tasks_of(c, Kind.READ)
    assert reads
    for key, task in reads.items():
        if when[key] < WINDOW:
            assert not task.dependencies
        else:
            (barrier,) = task.dependencies
            assert when[barrier] == when[key] - WINDOW
            ranks = {
                layout.grid.rank(tasks[name].place.owner)
                for name in (key, barrier, *tasks[barrier].dependencies)
            }
            assert len(ranks) == 1  # nothing travels for it
            assert {when[name] for name in tasks[barrier].dependencies} == {when[barrier]}
    check_barriers_are_kept(tasks, layout)
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


def check_barriers_are_kept(tasks, layout):
    """The last task of a worker depends on all its barriers: who reads again finds them passed."""
    own = {}
    for key, task in tasks.items():
        own.setdefault(layout.grid.rank(task.place.owner), {})[key] = task
    for mine in own.values():
        barriers = {key for key, task in mine.items() if task.label.kind is Kind.WAIT}
        *_, last = sorted(mine.values(), key=lambda task: task.place.order)
        later = {key for key in barriers if mine[key].place.order[:2] >= last.place.order[:2]}
        assert barriers - last.dependencies == later
        assert len(later) <= 2


class Live(Callback):
    """The most bytes of some tasks' results that were in memory at once."""

    def __init__(self, tasks):
        self.tasks, self.peak = tasks, 0

    def _posttask(self, key, result, dsk, state, worker_id):
        live = (value.nbytes for name, value in state["cache"].items() if name in self.tasks)
        self.peak = max(self.peak, sum(live))


def test_streaming_holds_a_few_k_tiles_only(tmp_path):
    x, y = integers((200, 8000)), integers((8000, 200), 1)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    a, b = (open_array(tmp_path / f"{name}.npy") for name in "xy")
    plan = plan_of(a, b, 1, 2_500_000, rereadable=True, blocks=50, slabs=100)
    assert plan.layout.stream
    c = by_plan(plan, a, b)
    with Live(tasks_of(c, Kind.READ)) as live:
        result = c.compute(scheduler="sync")
    np.testing.assert_array_equal(result, x @ y)
    assert live.peak <= (WINDOW + 1) * (200 + 200) * 100 * 4
    assert live.peak < (x.nbytes * 2) / 20


@settings(max_examples=25)
@given(
    st.tuples(*[st.integers(0, 9)] * 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.integers(1, 6),
)
def test_any_layout_gives_the_product(size, block, k_tile, chunk, p_k, workers):
    m, n, k = size
    x, y = integers((m, k)), integers((k, n), 1)
    a, b = da.from_array(x, chunks=chunk), da.from_array(y, chunks=chunk)
    plan = plan_of(a, b, workers, blocks=block, slabs=k_tile, p_k=p_k)
    result = by_plan(plan, a, b).compute(scheduler="sync")
    np.testing.assert_array_equal(result, x @ y)
    assert result.shape == (m, n)


def test_bits_do_not_depend_on_the_number_of_workers():
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((200, 300), dtype="float32") for _ in range(2))
    a, b = da.from_array(x, chunks=64), da.from_array(y.T, chunks=50)
    results = []
    for workers in (1, 2, 3, 6, 16):
        plan = plan_of(a, b, workers, blocks=(60, 70), slabs=45, p_k=3)
        results.append(by_plan(plan, a, b).compute(scheduler="threads"))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_each_block_is_packed_once_and_at_owner():
    a, b = (
        da.ones((2048, 512), chunks=(1024, 256), dtype="f4"),
        da.ones((512, 3072), chunks=(256, 1024), dtype="f4"),
    )
    specs = (MatrixSpec(x.shape) for x in (a, b))
    options = Options(blocks=1024, slabs=256)
    plan = plan_matmul(Problem(*specs, pack="float32"), gpus(2), options=options)
    assert plan.layout.operands.packed
    c = by_plan(plan, a, b)
    made = block_tasks(c)
    packs = tasks_of(c, Kind.PACK)
    assert len(packs) == 2 * 2 + 3 * 2
    assert len(made) == plan.tasks == 2 * 3 * 2 + len(packs)
    for task in packs.values():
        ((source, owner),) = task.place.blocks
        assert task.dependencies == {source}
        assert task.place.owner == owner
    for key, task in made.items():
        if key not in packs:
            used = {key for key, _ in task.place.blocks}
            assert used <= set(packs)
            assert used <= task.dependencies
    # On a worker without a GPU, packing hands the block on.
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((2048, 3072), 512.0))
