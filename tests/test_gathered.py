"""Tall matrices in small chunks, multiplied where they lie, and C joined of partial products."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, received, scattered
from dask._task_spec import Task, TaskRef
from distributed import futures_of
from hypothesis import given
from hypothesis import strategies as st
from small import integers

import multimm
from multimm.graph.array import build
from multimm.graph.lowering import owner_computes
from multimm.graph.task_refs import refs
from multimm.graph.tasks.multiply import Step
from multimm.planning import choice
from multimm.planning.candidates import in_place
from multimm.planning.candidates import owner_computes as module
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import counted_transfers
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

TALL, WIDE = (2**20, 8192), (8192, 1024)
IN_TURN = (0, 1, 2, 3) * 64
NEARLY = (1, 0, 2, 3, 0, 1, 3, 2) * 32
BANDS = (0,) * 64 + (2,) * 64 + (1,) * 64 + (3,) * 64


def gpus(workers=4):
    return ClusterSpec.homogeneous(H200, workers)


def in_rows(owners, shape=TALL):
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=tuple(owners))


def times(a, **more):
    return Problem(a, MatrixSpec(WIDE, owners=(0,)), pack="tf32", **more)


# --------------------------------------------------------------------- the plan


@pytest.mark.parametrize("owners", [IN_TURN, NEARLY])
def test_of_chunks_as_dask_makes_them_c_travels_and_in_few_tasks(owners):
    plan = plan_matmul(times(in_rows(owners)), gpus(), precision="tf32")
    layout = plan.layout
    assert layout.in_place is not None
    assert plan.tasks <= 40
    assert not plan.bytes_recut
    of_c = 2**20 * 1024 * 4 * 3 / 4
    assert plan.bytes_received == of_c + 3 * 8192 * 1024 * 4
    assert sum(plan.received.values()) == plan.bytes_received == plan.bytes_moved
    assert layout.sides == ((2**18,) * 4, (1024,))
    assert layout.result_owners(4) == (0, 1, 2, 3)
    text = str(plan)
    assert (
        "C in 4 of 262144 x 1 of 1024, made in 16 partial products where A lies, and joined" in text
    )
    assert "stationary A, because A stays where it lies, and what is made of it travels" in text
    assert "cut by every product" not in text


def test_whose_rows_are_neighbours_makes_blocks_that_need_not_be_joined():
    plan = plan_matmul(times(in_rows(BANDS)), gpus(), precision="tf32")
    layout = plan.layout
    assert layout.in_place is not None
    assert not layout.in_place.work.joined
    assert plan.tasks == layout.blocks == len(layout.sides[0])
    assert layout.result_owners(4)[:: plan.tasks // 4] == (0, 2, 1, 3)
    assert plan.bytes_moved == 3 * 8192 * 1024 * 4
    assert plan.time_terms["joining C"] == 0
    assert "x 1 of 1024, made where A lies, k in k-tiles" in str(plan)
    assert "joined" not in str(plan).replace("operands being joined", "")


def test_columns_of_a_wide_matrix_too():
    b = in_rows(NEARLY).T
    problem = Problem(MatrixSpec((1024, 8192), owners=(0,)), b, pack="tf32")
    plan = plan_matmul(problem, gpus(), precision="tf32")
    assert plan.layout.in_place is not None
    assert plan.layout.partial_products.by_columns
    assert plan.layout.sides == ((1024,), (2**18,) * 4)
    rows = plan_matmul(times(in_rows(NEARLY)), gpus(), precision="tf32")
    assert plan.seconds == rows.seconds
    assert plan.bytes_moved == rows.bytes_moved


@pytest.mark.parametrize("by_columns", [False, True])
def test_who_has_no_partial_product_receives_nothing(by_columns):
    a = in_rows((1, 2, 2, 1) * 64)
    wide = Problem(MatrixSpec((1024, 8192), owners=(0,)), a.T, pack="tf32")
    problem = wide if by_columns else times(a)
    plan = plan_matmul(problem, gpus())
    assert plan.layout.in_place is not None
    of_c, small = 2**20 * 1024 * 4, 8192 * 1024 * 4
    assert plan.received.keys() == {1, 2}
    assert plan.bytes_moved == of_c / 2 + 2 * small


def test_large_chunks_are_multiplied_one_by_one_and_c_keeps_them():
    plan = plan_matmul(times(in_rows(NEARLY[:32])), gpus(), precision="tf32")
    assert plan.layout.in_place is None
    assert plan.layout.sides[0] == (2**15,) * 32


def test_where_c_is_wider_than_a_the_partial_products_would_be_more_than_a():
    wide = Problem(in_rows(NEARLY, (2**18, 1024)), MatrixSpec((1024, 2**15), owners=(0,)))
    plan = plan_matmul(wide, gpus())
    assert plan.layout.in_place is None


def test_what_is_too_large_is_not_taken(monkeypatch):
    ranked = in_place.ranked

    def judged(*args):
        return {x: rank._replace(too_large=too_large) for x, rank in ranked(*args).items()}

    monkeypatch.setattr(in_place, "ranked", judged)
    for too_large in (False, True):
        choice.plan_matmul.cache_clear()
        plan = plan_matmul(times(in_rows(NEARLY)), gpus())
        assert (plan.layout.in_place is None) == too_large
    choice.plan_matmul.cache_clear()


def test_what_is_not_taken_in_partial_products():
    a = in_rows(NEARLY)
    for problem in (
        times(replace(a, owners=())),
        times(in_rows(NEARLY[:8])),
        times(a, c=MatrixSpec((2**20, 1024))),
        times(a, rereadable=(False, True)),
        Problem(a, MatrixSpec((3, 8192, 16), chunks=((3,), (8192,), (16,)))),
        Problem(a, a.T, symmetric=True),
    ):
        assert not list(in_partial_products(problem, gpus()))
    assert list(in_partial_products(times(a), gpus()))
    empty = MatrixSpec((0, 8192), chunks=((0, 0), (8192,)), owners=(0, 1))
    assert not list(in_partial_products(times(empty), gpus()))
    for tall in (empty.T, a):
        no_columns = MatrixSpec((tall.cols, 0), owners=(0,))
        plan_matmul(Problem(tall, no_columns), gpus()).check()
    assert not list(in_partial_products(times(in_rows((0,) * 256)), gpus(1)))
    assert not list(in_partial_products(times(a), gpus(2)))  # some lies beyond


def test_memory_counts_partial_products_and_what_is_joined_of_them():
    plan = plan_matmul(times(in_rows(NEARLY)), gpus(), precision="tf32")
    of_c = 2**20 * 1024 * 4 / 4  # of each worker
    assert plan.memory_terms["partial sums"] >= of_c
    assert plan.memory_terms["partial products received"] == of_c * 3 / 4
    assert plan.spill_terms["C finished"] == of_c
    assert plan.memory_terms["operands being joined"] == max(plan.layout.m_blocks) * 8192 * 4


# -------------------------------------------------------------------- the graph

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any)


@given(LENGTHS, LENGTHS, st.data(), st.integers(2, 4), st.booleans(), st.booleans())
def test_products_are_right_wherever_chunks_lie(rows, columns, data, workers, by_columns, turned):
    number = st.integers(0, workers - 1)
    owners = data.draw(st.lists(number, min_size=len(rows) * len(columns), max_size=64))
    x, y = integers((sum(rows), sum(columns))), integers((sum(columns), 5), seed=1)
    cut = data.draw(st.integers(1, sum(columns)))
    a, b = da.from_array(x, chunks=(tuple(rows), tuple(columns))), da.from_array(y, (cut, 2))
    owners = tuple(owners[: a.npartitions])
    large, small = (MatrixSpec(z.shape, chunks=z.chunks) for z in (a, b))
    large = replace(large, owners=owners)
    problem = Problem(small.T, large.T) if by_columns else Problem(large, small)
    operands = (b.T, a.T) if by_columns else (a, b)
    stored = tuple(z.T for z in operands) if turned else operands
    step = Step("float32", "float32", alpha=2, trans_a=turned, trans_b=turned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_JOINED", 0)
        layouts = list(in_partial_products(problem, gpus(workers)))
    for layout in layouts:
        plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
        assert plan.bytes_received == sum(counted_transfers.received(layout, workers).values())
        result = build(plan, *stored, None, step, np.empty((0, 0), "float32"))
        got = result.compute(scheduler="sync")
        np.testing.assert_array_equal(got.T if by_columns else got, 2 * (x @ y))
        assert len(result.__dask_graph__().layers[result.name]) == plan.tasks
        assert len(layout.result_owners(workers)) in (0, result.npartitions)
        check_partial_products(layout.partial_products)


class Counting(pickle.Pickler):
    """Counts what is pickled by more than pickle's own code: a microsecond, and another to read."""

    def __init__(self):
        super().__init__(io.BytesIO(), protocol=5)
        self.objects = 0

    def reducer_override(self, obj):
        self.objects += 1
        return NotImplemented


