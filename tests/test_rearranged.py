"""Axes that are flattened block by block: what is made, where it lies, and what travels."""

from __future__ import annotations

from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, received, scattered
from dask.array.core import normalize_chunks
from dask.core import flatten
from dask.graph_manipulation import bind, clone
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st
from labels import block_tasks
from paper import cpus
from repeated import others_slow

import multimm
from multimm import products
from multimm.cluster.inspect import cluster_spec
from multimm.cluster.inspect.cluster_spec import listed
from multimm.contractions import steps
from multimm.errors import ShapeError
from multimm.graph.data_location import ProductLayer, owners_of
from multimm.graph.lazy_views import permuted
from multimm.graph.rearranged import flattened, grouped_chunks, split
from multimm.graph.taken_apart import by_its_tasks

WORKERS = 4


client = counting_client(WORKERS)


@given(st.data())
def test_blocks_are_flattened_and_taken_apart_again(data):
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=4))
    edges = [data.draw(st.integers(1, 5)) for _ in sizes]
    x = np.arange(float(np.prod(sizes))).reshape(sizes)
    own = normalize_chunks(tuple(edges), x.shape) if sizes else ()
    parts = tuple(halved(c) if data.draw(st.booleans()) else c for c in own)
    array = da.from_array(x, chunks=own)
    order = tuple(data.draw(st.permutations(range(x.ndim))))
    groups = data.draw(st.lists(st.integers(0, 2), max_size=4).filter(lambda g: sum(g) <= x.ndim))
    groups += [1] * (x.ndim - sum(groups))
    flat = flattened(array, order, groups, parts)
    cut = tuple(parts[axis] for axis in order)
    assert flat.chunks == grouped_chunks(cut, groups)
    turned = x.transpose(order)
    value = flat.compute(scheduler="sync")
    assert value.shape == tuple(map(sum, flat.chunks))
    first = turned[tuple(slice(blocks[0]) for blocks in cut)]
    part = value[tuple(slice(blocks[0]) for blocks in flat.chunks)]
    np.testing.assert_array_equal(part, first.reshape(part.shape))
    assert sorted(value.ravel()) == sorted(x.ravel())
    back = split(flat, cut, groups, tuple(np.argsort(order).tolist()))
    assert back.chunks == parts
    np.testing.assert_array_equal(back.compute(scheduler="sync"), x)


def test_a_sum_over_everything_is_rearranged():
    """Its only block is a scalar of NumPy."""
    flat = flattened(da.ones(3, chunks=2).sum(), (), [0], ())
    np.testing.assert_array_equal(flat.compute(scheduler="sync"), [3.0])


