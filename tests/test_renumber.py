"""Workers are numbered as operands lie on them where that is faster: planned, counted, right."""

from __future__ import annotations

import itertools
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, scattered
from distributed import wait
from small import integers

import multimm
from multimm.cluster.inspect import cluster_spec
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.graph.data_location import owners_of
from multimm.planning.candidates.block_order import as_stored
from multimm.planning.candidates.rank_map import renumbered
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, Link, MatrixSpec

TALL, ROWS = (2**22, 2048), (2**20, 8192)


def gpus(workers, per_node=0):
    addresses = tuple(f"ucxx://host:{rank}" for rank in range(workers))
    paper = ClusterSpec.homogeneous(H200, workers)
    return replace(paper, addresses=addresses, per_node=per_node)


def in_rows(owners, shape):
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=tuple(owners))


def symmetric_of(spec):
    return Problem(spec.T, spec, pack="tf32", symmetric=True)


def times(spec, columns=1024):
    return Problem(spec, MatrixSpec((spec.cols, columns)), pack="tf32")


def product_on(grid, owners=None):
    """A matrix as a product left it on a grid of p_m x p_n, by workers of other numbers."""
    p_m, p_n = grid
    owners = owners or range(p_m * p_n)
    at = tuple(owners[i % p_m * p_n + j % p_n] for i, j in itertools.product(range(8), range(8)))
    return MatrixSpec((32768, 32768), chunks=((4096,) * 8,) * 2, owners=at)


# ------------------------------------------------------------------ the numbers


@pytest.mark.parametrize(
    ("owners", "per_node", "numbers"),
    [
        ((2, 0, 3, 1), 0, (2, 0, 3, 1)),
        ((3, 3, 1, 3), 0, (3, 1, 0, 2)),  # those without blocks come last
        ((3, 0, 1, 2), 2, (3, 2, 0, 1)),  # nodes stay together
        ((2, 2, 2, 2), 2, (2, 3, 0, 1)),
        ((0, 2, 1, 3), 2, ()),
        ((0, 0, 1, 1), 0, ()),
        ((3, 0, 1, 2), 3, ()),  # one node has fewer workers
    ],
)
def test_who_appears_first_is_first(owners, per_node, numbers):
    asked, cluster = times(in_rows(owners, ROWS)), gpus(4, per_node)
    problem, anew = renumbered(asked, cluster)
    assert anew.numbers == numbers
    if not numbers:
        assert problem is asked
        assert anew is cluster
    assert tuple(map(anew.number, problem.a.owners)) == owners
    assert anew.addresses == tuple(cluster.addresses[at] for at in numbers or range(4))
    assert anew.ranks(owners) == problem.a.owners


def test_c_is_numbered_with_the_others():
    """It lies with the same workers, and travels no further than they do."""
    a, c = in_rows((1,) * 4, (16384, 16384)), in_rows((1,) * 4, (16384, 16384))
    cluster = gpus(2)
    problem, anew = renumbered(Problem(a, a, c=c), cluster)
    assert anew.numbers == (1, 0)
    assert problem.c.owners == (0,) * 4
    plan = plan_matmul(Problem(a, a, c=c, pack="tf32"), cluster)
    assert plan.cluster.numbers[0] == 1
    assert plan.grid.workers == 1
    assert plan.bytes_received == plan.bytes_recut == plan.bytes_added == 0


def test_the_larger_operand_comes_first():
    large, small = in_rows((2, 1), ROWS), in_rows((3, 0), (8192, 1024))
    assert renumbered(Problem(large, small), gpus(4))[1].numbers == (2, 1, 3, 0)
    assert renumbered(Problem(small.T, large.T), gpus(4))[1].numbers == (2, 1, 3, 0)


def test_rows_are_gone_through_as_they_are_multiplied():
    c = product_on((2, 4))
    other = MatrixSpec((32768, 32768))
    assert renumbered(Problem(c, other), gpus(8))[1].numbers == ()
    assert renumbered(Problem(other, c), gpus(8))[1].numbers == ()
    assert renumbered(Problem(c.T, other), gpus(8))[1].numbers == (0, 4, 1, 5, 2, 6, 3, 7)


def test_a_worker_that_is_none_of_these_keeps_its_number():
    problem, anew = renumbered(times(in_rows((7, 2, 0, 2), ROWS)), gpus(4))
    assert anew.numbers == (2, 0, 1, 3)
    assert problem.a.owners == (7, 0, 1, 0)


