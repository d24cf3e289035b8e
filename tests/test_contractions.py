"""einsum, tensordot, inner, vecdot and outer, against NumPy and against Dask's chunks."""

from __future__ import annotations

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import sparse
from clusters import in_threads
from distributed import Client
from hypothesis import example, given, settings
from hypothesis import strategies as st

import multimm
from multimm.contractions import functions
from multimm.errors import ArrayTypeError, DTypeError, OptionError, ShapeError
from multimm.graph import taken_apart
from multimm.planning import choice

pytestmark = [
    pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning"),
    pytest.mark.filterwarnings("ignore:Increasing number of chunks"),
]
DTYPES = ("float64", "float32", "int64", "int8", "complex128", "bool")


@pytest.fixture(scope="module", autouse=True, params=[0, 3], ids="{} workers".format)
def workers(request):
    """With and without a cluster."""
    if not request.param:
        with dask.config.set(scheduler="sync"):
            yield 0
        return
    with in_threads(request.param, memory_limit=0) as cluster, Client(cluster):
        yield request.param


#: For what is decided at the call, or within a block: clusters know nothing of it.
HERE = pytest.mark.parametrize("workers", [0], ids=["0 workers"], indirect=True, scope="module")
#: For what its like finds on workers, too, in `make test`.
HERE_AND_THERE = pytest.mark.parametrize(
    "workers",
    [
        pytest.param(0, id="0 workers"),
        pytest.param(3, id="3 workers", marks=pytest.mark.slow),
    ],
    indirect=True,
    scope="module",
)


def numbers(shape, dtype, seed=0):
    """Small ones, whose products and sums are exact."""
    x = np.random.default_rng(seed).integers(-3, 4, shape)
    return (x + 1j * x[::-1] if dtype.startswith("complex") and x.ndim else x).astype(dtype)


@st.composite
def cuts(draw, size):
    """Chunks of an axis, of any sizes."""
    ends = draw(st.lists(st.integers(1, max(size - 1, 1)), max_size=3)) if size > 1 else []
    edges = [0, *sorted({*ends}), size]
    return tuple(int(n) for n in np.diff(edges)) if size else (0,)


def lazy(draw, x):
    return da.from_array(x, chunks=tuple(draw(cuts(size)) for size in x.shape))


@st.composite
def sums(draw, labels="abcde", most=3):
    """Subscripts of any kind that NumPy takes, and shapes for them."""
    sizes = {
        x: draw(st.sampled_from([1, 2, 3, 4, 5] + [0] * (n == 0))) for n, x in enumerate(labels)
    }
    broadcast = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, most))):
        own = draw(st.lists(st.sampled_from(labels), max_size=4))
        # NumPy takes an axis of length 1 for one of any length, but for diagonals.
        short = {x for x in own if own.count(x) == 1 and draw(st.integers(0, 9)) == 0}
        shape = [1 if x in short else sizes[x] for x in own]
        if broadcast and draw(st.booleans()):
            more = broadcast[draw(st.integers(0, len(broadcast))) :]
            at = draw(st.integers(0, len(own)))
            own, shape = [*own[:at], "...", *own[at:]], [*shape[:at], *more, *shape[at:]]
        terms.append("".join(own))
        shapes.append(tuple(shape))
    subscripts = ",".join(terms)
    if draw(st.booleans()) or "..." in subscripts:
        known = sorted({*subscripts} - {*",."})
        out = draw(
            st.permutations(draw(st.lists(st.sampled_from(known), unique=True)) if known else [])
        )
        dots = ["..."] if "..." in subscripts else []
        subscripts += "->" + "".join(draw(st.permutations([*out, *dots])))
    return subscripts, shapes


