"""Copies of operand blocks, with an active memory manager of Dask's that looks all the time."""

from __future__ import annotations

from types import SimpleNamespace

import dask
import dask.array as da
import pytest
from clusters import in_threads
from distributed import Client, wait
from distributed.active_memory_manager import ActiveMemoryManagerPolicy
from labels import block_tasks
from repeated import others_slow

import multimm
from multimm.cluster.plugins.transfer_counter import (
    TransferCounter,
    received_bytes,
    reset_received_bytes,
)
from multimm.graph.scheduler.install import install
from multimm.graph.scheduler.replicas import SpareAwaited

SIZE, BLOCK = 256, 32


class Users(ActiveMemoryManagerPolicy):
    """A policy that a user has added."""

    def run(self):
        yield from ()


class State(SimpleNamespace):
    """Of a task on a scheduler, as far as policies look at it."""

    __hash__ = object.__hash__


@pytest.fixture(scope="module")
def cluster():
    often = {"distributed.scheduler.active-memory-manager.interval": "2ms"}
    with dask.config.set(often), in_threads(memory_limit=0) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        install(client, TransferCounter())
        yield client


def operands(seed):
    rng = da.random.default_rng(seed)
    return [rng.standard_normal((SIZE, SIZE), chunks=BLOCK, dtype="float32") for _ in "ab"]


@pytest.mark.parametrize("persisted", others_slow([False, True], False))
def test_a_copy_that_a_product_waits_for_is_not_dropped_and_fetched_again(client, persisted):
    for seed in range(1 if persisted else 3):
        a, b = operands(10 * persisted + seed)
        if persisted:
            a, b = dask.persist(a, b)
            wait([a, b])
        plan = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK)
        assert plan.bytes_received
        reset_received_bytes(client)
        c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK).persist()
        wait(c)
        assert sorted(received_bytes(client).values()) == sorted(plan.received.values())


def test_other_copies_are_dropped_as_ever():
    """By a policy that sees blocks on three workers, and what waits for them."""
    c = multimm.matmul(*operands(20), blocks=BLOCK, slabs=BLOCK)
    task = next(iter(block_tasks(c).values()))
    ours = State(run_spec=task, processing_on="x")
    other = State(run_spec=None, processing_on="y")
    blocks = [
        State(who_has=set("xyz"), waiters=waiters) for waiters in ([], [other], [other, ours])
    ]
    policy = SpareAwaited()
    scheduler = SimpleNamespace(replicated_tasks=blocks)
    policy.manager = SimpleNamespace(scheduler=scheduler, pending={})
    dropped = [suggestion.ts for suggestion in policy.run()]
    assert [dropped.count(block) for block in blocks] == [2, 2, 0]


@pytest.mark.slow
def test_a_user_s_own_policies_stay(client, cluster):
    manager, own = cluster.scheduler.extensions["amm"], Users()
    manager.add_policy(own)
    for seed in (30, 31):
        multimm.matmul(*operands(seed), blocks=BLOCK, slabs=BLOCK).compute()
    assert own in manager.policies
    assert [type(policy) for policy in manager.policies].count(SpareAwaited) == 1
    assert len(manager.policies) == 2
