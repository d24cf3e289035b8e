"""Products of chunks where they lie: partial products, joined or added to C."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from by_plan import by_plan, spec_of
from clusters import counting_client, scattered
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st
from paper import cpus, gpus, in_rows
from small import integers

import multimm
from multimm.errors import ArrayTypeError, ShapeError
from multimm.graph.lowering import owner_computes
from multimm.graph.tasks.multiply import Step
from multimm.graph.tasks.partial_products import Recipe, partial_product
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import counted_transfers
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec

TALL, WIDE = (2**20, 8192), (8192, 1024)
IN_TURN = (0, 1, 2, 3) * 64


# -------------------------------------------------------------------- the graph

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any)


@given(LENGTHS, LENGTHS, st.data(), st.integers(2, 4), st.booleans(), st.booleans())
def test_products_are_right_wherever_chunks_lie(rows, columns, data, workers, by_columns, turned):
    number = st.integers(0, workers - 1)
    owners = data.draw(st.lists(number, min_size=len(rows) * len(columns), max_size=36))
    x, y = integers((sum(rows), sum(columns))), integers((sum(columns), 5), seed=1)
    cut = data.draw(st.integers(1, sum(columns)))
    a, b = da.from_array(x, chunks=(tuple(rows), tuple(columns))), da.from_array(y, (cut, 2))
    owners = tuple(owners[: a.npartitions])
    large, small = (spec_of(z) for z in (a, b))
    large = replace(large, owners=owners)
    problem = Problem(small.T, large.T) if by_columns else Problem(large, small)
    operands = (b.T, a.T) if by_columns else (a, b)
    stored = tuple(z.T for z in operands) if turned else operands
    step = Step("float32", "float32", alpha=2, trans_a=turned, trans_b=turned)
    alone = data.draw(st.sampled_from([0, 1, 6]))  # all chunks are joined, none, small ones
    for found in in_partial_products(problem, gpus(workers)):
        own = replace(found.partial_products, alone=alone)
        layout = replace(found, partial_products=own)
        plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
        assert plan.bytes_received == sum(counted_transfers.received(layout, workers).values())
        result = by_plan(plan, *stored, step=step)
        got = result.compute(scheduler="sync")
        np.testing.assert_array_equal(got.T if by_columns else got, 2 * (x @ y))
        assert len(result.__dask_graph__().layers[result.name]) == plan.tasks
        assert len(layout.result.owners(workers)) in (0, result.npartitions)


def test_cpus_sum_ranges_of_k_where_most_of_both_operands_lies():
    """Each chunk of A is as large as one of B; each worker sums two of four ranges."""
    x, y = integers((12, 40)), integers((40, 12), seed=1)
    a, b = da.from_array(x, (6, 10)), da.from_array(y, (10, 6))
    on_a, on_b = (0, 0, 1, 1, 0, 1, 1, 0), (0, 1, 0, 0, 1, 1, 1, 0)  # row by row
    large, small = (
        MatrixSpec(z.shape, chunks=z.chunks, owners=owners) for z, owners in ((a, on_a), (b, on_b))
    )
    problem, workers = Problem(large, small), (0, 0, 1, 1)
    plan = plan_matmul(problem, cpus(2))
    found = [
        layout
        for layout in in_partial_products(problem, cpus(2))
        if layout.partial_products.at == 2 * workers
    ]
    assert {layout.partial_products.by_columns for layout in found} == {False, True}
    for layout in found:
        own, sums = layout.partial_products, 0
        assert own.multiplied == {0: 240, 1: 240}
        if not own.coalesced:
            sums = sum(own.lengths) * 12 * 4 // 2  # of one worker: the other one joins them
            chunks = 4  # of B in ranges 0 and 3, of A in 1 and 3
            assert sum(counted_transfers.received(layout, 2).values()) == 240 * chunks + sums
        result = by_plan(replace(plan, layout=layout), a, b)
        np.testing.assert_array_equal(result.compute(scheduler="sync"), x @ y)
    assert not [x for x in in_partial_products(problem, gpus(2)) if x in found]


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
def test_a_task_of_twice_as_many_chunks_has_no_more_objects_but_references(by_columns):
    found = []
    for owners in (IN_TURN, IN_TURN * 2):
        large, small = in_rows(owners, TALL), MatrixSpec(WIDE, chunks=((4096, 4096), (1024,)))
        specs = (small.T, large.T) if by_columns else (large, small)
        plan = plan_matmul(Problem(*specs, pack="tf32"), gpus(), precision="tf32")
        arrays = [da.zeros(spec.shape, chunks=spec.chunks, dtype="float32") for spec in specs]
        step = Step("float32", "float32", precision="tf32")
        c = by_plan(plan, *arrays, step=step)
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
    assert more - less == many - few


# ------------------------------------------------------------------- on workers

client = counting_client(3)


def owners_of(rows, columns, seed=0, workers=3):
    found = np.random.default_rng(seed).integers(0, workers, rows * columns)
    return tuple(map(int, found))


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64", "int32"])
@pytest.mark.parametrize("alpha", [1, 3])
def test_partial_products_are_added_before_they_are_rounded(dtype, alpha):
    x, w = (integers(shape).astype(dtype) for shape in ((60, 8), (8, 5)))
    x[0, :] = 5000 if dtype == "float16" else 5  # 5000 * 8 * 4 is no float16, the sum may be one
    w[:4, 0] = 7
    w[4:] = -w[:4]
    a, b = da.from_array(x, chunks=(4, 4)), da.from_array(w)
    wide = "float32" if dtype == "float16" else dtype
    sizes = {"dtype": dtype, "itemsize": x.itemsize}
    owners = owners_of(15, 2)
    large = MatrixSpec(x.shape, chunks=a.chunks, owners=owners, **sizes)
    problem = Problem(large, MatrixSpec(w.shape, **sizes), dtype, wide)
    layouts = [layout for layout in in_partial_products(problem, gpus(3)) if layout.in_place.adds]
    assert layouts
    precise = alpha * (x.astype(wide) @ w.astype(wide))
    assert dtype != "float16" or precise[0, 0] == 0
    for layout in layouts:
        plan = replace(plan_matmul(problem, gpus(3)), layout=layout)
        step = Step(wide, dtype, alpha=alpha)
        c = by_plan(plan, a, b, step=step).compute(scheduler="sync")
        assert c.dtype == dtype
        np.testing.assert_array_equal(c, precise.astype(dtype))


def test_one_gpu_joins_no_large_chunks_that_ordinary_blocks_are():
    """Two ranges of k, each a block of its own: to join them would take as much memory again."""
    side, k = 16384, 262144
    a = MatrixSpec((side, k), chunks=((side,), (k // 2,) * 2), owners=(0, 0))
    b = MatrixSpec((k, side), chunks=((k // 2,) * 2, (side,)), owners=(0, 0))
    plan = plan_matmul(Problem(a, b), gpus(1))
    assert plan.peak_bytes < 1.2 * (a.nbytes + b.nbytes)


def test_what_is_joined_for_a_product_is_let_go_before_the_next():
    chunks = [np.ones((1000, 200), "float32") for _ in range(16)]
    other = np.ones((400, 4), "float32")
    where = ((slice(0, 200), slice(0, 4)), (slice(200, 400), slice(0, 4)))
    k_tiles = tuple(SubBlocks([0], ((cut, where[0]),), ((400, 4),), (200, 4)) for cut in where)
    recipe = Recipe(k_tiles, (200, 200), (((1000,) * 8, (0, 1)),), by_columns=False, turned=False)
    step = Step("float32", "float32")
    joined = 8000 * 200 * 4
    tracemalloc.start()
    try:
        c = partial_product([other], chunks, recipe=recipe, step=step, inner=step)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert joined <= peak < 1.5 * joined
    np.testing.assert_array_equal(c, np.full((8000, 4), 400))


@pytest.mark.parametrize(
    ("spoilt", "error", "said"),
    [
        (lambda x: np.ma.masked_array(x, mask=x > 0), ArrayTypeError, "MaskedArray"),
        pytest.param(lambda x: x[1:], ShapeError, "38, 1", marks=pytest.mark.slow),
    ],
)
def test_one_chunk_of_hundreds_that_is_none(client, spoilt, error, said):
    x, w = integers((36000, 512)), integers((512, 24), seed=1)
    a, b = scattered(client, x, (400, 256), owners_of(90, 2)), scattered(client, w, 512, (0,))
    bad = a.map_blocks(_spoil, spoilt, dtype="float32", name=f"spoilt-{said}").persist()
    wait(bad)
    assert multimm.plan(bad, b).layout.in_place is not None
    with pytest.raises(error, match=said) as caught:
        multimm.matmul(bad, b).compute()
    (note,) = caught.value.__notes__
    assert note.startswith("partial product of block (")
    assert len(note) < 900


def _spoil(block, spoilt, block_id=None):
    return spoilt(block) if block_id == (38, 1) else block