def halved(blocks):
    return tuple(part for n in blocks for part in (n // 2, n - n // 2) if part or not n)


def test_lazy_transposes_of_any_axes_are_looked_through():
    x = da.ones((2, 3, 4, 5), chunks=2)
    y = x.transpose(2, 0, 3, 1).swapaxes(-1, 0)
    below, order = permuted(y)
    assert below.name == x.name
    assert tuple(x.shape[axis] for axis in order) == y.shape
    for other in (x + 1, x[:, ::-1], x.rechunk(3), x.map_blocks(np.transpose, axes=(1, 0, 2, 3))):
        assert permuted(other)[0] is other


def lying(client, shape, chunks, seed=0, owners=None):
    """An array whose blocks lie with the workers in turn, and its values."""
    x = np.random.default_rng(seed).integers(-3, 4, shape).astype("float32")
    sizes = normalize_chunks(chunks, shape)
    count = int(np.prod([len(c) for c in sizes]))
    return x, scattered(client, x, sizes, owners or [n % WORKERS for n in range(count)])


def test_flattened_blocks_lie_where_their_blocks_lie(client):
    _, a = lying(client, (8, 6, 4), (2, 3, 4), owners=[3, 1, 0, 2, 2, 0, 1, 3])
    flat = flattened(a, (0, 1, 2), [2, 1], ((2,) * 4, (1, 2, 3), (4,)))  # some blocks are cut
    plan = multimm.plan(flat, da.ones((4, 5), chunks=-1))
    assert plan.layout.problem.a.owners == (3, 3, 1, 0, 0, 2, 2, 2, 0, 1, 1, 3)


def test_of_a_product_that_is_taken_apart_owners_are_known(client):
    _, a = lying(client, (1264, 8, 400), (316, 8, 400))
    _, w = lying(client, (400, 300), (400, 300), 1)
    made = multimm.einsum("tik,kj->tij", a, w)
    again = flattened(made, (0, 1, 2), [2, 1], made.chunks)
    assert owners_of(again, WORKERS) == (0, 1, 2, 3)
    made = made.persist()
    wait(made)
    flat = flattened(made, (0, 1, 2), [2, 1], made.chunks)
    problem = multimm.plan(flat, da.ones((300, 5), chunks=-1)).asked.problem
    assert problem.a.owners == (0, 1, 2, 3)


@pytest.mark.parametrize("subscripts", ["tik,kj->tij", "tik,kj->jit", "tik,sij->tksj"])
def test_the_tasks_of_a_product_take_its_blocks_apart(client, subscripts):
    shapes = {"tik": (12, 8, 40), "kj": (40, 30), "sij": (6, 8, 5)}
    first, second = subscripts.partition("->")[0].split(",")
    x, a = lying(client, shapes[first], (3, 8, 40))
    y, b = lying(client, shapes[second], shapes[second], 1)
    made = multimm.einsum(subscripts, a, b)
    layer = made.dask.layers[made.name]
    assert isinstance(layer, ProductLayer)
    assert {key for key in layer if key[0] == made.name} == {*flatten(made.__dask_keys__())}
    np.testing.assert_array_equal(made.compute(), np.einsum(subscripts, x, y))
    part = made[:, -1:]
    np.testing.assert_array_equal(part.compute(), np.einsum(subscripts, x, y)[:, -1:])
    for copied in (clone(made), bind(made, a.sum())):
        np.testing.assert_array_equal(copied.compute(), np.einsum(subscripts, x, y))


def flattening(array):
    """Tasks that do nothing but flatten blocks."""
    return {key for key in array.__dask_graph__() if key[0].startswith("multimm-flattened")}


def test_a_block_that_several_tasks_take_is_copied_once(client):
    x, a = lying(client, (1264, 8, 400), (316, 8, 400))
    y, w = lying(client, (400, 8, 96), (400, 8, 96), 1)
    made = multimm.einsum("tik,kij->tj", a, w)
    assert len(flattening(made)) == 1  # w has to be transposed
    expected = np.einsum("tik,kij->tj", x, y, optimize=True)
    np.testing.assert_array_equal(made.compute(), expected)


def test_the_tasks_of_a_product_flatten_blocks_that_one_of_them_takes(client):
    x, a = lying(client, (1264, 8, 400), (316, 8, 400))
    y, w = lying(client, (8, 400), (8, 400), 1)
    made = multimm.einsum("tik,ik->t", a, w)
    assert flattening(made) == set()  # of w, which each of them takes, they make views
    assert a.name in made.dask.layers
    np.testing.assert_array_equal(made.compute(), np.einsum("tik,ik->t", x, y))
    half = multimm.einsum("tik,ik->t", a[:, :, :200], w[:, :200].map_blocks(np.positive))
    np.testing.assert_array_equal(half.compute(), np.einsum("tik,ik->t", x[..., :200], y[:, :200]))


def test_what_needs_blocks_of_a_product_besides_keeps_them(client):
    _, a = lying(client, (12, 8, 40), (3, 8, 40))
    made = multimm.matmul(a[0], a[0].T)
    halves = flattened(made, (0, 1), [2], ((4, 4), (8,)))
    assert by_its_tasks(halves) is halves
    assert by_its_tasks(flattened(a, (0, 1, 2), [3], a.chunks)).shape == (12 * 8 * 40,)


def of_three(client, owners, columns):
    """A field multiplied by two matrices, one after the other, and what it should be."""
    x, a = lying(client, (1264, 8, 400), (316, 8, 400), owners=owners)
    y, w = lying(client, (400, 300), (400, 300), 1)
    z, v = lying(client, (300, 200), (300, columns), 2)
    made = multimm.einsum("tik,kj,jl->tli", a, w, v, optimize=[(0, 1), (0, 1)])
    return made, (x @ y @ z).swapaxes(1, 2)


@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (2, 3, 1, 0)])
def test_a_task_makes_the_block_of_a_step_before_that_it_alone_takes(client, owners):
    made, expected = of_three(client, owners, 200)
    own = block_tasks(made)
    assert own.keys() == {*flatten(made.__dask_keys__())}
    assert len(own) == 4
    addresses = sorted(listed(client))
    for task in own.values():  # all that it takes is known to lie, or to belong, somewhere
        assert {key for key, _ in task.place.blocks} == {*task.dependencies}
    made, bytes_moved = received(client, made)
    assert bytes_moved <= 3 * 4 * (400 * 300 + 300 * 200)  # both matrices to three workers
    where = {str(key): at for key, (at,) in client.who_has(made).items()}
    at = [where[str((made.name, n, 0, 0))] for n in range(4)]
    assert at == [addresses[owner] for owner in owners]
    np.testing.assert_array_equal(made.compute(), expected)


def test_a_block_of_a_step_before_that_several_tasks_take_has_a_task(client):
    made, expected = of_three(client, None, 100)
    own = block_tasks(made)
    assert len(own) == 12
    assert flattening(made) == {key for key in own if "flattened" in key[0]}
    assert len(flattening(made)) == 4  # by the tasks that make them
    np.testing.assert_array_equal(made.compute(), expected)


