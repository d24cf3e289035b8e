"""What an open cluster does to the garbage collector of the process: little, and for a time."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import dask
import pytest

import multimm.cluster as mc
from multimm.cluster.plugins import gc_policy
from multimm.cluster.plugins.gc_policy import MESSAGES, MESSAGES_KEPT, SELDOM, SPARED

GIB = 2**30


class Client:
    """Something that may be dropped."""


@pytest.fixture(autouse=True)
def as_found(monkeypatch):
    """No cluster of another test's is open, and what is set here does not last."""
    monkeypatch.setattr(gc_policy, "_open", set())
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("set_to", "kept"), [(1000, MESSAGES), (7, 7)])
def test_few_messages_are_kept_or_what_the_user_has_set(set_to, kept):
    with dask.config.set({MESSAGES_KEPT: set_to}):
        with gc_policy.fewer_messages():
            assert dask.config.get(MESSAGES_KEPT) == kept
        assert dask.config.get(MESSAGES_KEPT) == set_to


def test_a_cluster_leaves_the_process_as_it_found_it():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, lost = cycle, weakref.ref(cycle)
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    with mc.start(workers=1, memory_limit=GIB) as client:
        assert gc.get_threshold() == (SELDOM * usual[0], *usual[1:])
        assert gc.get_freeze_count() == frozen
        streams = client.cluster.scheduler.stream_comms.values()
        assert {stream.recent_message_log.maxlen for stream in streams} == {MESSAGES}
        del cycle  # alive when the cluster was started, and garbage since
        gc.collect()
        assert lost() is None
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == frozen


FROZEN_BY_THE_USER = """
import gc

from distributed import LocalCluster

import multimm.cluster as mc

if __name__ == "__main__":
    gc.freeze()
    frozen, counts = gc.get_freeze_count(), []
    settings = {"processes": False, "protocol": "tcp", "memory_limit": 2**30}
    with LocalCluster(n_workers=2, dashboard_address=None, **settings) as cluster:
        with mc.connect(cluster.scheduler_address, overlap=True):
            counts.append(gc.get_freeze_count())
    counts.append(gc.get_freeze_count())
    # Objects that are no longer used may go, but none comes, and most stay.
    assert all(0.9 * frozen < count <= frozen for count in counts), (frozen, counts)
"""


def test_what_the_user_has_frozen_stays_frozen_and_nothing_else_is(tmp_path):
    script = tmp_path / "frozen.py"
    script.write_text(FROZEN_BY_THE_USER)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_thresholds_come_back_where_the_cluster_is_closed_and_not_the_client():
    usual = gc.get_threshold()
    with mc.start(workers=1, memory_limit=GIB) as client:
        assert gc.get_threshold() != usual
        client.cluster.close()
        assert gc.get_threshold() == usual


def test_thresholds_come_back_with_the_last_of_several_clusters():
    usual, clients = gc.get_threshold(), [Client(), Client()]
    for client in clients:
        gc_policy.spare_products(client)
        assert gc.get_threshold()[0] == SELDOM * usual[0], "never raised twice"
    gc_policy.as_usual(clients[0])
    assert gc.get_threshold()[0] == SELDOM * usual[0]
    for client in (clients[0], *clients):  # whoever is closed again
        gc_policy.as_usual(client)
    assert gc.get_threshold() == usual


def test_a_cluster_that_is_dropped_counts_as_closed():
    usual, client = gc.get_threshold(), Client()
    gc_policy.spare_products(client)
    assert gc.get_threshold() != usual
    del client
    gc.collect()
    assert gc.get_threshold() == usual


def test_thresholds_that_the_user_sets_meanwhile_stay():
    client = Client()
    gc_policy.spare_products(client)
    gc.set_threshold(123, 4, 5)
    gc_policy.as_usual(client)
    assert gc.get_threshold() == (123, 4, 5)


def test_the_collector_is_left_alone_where_the_user_says_so():
    usual, client = gc.get_threshold(), Client()
    with dask.config.set({SPARED: False}):
        gc_policy.spare_products(client)
    assert gc.get_threshold() == usual
    gc_policy.as_usual(client)
    assert gc.get_threshold() == usual
