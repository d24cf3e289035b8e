"""Packed blocks in a blocked product: when they are made, where, how often, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from labels import tasks_of

import multimm
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.label import Kind
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step
from multimm.io import open_array
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import communication, memory, time
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


@pytest.mark.parametrize("role", ["a", "b"])
def test_transposed_blocks_are_packed_as_they_are_stored(role, monkeypatch):
    seen = []
    monkeypatch.setattr(multiply, "is_cupy", lambda block: seen.append(block.shape))
    step = replace(FLOAT, trans_a=role == "a", trans_b=role == "b")
    a, b = (da.ones(shape, chunks=1024, dtype="f4") for shape in ((2048, 1024), (1024, 2048)))
    stored = [a.T if role == "a" else a, b.T if role == "b" else b]
    plan = planned(a.shape, b.shape, blocks=1024, slabs=512)
    c, _ = graph_of(*stored, plan, step)
    c.compute(scheduler="sync")
    assert (512, 1024) in seen or (1024, 512) in seen


def test_streamed_blocks_are_read_gated_and_packed_again_in_each_row_panel(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4096, 2048), "f4"))
    np.save(tmp_path / "y.npy", np.ones((2048, 2048), "f4"))
    a, b = (open_array(tmp_path / f"{name}.npy") for name in "xy")
    plan = planned(a.shape, b.shape, 1, memory=147_000_000, rereadable=True, blocks=1024, slabs=256)
    assert plan.layout.stream
    assert plan.layout.row_panels > 1
    assert plan.peak_bytes <= plan.budget_bytes
    c, made = graph_of(a, b, plan)
    assert len(made) == plan.tasks
    packs, reads = tasks_of(c, Kind.PACK), tasks_of(c, Kind.READ)
    assert len(packs) == len(reads)
    assert {key for task in packs.values() for key in task.dependencies} == set(reads)
    for task in packs.values():
        (source,) = task.dependencies
        assert made[source].place.step == task.place.step  # then by block
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((4096, 2048), 2048.0))


def test_the_plan_counts_packed_blocks_and_what_they_are_filled_up_with():
    options = {"blocks": 1025, "slabs": 512}
    packed = planned((4100, 4096), (4096, 4100), **options)
    plain = planned((4100, 4096), (4096, 4100), pack="", **options)
    assert packed.layout.padding == pytest.approx(1152 / 1025)
    half = 4100 * 4096 * 4  # of both operands, on each of two workers
    stay, spill = memory.held(packed.layout, packed.cluster)
    # Of A, which stays where it is, what is in use cannot be spilled.
    assert stay["A in use"] + spill["packed A"] == pytest.approx(half / 2 * 1152 / 1025)
    assert spill["packed B"] == pytest.approx(half / 2 * 1152 / 1025)
    assert packed.peak_bytes > plain.peak_bytes
    products = [time.seconds(p.layout, p.cluster, 0)["block products"] for p in (packed, plain)]
    assert products[0] == pytest.approx(0.29 * products[1])


def test_tf32_blocks_are_half_as_large_once_they_are_packed():
    sizes, options = ((4096, 4096), (4096, 4096)), {"blocks": 1024, "slabs": 512}
    full, half = (planned(*sizes, pack=pack, **options) for pack in ("float32", "tf32"))
    assert half.layout.operands.packed == ("a", "b")
    assert half.bytes_received == full.bytes_received / 2 == full.bytes_bound / 2
    assert communication.moved(half.layout, 2).total == half.bytes_received  # the closed form, too
    in_flight, being_packed = "B in flight", "operands being packed"
    for name in (in_flight, being_packed):
        assert half.memory_terms[name] == full.memory_terms[name] / 2
    for name in ("packed A", "packed B"):
        assert half.spill_terms[name] == full.spill_terms[name] / 2


@pytest.mark.parametrize(
    ("precision", "dtype", "device", "packs"),
    [
        ("float32", "float32", H200, True),
        ("tf32", "float32", H200, True),
        ("ieee", "float32", H200, False),
        ("float32", "float64", H200, False),
        ("float32", "float32", replace(H200, packs=()), False),
    ],
)
def test_what_is_packed_of_shapes_alone(precision, dtype, device, packs):
    spec = MatrixSpec((65536, 65536), dtype, np.dtype(dtype).itemsize)
    cluster = ClusterSpec.homogeneous(device, 2)
    assert (
        bool(multimm.plan(spec, spec, precision=precision, cluster=cluster).layout.operands.packed)
        == packs
    )


def test_blocks_in_host_memory_are_not_packed_on_a_cluster_of_gpus():
    x = da.ones((65536, 65536), chunks=16384, dtype="float32")
    cluster = ClusterSpec.homogeneous(H200, 2)
    assert not multimm.plan(x, x, cluster=cluster).layout.operands.packed
