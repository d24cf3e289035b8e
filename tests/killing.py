"""Clusters of worker processes, what kills these in mid-run, and what looks at the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager

from clusters import forked
from distributed import Client, LocalCluster
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from multimm.graph.block_task import BlockTask, LabelledTask
from multimm.graph.label import Kind

#: What brings operand blocks.
OPERANDS = (Kind.READ, Kind.UPLOAD)


@contextmanager
def workers(count):
    """Worker processes, under nannies that start a lost one again."""
    with (
        forked(),
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            memory_limit="500MB",
            dashboard_address=":0",
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(count, timeout=60)
        yield cluster, client


class Killer:
    """Kills worker processes, one after another, as the results of block products come in.

    Parameters
    ----------
    after : list of int
        One worker is killed for each number, when as many results are or were in memory.
    only : callable
        Counts results of tasks of whose label this is true.
    for_good : bool
        Nobody starts the worker again.
    """

    def __init__(self, cluster, client, after, *, only=lambda label: True, for_good=True):
        self.cluster, self.scheduler = cluster, cluster.scheduler
        self.for_good = for_good
        self.pids = client.run(os.getpid)
        self.after, self.only = after, only
        self.victims = []
        self.owners = {}  #: of each task, before the first was killed
        self.labels = {}
        self.thread = threading.Thread(target=self.watch)
        self.record = Record(cluster.scheduler)
        self.scheduler.add_plugin(self.record)
        self.thread.start()

    def watch(self):
        deadline = time.time() + 60
        for count in self.after:
            while self.made() < count:
                if time.time() > deadline:
                    return
                time.sleep(0.005)
            if not self.victims:
                tasks = list(self.scheduler.tasks.values())
                blocks = [ts for ts in tasks if isinstance(ts.run_spec, BlockTask)]
                self.owners = {ts.key: set(ts.worker_restrictions or ()) for ts in blocks}
                self.labels = {ts.key: ts.run_spec.label for ts in blocks}
            self.kill(max(set(self.pids) - set(self.victims)))

    def made(self):
        return sum(self.only(label) for label in list(self.record.labels.values()))

    def kill(self, victim):
        self.victims.append(victim)
        if self.for_good:
            forget(self.cluster, victim)
        os.kill(self.pids[victim], signal.SIGKILL)

    def check(self, count, *, once=True):
        """All were killed, the survivors kept what they had, and did nothing of it twice.

        But for operand blocks: they are gone when they have been used, and the heirs need them. Not
        `once`: of what is such an operand block it is allowed.
        """
        self.thread.join()
        assert len(self.victims) == count, "the product was over before the worker was killed"
        lost = {key for key, owners in self.owners.items() if owners & set(self.victims)}
        theirs = set(self.owners) - lost
        assert theirs
        moved = [
            key
            for key in theirs
            if (ts := self.scheduler.tasks.get(key)) and ts.worker_restrictions != self.owners[key]
        ]
        assert moved == []
        # Parts along k that went into a lost sum are lost work, whoever did it.
        blocks = {self.labels[key].block for key in lost}
        own = {key for key in theirs if self.labels[key].kind not in OPERANDS}
        twice = {key for key in own if self.record.made[key] > 1} if once else set()
        assert {key for key in twice if self.labels[key].block not in blocks} == set()


class Record(SchedulerPlugin):
    """How often each result of a product's tasks came into being."""

    name = "record"

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.made, self.labels = Counter(), {}
        self.who = {}  #: the last worker that made it

    def transition(self, key, start, finish, *args, worker=None, **kwargs):
        if start == "processing" and finish == "memory":
            task = self.scheduler.tasks[key].run_spec
            if isinstance(task, LabelledTask):
                self.made[key] += 1
                self.labels[key] = task.label
                self.who[key] = worker


def forget(cluster, victim):
    """Neither the worker's nanny nor the cluster is to start another one."""
    for name, nanny in cluster.workers.items():
        if nanny.worker_address == victim:
            nanny.status = Status.closing_gracefully
            del cluster.worker_spec[name]
            return
