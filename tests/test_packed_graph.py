"""Packed blocks in a blocked product: when they are made, where, how often, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
from labels import tasks_of

from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.label import Kind
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

FLOAT = Step("float32", "float32")


def planned(shape_a, shape_b, workers=2, pack="float32", memory=None, rereadable=False, **options):
    device = H200 if memory is None else replace(H200, memory_bytes=memory)
    specs = [MatrixSpec(shape) for shape in (shape_a, shape_b)]
    problem = Problem(*specs, rereadable=(rereadable, rereadable), pack=pack)
    cluster = ClusterSpec.homogeneous(device, workers)
    return plan_matmul(problem, cluster, options=Options(**options))


def graph_of(a, b, plan, step=FLOAT):
    c = build(plan, a, b, None, step, np.empty((0, 0), "float32"))
    return c, {k: t for k, t in dict(c.dask).items() if isinstance(t, BlockTask)}


def test_each_block_is_packed_once_and_at_owner():
    a, b = (
        da.ones((2048, 512), chunks=(1024, 256), dtype="f4"),
        da.ones((512, 3072), chunks=(256, 1024), dtype="f4"),
    )
    plan = planned(a.shape, b.shape, blocks=1024, slabs=256)
    assert plan.layout.operands.packed
    c, made = graph_of(a, b, plan)
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