#: From how many times the operands' blocks on Dask's einsum cuts a result.
CUT_FROM = "array.chunk-size-tolerance"


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_einsum_is_numpys_in_the_operands_chunks(workers, data):
    subscripts, shapes = data.draw(sums())
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    arrays = [
        numbers(shape, dtype, n)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    expected = np.einsum(subscripts, *arrays)
    operands = [lazy(data.draw, x) for x in arrays]
    found = multimm.einsum(subscripts, *operands)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found.dask.validate()
    value = found.compute()
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)
    here = multimm.einsum(subscripts, *arrays)
    assert type(here) is type(expected)
    assert here.dtype == expected.dtype
    np.testing.assert_array_equal(here, expected)
    inputs, explicit, out = subscripts.partition("->")
    terms, labels = inputs.split(","), [x for x in inputs if x.isalpha()]
    if any(term.count(x) > 1 for term in terms for x in term if x.isalpha()):
        return  # of a diagonal it takes those of one axis, and is right where both have the same
    steps = functions.einsum_steps([subscripts, *operands]).steps
    # One step that sums, and is no product, is Dask's own; elsewhere it would cut what is small.
    summed = {*labels} - {*out} if explicit else len(labels) > len({*labels})
    dasks = [step.product for step in steps] == [False] and (summed or len(terms) == 1)
    cuts = {} if dasks else {CUT_FROM: 1e9}
    try:
        with dask.config.set(cuts):
            theirs = da.einsum(subscripts, *operands)
    except ValueError:  # it knows less of axes of length 1
        return
    if theirs.shape == found.shape:
        assert found.chunks == theirs.chunks


@HERE
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*"aabbcA.,,-> 1", "...", "...", "->", "->"]), max_size=9).map(
        "".join
    ),
    st.lists(st.lists(st.integers(1, 2), max_size=3), max_size=2),
)
@example(".. .", [[]])
@example(" i  ... -> ... i", [[2, 3]])
def test_what_numpy_refuses_is_refused_and_nothing_else(subscripts, shapes):
    arrays = [numbers(tuple(shape), "int64") for shape in shapes]
    try:
        expected = np.einsum(subscripts, *arrays)
    except ValueError:
        with pytest.raises((OptionError, ShapeError)) as refused:
            multimm.einsum(subscripts, *map(da.from_array, arrays))
        assert len(str(refused.value).splitlines()) == 1
    else:
        np.testing.assert_array_equal(multimm.einsum(subscripts, *arrays), expected)


LISTS = (
    ([0, 1], [1, 2]),
    ([0, 1], [1, 2], [2, 0]),
    ((0, 1), (1, 2), (0,)),
    ([..., 1], [1, 2]),
    ([..., 0, 1], [1, ...], [..., 0]),
    (np.array([0, 51]), [51, 2]),
    ([0, 52], [52, 1]),
    ([0, -1], [1, 2]),
    ("ij", "jk"),
    ([0, 1.5], [1, 2]),
    ([True, 0], [0, 2]),
    ([0, 1], [1, 2], [0, 0]),
    ([0, 1, 2], [1, 2]),
    ([0, 1], 5),
)


@HERE
@pytest.mark.parametrize("lists", LISTS, ids=str)
def test_lists_of_axes_are_numpys(lists):
    x, y = numbers((3, 4), "float64"), numbers((4, 5), "float64", 1)

    def call(einsum, wrap):
        return einsum(wrap(x), lists[0], wrap(y), lists[1], *lists[2:])

    try:
        expected = call(np.einsum, np.asarray)
    except (ValueError, TypeError):
        with pytest.raises((OptionError, ShapeError)):
            call(multimm.einsum, da.from_array)
    else:
        np.testing.assert_array_equal(call(multimm.einsum, da.from_array).compute(), expected)


@HERE_AND_THERE
@given(st.data())
def test_tensordot_is_numpys_in_dasks_chunks(workers, data):
    sizes = [2, 3, 4, 5]
    summed = data.draw(st.lists(st.sampled_from(sizes), max_size=2))
    shapes, places = [], []
    for _ in "ab":
        free = data.draw(st.lists(st.sampled_from(sizes), max_size=2))
        order = data.draw(st.permutations(range(len(summed) + len(free))))
        shape = [0] * len(order)
        for at, size in zip(order, [*summed, *free], strict=True):
            shape[at] = size
        shapes.append(tuple(shape))
        places.append([at - len(order) * data.draw(st.booleans()) for at in order[: len(summed)]])
    x, y = (numbers(shape, "float64", n) for n, shape in enumerate(shapes))
    a, b = lazy(data.draw, x), lazy(data.draw, y)
    expected = np.tensordot(x, y, places)
    found = multimm.tensordot(a, b, places)
    np.testing.assert_array_equal(found.compute(), expected)
    np.testing.assert_array_equal(multimm.tensordot(x, y, places), expected)
    if summed:
        assert found.chunks == da.tensordot(a, b, places).chunks


