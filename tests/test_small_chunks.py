"""Products in chunks that are small, or lie anywhere: blocks stay, and the search is short."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from paper import cpus, gpus

from multimm.planning import choice
from multimm.planning.candidates.in_place import in_place
from multimm.planning.choice import plan_matmul
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec

UNEVEN = (0, 1, 0, 0, 1, 0, 1, 1)


def projection(rows=316, k=11552):
    """Eight blocks of rows, lower than blocks are cut to, by a narrow matrix; C in their rows."""
    a = MatrixSpec((8 * rows, k), chunks=((rows,) * 8, (k,)), owners=UNEVEN)
    return Problem(a, MatrixSpec((k, 64), owners=(1,)), chunks=((rows,) * 8, (64,)))


#: Rows of chunks of 500 MB.
ON_GPUS = 10_000


@pytest.mark.parametrize(("on", "rows"), [(cpus(2), 316), (gpus(2), ON_GPUS)], ids=["cpu", "gpu"])
def test_a_chunk_of_c_is_one_task_where_its_rows_lie(on, rows):
    plan = plan_matmul(projection(rows), on)
    assert plan.tasks == 8
    assert not plan.layout.result.hands_out
    assert not plan.bytes_recut
    assert plan.bytes_moved == 11552 * 64 * 4


def test_a_chunk_of_c_is_no_task_where_it_is_part_of_one():
    """The last chunk of C ends within a chunk of A."""
    given = projection(ON_GPUS)
    wanted = (ON_GPUS,) * 7 + (ON_GPUS // 2,) * 2
    plan = plan_matmul(replace(given, chunks=(wanted, (64,))), gpus(2))
    assert plan.layout.result.chunks == (wanted, (64,))
    assert plan.layout.result.hands_out or plan.bytes_recut


@pytest.fixture
def searched(monkeypatch):
    """How often plans were searched for."""
    found = []

    def candidates(*args):
        found.append(args)
        return original(*args)

    original = choice.candidates
    monkeypatch.setattr(choice, "candidates", candidates)
    for cached in (plan_matmul, choice._best_anywhere):
        cached.cache_clear()
    yield found
    for cached in (plan_matmul, choice._best_anywhere):
        cached.cache_clear()


def test_nothing_is_searched_for_where_little_can_be_gained(searched):
    plan = plan_matmul(projection(), cpus(2))
    assert searched == []
    assert plan.reason
    assert plan_matmul(projection(ON_GPUS), gpus(2)).tasks == 8
    assert searched == []


def test_a_symmetric_product_is_cut_as_usual_before_a_search(searched, monkeypatch):
    """The covariance of a field that comes in chunks of time."""
    a = MatrixSpec((3072, 30_752), chunks=((384,) * 8, (30_752,)), owners=(0, 1, 1, 0, 1, 0, 0, 1))
    chunks = ((15_376,) * 2,) * 2
    covariance = Problem(a.T, a, symmetric=True, same="turned", pack="float32", chunks=chunks)
    found = plan_matmul(covariance, gpus(2))
    assert found.layout.mirrors
    assert searched == []
    monkeypatch.setitem(choice.SEARCH_S, "gpu", 0.0)
    monkeypatch.setattr(choice, "PROBED_S", 0.0)
    plan_matmul.cache_clear()
    assert found.seconds == plan_matmul(covariance, gpus(2)).seconds
    assert len(searched) == 1


def test_parts_of_k_of_a_tall_array_need_no_search(searched, monkeypatch):
    x = MatrixSpec((65_536, 128), chunks=((8192,) * 8, (128,)), owners=UNEVEN)
    tall = Problem(x.T, x, symmetric=True, same="turned")
    found = plan_matmul(tall, cpus(2))
    assert found.layout.k_parts
    assert searched == []
    monkeypatch.setitem(choice.SEARCH_S, "cpu", 0.0)
    plan_matmul.cache_clear()
    assert found.seconds == plan_matmul(tall, cpus(2)).seconds
    assert len(searched) == 1


def test_a_search_may_gain_something(searched):
    large = projection(20_000)
    plan = plan_matmul(large, cpus(2, memory=10**11))
    assert not searched  # its products take ten seconds, and no plan has fewer
    at_random = (0, 1, 0, 0, 1, 0, 1, 1, 0)
    square = MatrixSpec((3000, 3000), chunks=((1000,) * 3,) * 2, owners=at_random)
    assert plan_matmul(Problem(square, square), cpus(2)).tasks
    assert len(searched) == 1
    assert plan.tasks


def test_gpus_search_where_other_blocks_look_better_alone(searched):
    """The overlap of two ensembles in chunks along members and time, and a covariance."""
    owners = (0, 1, 0, 0, 1, 0, 1, 0)
    a = MatrixSpec((760, 1_214_976), chunks=((380,) * 2, (303_744,) * 4), owners=owners)
    b = replace(a, owners=(1, 0, 1, 1, 1, 0, 1, 0))
    overlap = Problem(a, b.T, pack="float32", chunks=((380,) * 2,) * 2)
    plan = plan_matmul(overlap, gpus(2))
    assert searched == []
    assert plan.layout.k_parts  # which a first look does not know
    x = MatrixSpec((3072, 30_752), chunks=((384,) * 8, (30_752,)), owners=(0, 1, 1, 0, 1, 0, 0, 1))
    y = MatrixSpec((3072, 30_752), chunks=((384,) * 8, (30_752,)), owners=(0, 1) * 4)
    plans = [plan_matmul(Problem(x.T, y, pack="float32"), gpus(2))]
    assert len(searched) == 1
    elsewhere = replace(y, owners=(0, 0, 1, 1, 1, 0, 0, 1))
    plans.append(plan_matmul(Problem(x.T, elsewhere, pack="float32"), gpus(2)))
    plan_matmul(Problem(replace(x, owners=(1, 0) * 4).T, elsewhere, pack="float32"), gpus(2))
    assert len(searched) == 1  # the same shapes, also where the other worker has the first block
    assert plans[0].layout.problem.b.owners != plans[1].layout.problem.b.owners
    assert plans[0].seconds == pytest.approx(plans[1].seconds, rel=0.1)


def test_what_is_little_is_planned_for_fewer_workers_without_a_search(searched):
    """One worker of seven has its tasks sooner than all theirs."""
    owners = tuple(block * 7 // 30 for block in range(30))
    wide = MatrixSpec((300, 150_000), chunks=((300,), (5000,) * 30), owners=owners)
    plan = plan_matmul(Problem(MatrixSpec((300, 300)), wide), gpus(7))
    assert plan.layout.grid.workers == 1
    assert searched == []


def test_rows_that_two_workers_have_as_much_of_go_to_both():
    """A of 2 x 2 chunks, each row on two workers: no worker has all of C."""
    a = MatrixSpec((30_720, 3840), chunks=((15_360,) * 2, (1920,) * 2), owners=(1, 0, 1, 0))
    b = MatrixSpec((3840, 960), chunks=((1920,) * 2, (480,) * 2), owners=(0, 1, 0, 1))
    plan = plan_matmul(Problem(a, b, pack="float32", chunks=((15_360,) * 2, (480,) * 2)), gpus(2))
    assert plan.strategy == "owners compute"
    rows = plan.layout.partial_products.at[::2]
    assert sorted(rows) == [0, 1]


def test_what_would_take_too_long_if_nothing_moved_is_not_looked_at():
    sides = (30_720, 30_720), "float32", 4, ((15_360,) * 2, (15_360,) * 2)
    a, b = (MatrixSpec(*sides, owners=owners) for owners in ((0, 1, 1, 0), (1, 1, 0, 1)))
    problem = Problem(a, b, pack="float32")
    everything = in_place(problem, gpus(2), inf)
    limit = sorted(rank.seconds for rank in everything.values())[len(everything) // 2]
    some = in_place(problem, gpus(2), limit)
    assert some.items() >= {x for x in everything.items() if x[1].seconds <= limit}
    assert some.items() < everything.items()
    assert in_place(problem, gpus(2), 0) == {}
