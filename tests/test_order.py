"""Sums over k in the order in which operands lie: planned, counted on workers, and right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, scattered
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.graph.array import build
from multimm.graph.tasks.multiply import Step
from multimm.planning import choice
from multimm.planning.candidates.block_order import by_owner
from multimm.planning.candidates.in_place import parts_in_place
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import redistribution
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.grid import Grid

TALL = (2**19, 2048)


def gpus(workers):
    return ClusterSpec.homogeneous(H200, workers)


def tall(owners, shape=TALL):
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=owners)


def symmetric_of(spec):
    return Problem(spec.T, spec, pack="tf32", symmetric=True)


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize("owners", [(0, 1) * 8, (1, 0, 0, 1) * 4])
def test_of_a_tall_matrix_nothing_travels_wherever_its_blocks_lie(owners):
    plan = plan_matmul(symmetric_of(tall(owners)), gpus(2))
    in_a_row = plan_matmul(symmetric_of(tall((0,) * 8 + (1,) * 8)), gpus(2))
    assert plan.grid == in_a_row.grid == (1, 1, 2)
    assert plan.layout.operands.in_place
    assert not plan.bytes_recut
    assert plan.bytes_received == in_a_row.bytes_received == 2048 * 2048 * 4  # one sum
    assert plan.seconds == in_a_row.seconds
    assert "k in the order in which it lies on workers" in str(plan)
    assert "k in the order" not in str(in_a_row)


def test_order_is_worth_its_bits():
    """Unless it is faster k is as it is stored."""
    plan = plan_matmul(symmetric_of(tall((0, 1) * 8)), gpus(2))
    other = plan_matmul(symmetric_of(tall((0, 1) * 8)), gpus(2), options=Options(p_k=2))
    assert plan.layout.problem.order
    assert not other.layout.problem.order
    assert plan.seconds < 0.9 * other.seconds
    square = MatrixSpec((16384, 16384), chunks=((1024,) * 16, (16384,)), owners=(0, 1) * 8)
    plan = plan_matmul(Problem(square.T, square, pack="float32"), gpus(2))
    assert not plan.layout.problem.order or plan.grid.p_k > 1


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (tall((0, 0, 1, 1)), tall((0, 0, 1, 1))),  # as they are
        (tall((0, 1, 0, 1)), tall((0, 1))),  # other blocks
        (MatrixSpec(TALL, chunks=((2**18,) * 2, (1024,) * 2), owners=(1, 0, 0, 1)),
         MatrixSpec(TALL, chunks=((2**18,) * 2, (1024,) * 2))),  # nobody has a whole one
        (MatrixSpec(TALL, chunks=((2**18,) * 2, (2048,))),) * 2,  # nobody knows
    ],
)  # fmt: skip
def test_there_may_be_no_better_order(a, b):
    assert by_owner(Problem(a.T, b)) is None


def test_the_larger_of_two_decides():
    a, b = tall((0, 1, 0, 1)), tall((1, 1, 0, 0), (2**19, 1024))
    for large, small in ((a, b), (b, a)):
        found = by_owner(Problem(large.T, small))
        assert found.order == (0, 2, 1, 3)
        assert {found.a.owners, found.b.owners} == {(0, 0, 1, 1), (1, 0, 1, 0)}
    unknown = replace(a, owners=())
    assert by_owner(Problem(unknown.T, b)).order == (2, 3, 0, 1)


def test_stacks_and_files_stay_as_they_are():
    a = tall((0, 1, 0, 1))
    assert by_owner(Problem(a.T, a, rereadable=(True, False))) is None
    stack = MatrixSpec((3, 2**19, 16), chunks=((3,), (2**17,) * 4, (16,)))
    assert by_owner(Problem(a.T, stack)) is None


# ------------------------------------------------------------------ the graph


@given(
    st.permutations(range(5)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(7, 7), (20, 20), (4, 9)]),
    st.sampled_from([1, 2, 3]),
)
def test_products_in_any_order_are_right(order, trans_a, trans_b, cut, workers):
    """Cut, joined or used as they are; stored either way."""
    k, rng = (3, 6, 2, 5, 4), np.random.default_rng(0)
    x = rng.integers(-8, 9, (12, 20)).astype("float32")
    y = rng.integers(-8, 9, (20, 10)).astype("float32")
    a, b = da.from_array(x, chunks=((5, 7), k)), da.from_array(y, chunks=(k, (6, 4)))
    sorted_k = tuple(k[i] for i in order)
    specs = (
        MatrixSpec(x.shape, chunks=((5, 7), sorted_k)),
        MatrixSpec(y.shape, chunks=(sorted_k, (6, 4))),
    )
    problem = Problem(*specs, order=tuple(order))
    blocks, k_tiles = cut
    fixed = Options(blocks=blocks, slabs=k_tiles)
    layout, _ = lay_out(problem, gpus(workers), Grid(1, 1, workers), fixed)
    plan = replace(plan_matmul(problem, gpus(workers), options=fixed), layout=layout)
    for once in (True, False) if workers == 1 else (True,):
        plan = replace(plan, layout=replace(layout, cut_once=once))
        step = Step("float32", "float32", trans_a=trans_a, trans_b=trans_b)
        stored = a.T if trans_a else a, b.T if trans_b else b
        c = build(plan, *stored, None, step, np.empty((0, 0), "float32"))
        np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


@given(st.integers(0, 5), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.booleans(),
       st.sampled_from([1, 2, 5]))  # fmt: skip
def test_parts_of_any_length_are_right(seed, counts, symmetric, at_once):
    k, rng = tuple(1 + i % 3 for i in range(sum(counts))), np.random.default_rng(seed)
    x = rng.integers(-8, 9, (9, sum(k))).astype("float32")
    y = x.T if symmetric else rng.integers(-8, 9, (sum(k), 10)).astype("float32")
    a = da.from_array(x, chunks=((5, 4), k))
    b = a.T if symmetric else da.from_array(y, chunks=(k, (6, 4)))
    workers = len(counts)
    owners = tuple(part for part, count in enumerate(counts) for _ in range(count))
    left = MatrixSpec(x.shape, chunks=a.chunks, owners=owners * 2)
    problem = Problem(left, MatrixSpec(y.shape, chunks=b.chunks), symmetric=symmetric)
    grid, options = Grid(1, 1, workers), Options(blocks=4)
    layout, _ = lay_out(replace(problem, symmetric=False), gpus(workers), grid, options)
    layout = replace(layout, k_tiles=k, part_k_tiles=tuple(counts), k_tiles_per_task=at_once)
    assert layout.steps == max(counts)
    assert layout.share_k == max(
        sum(k[start:end]) for start, end in pairwise([0, *accumulate(counts)])
    )
    plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
    c = build(
        plan, a, a.T if symmetric else b, None, Step("float32", "float32"), np.empty((0, 0), "f4")
    )
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


@pytest.mark.parametrize("chunks", [512, 2048, 4096])
@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("in_turn", [True, False])
def test_many_chunks_are_joined_where_they_lie(chunks, workers, symmetric, in_turn):
    """As Dask cuts it: too many to be multiplied one by one."""
    owners = [i % workers for i in range(chunks)]
    x = tall(tuple(owners if in_turn else sorted(owners)), (2**22, 1024))
    shape = symmetric_of(x) if symmetric else Problem(x.T, replace(x), pack="tf32")
    plan = plan_matmul(shape, gpus(workers))
    assert len(plan.layout.k_tiles) < chunks / 16
    assert not plan.bytes_recut
    assert plan.bytes_moved == (workers - 1) * 4 * 1024 * 1024  # sums
    assert "MB move" in plan.reason
    assert "GB" not in plan.reason.partition(";")[0]
    assert plan.time_terms["transfers"] < 0.01


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=2, max_size=40),
    st.integers(1, 4),
    st.integers(1, 12),
    st.booleans(),
)
def test_what_of_an_ordered_operand_travels_is_known(blocks, workers, k_tile, symmetric):
    """Where it is cut into k-tiles of any length, too; workers beyond the grid send it."""
    sizes, owners = zip(*blocks, strict=True)
    x = MatrixSpec((sum(sizes), 4), chunks=(sizes, (4,)), owners=owners)
    given = symmetric_of(x) if symmetric else Problem(x.T, replace(x))
    ordered = by_owner(given) or given
    layout, _ = lay_out(ordered, gpus(4), Grid(1, 1, workers), Options(blocks=(4, 4), slabs=k_tile))
    for role in layout.operands.cut_again:
        if all(owner < workers for owner in owners):
            share = sum(redistribution._sub_blocks_brought(layout, role, 4)) / x.nbytes
            assert layout.tiles.away(role) == pytest.approx(share)
        else:
            assert 0 < layout.tiles.away(role) <= 1


def test_of_stacks_any_may_travel():
    x = MatrixSpec((4, 8, 6), chunks=((4,), (8,), (3, 3)), owners=(0, 1))
    y = MatrixSpec((4, 6, 8), chunks=((4,), (6,), (8,)), owners=(0,))
    layout, _ = lay_out(Problem(x, y), gpus(2), Grid(2, 1, 1), Options(blocks=(8, 8), slabs=6))
    assert layout.operands.cut_again == ("a", "b")
    assert layout.tiles.away("a") is layout.tiles.away("b") is None
    assert layout.operands.rechunk.nbytes == (x.nbytes + y.nbytes) // 2


def test_uneven_blocks_are_uneven_parts():
    """As `persist()` may leave them: those of even parts would be sent."""
    owners = (0, 1) * 10 + (0,) * 12
    plan = plan_matmul(symmetric_of(tall(owners)), gpus(2))
    assert plan.layout.part_k_tiles == (22, 10)
    assert plan.bytes_moved == 2048 * 2048 * 4  # one sum
    assert "parts of k are where they lie; 16.8 MB move" in str(plan)
    assert plan.layout.k_tiles_per_task > 1
    assert plan.tasks <= 6
    one_does_it_all = tall((0,) * 31 + (1,), (2**19, 8192))
    long = replace(symmetric_of(one_does_it_all), pack="")
    assert not plan_matmul(long, gpus(2)).layout.part_k_tiles
    for uneven in ((0, 2, 0, 0) * 4, (0,) * 16):  # some have nothing
        assert not list(parts_in_place(symmetric_of(tall(tuple(uneven))), gpus(3)))


# ----------------------------------------------------------------- on workers


client = counting_client(3)


@pytest.mark.parametrize("owners", [(2, 0, 1, 1, 2, 0, 0, 1, 2), (1, 0, 1, 1, 2, 0, 0, 1, 1)])
@pytest.mark.parametrize("other", [False, True])
def test_only_sums_travel(client, other, owners, monkeypatch):
    """Where parts are not even, too: here nothing takes long enough to travel that it matters."""
    if uneven := len(set(Counter(owners).values())) > 1:
        monkeypatch.setattr(choice, "_moving_less", lambda other, plan: other)
    choice.plan_matmul.cache_clear()
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (36000, 256)).astype("float32")
    y = rng.integers(-4, 5, (36000, 256)).astype("float32")
    a = scattered(client, x, 4000, owners)
    b = scattered(client, y, 4000, owners) if other else a
    plan = multimm.plan(a.T, b)
    assert plan.layout.problem.order
    assert plan.grid == (1, 1, 3)
    assert bool(plan.layout.part_k_tiles) is uneven
    reset_received_bytes(client)
    c = multimm.matmul(a.T, b).persist()
    wait(c)
    received = sum(received_bytes(client).values())
    assert received == plan.bytes_received <= 2 * 256 * 256 * 4
    np.testing.assert_array_equal(c.compute(), x.T @ (y if other else x))
    choice.plan_matmul.cache_clear()


@pytest.mark.parametrize("other", [False, True])
def test_many_chunks_do_not_travel(client, other):
    rng = np.random.default_rng(3)
    x, y = rng.integers(-4, 5, (2, 264 * 512, 64)).astype("float32")
    a = scattered(client, x, 512, (0, 1, 2) * 88)
    b = scattered(client, y, 512, (0, 1, 2) * 88) if other else a
    plan = multimm.plan(a.T, b)
    assert len(plan.layout.k_tiles) < 264
    reset_received_bytes(client)
    c = multimm.matmul(a.T, b).persist()
    wait(c)
    assert sum(received_bytes(client).values()) == plan.bytes_moved <= 2 * 64 * 64 * 4
    np.testing.assert_array_equal(c.compute(), x.T @ (y if other else x))


def test_a_little_operand_comes_to_where_the_large_one_lies(client, monkeypatch):
    """X' y: y's blocks lie elsewhere, and each worker needs those of its part of X alone."""
    monkeypatch.setattr(choice, "with_fewer", lambda *_: {})  # one worker has it done first
    choice.plan_matmul.cache_clear()
    rng, owners = np.random.default_rng(2), (2, 0, 1, 1, 2, 0, 0, 1, 2, 0, 1, 2)
    x = rng.integers(-4, 5, (60000, 256)).astype("float32")
    y = rng.integers(-4, 5, (60000, 16)).astype("float32")
    a, b = scattered(client, x, 5000, owners), scattered(client, y, 5000, (0, 1, 2) * 4)
    plan = multimm.plan(a.T, b)
    assert plan.layout.k_tiles_per_task == 4
    assert plan.tasks == 3 + 1  # the sum
    reset_received_bytes(client)
    c = multimm.matmul(a.T, b).persist()
    wait(c)
    assert sum(received_bytes(client).values()) == plan.bytes_moved <= y.nbytes
    np.testing.assert_array_equal(c.compute(), x.T @ y)