AXES = (0, 1, 2, 3, -1, 1.0, "a", None, (1,), (1, 0), (2, 0), (-1, -2), ((), ()), ((1,), (1,)),
        ((1,), (0, 1)), ((0, 0), (0, 0)), ((0, -2), (0, 1)), ([0, 1], [1, 0]),
        ((0.0,), (0,)))  # fmt: skip


@HERE
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((2, 3), (3, 4)), ((2, 1), (3, 4))], ids=str)
def test_axes_that_numpy_refuses_are_refused(axes, shapes):
    x, y = (numbers(shape, "float64", n) for n, shape in enumerate(shapes))
    try:
        expected = np.tensordot(x, y, axes)
    except (ValueError, TypeError, IndexError):
        with pytest.raises((OptionError, ShapeError)) as refused:
            multimm.tensordot(da.from_array(x), y, axes)
        assert len(str(refused.value).splitlines()) == 1
    else:
        np.testing.assert_array_equal(multimm.tensordot(da.from_array(x), y, axes), expected)


PAIRS = [((3, 4), (3, 4)), ((2, 3, 4), (3, 4)), ((4,), (4,)), ((2, 1, 4), (3, 4)), ((4,), (2, 4)),
         ((), (3, 4)), ((3, 4), (3, 5)), ((2, 4), (3, 4)), ((0, 4), (2, 4)),
         ((2, 0), (2, 0))]  # fmt: skip


@HERE
@pytest.mark.parametrize("shapes", PAIRS, ids=str)
@pytest.mark.parametrize("name", ["inner", "vecdot", "outer"])
@pytest.mark.parametrize("dtype", ["float64", "complex128", "bool"])
def test_inner_vecdot_and_outer_are_numpys(name, shapes, dtype):
    x, y = (numbers(shape, dtype, n) for n, shape in enumerate(shapes))
    ours, theirs = getattr(multimm, name), getattr(np, name)
    try:
        expected = theirs(x, y)
    except ValueError:
        with pytest.raises(ShapeError, match="^inner of" if name == "inner" else "of shapes"):
            ours(da.from_array(x), y)
        return
    found = ours(da.from_array(x, chunks=2), da.from_array(y, chunks=3))
    assert isinstance(found, da.Array)
    for value in (found.compute(), ours(x, y)):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


@HERE
@pytest.mark.parametrize("axis", [0, 1, -2, 2, 1.5])
def test_vecdot_along_an_axis(axis):
    x = numbers((4, 3), "complex128")
    try:
        expected = np.vecdot(x, x, axis=axis)
    except (ValueError, TypeError):
        with pytest.raises(OptionError, match="axis"):
            multimm.vecdot(da.from_array(x), x, axis=axis)
    else:
        np.testing.assert_array_equal(multimm.vecdot(da.from_array(x), x, axis=axis), expected)


@pytest.mark.parametrize("subscripts", ["ijk,jkl->il", "ijk,lkj->il", "jik,klj->li"])
def test_axes_that_are_summed_over_may_come_in_other_chunks(subscripts):
    sizes = {"i": 4, "j": 6, "k": 8, "l": 5}
    terms = subscripts.partition("->")[0].split(",")
    x, y = (numbers([sizes[label] for label in own], "float64", n) for n, own in enumerate(terms))
    a, b = da.from_array(x, chunks=(2, 4, 3)), da.from_array(y, chunks=(3, 5, 2))
    expected = np.einsum(subscripts, x, y)
    np.testing.assert_array_equal(multimm.einsum(subscripts, a, b).compute(), expected)


PATHS = (True, False, None, "greedy", "optimal", "auto", ("greedy", 10**6), [(0, 1), (0, 1)],
         [(0, 1, 2)], ["einsum_path", (1, 2), (0, 1)])  # fmt: skip


@pytest.mark.parametrize("optimize", PATHS, ids=str)
def test_several_operands_go_any_way(optimize):
    x, y, z = (
        numbers((5, 4), "float64"),
        numbers((4, 3, 2), "float64", 1),
        numbers((3, 6), "float64"),
    )
    expected = np.einsum("ij,jkl,km->mil", x, y, z)
    operands = [da.from_array(each, chunks=2) for each in (x, y, z)]
    found = multimm.einsum("ij,jkl,km->mil", *operands, optimize=optimize)
    np.testing.assert_array_equal(found.compute(), expected)
    assert found.chunks == da.einsum("ij,jkl,km->mil", *operands).chunks
    assert functions.einsum_steps(["ij,jkl,km->mil", *operands], None, optimize).products == 2