def test_workers_may_be_numbered_time_and_again():
    cluster = gpus(4).reordered((2, 0, 3, 1))
    again = cluster.reordered((3, 0, 1, 2))
    assert again.numbers == (1, 2, 0, 3)
    assert again.addresses == tuple(gpus(4).addresses[at] for at in again.numbers)
    assert again.first(2).numbers == (1, 2)
    assert again.reordered((2, 0, 1, 3)) == gpus(4)


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize("worker", [1, 2, 3])
@pytest.mark.parametrize("options", [Options(), Options(blocks=4096, slabs=4096)])
def test_all_on_one_worker_is_multiplied_there(worker, options):
    def plan_of(owner):
        square = MatrixSpec((16384,) * 2, chunks=((4096,) * 4,) * 2, owners=(owner,) * 16)
        return plan_matmul(Problem(square, square, pack="tf32"), gpus(4), options=options)

    plan, first = plan_of(worker), plan_of(0)
    assert plan.seconds == first.seconds
    assert plan.bytes_received == first.bytes_received
    if options.given:
        return
    assert plan.grid.workers == 1
    assert plan.cluster.addresses[0] == f"ucxx://host:{worker}"
    assert not plan.bytes_received + plan.bytes_recut


def test_a_tall_matrix_stays_with_its_workers():
    plan = plan_matmul(symmetric_of(in_rows((1,) * 32, TALL)), gpus(2))
    assert plan.seconds == plan_matmul(symmetric_of(in_rows((0,) * 32, TALL)), gpus(2)).seconds
    assert not plan.bytes_received + plan.bytes_recut
    plan = plan_matmul(symmetric_of(in_rows((2,) * 16 + (3,) * 16, TALL)), gpus(4))
    assert plan.used.addresses == ("ucxx://host:2", "ucxx://host:3")
    assert plan.bytes_received == 2048 * 2048 * 4  # one sum
    assert not plan.bytes_recut


@pytest.mark.parametrize(
    ("owners", "per_node"),
    [((1, 2, 3, 0) * 8, 0), ((3, 0, 1, 2) * 8, 0), ((2, 0, 3, 1) * 8, 0), ((3, 2, 1, 0) * 8, 2)],
)
def test_blocks_in_turn_stay_wherever_they_begin(owners, per_node):
    plan, first = (
        plan_matmul(times(in_rows(each, ROWS)), gpus(4, per_node))
        for each in (owners, (0, 1, 2, 3) * 8)
    )
    assert plan.cluster.numbers == owners[:4]
    assert plan.layout == first.layout
    assert (plan.seconds, plan.received) == (first.seconds, first.received)
    assert plan.bytes_received < 3.1 * plan.layout.problem.b.nbytes
    assert "numbered in the order in which blocks lie on them" in str(plan)
    assert "numbered" not in str(first)


def test_bands_stay_in_any_order():
    owners = [worker for worker in (2, 0, 3, 1) for _ in range(8)]
    plan, first = (
        plan_matmul(symmetric_of(in_rows(each, TALL)), gpus(4)) for each in (owners, sorted(owners))
    )
    assert plan.cluster.numbers == (2, 0, 3, 1)
    assert plan.layout == first.layout
    assert plan.bytes_received == 3 * 2048 * 2048 * 4
    assert not plan.bytes_recut


def test_a_product_finds_its_grid_again():
    slow = replace(gpus(8), link=LOCAL_TCP)
    other, moved = MatrixSpec((32768, 32768)), (3, 1, 7, 0, 2, 6, 5, 4)
    for sides in ((0, 1), (1, 0)):
        plan, first = (
            plan_matmul(Problem(*(((c, other)[side]) for side in sides)), slow)
            for c in (product_on((2, 4), moved), product_on((2, 4)))
        )
        assert plan.cluster.numbers == moved
        assert plan.layout == first.layout


def test_numbers_that_bring_nothing_stay():
    """Of blocks in no order, and of such as lie where a grid keeps them."""
    owners = np.random.default_rng(0).integers(4, size=32).tolist()
    plan = plan_matmul(times(in_rows(owners, ROWS)), gpus(4))
    other, _ = renumbered(plan.layout.problem, gpus(4))
    assert plan.cluster is gpus(4) or not plan.cluster.numbers
    in_place = plan.layout.problem
    assert as_stored(in_place.a.owners, in_place.rows) == tuple(owners)
    assert other.a.owners != tuple(owners)
    alone = plan_matmul(times(MatrixSpec(ROWS)), gpus(4))
    assert not alone.cluster.numbers


