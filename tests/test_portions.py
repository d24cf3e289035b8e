"""Matrices in two-dimensional chunks, multiplied where these lie: sums of partial products."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting, counting_client, received, scattered
from distributed import wait
from small import integers

import multimm
from multimm.errors import ArrayTypeError, ShapeError
from multimm.graph.array import build
from multimm.graph.tasks.multiply import Step
from multimm.graph.tasks.partial_products import KTile, Recipe, partial_product
from multimm.planning.candidates.in_place import in_place
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import time
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.work.owner_computes import Group, PartialProducts

#: 1048576 x 8192 in the squares of 128 MiB that Dask cuts it into, 182 times 2.
ROWS, COLUMNS = (5792,) * 181 + (224,), (5792, 2400)
SHAPE = sum(ROWS), sum(COLUMNS)


def gpus(workers):
    return ClusterSpec.homogeneous(H200, workers)


def anywhere(workers, seed=0):
    """Chunks of X on any workers, as `persist` leaves them."""
    owners = np.random.default_rng(seed).integers(0, workers, len(ROWS) * len(COLUMNS))
    return MatrixSpec(SHAPE, chunks=(ROWS, COLUMNS), owners=tuple(map(int, owners)))


# --------------------------------------------------------------------- the plan


def test_a_partial_product_has_the_rows_of_which_its_worker_has_chunks():
    """The example of the module's docstring."""
    partial_products = PartialProducts((1, 1, 1, 1), (5, 3), (0, 0, 0, 1, 1, 0, 1, 1), (4,), 2)
    assert partial_products.lengths == (3, 3)
    assert partial_products.made[0].groups == (
        Group((0,), (0, 1)),
        Group((1,), (0,)),
        Group((2,), (1,)),
    )
    assert partial_products.made[1].groups == (
        Group((1,), (1,)),
        Group((2,), (0,)),
        Group((3,), (0, 1)),
    )
    runs = list(partial_products.runs(0))
    assert [[number for number, _ in run.found] for run in runs] == [[0], [0, 1], [0, 1], [1]]
    assert [to for run in runs for _, to in run.goes_to] == [slice(i, i + 1) for i in range(4)]
    assert partial_products.multiplied == {0: 16, 1: 16}


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("columns", [1, 64, 1024])
def test_little_of_a_tall_matrix_in_default_chunks_travels(workers, columns):
    x = anywhere(workers)
    w = MatrixSpec((SHAPE[1], columns), owners=(0,))
    plan = plan_matmul(Problem(x, w, pack="float32"), gpus(workers))
    layout = plan.layout
    assert layout.in_place is not None
    assert not plan.bytes_recut
    # Each row's sums are in two partial products at most, and one of them may be where they are
    # joined.
    of_c = 2 * SHAPE[0] * columns * 4 + sum(layout.in_place.fetched.values())
    assert plan.bytes_moved <= of_c + (workers - 1) * w.nbytes
    assert plan.bytes_moved < 0.35 * x.nbytes
    assert sum(plan.received.values()) == plan.bytes_moved
    assert plan.tasks <= 4 * workers * (workers + 1)
    text = str(plan)
    assert f"{layout.blocks} partial products where A lies" in text
    assert (", added and joined" in text) == layout.in_place.work.adds
    assert (" but for " in text) == bool(layout.in_place.fetched)


def test_of_long_vectors_partial_products_are_sums_of_what_each_worker_has():
    x = anywhere(4)
    y = MatrixSpec((SHAPE[0], 64), chunks=((2**19,) * 2, (64,)), owners=(0, 1))
    plan = plan_matmul(Problem(x.T, y, pack="float32"), gpus(4))
    layout = plan.layout
    assert layout.in_place is not None
    assert not layout.in_place.fetched
    assert plan.bytes_moved <= 3 * (y.nbytes + 2 * SHAPE[1] * 64 * 4)
    turned = plan_matmul(Problem(y.T, x, pack="float32"), gpus(4))
    assert turned.layout.partial_products.by_columns
    assert turned.bytes_moved == plan.bytes_moved
    assert turned.seconds == pytest.approx(plan.seconds)


@pytest.mark.parametrize("role", ["A", "B"])
def test_of_two_matrices_of_one_size_the_plan_names_the_one_that_stays(role):
    x = MatrixSpec((2**15,) * 2, chunks=((2**12,) * 8,) * 2, owners=tuple(range(8)) * 8)
    whole = replace(x, chunks=((2**15,),) * 2, owners=(0,))
    found = in_place(Problem(*((x, whole) if role == "A" else (whole, x))), gpus(8))
    ((named, layouts),) = ((kind.strategy, kind.ranks) for kind in found if kind.strategy)
    assert named == f"stationary {role}"
    assert {layout.in_place.large for layout in layouts} == {role.lower()}
    both = [kind for kind in in_place(Problem(x, x), gpus(8)) if kind.strategy]
    assert [kind.strategy for kind in both] == ["stationary A", "stationary B"]
    assert all(kind.ranks for kind in both)


def test_many_small_chunks_travel_in_coalesced_transfers():
    x = anywhere(2)
    y = MatrixSpec((SHAPE[0], 8), chunks=(ROWS, (8,)), owners=(0, 1) * 91)
    plan = plan_matmul(Problem(x.T, y), gpus(2))
    assert plan.layout.operands.coalesced_transfers == 2
    assert plan.layout.in_place.arriving.chunks == 1
    assert "coalesced" in str(plan)
    single = replace(
        plan.layout, partial_products=replace(plan.layout.partial_products, coalesced=False)
    )
    assert time.seconds(single, gpus(2), 0)["first blocks"] > 0.1
    one = replace(y, chunks=((SHAPE[0],), (8,)), owners=(0,))
    assert not plan_matmul(Problem(x.T, one), gpus(2)).layout.operands.coalesced_transfers


