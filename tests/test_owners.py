"""Operands that lie on workers, or will, are used where they lie."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, wait
from hypothesis import given, settings
from hypothesis import strategies as st

import multimm
from multimm.errors import ShapeError
from multimm.graph.data_location import owners_of
from multimm.planning.choice import NEARLY, plan_matmul
from multimm.planning.cost import communication, counted_transfers, memory
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import rank_of
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import Grid
from multimm.planning.tiling.rechunk import cuts, cuts_of, offsets

SIZE, BLOCK = 96, 12
FIXED = {"blocks": BLOCK, "slabs": BLOCK}


def cpus(workers):
    return ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 10**9, 50.0, 20.0), workers, LOCAL_TCP)


def matrix(seed):
    x = np.random.default_rng(seed).integers(-4, 5, (SIZE, SIZE)).astype("float32")
    return x, da.from_array(x, chunks=BLOCK, name=f"owned-{seed}", inline_array=True)


@pytest.fixture(scope="module")
def client():
    with in_threads() as cluster, Client(cluster) as client:
        yield client


def held(client, array):
    """The one worker of each block, by its place among the workers' addresses."""
    ranks = sorted(client.cluster.scheduler.workers)
    where = {str(key): at for key, at in client.who_has(array).items()}
    return tuple(
        ranks.index(min(where[str((array.name, *index))])) for index in np.ndindex(array.numblocks)
    )


@pytest.mark.parametrize("p_k", [1, 2])
@pytest.mark.parametrize("gram", [False, True])
def test_a_lazy_product_knows_where_its_blocks_will_be(client, p_k, gram):
    (x, a), (y, b) = matrix(1), matrix(2)
    c = multimm.matmul(a, a.T if gram else b, **FIXED, p_k=p_k)
    owners = owners_of(c, 4)
    done = c.persist()
    wait(done)
    assert owners == held(client, done)
    assert len(set(owners)) == 4
    np.testing.assert_array_equal(done.compute(), x @ (x.T if gram else y))


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


def test_owners_of_another_number_of_workers_are_not_used(client):
    c = multimm.matmul(matrix(1)[1], matrix(2)[1], **FIXED)
    assert owners_of(c, 4)
    assert not owners_of(c, 3)