def test_workers_keep_their_devices():
    """Data on the fast one of two is multiplied there."""
    slow = replace(H200, name="slow", gflops=H200.gflops / 2, memory_bytes=H200.memory_bytes // 2)
    cluster = replace(gpus(2), devices=(slow, H200))
    square = MatrixSpec((16384,) * 2, chunks=((4096,) * 4,) * 2, owners=(1,) * 16)
    plan = plan_matmul(Problem(square, square, pack="tf32"), cluster)
    assert plan.grid.workers == 1
    assert plan.cluster.devices == (H200, slow)
    assert plan.cluster.addresses == ("ucxx://host:1", "ucxx://host:0")


def test_numbers_stay_if_the_search_finds_nothing_better():
    """One task alone is reckoned with on any worker, the slow one as well."""
    slow = replace(H200, name="slow", gflops=H200.gflops / 4)
    square = MatrixSpec((8192,) * 2, chunks=((4096,) * 2,) * 2, owners=(1,) * 4)
    problem = Problem(square, square, pack="float32")
    assert plan_matmul(problem, gpus(2)).cluster.numbers == (1, 0)
    assert not plan_matmul(problem, replace(gpus(2), devices=(slow, H200))).cluster.numbers


def test_the_order_of_k_does_not_depend_on_numbers():
    """So neither do the bits."""
    found = set()
    for names in itertools.permutations(range(3)):
        owners = [names[at] for at in (0, 1, 1, 2, 0, 2) * 4]
        plan = plan_matmul(symmetric_of(in_rows(owners, (2**21 * 3, 2048))), gpus(3))
        found.add(plan.layout)
    (layout,) = found
    assert layout.problem.order


# ----------------------------------------------------------------- on workers


client = counting_client(4)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Plans reckon with a link on which copies are worth avoiding."""
    monkeypatch.setattr(cluster_spec, "SHARED_MEMORY", Link("slow", 0.1, 1e-3))


def held(client, array):
    """The one worker of each block, by its place among the workers' addresses."""
    ranks = sorted(listed(client))
    where = {str(key): at for key, at in client.who_has(array).items()}
    lie = (where[str((array.name, *index))] for index in np.ndindex(array.numblocks))
    return tuple(ranks.index(at) for (at,) in lie)


def counted(client, product):
    """The product, computed, and what workers received."""
    reset_received_bytes(client)
    done = product.persist()
    wait(done)
    return done, sum(received_bytes(client).values())


@pytest.mark.parametrize("owners", [(1, 2, 3, 0) * 2, (2, 0, 3, 1) * 2, (2, 0, 3, 1)])
def test_rows_stay_where_they_lie(client, owners):
    x, y = integers((72000, 256), 1), integers((256, 256), 2)
    a = scattered(client, x, 72000 // len(owners), owners)
    b = scattered(client, y, 256, owners[:1])
    plan = multimm.plan(a, b)
    assert plan.cluster.numbers == owners[:4]
    assert plan.cluster.addresses[0] == sorted(listed(client))[owners[0]]
    c = multimm.matmul(a, b)
    done, received = counted(client, c)
    assert received == plan.bytes_received == 3 * y.nbytes
    assert owners_of(c, 4) == held(client, done)
    assert {owner for owner, _ in zip(held(client, done), owners, strict=False)} == {0, 1, 2, 3}
    np.testing.assert_array_equal(done.compute(), x @ y)


def test_a_chain_stays_where_it_lies(client):
    """The operand of the second product is one that was planned with other numbers."""
    x, y, z = integers((72000, 256), 3), integers((256, 256), 4), integers((256, 256), 5)
    a = scattered(client, x, 9000, (1, 2, 3, 0) * 2)
    b, e = (scattered(client, each, 256, (1,)) for each in (y, z))
    c = multimm.matmul(a, b)
    plans = multimm.plan(a, b), multimm.plan(c, e)
    assert all(plan.cluster.numbers == (1, 2, 3, 0) for plan in plans)
    assert all(plan.bytes_received == 3 * y.nbytes for plan in plans)
    done, received = counted(client, multimm.matmul(c, e))
    assert received == 6 * y.nbytes
    np.testing.assert_array_equal(done.compute(), (x @ y) @ z)
    # Of workers that have numbers already, these are meant by them.
    again = multimm.plan(c, e, cluster=plans[0].cluster)
    assert again.layout == plans[1].layout
    assert again.cluster == plans[1].cluster


@pytest.mark.parametrize("owners", [(3,) * 8, (2, 3) * 4, (3, 1, 1, 2, 0, 3, 2, 0)])
def test_of_a_symmetric_product_sums_alone_travel(client, owners):
    x = integers((144000, 64), 6)
    a = scattered(client, x, 18000, owners)
    plan = multimm.plan(a.T, a)
    assert plan.cluster.number(0) == owners[0]
    done, received = counted(client, multimm.matmul(a.T, a))
    assert received == plan.bytes_received <= (len(set(owners)) - 1) * 64 * 64 * 4
    np.testing.assert_array_equal(done.compute(), x.T @ x)


def test_elsewhere_it_is_right_as_well(client):
    """On other workers than it was planned for."""
    x, y = integers((72000, 256), 7), integers((256, 256), 8)
    a = scattered(client, x, 9000, (1, 2, 3, 0) * 2)
    product = multimm.matmul(a, da.from_array(y))
    graph = dict(product.dask)
    places = {task.place.numbers for task in graph.values() if hasattr(task, "place")}
    assert places == {(1, 2, 3, 0)}
    np.testing.assert_array_equal(product.compute(scheduler=client), x @ y)


def test_numbers_count_on_as_many_workers_only():
    cpus = ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 10**9, 50.0, 20.0), 3, LOCAL_TCP)
    assert cpus.reordered((2, 0, 1)).first(2).numbers == (2, 0)
