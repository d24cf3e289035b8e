"""What a Dask worker did in a run: which tasks it executed, which blocks it fetched, and when."""

from __future__ import annotations

import time
from typing import Any

from distributed import WorkerPlugin

from multimm.graph.block_task import LabelledTask
from multimm.graph.label import Kind

#: What the timeline calls a task of a product; others are "other".
KINDS = {
    Kind.MULTIPLY: "multiply", Kind.PARTIAL: "multiply", Kind.ADD: "add", Kind.FINISH: "add",
    Kind.PACK: "pack", Kind.WAIT: "wait", Kind.READ: "read",
}  # fmt: skip
#: First parts of keys of Dask's own product -> the same.
DASK_KINDS = {"matmul": "multiply", "sum": "add"}
NAME = "benchmark-trace"

#: (kind, key, start, end), seconds since the epoch.
Interval = tuple[str, str, float, float]


class Trace(WorkerPlugin):
    """Notes when tasks are executed and when blocks are in flight."""

    name = NAME

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._since: dict[Any, tuple[str, float]] = {}

    def setup(self, worker: Any) -> None:
        self.intervals, self._since, self._tasks = [], {}, worker.state.tasks

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        now = time.time()
        # A block in flight that another task asks for is sent to "fetch", where it does not go.
        # A task that secedes runs on.
        ran = start in ("executing", "long-running") and finish != "long-running"
        ended = ran or (start == "flight" and finish == "memory")
        if ended and key in self._since:
            kind, since = self._since.pop(key)
            self.intervals.append((kind, str(key), since, now))
        if finish == "flight":
            self._since[key] = "transfer", now
        elif finish == "executing":
            self._since[key] = kind_of(key, self._tasks[key].run_spec), now


def kind_of(key: Any, task: Any) -> str:
    """Return what a task does: by its label, or, of Dask's own product, by its key."""
    if isinstance(task, LabelledTask):
        return KINDS.get(task.label.kind, "other")
    name = str(key[0] if isinstance(key, tuple) else key)
    return next((kind for prefix, kind in DASK_KINDS.items() if name.startswith(prefix)), "other")


def taken(dask_worker: Any) -> list[Interval]:
    """Runs on a worker: what it did since it was asked last."""
    plugin: Trace = dask_worker.plugins[NAME]
    done, plugin.intervals = plugin.intervals, []
    return done


def timeline(
    by_worker: dict[str, list[Interval]], start: float, most: int
) -> list[list[Any]] | None:
    """Return [worker, start_s, end_s, kind] of a run, from its start; None if there are too many.

    Workers are numbered in the order of their addresses.
    """
    rows = [
        [rank, round(begin - start, 5), round(end - start, 5), kind]
        for rank, address in enumerate(sorted(by_worker))
        for kind, _, begin, end in by_worker[address]
    ]
    return sorted(rows, key=lambda row: row[1]) if len(rows) <= most else None