@pytest.mark.parametrize("side", ["a", "b", "both"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_of_a_product_uses_it_where_it_lies(client, side, turned):
    (x, a), (y, b), (z, e) = matrix(3), matrix(4), matrix(5)
    c, right = multimm.matmul(a, b, **FIXED), x @ y
    inner, expected = (c.T, right.T) if turned else (c, right)
    operands = {"a": (inner, e), "b": (e, inner), "both": (inner, inner)}[side]
    plan = multimm.plan(*operands, **FIXED)
    assert set(plan.layout.operands.lying) == ({"a", "b"} if side == "both" else {side})
    assert ("used where they lie" if side == "both" else "used where it lies") in str(plan)
    assert not plan.bytes_recut
    d = multimm.matmul(*operands, **FIXED)
    for index in np.ndindex(SIZE // BLOCK, SIZE // BLOCK):
        role = "a" if side == "both" else side
        at = index[::-1] if turned else index
        block, slab = index if role == "a" else index[::-1]
        home = plan.grid.rank(plan.layout.tiles.home(role, 0, block, slab))
        assert plan.cluster.number(home) == owners_of(c, 4)[at[0] * (SIZE // BLOCK) + at[1]]
    other = z if side != "both" else expected
    first, second = (expected, other) if side != "b" else (other, expected)
    np.testing.assert_array_equal(d.compute(), first @ second)


def test_what_is_between_two_products_stays_where_the_first_left_it(client):
    (x, a), (y, b), (z, e) = matrix(6), matrix(7), matrix(8)
    c = multimm.matmul(a, b, **FIXED)
    between = c * 2 + 1
    d = multimm.matmul(between, e, **FIXED)
    done = dask.persist(between, d)
    wait(done)
    ranks = sorted(client.cluster.scheduler.workers)
    made = client.cluster.scheduler.tasks
    for owner, index in zip(owners_of(c, 4), np.ndindex(between.numblocks), strict=True):
        assert made[(between.name, *index)].worker_restrictions == {ranks[owner]}
    np.testing.assert_array_equal(done[1].compute(), (2 * (x @ y) + 1) @ z)


def test_the_traffic_of_a_chain_is_as_planned():
    from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes

    def normal(seed):
        return da.random.default_rng(seed).standard_normal((512, 512), chunks=64, dtype="f4")

    fixed = {"blocks": 64, "slabs": 64}
    with multimm.cluster.start(workers=4, memory_limit="1GB") as client:
        a, b, e = (normal(seed) for seed in range(3))
        # A worker that knows of no further task for a block drops its copy. Tasks are shorter than
        # messages here, so on a busy machine a block may come twice; not time and again.
        for _ in range(3):
            c = multimm.matmul(a, b, **fixed)
            plans = multimm.plan(a, b, **fixed), multimm.plan(c, e, **fixed)
            reset_received_bytes(client)
            d = multimm.matmul(c, e, **fixed).persist()
            wait(d)
            moved = sum(received_bytes(client).values())
            if moved <= 1.05 * sum(plan.bytes_received for plan in plans):
                break
            del d
        else:
            pytest.fail(f"{moved} bytes moved, three times more than planned")
        # The intermediate moves no more than any operand does.
        assert plans[1].bytes_received == plans[1].bytes_bound


def test_persisted_operands_are_used_where_they_lie(client):
    (x, a), (y, b) = matrix(9), matrix(10)
    a = a.map_blocks(np.negative, dtype="f4").persist()
    wait(a)
    plan = multimm.plan(a, b, **FIXED)
    assert tuple(map(plan.cluster.number, plan.layout.operands.lying["a"])) == held(client, a)
    assert sum(plan.received.values()) == plan.bytes_received
    np.testing.assert_array_equal(multimm.matmul(a, b, **FIXED).compute(), -x @ y)


def test_lazy_operands_are_awaited_and_others_are_not(client):
    lazy, kept = matrix(17)[1], matrix(18)[1].map_blocks(np.negative, dtype="f4").persist()
    wait(kept)
    lies = multimm.matmul(kept, kept, **FIXED)

    def awaited(a, b):
        return multimm.plan(a, b, **FIXED).layout.problem.awaited

    assert awaited(lazy, kept)
    assert awaited(kept, lazy + 1)
    assert not awaited(kept, kept)
    assert not awaited(kept, lies)
    assert not awaited(MatrixSpec((SIZE, SIZE)), kept)


def test_operands_that_are_still_being_made_lie_nowhere(client):
    from distributed import Event

    _, a = matrix(11)

    def hold(block):
        Event("multimm-owners").wait()
        return block

    a = a.map_blocks(hold, dtype="f4", meta=a._meta).persist()
    assert not multimm.plan(a, a, **FIXED).layout.operands.lying
    Event("multimm-owners", client=client).set()


def test_the_scheduler_is_not_asked_about_lazy_operands(client, monkeypatch):
    async def refuse(*args, **kwargs):
        raise AssertionError("asked")

    monkeypatch.setattr(client.scheduler, "who_has", refuse, raising=False)
    a, b = matrix(12)[1], matrix(13)[1]
    multimm.matmul(multimm.matmul(a, b, **FIXED), b + 1, **FIXED)
    kept = b.persist()
    with pytest.raises(AssertionError, match="asked"):
        multimm.matmul(kept, kept, **FIXED)


def test_the_scheduler_is_asked_once(client, monkeypatch):
    """For its workers and for the blocks of both operands: each question takes a millisecond."""
    a, b = (matrix(seed)[1].map_blocks(np.negative, dtype="f4").persist() for seed in (14, 15))
    wait([a, b])
    multimm.plan(a, b, **FIXED)  # workers that are new are asked, too
    questions, sync = [], client.sync
    monkeypatch.setattr(client, "sync", lambda *call: questions.append(call) or sync(*call))
    assert multimm.plan(a, b, **FIXED).layout.operands.lying.keys() == {"a", "b"}
    assert len(questions) == 1
    workers = multimm.cluster.describe(client)
    assert multimm.plan(a, b, cluster=workers, **FIXED).layout.operands.lying.keys() == {"a", "b"}
    del questions[:]
    multimm.plan(a, b, cluster=cpus(4), **FIXED)  # on paper
    assert questions == []


# Plans on paper --------------------------------------------------------------------------


def chunks_of(size):
    """Sizes that sum up to `size`."""
    cut = st.sets(st.integers(1, size - 1), max_size=4)
    return cut.map(lambda at: tuple(np.diff([0, *sorted(at), size]).tolist()))


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


def test_bytes_and_memory_are_counted_from_the_owners():
    a = owned((1, 1, 0, 1), ((10, 10), (10, 10)))
    problem = Problem(a, MatrixSpec((20, 20)))
    layout = plan_matmul(problem, cpus(2), options=Options(blocks=10, slabs=10)).layout
    assert layout.grid == (1, 2, 1)
    # Both workers use all of A, each block of which lies on one; B's columns are at home.
    assert counted_transfers.received(layout, 2).total() == 4 * 100 * 4
    assert memory.held(layout, cpus(2))[1]["A at home"] == 3 * 100 * 4


def test_the_plan_prefers_blocks_that_lie_right_to_others():
    n, edge = 131072, 16384
    cluster = ClusterSpec.homogeneous(H200, 8)
    first = plan_matmul(Problem(MatrixSpec((n, n)), MatrixSpec((n, n))), cluster)
    layout = first.layout
    chunks = (layout.m_blocks, layout.n_blocks)
    c = MatrixSpec((n, n), chunks=chunks, owners=layout.result_owners(8))
    blocks = ((edge,) * 8,) * 2
    for problem in (
        Problem(c, MatrixSpec((n, n), chunks=blocks)),
        Problem(MatrixSpec((n, n), chunks=blocks), c),
    ):
        plan = plan_matmul(problem, cluster)
        assert plan.layout.operands.lying
        assert not plan.bytes_recut
        assert plan.bytes_received <= 1.05 * plan.bytes_bound


def laid_out(layout, role):
    """An operand in the blocks of a layout, where the layout keeps them."""
    edges = layout.m_blocks if role == "a" else layout.n_blocks
    at = [(block, slab) for block in range(len(edges)) for slab in range(len(layout.slabs))]
    if role == "b":
        at.sort(key=lambda pair: pair[::-1])
    owners = tuple(layout.grid.rank(layout.tiles.home(role, 0, *pair)) for pair in at)
    return owned(owners, layout.operand_chunks(role))


@pytest.mark.parametrize("pack", ["", "float32"])
@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(65536,) * 3, (131072,) * 3, (8192, 8192, 2**20), (32768, 4096, 16384), (16384, 16384, 2**18)],
)
def test_operands_that_lie_as_planned_are_multiplied_as_planned(workers, m, n, k, pack):
    """Or faster: nothing has to move first, and memory holds them once."""
    cluster = ClusterSpec.homogeneous(H200, workers)
    first = plan_matmul(Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), pack=pack), cluster)
    a, b = (laid_out(first.layout, role) for role in "ab")
    plan = plan_matmul(Problem(a, b, pack=pack), cluster)
    assert plan.seconds <= 1.003 * first.seconds
    assert not plan.bytes_recut
    # Where they lie is known, so a task may multiply several slabs, and have them in use.
    plan = replace(plan, layout=replace(plan.layout, slabs_per_task=first.layout.slabs_per_task))
    assert plan.grid == first.grid
    assert set(plan.layout.operands.lying) == {"a", "b"}
    assert not plan.layout.operands.elsewhere
    assert plan.memory_terms == first.memory_terms
    assert plan.spill_terms == first.spill_terms


@pytest.mark.parametrize(
    ("workers", "m", "n", "k", "pack"),
    [(4, 16384, 16384, 2**18, "float32"), (16, 16384, 16384, 2**18, ""),
     (8, 65536, 16384, 65536, "float32")],
)  # fmt: skip
def test_operands_cut_as_planned_are_multiplied_as_fast(workers, m, n, k, pack):
    """Also where the arrangement they are cut for is none of the best with usual blocks."""
    cluster = ClusterSpec.homogeneous(H200, workers)
    first = plan_matmul(Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), pack=pack), cluster)
    a, b = (
        MatrixSpec(shape, chunks=first.layout.operand_chunks(role))
        for shape, role in (((m, k), "a"), ((k, n), "b"))
    )
    assert plan_matmul(Problem(a, b, pack=pack), cluster).seconds <= NEARLY * first.seconds


