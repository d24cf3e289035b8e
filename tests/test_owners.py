"""Operands that lie on workers, or will, are used where they lie, and by workers in their order."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from by_plan import by_plan, spec_of
from clusters import counting_client, in_threads, received, scattered, soon
from distributed import Client, Event, futures_of, wait
from paper import cpus, in_rows
from small import integers

import multimm
from multimm.cluster.inspect import cluster_spec
from multimm.cluster.inspect.cluster_spec import listed, listed_with
from multimm.cluster.plugins.transfer_counter import received_bytes
from multimm.errors import ShapeError
from multimm.graph.data_location import owners_of
from multimm.graph.scheduler.install import install
from multimm.planning.blocking import lay_out
from multimm.planning.candidates.rank_map import renumbered
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.plan import Asked, MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, INFINIBAND, NVLINK, ClusterSpec, Link, MatrixSpec
from multimm.planning.tiling.grid import Grid

SIZE, BLOCK = 96, 24
FIXED = {"blocks": BLOCK, "slabs": BLOCK}
LIE = "used where"  # it lies, or they lie: what a plan says of such operands

client = counting_client(4)


def matrix(seed):
    x = integers((SIZE, SIZE), seed)
    return x, da.from_array(x, chunks=BLOCK, name=f"owned-{seed}", inline_array=True)


def held(client, array):
    """The one worker of each block, by its place among the workers' addresses."""
    ranks = sorted(listed(client))
    where = {str(key): at for key, at in client.who_has(array).items()}
    lie = (where[str((array.name, *index))] for index in np.ndindex(array.numblocks))
    return tuple(ranks.index(at) for (at,) in lie)


