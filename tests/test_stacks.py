"""Stacks of matrices: what a layout says of them is what its graph does."""

from __future__ import annotations

from collections import Counter, defaultdict

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multimm
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import communication, counted_transfers, memory
from multimm.planning.plan import MatmulPlan
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


def stack_layout(batches, grid, rows, band, slabs=2):
    a, b = (MatrixSpec((*batch, *sides)) for batch, sides in zip(batches, ((M, K), (K, N))))  # noqa: B905
    problem = Problem(a, b)
    blocks = tuple(even(size, size) for size in problem.batch_shape)
    return Schedule(problem, grid, blocks, even(M, rows), even(N, 3), even(K, slabs), band=band)


def counted(layout):
    """Bytes received and bytes kept by each rank, from the tasks of the graph."""
    plan = MatmulPlan(layout, gpus(layout.grid.workers), "float32", "", "")
    a, b = (
        da.zeros(spec.shape, chunks=layout.operand_chunks(role), dtype="float32")
        for role, spec in (("a", layout.problem.a), ("b", layout.problem.b))
    )
    size = {(x.name, *at): 4 * np.prod([sizes[i] for sizes, i in zip(x.chunks, at)])  # noqa: B905
            for x in (a, b) for at in np.ndindex(x.numblocks)}  # fmt: skip
    made = build(plan, a, b, None, Step("float32", "float32"), np.empty((0, 0), "float32"))
    received, sent = Counter(), set()
    kept: dict[str, Counter] = defaultdict(Counter)
    homes = {}
    for task in dict(made.dask).values():
        if not isinstance(task, BlockTask):
            continue
        here, wave = layout.grid.rank(task.place.owner), task.place.order[0]
        for key, home in task.place.blocks:
            home = layout.grid.rank(home)
            assert homes.setdefault(key, home) == home
            if home != here and (key, here, wave) not in sent:
                sent.add((key, here, wave))
                received[here] += size[key]
    for key, home in homes.items():
        kept["a" if key[0] == a.name else "b"][home] += size[key]
    return received, kept


layouts = st.builds(
    stack_layout,
    st.sampled_from(BATCHES),
    st.sampled_from([Grid(1, 1, 1), Grid(2, 1, 1), Grid(4, 2, 1), Grid(3, 2, 1), Grid(8, 1, 1)]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
)


@settings(max_examples=80, deadline=None)
@given(layouts)
def test_bytes_and_homes_are_those_of_the_graph(layout):
    received, kept = counted(layout)
    assert counted_transfers.received(layout, layout.grid.workers) == received
    moved = communication.moved(layout, layout.grid.workers)
    assert moved.total == sum(received.values())
    assert moved.busiest >= moved.total / layout.grid.workers
    for role in "ab":
        most = max(kept[role].values())
        assert most <= layout.operands.at_home[role]
        if all(len(share.users) == 1 for share in layout.shares(role)):
            assert layout.operands.at_home[role] <= 2 * most


@settings(max_examples=80, deadline=None)
@given(layouts)
def test_memory_holds_what_the_tasks_of_a_slab_use(layout):
    needed: dict[tuple[str, int, int, int], int] = Counter()
    for row in range(len(layout.row_sizes)):
        flat, i = divmod(row, len(layout.m_blocks))
        for j in range(len(layout.n_blocks)):
            at = layout.owner(row, j, 0)
            who = at.row % layout.grid.p_m, at.col % layout.grid.p_n
            share_a, share_b = (layout.work.share_of(role)[flat] for role in "ab")
            needed["a", *who, layout.wave(row), share_a, i] = share_a.matrices * layout.m_blocks[i]
            needed["b", *who, layout.wave(row), share_b, j] = share_b.matrices * layout.n_blocks[j]
    for role, panel in zip("ab", layout.work.panels, strict=True):
        most: Counter = Counter()
        for (whose, *at, _, _), size in needed.items():
            if whose == role:
                most[tuple(at)] += size
        assert panel >= max(most.values())
        # Of columns the busiest share is taken.
        loose = layout.work.most_columns / min(layout.n_blocks) if role == "b" else 1
        assert panel <= loose * max(most.values())


@pytest.mark.parametrize(("batch", "matrices"), [((6,), 3), ((1,), 1), ((), 1)])
def test_memory_holds_all_matrices_that_a_task_converts(batch, matrices):
    a, b = (
        MatrixSpec((*own, *sides), "float16", 2) for own, sides in (((6,), (M, K)), (batch, (K, N)))
    )
    problem = Problem(a, b, "float16", "float32", 2, 4)
    layout = Schedule(problem, Grid(2, 1, 1), ((3, 3),), (M,), (N,), (K,), band=1)
    stay, _ = memory.held(layout, gpus(2))
    assert stay["operands being converted"] == (3 * M + matrices * N) * K * 4


def test_what_each_matrix_has_of_its_own_is_dealt_out_evenly():
    layout = stack_layout(((8,), (8,)), Grid(4, 2, 1), 1, 2, slabs=4)
    _, kept = counted(layout)
    assert layout.operands.at_home["a"] == max(kept["a"].values()) == 8 * M * K * 4 // 8


def test_operands_that_all_matrices_share_are_kept_by_several_workers():
    """And sent by them: one worker would have to send all."""
    layout = stack_layout(((8,), ()), Grid(8, 1, 1), 1, 1)
    _, kept = counted(layout)
    assert len(kept["b"]) == 4  # two slabs of three blocks: places slab + column
    layout = stack_layout(((), (8,)), Grid(8, 1, 1), 4, 8)
    _, kept = counted(layout)
    assert len(kept["a"]) >= 4
    layout = stack_layout(((3,), (3,)), Grid(4, 2, 1), 4, 3)
    _, kept = counted(layout)
    assert len(kept["b"]) == 8


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
