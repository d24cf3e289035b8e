"""Operands that lie on workers, or will, are used where they lie."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, wait
from paper import cpus

import multimm
from multimm.errors import ShapeError
from multimm.graph.data_location import owners_of
from multimm.planning.spec import MatrixSpec

SIZE, BLOCK = 96, 24
FIXED = {"blocks": BLOCK, "slabs": BLOCK}
LIE = "used where"  # it lies, or they lie: what a plan says of such operands


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


def test_owners_of_another_number_of_workers_are_not_used(client):
    c = multimm.matmul(matrix(1)[1], matrix(2)[1], **FIXED)
    assert owners_of(c, 4)
    assert not owners_of(c, 3)


def test_operands_that_are_still_being_made_lie_nowhere(client):
    from distributed import Event

    _, a = matrix(11)

    def hold(block):
        Event("multimm-owners").wait()
        return block

    a = a.map_blocks(hold, dtype="f4", meta=a._meta).persist()
    assert LIE not in str(multimm.plan(a, a, **FIXED))
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
    assert LIE in str(multimm.plan(a, b, **FIXED))
    assert len(questions) == 1
    workers = multimm.cluster.describe(client)
    assert LIE in str(multimm.plan(a, b, cluster=workers, **FIXED))
    del questions[:]
    multimm.plan(a, b, cluster=cpus(4), **FIXED)  # on paper
    assert questions == []


# Plans on paper --------------------------------------------------------------------------


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