def objects(task):
    """How many objects of a task's message are none of Python's plain ones."""
    counting = Counting()
    counting.dump(task)
    return counting.objects


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_task_of_twice_as_many_chunks_has_no_more_objects(by_columns):
    found = []
    for owners in (IN_TURN, IN_TURN * 2):
        large, small = in_rows(owners), MatrixSpec(WIDE, chunks=((4096, 4096), (1024,)))
        specs = (small.T, large.T) if by_columns else (large, small)
        plan = plan_matmul(Problem(*specs, pack="tf32"), gpus(), precision="tf32")
        arrays = [da.zeros(spec.shape, chunks=spec.chunks, dtype="float32") for spec in specs]
        step = Step("float32", "float32", precision="tf32")
        c = build(plan, *arrays, None, step, np.empty((0, 0), "float32"))
        tasks = [
            t
            for t in dict(c.dask).values()
            if getattr(t, "func", None) is owner_computes.partial_product
        ]
        assert sum(len(task.dependencies) for task in tasks) >= len(owners) + len(tasks)
        found.append({(len(task.dependencies), objects(task)) for task in tasks})
        for task in tasks:
            again = pickle.loads(pickle.dumps(task))
            assert again.dependencies == task.dependencies
            assert (again.place, again.sizes) == (task.place, task.sizes)
    (few, less), (many, more) = (max(pairs) for pairs in found)
    assert many > 1.8 * few
    assert more == less


