"""Block rows and columns that are multiplied where they lie: planned, counted, and right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, received, scattered
from hypothesis import given
from hypothesis import strategies as st
from small import integers

import multimm
from multimm.graph.array import build
from multimm.graph.tasks.multiply import Step
from multimm.planning import choice
from multimm.planning.candidates import in_place
from multimm.planning.candidates.block_order import (
    _in_turn,
    as_stored,
    stack_where_it_lies,
    stored_at,
    where_they_lie,
)
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import redistribution, time
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import Grid

TALL, WIDE = (2**20, 8192), (8192, 1024)
BANDS, NEARLY = (0,) * 8 + (2,) * 8 + (1,) * 8 + (3,) * 8, (1, 0, 2, 3, 0, 1, 3, 2) * 4


def gpus(workers=4):
    return ClusterSpec.homogeneous(H200, workers)


def in_rows(owners, shape=TALL):
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=tuple(owners))


def times(a, c=None, shape=WIDE):
    return Problem(a, MatrixSpec(shape), pack="float32", c=c)


# -------------------------------------------------------------------- the order


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 5))
def test_blocks_are_assigned_out_to_those_who_have_them(owners, workers):
    """Whose are more than a fair share gives away just what is beyond it."""
    owners = [owner % workers for owner in owners]
    order = _in_turn(owners, workers)
    assert sorted(order) == list(range(len(owners)))
    stay = sum(owners[at] == i % workers for i, at in enumerate(order))
    places = Counter(i % workers for i in range(len(owners)))
    assert stay == sum(min(count, places[owner]) for owner, count in Counter(owners).items())


def test_orders_lead_there_and_back():
    order = (2, 0, 3, 1)
    assert [stored_at(order, i) for i in range(4)] == [2, 0, 3, 1]
    assert as_stored("abcd", order) == ("b", "d", "a", "c")
    assert stored_at((), 3) == 3
    assert as_stored("abcd", ()) == tuple("abcd")


# --------------------------------------------------------------------- the plan


@pytest.mark.parametrize("owners", [BANDS, NEARLY])
def test_of_a_tall_matrix_nothing_travels(owners):
    plan = plan_matmul(times(in_rows(owners)), gpus())
    in_turn = plan_matmul(times(in_rows((0, 1, 2, 3) * 8)), gpus())
    assert plan.grid == in_turn.grid == (4, 1, 1)
    assert plan.layout.problem.rows
    assert not in_turn.layout.problem.rows
    assert not plan.bytes_recut
    assert plan.bytes_received == in_turn.bytes_received == 3 * 8192 * 1024 * 4
    assert plan.seconds == in_turn.seconds
    assert "rows in the order in which they lie on workers" in str(plan)
    assert "operands stay where they lie; 101 MB move" in str(plan)
    assert "in the order" not in str(in_turn)


def test_the_other_side_may_be_cut():
    """Columns of C are no concern of the rows."""
    plan = plan_matmul(times(in_rows(BANDS), shape=(8192, 32768)), gpus())
    assert plan.layout.problem.rows
    assert len(plan.layout.n_blocks) > 1
    assert plan.bytes_received == 3 * 8192 * 32768 * 4


def test_of_a_wide_one_nothing_either():
    b = in_rows(BANDS).T
    plan = plan_matmul(Problem(MatrixSpec((1024, 8192)), b, pack="float32"), gpus())
    assert plan.grid == (1, 4, 1)
    assert plan.layout.problem.columns
    assert plan.bytes_received == 3 * 8192 * 1024 * 4
    assert "columns in the order in which they lie on workers" in str(plan)


def test_c_goes_with_the_columns():
    b, c = in_rows(BANDS).T, in_rows(BANDS, (2**20, 1024)).T
    plan = plan_matmul(Problem(MatrixSpec((1024, 8192)), b, pack="float32", c=c), gpus())
    assert plan.layout.problem.columns
    assert not plan.bytes_added
    assert plan.layout.spec("c").owners == plan.layout.spec("b").owners == (0, 1, 2, 3) * 8


def test_c_has_to_come_in_the_same_rows():
    a, rows = in_rows(BANDS), (2**20, 1024)
    alike, other = in_rows(BANDS, rows), in_rows(BANDS[::2], rows)
    plan = plan_matmul(times(a, alike), gpus())
    assert plan.layout.problem.rows
    assert not plan.bytes_added
    assert plan.layout.spec("c").owners == plan.layout.spec("a").owners == (0, 1, 2, 3) * 8
    assert not plan_matmul(times(a, other), gpus()).layout.problem.rows


def test_where_more_of_c_would_travel_than_of_the_rows_these_do():
    a, shape = in_rows(BANDS), (2**20, 16384)
    where_a_lies, in_turn = in_rows(BANDS, shape), in_rows((0, 1, 2, 3) * 8, shape)
    in_place, other = (
        plan_matmul(Problem(a, MatrixSpec((8192, 16384)), c=c), gpus())
        for c in (where_a_lies, in_turn)
    )
    assert in_place.layout.problem.rows
    assert not in_place.bytes_added
    assert not other.layout.problem.rows
    assert not other.bytes_added
    assert other.bytes_moved == other.bytes_received == in_place.bytes_moved + a.nbytes * 3 / 4
    assert a.nbytes < in_turn.nbytes


@pytest.mark.parametrize("fixed", [{"blocks": 2**15}, {"slabs": 8192}, {"p_k": 1}])
def test_what_is_fixed_stays_as_it_is_stored(fixed):
    plan = plan_matmul(times(in_rows(BANDS)), gpus(), options=Options(**fixed))
    assert not plan.layout.problem.rows


def test_only_what_lies_on_one_worker_each():
    a = in_rows(BANDS)
    parts = MatrixSpec(TALL, chunks=((2**15,) * 32, (4096,) * 2), owners=(0, 1, 2, 3) * 16)
    stack = MatrixSpec((3, 8192, 16), chunks=((3,), (8192,), (16,)))
    for problem in (
        times(parts),
        times(replace(a, owners=())),
        times(in_rows((0, 1, 2, 3) * 8)),  # as it is assigned
        Problem(a, stack),
        Problem(a, MatrixSpec(WIDE), rereadable=(True, False)),
        Problem(a, a.T, symmetric=True),
    ):
        assert not list(where_they_lie(problem, 4))
    assert [grid for _, grid in where_they_lie(Problem(a, a.T), 4)] == [(4, 1, 1), (1, 4, 1)]


def test_joined_blocks_would_be_rows_that_are_no_neighbours():
    """Tiny chunks are joined: those of C, too, which are rows in their order."""
    asked = times(in_rows(NEARLY * 8, (2**16, 8192)), shape=(8192, 8192))
    problem, grid = next(where_they_lie(asked, 4))
    layout, _ = lay_out(problem, gpus(), grid, Options(), Cut(given=True))
    assert layout.m_blocks != problem.a.chunks[0]
    assert in_place._as_they_come(problem, gpus(), grid) == {}
    assert not plan_matmul(asked, gpus()).layout.problem.rows


def test_what_is_too_large_is_not_taken_for_its_bytes(monkeypatch):
    rank_of = in_place.rank_of
    monkeypatch.setattr(in_place, "refined", lambda ranks, *_: ranks)
    for too_large in (False, True):
        choice.plan_matmul.cache_clear()
        monkeypatch.setattr(
            in_place, "rank_of", lambda *args, x=too_large: rank_of(*args)._replace(too_large=x)
        )
        plan = plan_matmul(times(in_rows(BANDS)), gpus())
        assert bool(plan.layout.problem.rows) is not too_large
    choice.plan_matmul.cache_clear()


# -------------------------------------------------------------------- the graph


@given(
    st.permutations(range(4)), st.permutations(range(3)), st.permutations(range(5)),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_products_of_sides_in_any_order_are_right(
    rows, columns, terms, trans_a, trans_b, added, workers
):
    m, n, k = (3, 5, 2, 4), (6, 1, 3), (2, 2, 4, 1, 3)
    rng = np.random.default_rng(0)
    x, y, z = (
        rng.integers(-8, 9, (sum(u), sum(v))).astype("float32") for u, v in ((m, k), (k, n), (m, n))
    )
    a, b, c = (da.from_array(x, chunks=(m, k)), da.from_array(y, chunks=(k, n)),
               da.from_array(z, chunks=(m, n)))  # fmt: skip
    sorted_m, sorted_n, sorted_k = (
        tuple(blocks[i] for i in order) for blocks, order in ((m, rows), (n, columns), (k, terms))
    )
    problem = Problem(
        MatrixSpec(x.shape, chunks=(sorted_m, sorted_k)),
        MatrixSpec(y.shape, chunks=(sorted_k, sorted_n)),
        c=MatrixSpec(z.shape, chunks=(sorted_m, sorted_n)) if added else None,
        order=tuple(terms), rows=tuple(rows), columns=tuple(columns), chunks=(m, n),
    )  # fmt: skip
    plan = plan_matmul(problem, gpus(workers), options=Options(p_k=1))
    layout, _ = lay_out(problem, gpus(workers), Grid(workers, 1, 1), Options())
    layout = replace(layout, m_blocks=sorted_m, n_blocks=sorted_n, k_tiles=sorted_k, band=4)
    plan = replace(plan, layout=layout)
    step = Step("float32", "float32", trans_a=trans_a, trans_b=trans_b, alpha=2, beta=3 * added)
    stored = a.T if trans_a else a, b.T if trans_b else b
    result = build(plan, *stored, c if added else None, step, np.empty((0, 0), "float32"))
    assert result.chunks == (m, n)
    np.testing.assert_array_equal(result.compute(scheduler="sync"), 2 * x @ y + 3 * added * z)


@given(st.permutations(range(5)), st.sampled_from(["own", "one", "two-dimensional"]), st.booleans(),
       st.booleans(), st.booleans(), st.integers(2, 4))  # fmt: skip
def test_stacks_in_any_order_are_right(order, kind, trans_a, trans_b, added, workers):
    sizes, rng = (3, 1, 2, 4, 1), np.random.default_rng(0)
    stack = {"own": (11,), "one": (1,), "two-dimensional": ()}[kind]
    x, y, z = (
        rng.integers(-8, 9, shape).astype("float32")
        for shape in ((11, 4, 6), (*stack, 6, 5), (11, 4, 5))
    )
    blocks = {11: sizes, 1: (1,)}
    a, b, c = (da.from_array(v, chunks=(*(blocks[n] for n in v.shape[:-2]), *v.shape[-2:]))
               for v in (x, y, z))  # fmt: skip
    owners = tuple(i % workers for i in order)
    own = owners if kind == "own" else ()
    problem = Problem(MatrixSpec(x.shape, chunks=a.chunks, owners=owners),
                      MatrixSpec(y.shape, chunks=b.chunks, owners=own),
                      c=MatrixSpec(z.shape, chunks=c.chunks) if added else None,
                      chunks=(sizes, (4,), (5,)))  # fmt: skip
    other = stack_where_it_lies(problem, workers)
    layout = in_place._whole_matrices(other, gpus(workers))
    assert as_stored(layout.batch_blocks[0], other.stack) == sizes
    plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
    step = Step("float32", "float32", trans_a=trans_a, trans_b=trans_b, alpha=2, beta=3 * added)
    stored = (v.swapaxes(-1, -2) if turned else v for v, turned in ((a, trans_a), (b, trans_b)))
    result = build(plan, *stored, c if added else None, step, np.empty((0, 0, 0), "float32"))
    assert result.chunks == ((sizes), (4,), (5,))
    np.testing.assert_array_equal(result.compute(scheduler="sync"), 2 * x @ y + 3 * added * z)


def test_stacks_of_whole_matrices_alone_stay_where_they_lie():
    a = MatrixSpec((6, 512, 512), chunks=((2, 2, 2), (512,), (512,)), owners=(1, 1, 0))
    b, whole = replace(a, owners=(0, 1, 1)), MatrixSpec((512, 512))
    cut = replace(a, chunks=((2, 2, 2), (256, 256), (512,)), owners=(1,) * 6)
    other = replace(a, chunks=((3, 3), (512,), (512,)), owners=(0, 1))
    deep = MatrixSpec((2, 3, 512, 512), chunks=((1, 1), (3,), (512,), (512,)), owners=(0, 1))
    for problem in (
        Problem(a, cut), Problem(a, other), Problem(deep, deep), Problem(whole, whole),
        Problem(replace(a, owners=()), whole), Problem(a, b, rereadable=(True, True)),
        Problem(a, b, c=replace(other, owners=())),
    ):  # fmt: skip
        assert stack_where_it_lies(problem, 2) is None
    found = stack_where_it_lies(Problem(a, b), 2)
    assert found.stack == (2, 0, 1)
    assert (found.a.owners, found.b.owners) == ((0, 1, 1), (1, 0, 1))
    assert stack_where_it_lies(Problem(a, replace(b, owners=(0, 1, 0))), 2).a.owners == (0, 1, 1)
    in_turn = Problem(replace(a, owners=(0, 1, 0)), b)
    assert stack_where_it_lies(in_turn, 2) is in_turn


def test_a_worker_waits_for_matrices_that_lie_elsewhere():
    """Of those with both operands at hand it does not."""
    whole = ((1,) * 8, (4096,), (4096,))
    a = MatrixSpec((8, 4096, 4096), chunks=whole, owners=(0, 1) * 4)
    waits = []
    for owners in ((0, 1) * 4, (1, 1, 0, 0) * 2, (1, 0) * 4):
        plan = plan_matmul(Problem(a, replace(a, owners=owners), pack="tf32"), gpus(2))
        assert "matrices stay where they lie" in str(plan)
        waits.append(plan.time_terms["first blocks"])
    assert 0 == waits[0] < waits[1] < waits[2]


def test_who_cuts_a_stack_waits_for_what_lies_elsewhere():
    a = MatrixSpec((8, 4096, 4096), chunks=((1,) * 8, (4096,), (4096,)), owners=(1, 0) * 4)
    layout, _ = lay_out(Problem(a, a), gpus(2), Grid(2, 1, 1), Options())
    layout = replace(layout, batch_blocks=((2,) * 4,), band=2)
    assert layout.operands.cut_again == ("a", "b")
    assert time.seconds(layout, gpus(2), 0)["first blocks"] > 0


# ------------------------------------------------------------------- on workers

OWNERS = (2, 0, 1, 1, 2, 0, 0, 1, 2)


client = counting_client(3)


def test_a_chain_stays_where_it_lies(client):
    """The blocks of a lazy product lie where they will be made, as they are stored."""
    x, y, z = integers((36000, 512)), integers((512, 512), seed=1), integers((512, 24), seed=2)
    a = scattered(client, x, 4000, OWNERS)
    b, d = scattered(client, y, 512, (0,)), scattered(client, z, 512, (1,))
    first = multimm.matmul(a, b)
    plan = multimm.plan(first, d)
    assert plan.layout.problem.rows == multimm.plan(a, b).layout.problem.rows
    assert plan.bytes_received <= 2 * z.nbytes
    c, moved = received(client, multimm.matmul(first, d))
    assert moved <= 2 * (y.nbytes + z.nbytes)
    np.testing.assert_array_equal(c.compute(), x @ y @ z)


def test_stored_the_other_way_round_and_added_to(client):
    x, y, z = integers((36000, 512)), integers((36000, 24), seed=1), integers((512, 24), seed=2)
    a = scattered(client, x, 4000, OWNERS)
    b, c0 = scattered(client, z.T, 24, (1,)), scattered(client, y, 4000, OWNERS)
    plan = multimm.plan(a, b, trans_b=True, c=c0, beta=2)
    assert plan.layout.problem.rows
    c, moved = received(client, multimm.gemm(3, a, b, 2, c0, trans_b=True))
    assert moved == plan.bytes_received <= 2 * z.nbytes
    np.testing.assert_array_equal(c.compute(), 3 * x @ z + 2 * y)


def test_columns(client):
    x, y = integers((36000, 512)), integers((24, 512), seed=1)
    a = scattered(client, x, 4000, OWNERS).T
    b = scattered(client, y, 24, (0,))
    plan = multimm.plan(b, a)
    assert plan.layout.problem.columns
    c, moved = received(client, multimm.matmul(b, a))
    assert moved == plan.bytes_received <= 2 * y.nbytes
    np.testing.assert_array_equal(c.compute(), y @ x.T)


def test_matrices_of_a_stack_travel_no_further_than_planned(client):
    x, y = integers((9, 400, 400)), integers((9, 400, 400), seed=1)
    for other in (OWNERS, tuple((i + (i == 4)) % 3 for i in OWNERS), (0, 1, 2) * 3):
        a, b = scattered(client, x, 1, OWNERS), scattered(client, y, 1, other)
        plan = multimm.plan(a, b)
        c, moved = received(client, multimm.matmul(a, b))
        assert (
            moved
            == plan.bytes_moved
            <= sum(i != j for i, j in zip(OWNERS, other, strict=True)) * 640000
        )
        np.testing.assert_array_equal(c.compute(), x @ y)
        if other is OWNERS:
            assert "matrices stay where they lie; 0 B move" in str(plan)
            assert "matrices in the order in which they lie on workers" in str(plan)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fixed", [{"slabs": 200}, {"blocks": (100, 400)}])
def test_stacks_that_are_cut_travel_as_is_counted(client, turned, fixed):
    """Several workers have a part of some blocks, each of which is cut where it lies."""
    x, y = integers((13, 400, 400)), integers((13, 400, 400), seed=1)
    a = scattered(client, x.swapaxes(-1, -2) if turned else x, 3, (1, 0, 2, 2, 0))
    b = scattered(client, y, 2, (2, 2, 0, 0, 1, 0, 2))
    a = a.swapaxes(-1, -2) if turned else a
    plan = multimm.plan(a, b, **fixed)
    assert plan.layout.operands.cut_again == ("a", "b")
    c, moved = received(client, multimm.matmul(a, b, **fixed))
    assert moved == plan.bytes_moved
    assert plan.bytes_recut < x.nbytes + y.nbytes
    assert "at most" not in str(plan)
    np.testing.assert_array_equal(c.compute(), x @ y)


def test_blocks_that_need_not_be_cut_stay_where_they_lie():
    """They count as sent from there, and not from where they would be kept otherwise."""
    a = MatrixSpec((13, 256, 8), chunks=((2, 1, 6, 4), (256,), (8,)), owners=(2, 3, 1, 0))
    problem = Problem(a, MatrixSpec((8, 16), owners=(0,)))
    layout, _ = lay_out(problem, gpus(4), Grid(2, 2, 1), Options(whole=True))
    layout = replace(layout, batch_blocks=((3, 6, 4),), n_blocks=(8, 8))
    assert layout.operands.cut_apart == ("a", "b")
    assert [layout.tiles.owners("a", flat, 0)[0] for flat in range(3)] == [0, 1, 0]
    of_b = 8 * 8 * 4  # from worker 0 to the other column
    assert redistribution.brought(layout, 4) == 3 * 256 * 8 * 4 + of_b
    beyond = replace(layout, grid=Grid(1, 1, 1))
    assert beyond.tiles.owners("a", 1, 0)[0] == 0


def test_what_a_lone_worker_lacks_of_a_stack_that_it_cuts_is_counted():
    a = MatrixSpec((4, 64, 64), chunks=((2, 2), (64,), (64,)), owners=(0, 1))
    problem = Problem(a, MatrixSpec((64, 64)))
    layout, _ = lay_out(problem, gpus(1), Grid(1, 1, 1), Options(whole=True))
    assert layout.operands.cut_again == ("a",)
    assert redistribution.brought(layout, 1) == a.nbytes / 2
