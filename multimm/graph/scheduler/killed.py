"""What the error of a task says whose workers died: Dask's own names neither memory nor a remedy.

Dask gives a task up (`KilledWorker`) when several workers have died while they ran it. That Dask's
nannies ended them for their memory, the scheduler alone is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import pickle

from multimm.display.units import human
from multimm.failures import note_given_up
from multimm.graph.block_task import LabelledTask

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from multimm.graph.block_task import Key

NAME = "multimm-killed-1"
#: The topic under which Dask's nannies tell the scheduler of a worker that they end for its memory.
ENDED_FOR_MEMORY = "worker-restart-memory"
#: States of tasks that no worker is to run.
OVER = ("memory", "erred", "forgotten")
#: Workers that left, of which what they ran is remembered: arbitrary.
REMEMBERED = 64


class Killed(SchedulerPlugin):
    """Adds to the error of each task that is given up why its workers died, and what to do."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Any = None
        #: Of tasks whose workers were ended for their memory: the bytes that each of these held.
        self.ended: dict[Key, list[int]] = {}
        #: The last workers that left, and their tasks.
        self.removed: dict[str, Collection[Key]] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Where the tasks are."""
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: Any) -> None:
        """A nanny ends a worker, and says so just before the worker is gone or just afterwards."""
        if topic == ENDED_FOR_MEMORY:
            ws = self.scheduler.workers.get(msg["worker"])
            keys = [ts.key for ts in ws.processing] if ws else self.removed.get(msg["worker"], ())
            for key in keys:
                ts = self.scheduler.tasks.get(key)
                if ts is not None and ts.state not in OVER:
                    self.ended.setdefault(key, []).append(msg["rss"])
        elif topic == "all" and msg.get("action") == "remove-worker":
            self.removed[msg["worker"]] = msg["processing-tasks"]
            if len(self.removed) > REMEMBERED:
                del self.removed[next(iter(self.removed))]

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Say it when a task is given up; forget what the scheduler forgets."""
        if finish == "erred":
            self._explain(key)
        if finish in OVER:
            self.ended.pop(key, None)

    def _explain(self, key: Key) -> None:
        from distributed.scheduler import KilledWorker

        ts = self.scheduler.tasks[key]
        if ts.suspicious <= self.scheduler.allowed_failures or ts.exception_blame is not ts:
            return
        error = pickle.loads(ts.exception)
        if isinstance(error, KilledWorker):
            held = [
                f"{human(rss)} of its {human(error.last_worker.memory_limit)}"
                for rss in self.ended.get(key, ())
            ]
            task = ts.run_spec
            what = str(task.label) if isinstance(task, LabelledTask) else f"task {key!r}"
            note_given_up(error, what, ts.suspicious, held)
            ts.exception = pickle.dumps(error)
            # Dask's message to clients that wait for this very task is made already.
            asyncio.get_running_loop().call_soon(self._tell, key)

    def _tell(self, key: Key) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is not None and ts.state == "erred":
            own = {"key": key, "exception": ts.exception, "traceback": ts.traceback}
            self.scheduler.report({"op": "task-erred", **own}, ts=ts)