def test_a_block_that_is_cut_along_its_first_axis_is_flattened_as_it_is():
    """Its pieces are rows of it, which the product takes; along another axis they are none."""
    x, y = (numbers((8, 6, 4), "float32", seed) for seed in (1, 2))
    a, b = (da.from_array(v, chunks=(2, 6, 4)) for v in (x, y))
    with dask.config.set({"array.chunk-size": 1000}):
        made = multimm.einsum("txy,tuv->xyuv", a, b)
        turned = multimm.einsum("txy,tuv->yxuv", a, b)
    assert made.numblocks == (2, 1, 2, 1)
    for result, letters in ((made, "xyuv"), (turned, "yxuv")):
        np.testing.assert_array_equal(result, np.einsum(f"txy,tuv->{letters}", x, y))
    tasks = [key for key in made.dask if "flattened" in str(key)]
    assert len(tasks) <= 8, "more than one for a block"


@pytest.mark.parametrize("gpu", [False, True])
def test_on_gpus_some_tasks_rearrange_a_block_that_they_share(gpu, monkeypatch):
    """Each block is copied into another order of axes, for two products."""
    monkeypatch.setattr(taken_apart, "is_cupy", lambda x: gpu)
    monkeypatch.setattr(choice, "is_small", lambda *args: False)
    x, y = (numbers((6, 4, 6, 4), "float32", seed) for seed in (1, 2))
    a = da.from_array(x, chunks=(3, 4, 6, 4))
    b = da.from_array(y, chunks=(3, 4, 6, 4))
    with dask.config.set({"array.chunk-size": 1000}):
        found = multimm.einsum("abcd,ebfd->acef", a, b)
    np.testing.assert_array_equal(found, np.einsum("abcd,ebfd->acef", x, y))
    assert any("flattened" in name for name in found.dask.layers) != gpu


#: Two orders with as many operations: p in two chunks, q in one.
TRANSFORMED = "pqrs,pi,qj->ijrs"


@pytest.mark.parametrize(
    ("chunks", "optimize", "first"),
    [
        ((4, 8, 3, 3), True, "pqrs,qj->prsj"),
        ((8, 4, 3, 3), True, "pqrs,pi->qrsi"),
        ((8, 8, 3, 3), True, "pqrs,pi->qrsi"),  # as opt_einsum has it
        ((4, 8, 3, 3), "optimal", "pqrs,pi->qrsi"),  # asked for
        ((4, 8, 3, 3), ["einsum_path", (0, 1), (0, 1)], "pqrs,pi->qrsi"),
    ],
    ids=str,
)
def test_axes_in_one_block_are_summed_first_where_orders_take_as_long(chunks, optimize, first):
    x, y, z = (numbers(shape, "float64") for shape in ((8, 8, 6, 6), (8, 3), (8, 3)))
    given = [da.from_array(v, chunks=c) for v, c in ((x, chunks), (y, chunks[0]), (z, chunks[1]))]
    plan = multimm.plan(TRANSFORMED, *given, optimize=optimize)
    assert plan.steps[0].subscripts == first
    found = multimm.einsum(TRANSFORMED, *given, optimize=optimize)
    np.testing.assert_array_equal(found, np.einsum(TRANSFORMED, x, y, z))


def test_an_order_of_more_operations_is_not_taken_for_its_blocks():
    """i is as long as 3, j as 4: the sum over p, in two chunks, makes less of the whole."""
    x = da.ones((8, 8, 6, 6), chunks=(4, 8, 6, 6))
    y, z = da.ones((8, 3), chunks=(4, 3)), da.ones((8, 4), chunks=(8, 4))
    assert multimm.plan(TRANSFORMED, x, y, z).steps[0].subscripts == "pqrs,pi->qrsi"


@HERE
@pytest.mark.parametrize(
    "optimize",
    [
        *("gready", [(0, 1)], [(0, 5), (0, 1)], [(0,)], 7, ["einsum_path"], ["einsum_path", 3]),
        *(("greedy", None), ("greedy", "1 GB"), ("greedy", float("inf"))),
    ],
)
def test_a_path_that_is_none_is_refused(optimize):
    x = da.ones((3, 3), chunks=2)
    with pytest.raises(OptionError, match="optimize"):
        multimm.einsum("ij,jk,kl->il", x, x, x, optimize=optimize)


