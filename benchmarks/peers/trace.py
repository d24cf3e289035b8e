"""What a Dask worker did in a run: which tasks it executed, which blocks it fetched, and when."""

from __future__ import annotations

import time
from typing import Any

from distributed import WorkerPlugin

#: First parts of keys -> what the timeline calls the task; others are "other".
KINDS = {
    "multimm-matmul": "multiply", "multimm-part": "multiply", "multimm-half": "multiply",
    "multimm-sum": "add", "multimm-packed": "pack", "multimm-gate": "wait",
    "multimm-a": "read", "multimm-b": "read",
    "matmul": "multiply", "sum": "add",
}  # fmt: skip
NAME = "benchmark-trace"

#: (kind, key, start, end), seconds since the epoch.
Interval = tuple[str, str, float, float]


class Trace(WorkerPlugin):
    """Notes when tasks are executed and when blocks are in flight."""

    name = NAME

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._since: dict[Any, float] = {}

    def setup(self, worker: Any) -> None:
        self.intervals, self._since = [], {}

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        now = time.time()
        # A block in flight that another task asks for is sent to "fetch", where it does not go.
        # A task that secedes runs on.
        ran = start in ("executing", "long-running") and finish != "long-running"
        ended = ran or (start == "flight" and finish == "memory")
        if ended and (since := self._since.pop(key, None)) is not None:
            kind = "transfer" if start == "flight" else kind_of(key)
            self.intervals.append((kind, str(key), since, now))
        if finish in ("executing", "flight"):
            self._since[key] = now


def kind_of(key: Any) -> str:
    """Return what a task does, judged by its key."""
    name = str(key[0] if isinstance(key, tuple) else key)
    return next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), "other")


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
