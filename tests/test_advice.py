"""Plans that do not fit: what they are refused for, and that what is advised would do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from dask.utils import parse_bytes
from repeated import others_slow

from multimm.errors import MemoryBudgetError
from multimm.planning.advice import refusal
from multimm.planning.choice import plan_matmul
from multimm.planning.limits import MOST_TASKS
from multimm.planning.options import Options
from multimm.planning.plan import MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec

GB = 10**9
CPU = DeviceSpec("CPU", "cpu", GB, 30.0, 10.0)


def square(size: int) -> Problem:
    return Problem(MatrixSpec((size, size)), MatrixSpec((size, size)))


def planned(
    problem: Problem, memory: int = GB, workers: int = 2, options: Options | None = None
) -> MatmulPlan:
    device = replace(CPU, memory_bytes=memory)
    cluster = ClusterSpec.homogeneous(device, workers, LOCAL_TCP)
    return plan_matmul(problem, cluster, options=options)


def refused(plan: MatmulPlan) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        plan.check()
    return str(caught.value)


@pytest.mark.parametrize("workers", others_slow([1, 2], 2))
def test_the_memory_and_the_workers_that_are_advised_do_and_little_less_does_not(workers):
    problem = square(50_000)
    text = refused(planned(problem, 50_000_000, workers))
    (size,) = map(parse_bytes, re.findall(r"give each worker ([\d.]+ [kMG]B)", text))
    assert planned(problem, size, workers).check()
    assert not planned(problem, int(0.7 * size), workers).fits
    (count,) = map(int, re.findall(r"use about (\d+) such workers", text))
    assert planned(problem, 50_000_000, count).check()
    assert not planned(problem, 50_000_000, count // 2).fits


def test_given_blocks_are_left_out_where_that_does():
    text = refused(planned(square(20_000), 10**8, options=Options(blocks=10_000)))
    assert "leave out blocks=" in text
    assert "slabs=" not in text


def test_blocks_shorter_than_any_that_are_planned_may_do():
    text = refused(planned(square(2000), 2_000_000, 1))
    (edge,) = map(int, re.findall(r"pass blocks=(\d+) and slabs=", text))
    assert planned(square(2000), 2_000_000, 1, Options(blocks=edge, slabs=edge)).check()


def test_nothing_is_advised_that_was_not_found_to_do(monkeypatch):
    monkeypatch.setattr("multimm.planning.advice.DOUBLINGS", 0)
    monkeypatch.setattr("multimm.planning.advice.MOST_WORKERS", 0)
    text = refusal(planned(square(300_000), 2 * GB))
    assert text.endswith("nothing that would do was found: use smaller matrices")


def test_more_tasks_than_dask_can_take_are_refused():
    plan = planned(square(300_000), 2 * GB)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.tasks > MOST_TASKS
    line = next(line for line in str(plan).splitlines() if line.startswith("tasks"))
    assert re.search(rf"{plan.tasks:,} \(more than Dask can take: \d+ GB in client", line)
    text = refused(plan)
    assert text.startswith(f"{plan.tasks} tasks: Dask takes")
    assert f"{MOST_TASKS} are allowed; give each worker" in text
    enough = planned(square(300_000), 8 * GB)
    assert enough.check() is enough
    assert "Dask can take" not in str(enough)


@pytest.mark.parametrize("shape", [(10**11, 10**11, 10**11), (10**8, 4, 10**8), (4, 10**15, 4)])
@pytest.mark.parametrize("gpus", [1, 1024])
def test_what_is_hopeless_is_refused_before_it_is_laid_out(shape, gpus):
    m, k, n = shape
    problem = Problem(MatrixSpec((m, k)), MatrixSpec((k, n)))
    why = r"all 1024 workers together have|the worker has|takes some .* tasks"
    with pytest.raises(MemoryBudgetError, match=rf"^{m} x {k} @ {k} x {n} .*({why})"):
        plan_matmul(problem, ClusterSpec.homogeneous(H200, gpus))


@pytest.mark.parametrize("options", [Options(blocks=1), Options(blocks=(1, 9), slabs=1000)])
def test_blocks_that_are_hopelessly_many_are_refused(options):
    with pytest.raises(MemoryBudgetError, match=r"tasks in the given blocks.* larger"):
        planned(square(10**5), options=options)