@HERE
def test_operands_are_cast_only_where_that_is_safe():
    x = da.from_array(numbers((40, 50), "int8"), chunks=16)
    with pytest.raises(DTypeError, match="can be cast"):
        multimm.einsum("ij,kj->ik", x.astype(float), x, dtype="int32")


NARROW = (
    "ij,kj->ik", "ij,ij->i", "ij,ij->", "ij,kj->i", "ij,ij->ij", "ij->i", "ij,kj,kl->il",
    "bij,bkj->bik",
)  # fmt: skip


@HERE
@pytest.mark.parametrize("asked", ["int64", "float32"])
@pytest.mark.parametrize("narrow", ["int8", "int16", "bool"])
@pytest.mark.parametrize("subscripts", NARROW)
def test_narrow_integers_are_exact_in_the_dtype_asked_for(workers, subscripts, narrow, asked):
    """Sums beyond 2^24 of int16, beyond what int8 holds of the others."""
    terms = subscripts.partition("->")[0].split(",")
    high = {"int8": 127, "int16": 3000, "bool": 1}[narrow]
    rng = np.random.default_rng(7)
    arrays = [rng.integers(0, high + 1, (9, 8, 70)[-len(x) :]).astype(narrow) for x in terms]
    if len(terms) == 3:
        arrays = [arrays[0], arrays[0], arrays[0].T[:8, :]]
        subscripts = "ij,kj,lk->il"
    exact = np.einsum(subscripts, *(x.astype("int64") for x in arrays))
    expected = exact.astype(asked)
    operands = [da.from_array(x, chunks=5) for x in arrays]
    for these in (operands, arrays):
        found = multimm.einsum(subscripts, *these, dtype=asked)
        assert found.dtype == asked
        np.testing.assert_array_equal(found, expected)


def test_sums_of_narrow_operands_beside_a_wide_one_are_exact():
    """The first step has two operands of int8, and its sums are beyond int8."""
    narrow = np.full((6, 6), 100, "int8")
    arrays = [narrow, narrow, np.arange(36).reshape(6, 6)]
    expected = np.einsum("ij,jk,kl->il", *(x.astype("int64") for x in arrays))
    path = ["einsum_path", (0, 1), (0, 1)]
    for these in (arrays, [da.from_array(x, chunks=4) for x in arrays]):
        found = multimm.einsum("ij,jk,kl->il", *these, optimize=path)
        np.testing.assert_array_equal(found, expected)


@HERE
def test_narrow_integers_travel_narrow():
    x = da.from_array(np.ones((64, 96), "int8"), chunks=16).persist()
    graph = dict(multimm.einsum("ij,kj->ik", x, x, dtype="float64").__dask_graph__())
    assert not any("astype" in str(key) for key in graph)


EMPTY_CHUNKS = {
    "vecdot": lambda xp, x, y: xp.vecdot(x, y.T),
    "einsum": lambda xp, x, y: xp.einsum("ki,ji,->kij", x, x, y[0, 0]),
    "outer": lambda xp, x, y: xp.outer(x, y),
    "tensordot": lambda xp, x, y: xp.tensordot(x, y, axes=0),
    "matmul": lambda xp, x, y: xp.matmul(x[:, :, None], y.T[:, None]),
}


@HERE
@pytest.mark.parametrize("subscripts", ["i,i->", "ij,ij->", "ij,i,j->"])
def test_a_lazy_sum_over_everything_is_numpys_scalar(subscripts):
    shapes = [(6,) * len(term) for term in subscripts[:-2].split(",")]
    found = multimm.einsum(subscripts, *(da.ones(shape, chunks=3) for shape in shapes))
    assert type(found.compute(scheduler="sync")) is np.float64


@HERE
@pytest.mark.parametrize("name", EMPTY_CHUNKS)
def test_empty_chunks_beside_others_are_no_elements(name):
    """Dask broadcasts them as it does the one of length 1: shapes come out too large."""
    x = np.array([[1.0, 2, 3]])
    y = np.array([[4.0], [5], [6]])
    for first in ((0, 1), (1, 0)):
        lazily = (
            da.from_array(x, chunks=(first, (2, 0, 1))),
            da.from_array(y, chunks=((0, 3), first)),
        )
        found = EMPTY_CHUNKS[name](multimm, *lazily)
        expected = EMPTY_CHUNKS[name](np, x, y)
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.compute(), expected)


