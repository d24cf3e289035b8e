"""Garbage in the process that the scheduler runs in: looked for less often while a cluster is open.

A full collection looks at every object that can be part of a cycle, and halts the process until it
is through, the scheduler with it: 50 ms for what is imported alone. Python makes one after so many
collections of new objects. Products of hundreds of chunks make new objects by the thousand: they
were halted for 21 to 238 ms, one in twelve.

This process is the user's, so little is done to it: while a cluster of its own is open, Python
looks a tenth as often. Nothing is frozen, and no collection is asked for.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from multimm.errors import OptionError

#: Python looks for garbage among so many times as many new objects as usual: arbitrary. 7000 of
#: them in place of 700, which a product of hundreds of chunks makes several times.
SELDOM = 10
#: Of Dask's configuration: false leaves the collector of this process alone.
SPARED = "multimm.seldom-collect-garbage"

Thresholds = tuple[int, int, int]
#: Clusters of this process that are open; the thresholds before the first, and as set for it.
_lock = threading.Lock()
_open = 0
_before: Thresholds = (0, 0, 0)
_set: Thresholds = (0, 0, 0)


def is_wanted(asked: bool | None) -> bool:
    """What `start` was asked for; by default what Dask's configuration says."""
    import dask

    if asked not in (None, True, False):
        raise OptionError(
            f"seldom_collect_garbage={asked!r}: give True, False, or None for what Dask's "
            f"configuration says ({SPARED})"
        )
    return bool(dask.config.get(SPARED, True) if asked is None else asked)


class SeldomGarbage(SchedulerPlugin):
    """Python looks for garbage less often while this scheduler, in the user's process, is open.

    Of several, the first one sets thresholds, and the last one to close, whichever it is, puts
    back what was there. Thresholds that the user sets meanwhile stay.
    """

    name = "multimm-garbage"
    idempotent = True

    async def start(self, scheduler: Any) -> None:
        """Called by the scheduler when it has the plugin."""
        global _open, _before, _set
        with _lock:
            if not _open:
                _before = gc.get_threshold()
                _set = (SELDOM * _before[0], *_before[1:])
                gc.set_threshold(*_set)
            _open += 1

    async def close(self) -> None:
        """Called by the scheduler once, when it ends."""
        global _open
        with _lock:
            _open -= 1
            if not _open and gc.get_threshold() == _set:
                gc.set_threshold(*_before)