def test_one_block_that_lies_elsewhere_is_counted():
    cluster = cpus(2)
    options = Options(blocks=10, slabs=10)
    problem = Problem(MatrixSpec((40, 40)), MatrixSpec((40, 40)))
    first = plan_matmul(problem, cluster, options=options)
    staying = "b" if first.grid.p_m == 1 else "a"  # all of it is used where the plan keeps it
    a, b = (laid_out(first.layout, role) for role in "ab")
    moved = a if staying == "a" else b
    moved = owned((1 - moved.owners[0], *moved.owners[1:]), moved.chunks)
    a, b = (moved, b) if staying == "a" else (a, moved)
    layout = replace(first.layout, problem=Problem(a, b))
    assert layout.operands.elsewhere == (staying,)
    assert first.layout.operands.arrives(staying) is False
    assert layout.operands.arrives(staying)
    before, after = (communication.moved(x, 2) for x in (first.layout, layout))
    assert after.total == before.total + 10 * 10 * 4
    assert after.busiest == before.total / 2 + 10 * 10 * 4  # all to one


@settings(max_examples=100, deadline=None)
@given(st.data(), st.tuples(*[st.integers(1, 3)] * 3), st.sampled_from([(), (1,), (3,)]))
def test_all_that_travels_is_counted(data, grid, batch):
    """Block by block: what products need and their worker does not keep, and p_k - 1 sums."""
    grid, m, n, k = Grid(*grid), (2, 3, 2), (4, 1), (1, 2, 2, 5, 3)
    stack = tuple((1,) * size for size in batch)
    stack_b = stack if data.draw(st.booleans()) else tuple((1,) for _ in batch)
    owners = st.integers(0, grid.workers - 1)
    chunks = {"a": (*stack, m, k), "b": (*stack_b, k, n)}
    lie = {x: np.array(data.draw(st.lists(owners, min_size=45, max_size=45))) for x in "ab"}
    lie = {x: own[: np.prod([*map(len, chunks[x])])] for x, own in lie.items()}
    a, b = (
        MatrixSpec(tuple(map(sum, chunks[x])), chunks=chunks[x], owners=tuple(map(int, lie[x])))
        for x in "ab"
    )
    layout = Schedule(Problem(a, b), grid, stack, m, n, k, band=9)
    lie = {x: own.reshape([*map(len, chunks[x])]) for x, own in lie.items()}
    needs, sums = set(), 0
    for flat, i, j in itertools.product(range(*batch or (1,)), range(len(m)), range(len(n))):
        at_b = flat if stack_b == stack else 0
        for s, size in enumerate(k):
            rank = grid.rank(layout.owner(layout.row(flat, i), j, layout.part_of[s]))
            for where, place, count in (
                (lie["a"], (*(flat,) * len(batch), i, s), m[i]),
                (lie["b"], (*(at_b,) * len(batch), s, j), n[j]),
            ):
                if where[place] != rank:
                    needs.add((id(where), place, rank, 4 * count * size))
        sums += (layout.parts - 1) * 4 * m[i] * n[j]
    expected = Counter(dict.fromkeys(range(grid.workers), 0))
    for *_, rank, size in needs:
        expected[rank] += size
    found = counted_transfers.received(layout, grid.workers)
    assert sum(found.values()) == sum(expected.values()) + sums
    assert all(found[rank] >= size for rank, size in expected.items())
    assert layout.parts > 1 or +found == +expected