@HERE
def test_arrays_of_more_axes_than_letters_are_multiplied():
    x = da.from_array(np.arange(4.0).reshape(2, *(1,) * 26, 2), chunks=1)
    for axes in (0, 1):
        found, expected = multimm.tensordot(x, x, axes), np.tensordot(*[x.compute()] * 2, axes)
        assert found.ndim == 56 - 2 * axes
        np.testing.assert_array_equal(found.compute(), expected)


NO_ELEMENTS = {
    "rows": (((0, 0), (2, 3)), ((2, 3), (4,))),
    "summed over": (((2, 3), (0, 0)), ((0, 0, 0), (4,))),
    "a stack": (((0, 0), (2,), (3,)), ((0, 0, 0), (3,), (1, 1))),
    "all": (((0, 0), (0, 0)), ((0,), (0, 0, 0))),
}


@pytest.mark.parametrize("name", NO_ELEMENTS)
@pytest.mark.parametrize(
    "subscripts", ["...ij,...jk->...ik", "...ij,...jk->k...i", "...ij,...jk->"]
)
def test_an_axis_of_no_elements_may_come_in_any_chunks(name, subscripts):
    """As those of ``x[mask]`` where no element is taken, which `compute_chunk_sizes` gives."""
    lazily = [da.zeros(tuple(map(sum, own)), chunks=own) for own in NO_ELEMENTS[name]]
    arrays = [x.compute() for x in lazily]
    subscripts += "" if subscripts[-1] != ">" or lazily[0].ndim == 2 else "..."
    found, expected = multimm.einsum(subscripts, *lazily), np.einsum(subscripts, *arrays)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.compute(), expected)
    for chunks in ("auto", "operands", 2):
        made = multimm.matmul(*lazily, chunks=chunks)
        np.testing.assert_array_equal(made.compute(), np.matmul(*arrays))


@HERE
@pytest.mark.parametrize(
    "subscripts", ["ii->i", "ii,ij->j", "ij,ij->i", "ij,ij->ij", "ij,kl,j->ikl"]
)
def test_no_elements_on_diagonals_and_beside_each_other(subscripts):
    terms = subscripts.split("->")[0].split(",")
    for rows in ((0, 0), (1, 0, 1, 0, 0)):
        first = rows if subscripts == "ij,ij->i" else (0, 0)
        cut = [(first, (0, 0)), ((sum(first),), (0, 0)), ((0, 0, 0, 0),)]
        lazily = [
            da.zeros(tuple(map(sum, cut[n][: len(x)])), chunks=cut[n][: len(x)])
            for n, x in enumerate(terms)
        ]
        found = multimm.einsum(subscripts, *lazily)
        expected = np.einsum(subscripts, *[x.compute() for x in lazily])
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.compute(), expected)


HALF = np.dtype(ml_dtypes.bfloat16)


@HERE
@pytest.mark.parametrize("lazily", [True, False])
@pytest.mark.parametrize("other", [HALF, "float32", "int8", "float16", "complex64"])
@pytest.mark.parametrize("subscripts", ["ij,kj->ik", "ij,ij->i", "ij,ij->ij", "ij,kj,ij->ik"])
def test_bfloat16_is_summed_in_float32_whatever_is_beside_it(subscripts, other, lazily):
    """NumPy has no einsum of it, and no dtype in common with most others."""
    first, second = numbers((5, 6), "float32"), numbers((5, 6), "float32", 1)
    arrays = [first, second, first][: subscripts.count(",") + 1]
    expected = np.einsum(subscripts, *arrays)
    dtypes = [HALF, other, HALF]
    given = [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=False)]
    given = [da.from_array(x, chunks=4) for x in given] if lazily else given
    found = multimm.einsum(subscripts, *given)
    assert found.dtype == multimm.matmul(given[0], given[1].T).dtype
    assert np.asarray(found).dtype == found.dtype
    np.testing.assert_array_equal(np.asarray(found).astype(np.complex128), expected)


