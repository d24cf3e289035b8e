"""Garbage in the process that the scheduler runs in: looked for less often while a cluster is open.

A full collection looks at every object that can be part of a cycle, and halts the process until it
is through, the scheduler with it: 50 ms for what is imported alone. Python makes one after so many
collections of new objects. Products of hundreds of chunks make new objects by the thousand: they
were halted for 21 to 238 ms, one in twelve.

This process is the user's, so little is done to it: while a cluster of its own is open, Python
looks a tenth as often. Nothing is frozen, and no collection is asked for. Dask also keeps fewer of
the last messages to each worker, which hold tasks.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

if TYPE_CHECKING:
    from distributed import Client

#: Python looks for garbage among so many times as many new objects as usual: arbitrary. 7000 of
#: them in place of 700, which a product of hundreds of chunks makes several times.
SELDOM = 10
#: Messages to a worker that the scheduler keeps, tasks and all; Dask's own 1000 are for debugging.
MESSAGES = 100
MESSAGES_KEPT = "distributed.admin.low-level-log-length"
#: Of Dask's configuration: false leaves the collector of this process alone.
SPARED = "multimm.seldom-collect-garbage"

Thresholds = tuple[int, int, int]
#: Clusters of this process that are open; the thresholds before the first, and as set for it.
_open: set[int] = set()
_before: Thresholds | None = None
_set: Thresholds | None = None


def fewer_messages() -> Any:
    """Dask's configuration while a cluster is made; what the user has set lower stays."""
    import dask

    return dask.config.set({MESSAGES_KEPT: min(MESSAGES, dask.config.get(MESSAGES_KEPT))})


def spare_products(client: Client) -> None:
    """Look for garbage less often, until the client is closed or nobody has it any more."""
    global _before, _set
    import dask

    if not dask.config.get(SPARED, True):
        return
    if not _open:
        _before = gc.get_threshold()
        _set = (SELDOM * _before[0], *_before[1:])
        gc.set_threshold(*_set)
    _open.add(id(client))
    weakref.finalize(client, _as_usual, id(client)).atexit = False


class UntilClosed(SchedulerPlugin):
    """Has garbage looked for as usual again when a cluster is closed, and not its client.

    Parameters
    ----------
    client : distributed.Client
        Of a cluster whose scheduler runs in this process.
    """

    name = "multimm-garbage"
    idempotent = True

    def __init__(self, client: Client) -> None:
        self.client = id(client)

    async def close(self) -> None:
        """Called by the scheduler when it ends."""
        _as_usual(self.client)


def as_usual(client: Client) -> None:
    """Leave garbage to Python again if this was the last of such clusters; again does nothing."""
    _as_usual(id(client))


def _as_usual(client: int) -> None:
    global _before, _set
    if client not in _open:
        return
    _open.discard(client)
    if not _open and _before is not None:
        if gc.get_threshold() == _set:  # else somebody has set others meanwhile
            gc.set_threshold(*_before)
        _before = _set = None