@pytest.mark.parametrize(("threads", "count"), others_slow([(1, 4), (2, 12)], (2, 12)))
def test_a_task_makes_both_blocks_that_it_takes_where_workers_have_a_thread(
    client, monkeypatch, threads, count
):
    """Two along p, which is summed over in the second step, for each of four along r."""
    x, a = lying(client, (32, 300, 1264), (16, 300, 316))
    y, w = lying(client, (300, 100), (300, 100), 1)
    z, v = lying(client, (32, 200), (16, 200), 2)
    answer = products.ask(None, [a, w, v])
    assert answer.cluster is not None
    on = replace(cpus(WORKERS), threads=threads, addresses=answer.cluster.addresses)
    answer = answer._replace(cluster=on)
    monkeypatch.setattr(steps, "ask", lambda *_: answer)
    made = multimm.einsum("pqr,qj,pi->ijr", a, w, v, optimize=[(0, 1), (0, 1)])
    own, last = block_tasks(made), {*flatten(made.__dask_keys__())}
    assert len(last) == 4
    assert own.keys() >= last
    assert len(own) == count
    for task in own.values():
        assert {key for key, _ in task.place.blocks} == {*task.dependencies}
    expected = np.einsum("pqr,qj,pi->ijr", x, y, z, optimize=True)
    np.testing.assert_array_equal(made.compute(), expected)


def test_a_product_that_is_asked_for_itself_keeps_its_tasks(client):
    x, a = lying(client, (1264, 8, 400), (316, 8, 400))
    y, w = lying(client, (400, 300), (400, 300), 1)
    z, v = lying(client, (300, 200), (300, 200), 2)
    first = multimm.einsum("tik,kj->tij", a, w)
    both = dask.compute(first, multimm.einsum("tij,jl->til", first, v))
    np.testing.assert_array_equal(both[0], np.einsum("tik,kj->tij", x, y, optimize=True))
    np.testing.assert_array_equal(both[1], np.einsum("tij,jl->til", both[0], z, optimize=True))
    second = multimm.einsum("tij,jl->til", first, v)
    assert {key for key in first.__dask_graph__() if key[0] == first.name} <= {*second.dask}


def test_the_scheduler_is_asked_once_for_all_steps(client, monkeypatch):
    of_three(client, None, 200)  # workers that are new are asked, too
    questions, ask = [], cluster_spec.listed_with
    monkeypatch.setattr(products, "listed_with", lambda *call: questions.append(call) or ask(*call))
    of_three(client, None, 200)
    assert len(questions) == 1
    assert len(questions[0][1]) == 4 + 1 + 1


#: Subscripts, shapes, chunks: four workers have the blocks in turn.
MOVED = {
    "covariance of a field": ("txy,tuv->xyuv", ((640, 24, 52),), ((80, 24, 52),)),
    "fields from modes": ("tm,mxy->txy", ((1264, 64), (64, 72, 152)), ((316, 64), (64, 36, 152))),
    "density fitting": ("Lpq,Lrs->pqrs", ((384, 40, 36),), ((96, 20, 36),)),
}  # fmt: skip


def dask_moves(client, product, nbytes):
    """Whether Dask's own product moves so many bytes: timing says where its tasks run."""
    return any(received(client, product())[1] >= nbytes for _ in range(10))


@pytest.mark.parametrize("name", others_slow(MOVED, "fields from modes"))
def test_sums_over_axes_move_at_most_half_of_what_dasks_move(client, name):
    subscripts, shapes, chunks = MOVED[name]
    made = [
        lying(client, *each, seed) for seed, each in enumerate(zip(shapes, chunks, strict=True))
    ]
    made = made if len(made) == 2 else made * 2
    (x, y), operands = [value for value, _ in made], [array for _, array in made]
    expected = np.einsum(subscripts, x, y, optimize=True)
    found, ours = received(client, multimm.einsum(subscripts, *operands))
    np.testing.assert_array_equal(found.compute(), expected)
    terms, _, out = subscripts.partition("->")
    labelled = zip(terms.split(","), operands, strict=True)
    own = {x: cut for term, a in labelled for x, cut in zip(term, a.chunks, strict=True)}
    assert found.chunks == tuple(own[x] for x in out)
    assert dask_moves(client, lambda: da.einsum(subscripts, *operands), 2 * ours)


def test_a_block_of_another_shape_than_declared_is_named(client):
    x = da.ones((4, 4, 2), chunks=2).map_blocks(lambda block: block[:1])
    made = multimm.tensordot(x, da.ones((4, 2, 3), chunks=2), 2)
    with pytest.raises(ShapeError, match=r"has shape \(1, 2, 2\), its array's chunks say") as wrong:
        made.compute()
    assert "of A" in wrong.value.__notes__[0]