@HERE
@pytest.mark.parametrize("chunks", [None, 700, -1])
@pytest.mark.parametrize("dtype", ["float16", HALF], ids=str)
@pytest.mark.parametrize("subscripts", ["ij->j", "ij->", "ij,ij->j", "ij,jk->k", "ij,jk,ij->"])
def test_halves_are_summed_in_float32_without_a_product_of_matrices(subscripts, dtype, chunks):
    """In their own dtype sums stick at 1024, where a half is rounded away."""
    arrays = [np.full((4096, 2), 0.5, dtype), np.ones((2, 2), dtype), np.ones((4096, 2), dtype)]
    arrays = arrays[: subscripts.count(",") + 1]
    if subscripts == "ij,ij->j":
        arrays[1] = np.ones((4096, 2), dtype)
    made = multimm.matmul(arrays[0].T, arrays[0]).dtype
    expected = np.einsum(subscripts, *[x.astype("f4") for x in arrays]).astype(made)
    given = arrays if chunks is None else [da.from_array(x, chunks=chunks) for x in arrays]
    found = multimm.einsum(subscripts, *given)
    assert found.dtype == made
    np.testing.assert_array_equal(np.asarray(found), expected)


@HERE
@pytest.mark.parametrize("lazily", [False, True])
def test_sums_of_narrow_integers_are_exact_on_the_way_to_a_half(lazily):
    """Their difference is 1, and in float32 they are even."""
    a, b = np.full((1, 1101), 127, "i1"), np.full((1101, 2), 127, "i1")
    a[0, -1], b[-1] = 1, [1, 0]
    given = [a, b, np.array([[1], [-1]], "i1")]
    given = [da.from_array(x, chunks=500) for x in given] if lazily else given
    path = ["einsum_path", (0, 1), (0, 1)]
    found = multimm.einsum("ij,jk,kl->il", *given, dtype="float16", optimize=path)
    assert found.dtype == np.float16
    assert np.asarray(found) == 1


@HERE
@pytest.mark.parametrize("chunks", [None, 700, -1])
@pytest.mark.parametrize("subscripts", ["ij,jk->k", "ij,jk->ik", "ij,kj,kl->il", "ij,kj->k"])
def test_halves_on_the_way_may_be_beyond_what_the_result_can_be(subscripts, chunks):
    """Sums of 2048 times 64 are beyond 65504, and a thousandth of them is not."""
    sizes = {"i": 2048, "j": 2, "k": 2, "l": 2}
    if subscripts == "ij,kj,kl->il":
        sizes |= {"i": 2, "j": 2048}
    terms = subscripts.partition("->")[0].split(",")
    arrays = [np.full([sizes[x] for x in term], 64, "f2") for term in terms]
    arrays[-1][:] = 2.0**-10
    expected = np.einsum(subscripts, *[x.astype("f4") for x in arrays]).astype("f2")
    assert np.isfinite(expected).all()
    given = arrays if chunks is None else [da.from_array(x, chunks=chunks) for x in arrays]
    found = multimm.einsum(subscripts, *given)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(np.asarray(found), expected)


@HERE
def test_bfloat16_is_summed_in_the_dtype_asked_for():
    """2^24 + 1 is no float32."""
    x = np.array([[4096.0, 1.0]]).astype(HALF)
    for y in (x, da.from_array(x, chunks=2)):
        assert multimm.einsum("ij,ij->i", y, y, dtype="float64")[0] == 2**24 + 1


@HERE
@pytest.mark.parametrize("subscripts", ["ij->ji", "ij", "ij->j", "ii->i"])
@pytest.mark.parametrize("stored", ["int8", ">f4", HALF])
def test_one_operand_has_the_dtype_asked_for_in_its_blocks_too(subscripts, stored):
    """NumPy returns a view, of the operand's dtype; a lazy result said another one."""
    x = numbers((6, 6), "int8").astype(stored)
    y = da.from_array(x, chunks=4)
    for found in (multimm.einsum(subscripts, y, dtype="float64"), multimm.einsum(subscripts, y)):
        made = found.compute()
        assert made.dtype == found.dtype
        assert made.dtype.isnative
        np.testing.assert_array_equal(made, np.einsum(subscripts, x.astype("float64")))


