"""What an open cluster does to the garbage collector of the process: little, and for a time."""

from __future__ import annotations

import gc
import os
import weakref
from copy import deepcopy

import dask
import pytest
from clusters import forked, soon
from commands import python
from distributed import LocalCluster

import multimm.cluster as mc
from multimm.cluster.client import ClusterClient
from multimm.cluster.plugins import gc_policy
from multimm.cluster.plugins.gc_policy import SELDOM, SPARED, SeldomGarbage
from multimm.errors import OptionError

GIB = 2**30


@pytest.fixture(autouse=True)
def as_found(monkeypatch):
    """No cluster of another test's is open, and what is set here does not last."""
    monkeypatch.setattr(gc_policy, "_open", 0)
    before, configured = gc.get_threshold(), deepcopy(dask.config.config)
    with forked():
        yield
    gc.set_threshold(*before)
    # Clients that are not closed in the reverse order leave Dask's scheduler set.
    dask.config.config.clear()
    dask.config.config.update(configured)


def small_cluster() -> ClusterClient:
    """A scheduler in this process, without workers, as `start` leaves it."""
    cluster = LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", protocol="tcp")
    client = ClusterClient(cluster, timeout=30, security=None)
    client.register_plugin(SeldomGarbage())
    return client


def test_a_cluster_leaves_the_process_as_it_found_it():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, lost = cycle, weakref.ref(cycle)
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    with mc.start(workers=1, memory_limit=GIB):
        assert gc.get_threshold() == (SELDOM * usual[0], *usual[1:])
        assert gc.get_freeze_count() == frozen
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
    with LocalCluster(n_workers=2, dashboard_address="127.0.0.1:0", **settings) as cluster:
        with mc.connect(cluster.scheduler_address, overlap=True):
            counts.append(gc.get_freeze_count())
    counts.append(gc.get_freeze_count())
    # Objects that are no longer used may go, but none comes, and most stay.
    assert all(0.9 * frozen < count <= frozen for count in counts), (frozen, counts)
"""


def test_what_the_user_has_frozen_stays_frozen_and_nothing_else_is(tmp_path):
    script = tmp_path / "frozen.py"
    script.write_text(FROZEN_BY_THE_USER)
    done = python(script)
    assert done.returncode == 0, done.stderr


def test_workers_exempt_what_they_have_imported_though_something_is_exempt_already(
    monkeypatch, tmp_path
):
    """As in Python 3.12 and later, which exempts some of its own objects as it starts."""
    (tmp_path / "sitecustomize.py").write_text("import gc\n\ngc.freeze()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with mc.start(workers=1, memory_limit=GIB) as client:
        exempt = lambda: (gc.get_freeze_count(), len(gc.get_objects()))  # noqa: E731
        soon(lambda: all(kept > 5 * rest for kept, rest in client.run(exempt).values()))


def test_thresholds_come_back_where_the_cluster_is_closed_and_not_the_client():
    usual = gc.get_threshold()
    with mc.start(workers=1, memory_limit=GIB) as client:
        assert gc.get_threshold() != usual
        client.cluster.close()
        assert gc.get_threshold() == usual


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=str)
def test_thresholds_come_back_with_the_last_of_several_clusters(order):
    usual, clients = gc.get_threshold(), []
    for _ in order:
        clients.append(small_cluster())
        assert gc.get_threshold()[0] == SELDOM * usual[0], "never raised twice"
    for which in order:
        assert gc.get_threshold()[0] == SELDOM * usual[0]
        clients[which].close()
        clients[which].close()  # again does nothing
    assert gc.get_threshold() == usual


def test_thresholds_that_the_user_sets_meanwhile_stay():
    client = small_cluster()
    gc.set_threshold(1234, 9, 8)
    other = small_cluster()
    client.close()
    other.close()
    assert gc.get_threshold() == (1234, 9, 8)


@pytest.mark.parametrize(
    ("asked", "configured", "seldom"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_whether_the_collector_is_left_alone_is_said_by_the_option_or_the_configuration(
    asked, configured, seldom
):
    with dask.config.set({SPARED: configured}):
        assert gc_policy.is_wanted(asked) is seldom


def test_the_collector_is_left_alone_where_the_user_says_so():
    usual = gc.get_threshold()
    with mc.start(workers=1, memory_limit=GIB, seldom_collect_garbage=False) as client:
        assert gc.get_threshold() == usual
        with mc.connect(client.scheduler.address, overlap=True):
            assert gc.get_threshold() == usual
    with pytest.raises(OptionError, match="seldom_collect_garbage='no'"):
        mc.start(workers=1, memory_limit=GIB, seldom_collect_garbage="no")
