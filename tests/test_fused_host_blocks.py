"""All k-tiles of a block in one task where operands and C lie in host memory, and GPUs multiply.

The workers here have no GPU: see `test_host_offload.py`.
"""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, received, scattered
from labels import tasks_of
from linked import plan_for
from small import integers

import multimm
from multimm.graph.label import Kind
from multimm.planning.spec import H200, NVLINK, ClusterSpec, MatrixSpec

client = counting_client(2)


@pytest.fixture
def gpus(monkeypatch):
    plan_for(monkeypatch, H200)


def hosted(workers=2, chunk=8192, n=32768):
    """The plan of a product of squares in host memory, their chunks assigned to H200s in turn."""
    count = n // chunk
    owners = tuple(at % workers for at in range(count**2))
    x = MatrixSpec((n, n), chunks=((chunk,) * count,) * 2, owners=owners, hosted=True)
    cluster = ClusterSpec.homogeneous(H200, workers, NVLINK)
    return multimm.plan(x, x, cluster=cluster)


def test_blocks_of_c_that_go_to_host_memory_are_finished_one_after_another():
    """Of several GPUs: operands come as they are, and one half of A travels to each of two."""
    plan = hosted()
    layout = plan.layout
    assert layout.k_tiles_per_task == len(layout.k_tiles) == 4
    assert not layout.operands.cut_again
    whole = layout.problem.a.nbytes
    assert plan.bytes_moved == whole
    assert plan.memory_terms["A in flight"] == whole
    assert plan.tasks == layout.work.count == 16
    one = hosted(workers=1)  # a worker's own link is what it waits for: longer blocks go up faster
    assert one.layout.problem.from_host


@pytest.mark.parametrize(("stack", "added"), [((), False), ((3,), False), ((), True)])
def test_host_blocks_are_multiplied_k_tile_by_k_tile_within_a_task(client, gpus, stack, added):
    x, y = integers((*stack, 120, 160), 1), integers((160, 80), 2)
    a = scattered(client, x, (*stack, 30, 40), [0, 1] * 8)
    b = scattered(client, y, (40, 20), [0, 1] * 8)
    fixed = {"blocks": (30, 20), "slabs": 40}
    if added:
        z = integers((120, 80), 3)
        c = da.from_array(z, chunks=(50, 80))
        plan, made = multimm.plan(a, b, c=c, **fixed), multimm.gemm(2, a, b, 3, c, **fixed)
        expected = 2 * (x @ y) + 3 * z
    else:
        plan, made = multimm.plan(a, b, **fixed), multimm.matmul(a, b, **fixed)
        expected = x @ y
    assert plan.layout.k_tiles_per_task == 4
    multiplied = tasks_of(made, Kind.MULTIPLY).values()
    assert {task.label.k_tiles for task in multiplied} == {(0, 3)}
    result, moved = received(client, made)
    if not added:
        assert moved == plan.bytes_moved
    np.testing.assert_array_equal(result.compute(), expected)


def test_a_product_begins_before_blocks_go_up_that_others_need(client, gpus):
    a = scattered(client, integers((120, 160), 1), (30, 40), [0, 1] * 8)
    b = scattered(client, integers((160, 80), 2), (40, 20), [0, 1] * 8)
    c = multimm.matmul(a, b, blocks=(30, 20), slabs=40)
    multiplied, up = (tasks_of(c, kind) for kind in (Kind.MULTIPLY, Kind.UPLOAD))
    needed = set()
    for task in sorted(multiplied.values(), key=lambda task: task.place.order):
        needed |= task.dependencies
        before = {key for key, x in up.items() if x.place.order < (*task.place.order, 1)}
        assert before == needed & {*up}
