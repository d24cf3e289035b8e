"""Stacks of matrices: what a layout says of them is what its graph does."""

from __future__ import annotations

import dask.array as da
import pytest

import multimm
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import communication, memory
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.grid import Grid, even
from multimm.planning.tiling.stacks import Share, shares

M, K, N = 16, 8, 12
#: Batch dimensions of A and of B: its own each, one or the other or both broadcast.
BATCHES = [((6,), (6,)), ((6,), ()), ((), (6,)), ((1,), (6,)), ((2, 1), (1, 3)), ((2, 3), (3,))]


def gpus(workers):
    return ClusterSpec.homogeneous(H200, workers)


def stack_layout(batches, grid, rows, band, k_tiles=2):
    a, b = (MatrixSpec((*batch, *sides)) for batch, sides in zip(batches, ((M, K), (K, N))))  # noqa: B905
    problem = Problem(a, b)
    blocks = tuple(even(size, size) for size in problem.batch_shape)
    return Schedule(problem, grid, blocks, even(M, rows), even(N, 3), even(K, k_tiles), band=band)


@pytest.mark.parametrize(("batch", "matrices"), [((6,), 3), ((1,), 1), ((), 1)])
def test_memory_holds_all_matrices_that_a_task_converts(batch, matrices):
    a, b = (
        MatrixSpec((*own, *sides), "float16", 2) for own, sides in (((6,), (M, K)), (batch, (K, N)))
    )
    problem = Problem(a, b, "float16", "float32", 2, 4)
    layout = Schedule(problem, Grid(2, 1, 1), ((3, 3),), (M,), (N,), (K,), band=1)
    stay, _ = memory.held(layout, gpus(2))
    assert stay["operands being converted"] == (3 * M + matrices * N) * K * 4


def test_operands_that_all_matrices_share_are_kept_by_several_workers():
    """And sent by them: one worker would have to send all."""
    layout = stack_layout(((8,), ()), Grid(8, 1, 1), 1, 1)
    assert len({x for j in range(3) for x in layout.tiles.owners("b", 0, j)}) == 4
    layout = stack_layout(((), (8,)), Grid(8, 1, 1), 4, 8)
    assert len({x for i in range(4) for x in layout.tiles.owners("a", 0, i)}) >= 4


def test_an_operand_that_several_rows_share_arrives():
    own = stack_layout(((8,), (8,)), Grid(8, 1, 1), 1, 1)
    shared = stack_layout(((), (8,)), Grid(8, 1, 1), 1, 1)
    assert not own.operands.arrives("a")
    assert shared.operands.arrives("a")
    stay, _ = memory.held(shared, gpus(8))
    assert stay["A in flight"] == 2 * M * (K // 2) * 4  # not once for each matrix


@pytest.mark.parametrize(
    ("a", "b", "copies"),
    [
        (((), (16,)), None, (7, 0)),
        (((16,), ()), None, (0, 7)),
        (((16,), (16,)), None, (0, 0)),
        (((4, 1), (1, 4)), None, (3, 1)),
    ],
)
def test_the_closed_form_of_a_stack_on_a_column_of_eight(a, b, copies):
    batch_a, batch_b = a
    problem = Problem(MatrixSpec((*batch_a, M, K)), MatrixSpec((*batch_b, K, N)))
    moved = copies[0] * problem.a.nbytes + copies[1] * problem.b.nbytes
    assert communication.volume(problem, Grid(8, 1, 1)) == moved


def test_shares_are_told_apart_by_every_dimension():
    blocks = ((1, 1), (2, 1))
    assert shares(blocks, (2, 3, 5, 5)) == tuple(
        Share((flat,), size) for flat, size in enumerate((2, 1, 2, 1))
    )
    assert shares(blocks, (2, 1, 5, 5)) == (Share((0, 1), 1), Share((2, 3), 1))
    assert shares(blocks, (3, 5, 5)) == (Share((0, 2), 2), Share((1, 3), 1))
    assert shares(blocks, (5, 5)) == (Share((0, 1, 2, 3), 1),)


@pytest.mark.parametrize("options", [{}, {"blocks": 20}, {"p_k": 2}])
def test_a_stack_of_no_matrices_gives_none(options):
    a = da.ones((0, 40, 50), chunks=(1, 20, 25), dtype="float32")
    b = da.ones((0, 50, 60), chunks=(1, 25, 30), dtype="float32")
    assert multimm.matmul(a, b, **options).compute().shape == (0, 40, 60)
    assert "0 B" in str(multimm.plan(a, b, **options)) or "nothing" in str(multimm.plan(a, b))


def test_a_plan_of_a_broadcast_operand_says_what_moves():
    problem = Problem(MatrixSpec((16384, 16384)), MatrixSpec((16, 16384, 4096)))
    plan = plan_matmul(problem, gpus(8))
    assert plan.bytes_received == plan.bytes_bound == 7 * problem.a.nbytes
    assert "because 7.52 GB move" in str(plan)
