"""What the error of a task says whose workers died: Dask's own names neither memory nor a remedy.

Dask gives a task up (`KilledWorker`) when several workers have died while they ran it. That Dask's
nannies ended them for their memory, the scheduler alone is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import pickle

from multimm.failures import note_given_up
from multimm.planning.dry_run import human

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from multimm.graph.block_task import Key

NAME = "multimm-killed-1"
#: What nannies tell the scheduler of a worker that they end for its memory.
ENDED_FOR_MEMORY = "worker-restart-memory"


class Killed(SchedulerPlugin):
    """Adds to the error of each task that is given up why its workers died, and what to do."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.ended: dict[Key, list[str]] = {}  #: of tasks whose workers were ended for memory: how

    async def start(self, scheduler: Scheduler) -> None:
        """Where the tasks are."""
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: Any) -> None:
        """A nanny is about to end a worker: its tasks will not be done by it."""
        if topic != ENDED_FOR_MEMORY or (ws := self.scheduler.workers.get(msg["worker"])) is None:
            return
        held, limit = human(msg["rss"]), human(ws.memory_limit)
        for ts in ws.processing:
            self.ended.setdefault(ts.key, []).append(f"{held} of its {limit}")

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Say it when a task is given up; forget what the scheduler forgets."""
        if finish == "erred":
            self._explain(key)
        if finish in ("memory", "erred", "forgotten"):
            self.ended.pop(key, None)

    def _explain(self, key: Key) -> None:
        from distributed.scheduler import KilledWorker

        ts = self.scheduler.tasks[key]
        if ts.suspicious <= self.scheduler.allowed_failures or ts.exception_blame is not ts:
            return
        error = pickle.loads(ts.exception)
        if isinstance(error, KilledWorker):
            note_given_up(error, key, ts.suspicious, self.ended.get(key, []))
            ts.exception = pickle.dumps(error)
            # Dask's message to clients that wait for this very task is made already.
            asyncio.get_running_loop().call_soon(self._tell, key)

    def _tell(self, key: Key) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is not None and ts.state == "erred":
            own = {"key": key, "exception": ts.exception, "traceback": ts.traceback}
            self.scheduler.report({"op": "task-erred", **own}, ts=ts)
