"""When the process that the scheduler runs in collects garbage in full."""

from __future__ import annotations

import gc
import time
import weakref
from types import SimpleNamespace

import dask
import pytest
from clusters import soon

import multimm.cluster as mc
from multimm.cluster import garbage
from multimm.cluster.garbage import MESSAGES, MESSAGES_KEPT, SELDOM, Idle

GIB = 2**30


class Cycle:
    """Garbage as soon as nobody else refers to it."""

    def __init__(self):
        self.itself = self


def old_garbage():
    """Garbage that full collections alone find, and enough that is new for one to be made."""
    cycle = Cycle()
    gc.collect()
    found = weakref.ref(cycle)
    del cycle
    return found, [[] for _ in range(garbage.LEAST * SELDOM * 1000)]


@pytest.fixture
def fulls(monkeypatch):
    """Full collections that were asked for, with a busy scheduler to look at and its count."""
    asked = []
    monkeypatch.setattr(garbage.gc, "collect", lambda: asked.append(None))
    monkeypatch.setattr(garbage.gc, "get_count", lambda: (5, *asked_for.count))
    asked_for = SimpleNamespace(asked=asked, count=(garbage.LEAST, 0))
    return asked_for


def test_two_idle_looks_in_a_row_collect(fulls):
    states = SimpleNamespace(processing={}), SimpleNamespace(processing={})
    look = Idle(SimpleNamespace(workers=dict(enumerate(states))))
    for busy, collected in ((True, 0), (False, 0), (True, 0), (False, 0), (False, 1), (False, 2)):
        states[1].processing = {"a task": None} if busy else {}
        look()
        assert len(fulls.asked) == collected


@pytest.mark.parametrize(("count", "collects"), [((2, 0), False), ((3, 0), True), ((0, 1), True)])
def test_where_little_is_new_nothing_is_collected(fulls, count, collects):
    fulls.count = count
    look = Idle(SimpleNamespace(workers={}))
    for _ in range(5):
        look()
    assert bool(fulls.asked) is collects


@pytest.mark.parametrize(("set_to", "kept"), [(1000, MESSAGES), (7, 7)])
def test_few_messages_are_kept_or_what_the_user_has_set(set_to, kept):
    with dask.config.set({MESSAGES_KEPT: set_to}):
        with garbage.fewer_messages():
            assert dask.config.get(MESSAGES_KEPT) == kept
        assert dask.config.get(MESSAGES_KEPT) == set_to


def test_a_cluster_of_its_own_collects_when_nothing_is_computed():
    usual = gc.get_threshold()
    with mc.start(workers=1, memory_limit=GIB) as client:
        assert gc.get_threshold() == (SELDOM * usual[0], *usual[1:])
        streams = client.cluster.scheduler.stream_comms.values()
        assert {stream.recent_message_log.maxlen for stream in streams} == {MESSAGES}
        task = client.submit(time.sleep, 5 * garbage.GLANCE)
        soon(lambda: any(x.processing for x in client.cluster.scheduler.workers.values()))
        lost, _kept = old_garbage()
        time.sleep(3 * garbage.GLANCE)
        assert lost() is not None, "collected beside a task"
        task.result()
        soon(lambda: lost() is None)
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0


def test_thresholds_come_back_with_the_last_of_several_clusters():
    usual = gc.get_threshold()
    clients = [SimpleNamespace(run_on_scheduler=lambda function: None) for _ in range(2)]
    for client in clients:
        garbage.spare_products(client)
        assert gc.get_threshold()[0] == SELDOM * usual[0], "never raised twice"
    garbage.as_usual(clients[0])
    assert gc.get_threshold()[0] == SELDOM * usual[0]
    assert gc.get_freeze_count()
    for client in (clients[0], *clients):  # whoever is closed again
        garbage.as_usual(client)
    assert gc.get_threshold() == usual
    assert not gc.get_freeze_count()