def test_references_are_read_as_they_were_and_take_what_dask_puts_in_their_place():
    wanted = refs([("x", 0), "y"])
    assert wanted.dependencies == {("x", 0), "y"}
    again = pickle.loads(pickle.dumps(wanted))
    assert (type(again), again.dependencies) == (type(wanted), wanted.dependencies)
    values = {("x", 0): 1, "y": 2, "z": 3}
    assert again(values) == wanted(values) == [1, 2]
    renamed = pickle.loads(pickle.dumps(wanted.substitute({"y": "z"})))
    assert renamed(values) == [1, 3]
    made = pickle.loads(pickle.dumps(wanted.substitute({"y": Task("y", max, TaskRef("z"), 7)})))
    assert made.dependencies == {("x", 0), "z"}
    assert made(values) == [1, 7]


def check_partial_products(partial_products):
    """Each chunk is multiplied once, by its worker, and goes from there to its place."""
    at = np.array(partial_products.at).reshape(
        len(partial_products.rows), len(partial_products.columns)
    )
    starts, found = np.cumsum([0, *partial_products.rows]), {}
    for number, partial_product in partial_products.made.items():
        lines = []
        for rows, k_tiles in partial_product.groups:
            lines += [line for i in rows for line in range(starts[i], starts[i + 1])]
            for i, s in ((i, partial_products.k_tiles[s]) for i in rows for s in k_tiles):
                assert at[i, s] == number % partial_products.workers
                assert found.setdefault((i, s), number) == number
        assert len(lines) == partial_products.lengths[number]
        found[number] = lines
    chunks = [key for key in found if isinstance(key, tuple)]
    assert len(chunks) == np.count_nonzero(partial_products.rows) * np.count_nonzero(
        partial_products.columns
    )
    begin = 0
    for output_tile, height in enumerate(partial_products.heights):
        whole = np.full(height, -1)
        for run in partial_products.runs(output_tile):
            for number, where in run.found:
                for inside, to in run.goes_to:
                    whole[to] = found[number][where][inside]
                    np.testing.assert_array_equal(whole[to], begin + np.arange(to.start, to.stop))
        assert -1 not in whole
        begin += height


# ------------------------------------------------------------------- on workers

OWNERS = tuple(int(i) for i in np.random.default_rng(0).integers(0, 3, 90))


client = counting_client(3)


def test_c_lies_where_the_next_product_takes_it_to_lie(client):
    x, y, z = integers((36000, 512)), integers((512, 64), seed=1), integers((64, 512), seed=2)
    a = scattered(client, x, 400, OWNERS)
    b, d = scattered(client, y, 512, (0,)), scattered(client, z, 64, (1,))
    first = multimm.matmul(a, b)
    planned = multimm.plan(a, b).layout
    assert planned.in_place is not None
    assert multimm.plan(first, d).layout.problem.a.owners == planned.result_owners(3)
    c, _ = received(client, first)
    addresses = sorted(client.scheduler_info(-1)["workers"])
    found = [client.who_has([future])[future.key] for future in futures_of(c)]
    assert tuple(addresses.index(*where) for where in found) == planned.result_owners(3)
    np.testing.assert_array_equal(multimm.matmul(c, d).compute(), x @ y @ z)