@pytest.mark.parametrize("subscripts", ["ij,kl->ljik", "ij,ik->kij", "ij,j->ji"])
def test_what_is_only_multiplied_keeps_the_operands_chunks(subscripts):
    """Dask's einsum cuts them into thousands, so that no block is larger than the operands'."""
    x, y = numbers((20, 12), "float64"), numbers((20, 16), "float64", 1)
    y = y[0, :12] if subscripts.startswith("ij,j") else y
    given = da.from_array(x, chunks=(7, 5)), da.from_array(y, chunks=5 if y.ndim == 1 else 6)
    made = multimm.einsum(subscripts, *given)
    np.testing.assert_array_equal(made.compute(), np.einsum(subscripts, x, y))
    terms, _, out = subscripts.partition("->")
    cuts = dict.fromkeys(out, 0)
    for term, array in zip(terms.split(","), given, strict=True):
        for label, count in zip(term, array.numblocks, strict=True):
            cuts[label] += count - 1
    for label, count in zip(out, made.numblocks, strict=True):
        assert count <= cuts[label] + 1


#: No products of matrices: of elements, sums of one operand, diagonals, views.
BY_ELEMENTS = ("ij,ij->ij", "ij,kl->ijkl", "ij,ij->i", "ij->i", "ij->ji", "ii->i")


def of_blocks(subscripts, make, dtype="float64"):
    """A sum over blocks that a function makes of numbers, and over numbers; all square."""
    x = numbers((4, 4), "float64")
    lazy = da.from_array(x, chunks=2)
    # Nobody but the function knows what they are.
    made = lazy.map_blocks(make, dtype=dtype, meta=np.empty((0, 0), dtype))
    more = ("," in subscripts) * 1
    return (
        multimm.einsum(subscripts, made, *[lazy.astype(dtype)] * more),
        np.einsum(subscripts, *[x] * (1 + more)),
    )


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("subscripts", BY_ELEMENTS)
def test_blocks_of_np_matrix_are_plain_without_a_product_of_matrices(workers, subscripts):
    made, expected = of_blocks(subscripts, np.matrix)
    result = made.compute()
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, expected)


@HERE
@pytest.mark.parametrize("subscripts", BY_ELEMENTS)
def test_masks_and_wrong_dtypes_are_refused_without_a_product_of_matrices(workers, subscripts):
    masked, _ = of_blocks(subscripts, lambda block: np.ma.masked_less(block, 0))
    with pytest.raises(ArrayTypeError, match="MaskedArray"):
        masked.compute()
    integers, _ = of_blocks(subscripts, lambda block: block + 0.5, "int64")
    with pytest.raises(DTypeError, match="float64, its array says int64"):
        integers.compute()


@HERE
def test_blocks_of_an_outer_product_are_no_larger_than_dask_has_them():
    x = da.ones(1000, chunks=1000, dtype="float32")
    with dask.config.set({"array.chunk-size": 40_000}):
        for made in (multimm.outer(x, x), multimm.tensordot(x, x, 0), multimm.outer(2, x)):
            assert max(np.prod(made.chunksize), 10_000) == 10_000
    assert multimm.outer(x, x).sum().compute() == 1_000_000


BAD = {
    "objects": (lambda x: multimm.einsum("ij,jk", x.astype(object), x), DTypeError),
    "strings": (lambda x: multimm.tensordot(x.astype(str), x, 1), DTypeError),
    "unknown chunks": (lambda x: multimm.einsum("ij,jk", x[x[:, 0] > 0], x), ShapeError),
    "sparse": (lambda x: multimm.inner(x.map_blocks(sparse.GCXS.from_numpy), x), TypeError),
    "masked": (lambda x: multimm.vecdot(da.ma.masked_greater(x, 1), x), TypeError),
    "no operands": (lambda x: multimm.einsum("ij,jk->ik"), OptionError),
    "nothing": (lambda x: multimm.einsum(), OptionError),
    "a precision": (lambda x: multimm.einsum("ij,jk", x, x, precision="fp8"), OptionError),
    "a dtype": (lambda x: multimm.einsum("ij,jk", x, x, dtype="float31"), DTypeError),
}


@HERE
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_at_the_call_in_one_line(name):
    call, kind = BAD[name]
    with pytest.raises(multimm.MultimmError) as refused:
        call(da.ones((4, 4), chunks=2))
    assert isinstance(refused.value, kind)
    assert len(str(refused.value).splitlines()) == 1