def test_plans_are_ranked_by_the_seconds_that_they_predict():
    """Where most workers have nothing to do, the others receive more than an even share."""
    cluster = ClusterSpec.homogeneous(H200, 16)
    k = (2**18,) * 4
    a = owned((15,) * 12, ((2731, 2731, 2730), k))
    b = owned((0,) * 12, (k, (2731, 2731, 2730)))
    plan = plan_matmul(Problem(a, b, pack="float32"), cluster)
    layout, _ = lay_out(plan.layout.problem, cluster, Grid(1, 1, 16), Options(), Cut(given=True))
    assert layout.operands.elsewhere == ("a", "b")
    for each, off in ((layout, 1e-6), (plan.layout, 0.01)):  # parts of k receive an even share
        rank = rank_of(each, cluster, memory.held(each, cluster))
        assert rank.seconds == pytest.approx(replace(plan, layout=each).seconds, rel=off)
    assert plan.seconds < replace(plan, layout=layout).seconds


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(chunks_of(12), chunks_of(12)), min_size=1, max_size=3))
def test_what_is_cut_and_joined_is_counted(axes):
    before, after = zip(*axes, strict=True)
    whole = [[slice(0, size) for size in blocks] for blocks in before]
    pieces = cut = joined = 0
    for block in itertools.product(*map(offsets, after)):
        found = cuts_of(before, block)
        uncut = [all(w[i] == s for w, i, s in zip(whole, at, part, strict=True))
                 for at, part, _ in found]  # fmt: skip
        pieces += len(found) * (len(found) > 1 or not uncut[0])
        cut += uncut.count(False)
        joined += len(found) > 1 or not uncut[0]
    assert cuts(before, after) == (pieces, cut, joined)


def test_cutting_an_operand_into_other_blocks_is_counted():
    a = MatrixSpec((40, 40), chunks=((40,), (7,) * 5 + (5,)))
    b = MatrixSpec((40, 40), chunks=((20, 20), (10,) * 4))
    layout = plan_matmul(Problem(a, b), cpus(2), options=Options(blocks=10, slabs=20)).layout
    # 4 x 7 pieces of A, for its columns are cut at 7, 14, 20, 21, 28, 35, 40; 4 x 2 blocks.
    # Half of what is elsewhere comes in bundles, one to a block.
    assert layout.operands.recut == (a.nbytes / 2, 2 * 4 * 2, 4 * 2, 4 * 7 * 1.5, a.nbytes * 1.5)
    alone = replace(layout, grid=Grid(1, 1, 1))
    assert alone.operands.recut == (0, 4 * 2, 0, 4 * 7, a.nbytes)  # cut as they are joined
    readable = Problem(a, b, rereadable=(True, False))
    layout = plan_matmul(readable, cpus(2), options=Options(blocks=10, slabs=20)).layout
    assert layout.operands.recut == (0, 0, 0, 0, 0)
