"""Operands in other blocks than the plan's, cut and joined by every product that uses them."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from by_plan import FLOAT, by_plan, spec_of
from labels import block_tasks
from paper import gpus
from small import integers

from multimm.graph.tasks.multiply import Step
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.candidates import owner_computes
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec


def planned(a, b, step=FLOAT, *, workers=1, symmetric=False, **fixed):
    """A plan, for one worker such that each product cuts its own."""
    specs = (spec_of(x).T if t else spec_of(x) for x, t in ((a, step.trans_a), (b, step.trans_b)))
    problem, fixed = Problem(*specs, symmetric=symmetric), Options(**fixed)
    return plan_matmul(problem, gpus(workers), options=fixed)


# ------------------------------------------------------------------ the graph


@pytest.mark.parametrize("step", [FLOAT, replace(FLOAT, trans_a=True, trans_b=True)])
@pytest.mark.parametrize(
    "fixed", [{"blocks": 10, "slabs": 10}, {"blocks": (30, 9), "slabs": 35}, {"blocks": 40}]
)
def test_products_of_sub_blocks_are_right_and_take_no_other_tasks(step, fixed):
    x, y = integers((31, 35), 0), integers((35, 33), 1)
    a, b = (z.T if step.trans_a else z for z in (x, y))
    a = da.from_array(a, chunks=(7, (30, a.shape[1] - 30)), name="pieces-a")
    b = da.from_array(b, chunks=(11, 8), name="pieces-b")
    plan = planned(a, b, step, **fixed)
    assert plan.layout.operands.cut_again == ("a", "b")
    c = by_plan(plan, a, b, step=step)
    tasks = dict(c.dask)
    ours = block_tasks(c).values()
    assert len(ours) == plan.tasks
    stored = {key for name in ("pieces-a", "pieces-b") for key in tasks if key[0] == name}
    assert len(stored) == a.npartitions + b.npartitions
    for task in ours:
        assert {key for key, _ in task.place.blocks} == task.dependencies & stored != set()
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


def test_the_bits_are_those_of_operands_that_are_cut_by_tasks():
    rng = np.random.default_rng(3)
    a, b = (
        da.from_array(rng.standard_normal((64, 64), np.float32), chunks=20, name=f"normal-{name}")
        for name in "ab"
    )
    results = [
        by_plan(planned(a, b, workers=n, blocks=32, slabs=16), a, b).compute(scheduler="sync")
        for n in (2, 1)
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("stored", ["as multiplied", "turned", "A turned", "B turned"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("k_tiles", "along_k"),
    [((24,), (24,)), ((10, 14), (10, 14)), ((24,), (10, 8, 6)), ((7, 17), (10, 14))],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_long_chunks_are_multiplied_as_they_come(
    monkeypatch, stored, wide, k_tiles, along_k, dtype
):
    """One worker joins nothing of them, also where k-tiles of the other operand end within one."""
    monkeypatch.setattr(owner_computes, "LONE_GPU", 8)
    x, y = integers((130, 24), 8), integers((24, 3), 9)
    chunks = (((40, 7, 43, 40), along_k), (k_tiles, (3,)))
    x, y = (y.T, x.T) if wide else (x, y)
    chunks = (chunks[1][::-1], chunks[0][::-1]) if wide else chunks
    turns = stored in ("turned", "A turned"), stored in ("turned", "B turned")
    of_sums = "int64" if dtype == "int32" else "float32"
    step = Step(of_sums, of_sums, *turns)
    a, b = (
        da.from_array((z.T if turn else z).astype(dtype), chunks=own[::-1] if turn else own)
        for z, turn, own in zip((x, y), turns, chunks, strict=True)
    )
    specs = (MatrixSpec(z.shape, dtype, chunks=own) for z, own in zip((x, y), chunks, strict=True))
    problem = Problem(*specs, dtype=of_sums, accumulate=of_sums)
    layout = next(owner_computes.in_partial_products(problem, gpus(1)))
    assert layout.in_place.large == ("b" if wide else "a")
    totals = layout.in_place.partial_products.totals
    assert (totals.sub_blocks, totals.joined) == (0, 0)
    plan = replace(plan_matmul(problem, gpus(1)), layout=layout)
    c = by_plan(plan, a, b, step=step)
    assert c.dtype == of_sums
    expected = x.astype("int64") @ y.astype("int64")
    np.testing.assert_array_equal(c.compute(scheduler="sync"), expected)


def test_a_block_within_another_is_no_copy():
    x = integers((8, 8), 8)
    cuts = (((slice(2, 4), slice(0, 8)), (slice(0, 2), slice(0, 8))),)
    whole = SubBlocks([x], cuts, ((8, 8),), (2, 8))
    assert whole.joined().base is x
    np.testing.assert_array_equal(whole.joined(), x[2:4])