def test_of_wide_products_each_row_goes_to_the_worker_with_most_of_it():
    w = MatrixSpec((SHAPE[1], 8192), owners=(0,))
    layouts = list(in_partial_products(Problem(anywhere(4), w, pack="float32"), gpus(4)))
    whole = [layout for layout in layouts if not layout.in_place.work.adds]
    assert whole
    for layout in whole:
        at = np.array(layout.partial_products.at).reshape(len(ROWS), 2)
        np.testing.assert_array_equal(at[:, 0], at[:, 1])
        assert sum(layout.in_place.fetched.values()) < 0.3 * layout.in_place.laid.nbytes


# ------------------------------------------------------------------- on workers

client = counting_client(3)


def owners_of(rows, columns, seed=0, workers=3):
    found = np.random.default_rng(seed).integers(0, workers, rows * columns)
    return tuple(map(int, found))


@pytest.mark.parametrize("turned", [False, True])
def test_what_travels_is_what_was_planned(client, turned):
    x, w = integers((36000, 512)), integers((512, 24), seed=1)
    a, b = scattered(client, x, (400, 320), owners_of(90, 2)), scattered(client, w, 512, (0,))
    operands = (b.T, a.T) if turned else (a, b)
    plan = multimm.plan(*operands)
    assert plan.layout.in_place is not None
    assert plan.layout.in_place.work.adds
    c, moved = received(client, multimm.matmul(*operands))
    assert moved == plan.bytes_moved < x.nbytes / 8
    np.testing.assert_array_equal(c.compute(), (x @ w).T if turned else x @ w)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("chunk", [400, 700, 36000])
def test_long_vectors(client, chunk, in_turn):
    """In turn, no worker needs what all others have of the small operand."""
    x, y = integers((36000, 512)), integers((36000, 8), seed=1)
    blocks = -(-36000 // chunk)
    of_a, of_b = owners_of(90, 2), owners_of(blocks, 1, seed=1)
    if in_turn:
        of_a, of_b = (0, 1, 2) * 60, ((0, 1, 2) * 30)[:blocks]
    a, b = scattered(client, x, (400, 320), of_a), scattered(client, y, chunk, of_b)
    plan = multimm.plan(a.T, b)
    assert plan.layout.in_place is not None
    assert plan.layout.partial_products.coalesced == (chunk < 36000)
    c, moved = received(client, multimm.matmul(a.T, b))
    assert moved == plan.bytes_moved < x.nbytes / 8
    np.testing.assert_array_equal(c.compute(), x.T @ y)


def test_a_square_matrix_and_a_vector_again_and_again(client):
    """As power iteration does: each result is the next operand."""
    x, v = integers((4000, 4000)), integers((4000, 1), seed=1)
    a, b = scattered(client, x, (500, 500), owners_of(8, 8)), scattered(client, v, 4000, (1,))
    wanted = v
    for _ in range(2):
        assert multimm.plan(a, b).layout.in_place is not None
        b, moved = received(client, multimm.matmul(a, b))
        assert moved <= 9 * v.nbytes
        wanted = x @ wanted
        np.testing.assert_array_equal(b.compute(), wanted)


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
    layouts = [
        layout for layout in in_partial_products(problem, gpus(3)) if layout.in_place.work.adds
    ]
    assert layouts
    precise = alpha * (x.astype(wide) @ w.astype(wide))
    assert dtype != "float16" or precise[0, 0] == 0
    for layout in layouts:
        plan = replace(plan_matmul(problem, gpus(3)), layout=layout)
        step = Step(wide, dtype, alpha=alpha)
        c = build(plan, a, b, None, step, np.empty((0, 0), dtype)).compute(scheduler="sync")
        assert c.dtype == dtype
        np.testing.assert_array_equal(c, precise.astype(dtype))


def test_what_is_joined_for_a_product_is_let_go_before_the_next():
    chunks = [np.ones((1000, 200), "float32") for _ in range(16)]
    other = np.ones((400, 4), "float32")
    where = ((slice(0, 200), slice(0, 4)), (slice(200, 400), slice(0, 4)))
    k_tiles = tuple(KTile((0,), ((cut, where[0]),), ((400, 4),), (200, 4)) for cut in where)
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


def test_chunks_that_are_still_to_be_made_are_made_where_they_are_multiplied():
    """Those of a product that is not computed yet, with something added."""
    x, w, d = (integers((4000, 4000), seed=seed) for seed in range(3))
    v, of_d = integers((4000, 8), seed=3), owners_of(16, 16, seed=9, workers=4)
    with counting(4) as client:
        a = scattered(client, x, (500, 4000), owners_of(8, 1, workers=4))
        b = scattered(client, w, (4000, 500), owners_of(8, 1, seed=1, workers=4))
        c, e = scattered(client, v, 4000, (1,)), scattered(client, d, (250, 250), of_d)
        first = multimm.matmul(a, b, blocks=250)
        plan = multimm.plan(first + e, c)
        assert plan.layout.in_place is not None
        held = first.persist()
        wait(held)
        owners = plan.layout.problem.a.owners
        elsewhere = sum(here != there for here, there in zip(owners, of_d, strict=True))
        found, moved = received(client, multimm.matmul(first + e, c))
        assert moved == plan.bytes_moved + elsewhere * 250 * 250 * 4
        np.testing.assert_array_equal(found.compute(), (x @ w + d) @ v)


@pytest.mark.parametrize(
    ("spoilt", "error", "said"),
    [
        (lambda x: np.ma.masked_array(x, mask=x > 0), ArrayTypeError, "MaskedArray"),
        (lambda x: x[1:], ShapeError, "38, 1"),
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