@pytest.mark.parametrize("p_k", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_lazy_product_knows_where_its_blocks_will_be(client, p_k, symmetric):
    (x, a), (y, b) = matrix(1), matrix(2)
    c = multimm.matmul(a, a.T if symmetric else b, **FIXED, p_k=p_k)
    owners = owners_of(c, 4)
    done = c.persist()
    wait(done)
    assert owners == held(client, done)
    assert len(set(owners)) == 4
    np.testing.assert_array_equal(done.compute(), x @ (x.T if symmetric else y))


@pytest.mark.parametrize(
    ("follow", "known"),
    [
        (lambda c: c, True),
        (lambda c: c + 1, True),
        (lambda c: np.sqrt(abs(c)) * 2 - c, True),
        (lambda c: c + da.ones((SIZE, SIZE), chunks=BLOCK), True),
        (lambda c: c.T, False),  # peeled off by the product
        (lambda c: c[:SIZE // 2], False),
        (lambda c: c.rechunk(SIZE), False),
        (lambda c: c.sum(axis=0), False),
        (lambda c: da.stack([c, c]), False),
    ],
)  # fmt: skip
def test_what_is_computed_block_by_block_has_the_same_owners(client, follow, known):
    c = multimm.matmul(matrix(1)[1], matrix(2)[1], **FIXED)
    assert owners_of(follow(c), 4) == (owners_of(c, 4) if known else ())
    assert not owners_of(c, 3)  # of another number of workers


def test_operands_that_are_still_being_made_lie_nowhere(client):
    def hold(block):
        Event("multimm-owners").wait()
        return block

    _, a = matrix(11)
    a = a.map_blocks(hold, dtype="f4", meta=a._meta).persist()
    assert LIE not in str(multimm.plan(a, a, **FIXED))
    Event("multimm-owners", client=client).set()


def test_the_scheduler_is_not_asked_about_lazy_operands(client, monkeypatch):
    def refuse(keys):
        raise AssertionError("asked")

    monkeypatch.setattr(client.cluster.scheduler, "get_who_has", refuse)
    a, b = matrix(12)[1], matrix(13)[1]
    multimm.matmul(multimm.matmul(a, b, **FIXED), b + 1, **FIXED)
    kept = b.persist()
    with pytest.raises(AssertionError, match="asked"):
        multimm.matmul(kept, kept, **FIXED)


def test_a_scheduler_of_this_process_answers_as_by_messages(client):
    a = matrix(16)[1].persist()
    keys = [future.key for future in futures_of(a)]
    soon(lambda: all(listed_with(client, keys)[1].values()))
    with Client(client.scheduler.address) as other:
        (workers, held), (told, told_of) = (listed_with(x, keys) for x in (client, other))
    assert {key: list(at) for key, at in told_of.items()} == held
    assert list(told) == list(workers)
    assert [x.keys() for x in told.values()] == [x.keys() for x in workers.values()]


def test_the_scheduler_is_asked_once(client, monkeypatch):
    """For its workers and for the blocks of both operands: each question takes a millisecond."""
    a, b = (matrix(seed)[1].map_blocks(np.negative, dtype="f4").persist() for seed in (14, 15))
    wait([a, b])
    multimm.plan(a, b, **FIXED)  # workers that are new are asked, too
    questions, sync = [], client.sync
    monkeypatch.setattr(client, "sync", lambda *call: questions.append(call) or sync(*call))
    assert LIE in str(multimm.plan(a, b, **FIXED))
    assert len(questions) == 1
    workers = multimm.cluster.describe(client)
    assert LIE in str(multimm.plan(a, b, cluster=workers, **FIXED))
    del questions[:]
    multimm.plan(a, b, cluster=cpus(4), **FIXED)  # on paper
    assert questions == []


def owned(owners, chunks):
    return MatrixSpec(tuple(map(sum, chunks)), chunks=chunks, owners=owners)


def test_owners_are_transposed_with_their_blocks():
    spec = owned((0, 1, 2, 3, 4, 5), ((2, 3), (5, 7, 11)))
    assert spec.T.owners == (0, 3, 1, 4, 2, 5)
    assert spec == spec.T.T


@pytest.mark.parametrize("owners", [(0,), (0, 1, 2)])
def test_there_is_one_owner_for_each_block(owners):
    with pytest.raises(ShapeError, match="one for each block"):
        owned(owners, ((2, 3), (5,)))


# Workers are numbered as operands lie on them -------------------------------------------


def gpus(workers, per_node=0, **more):
    return ClusterSpec((H200,) * workers, NVLINK, per_node=per_node, between=INFINIBAND, **more)


def with_addresses(workers):
    return gpus(workers, addresses=tuple(f"ucxx://host:{rank}" for rank in range(workers)))


def test_c_is_numbered_with_the_others():
    """It lies with the same workers, and travels no further than they do."""
    a = c = in_rows((1,) * 4, (16384, 16384))
    problem, anew = renumbered(Problem(a, a, c=c), with_addresses(2))
    assert anew.numbers == (1, 0)
    assert problem.c.owners == (0,) * 4
    plan = plan_matmul(Problem(a, a, c=c, pack="tf32"), with_addresses(2))
    assert plan.cluster.numbers[0] == 1
    assert plan.grid.workers == 1
    assert plan.bytes_received == plan.bytes_recut == plan.bytes_added == 0


def test_workers_keep_their_devices():
    """Data on the fast one of two is multiplied there."""
    slow = replace(H200, name="slow", gflops=H200.gflops / 2, memory_bytes=H200.memory_bytes // 2)
    cluster = replace(with_addresses(2), devices=(slow, H200))
    square = MatrixSpec((16384,) * 2, chunks=((4096,) * 4,) * 2, owners=(1,) * 16)
    plan = plan_matmul(Problem(square, square, pack="tf32"), cluster)
    assert plan.grid.workers == 1
    assert plan.cluster.devices == (H200, slow)
    assert plan.cluster.addresses == ("ucxx://host:1", "ucxx://host:0")


def test_the_order_of_k_does_not_depend_on_numbers():
    """So neither do the bits."""
    found = set()
    for names in itertools.permutations(range(3)):
        a = in_rows([names[at] for at in (0, 1, 1, 2, 0, 2) * 4], (2**21 * 3, 2048))
        problem = Problem(a.T, a, pack="tf32", symmetric=True)
        found.add(plan_matmul(problem, with_addresses(3)).layout)
    (layout,) = found
    assert layout.k_order


@pytest.fixture
def slow(monkeypatch):
    """Plans reckon with a link on which copies are worth avoiding."""
    monkeypatch.setattr(cluster_spec, "SHARED_MEMORY", Link("slow", 0.1, 1e-3))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    "owners",
    [
        pytest.param((1, 2, 3, 0) * 2, marks=pytest.mark.slow),
        (2, 0, 3, 1) * 2,
        (2, 0, 3, 1),
    ],
)
def test_rows_stay_where_they_lie(client, owners):
    x, y = integers((72000, 256), 1), integers((256, 256), 2)
    a = scattered(client, x, 72000 // len(owners), owners)
    b = scattered(client, y, 256, owners[:1])
    plan = multimm.plan(a, b)
    assert plan.cluster.numbers == owners[:4]
    assert plan.cluster.addresses[0] == sorted(listed(client))[owners[0]]
    c = multimm.matmul(a, b)
    done, moved = received(client, c)
    assert moved == plan.bytes_received == 3 * y.nbytes
    assert owners_of(c, 4) == held(client, done)
    assert {owner for owner, _ in zip(held(client, done), owners, strict=False)} == {0, 1, 2, 3}
    np.testing.assert_array_equal(done.compute(), x @ y)


@pytest.mark.usefixtures("slow")
def test_elsewhere_it_is_right_as_well(client):
    """On other workers than it was planned for."""
    x, y = integers((72000, 256), 7), integers((256, 256), 8)
    a = scattered(client, x, 9000, (1, 2, 3, 0) * 2)
    product = multimm.matmul(a, da.from_array(y))
    graph = dict(product.dask)
    places = {task.place.numbers for task in graph.values() if hasattr(task, "place")}
    assert places == {(1, 2, 3, 0)}
    np.testing.assert_array_equal(product.compute(scheduler=client), x @ y)


# Of lazy operands it may be known where they will be ------------------------------------


@pytest.mark.usefixtures("slow")
def test_a_lazy_operand_stays_where_the_product_before_has_it_made(client):
    """Q' X of what X W was made into: Dask's own tasks lie between, as in svd_compressed."""
    rng, w = da.random.default_rng(9), integers((256, 16), 10)
    a = rng.integers(-8, 9, (72000, 256), chunks=(9000, 256)).astype("f4")
    x, b = a.compute(scheduler="synchronous"), da.from_array(w)
    y = multimm.matmul(a, b, chunks="operands", blocks=(9000, 8))  # each block of X is used twice
    below = y.dask.layers[y.name].has_made_on(a)
    assert sorted(below) == [0, 0, 1, 1, 2, 2, 3, 3]
    q = y.map_blocks(lambda block: block[::-1], dtype="f4")
    q = q.rechunk((9000, 8)).rechunk((9000, 16))  # nobody knows where that will be
    plan = multimm.plan(q.T, a)
    assert plan.asked[0].b.owners == below
    done, moved = received(client, multimm.matmul(q.T, a))
    assert moved < 9000 * 256 * 4  # less than one of the eight blocks of X
    flipped = (x @ w).reshape(8, 9000, 16)[:, ::-1].reshape(-1, 16)
    exact = flipped.T.astype("f8") @ x
    np.testing.assert_allclose(done.compute(), exact, rtol=1e-5, atol=abs(exact).max() * 1e-5)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    "owners",
    [
        (3, 1, 1, 0, 2, 2, 0, 3),
        pytest.param((0, 0, 1, 1, 2, 2, 3, 3), marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_block_by_block_of_blocks_in_memory_stays_there(client, owners):
    x, w = integers((72000, 256), 9), integers((256, 16), 10)
    a = scattered(client, x, 9000, owners) - da.ones(256, dtype="f4")
    done, moved = received(client, multimm.matmul(a, da.from_array(w)))
    assert moved <= 3 * w.nbytes + 3 * 256 * 4  # W, and the vector
    np.testing.assert_array_equal(done.compute(), (x - 1) @ w)


# A grid may have fewer places than workers ----------------------------------------------


def planned(grid, a, b):
    asked = Asked(Problem(a, b), Options(blocks=24, slabs=48), plan_matmul)
    layout = lay_out(asked.problem, cpus(4), grid, asked.options)
    return MatmulPlan(layout, cpus(4), "float32", "by hand", "", asked)


def tall_and_wide():
    x, y = integers((96, 48), 1), integers((48, 96), 2)
    return x, y, da.from_array(x, chunks=(24, 48)), da.from_array(y, chunks=(48, 24))


@pytest.mark.parametrize("grid", [Grid(1, 1, 1), Grid(2, 1, 1), Grid(1, 2, 1), Grid(3, 1, 1)])
@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (0, 0, 0, 0), (3, 3, 2, 0)])
def test_some_of_the_workers_compute_it_and_fetch_what_is_planned(client, grid, owners):
    x, y, _, b = tall_and_wide()
    a = scattered(client, x, 24, owners)
    spec_a, spec_b = (spec_of(z) for z in (a, b))
    plan = planned(grid, replace(spec_a, owners=owners), spec_b)
    assert plan.layout.operands.in_place == {"a": owners}
    ranks = sorted(listed(client))
    c = by_plan(plan, a, b)
    done, moved = received(client, c)
    assert {ranks.index(at) for at, size in received_bytes(client).items() if size} == set(
        plan.received
    )
    assert moved == plan.bytes_received
    assert held(client, done) == owners_of(c, 4)
    assert set(owners_of(c, 4)) == set(range(grid.workers))
    np.testing.assert_array_equal(done.compute(), x @ y)


@pytest.mark.parametrize("there", [2, 3, 5])
def test_as_many_as_it_needs_do_it_when_others_came_or_went(there):
    x, y, a, b = tall_and_wide()
    plan = planned(Grid(2, 1, 1), *(spec_of(z) for z in (a, b)))
    assert plan.cluster.workers == 4
    with in_threads(there) as cluster, Client(cluster) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was planned for four
        install(client)
        done = client.persist(by_plan(plan, a, b))
        wait(done)
        assert set(held(client, done)) == {0, 1}
        np.testing.assert_array_equal(done.compute(), x @ y)


#: For two of many workers, in `float32`: measured on four.
MEDIUM = MatrixSpec((12288, 12288))


@pytest.mark.parametrize("workers", [3, 4, 6, 8, 24, 64, 1024])
def test_a_small_product_takes_no_longer_on_many_workers(workers):
    two, plan = (
        plan_matmul(Problem(MEDIUM, MEDIUM, pack="float32"), gpus(n)) for n in (2, workers)
    )
    assert plan.grid.workers == 2
    assert plan.seconds == two.seconds
    assert plan.memory_terms == two.memory_terms
    assert plan.received == two.received
    assert plan.bytes_bound == two.bytes_bound
