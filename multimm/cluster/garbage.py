"""Garbage in the process that the scheduler runs in: collected in full between products.

A full collection looks at every object that can be part of a cycle, and halts the process until it
is through, the scheduler with it. What is imported takes it 50 ms. On top of that come the last
messages to each worker, which Dask keeps, tasks and all: of products of hundreds of chunks, which
take two H200s 105 to 170 ms, one of twelve had a full collection of 21 to 238 ms.

So while a cluster of its own is open, this process

* keeps what it holds from the start out of collections;
* collects less often than Python would, unless nothing is computed: then in full;
* keeps fewer of those messages.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

if TYPE_CHECKING:
    from distributed import Client
    from distributed.scheduler import Scheduler

#: Python looks for garbage among so many times as many new objects as usual: arbitrary. 7000 of
#: them in place of 700, which a product of hundreds of chunks makes several times.
SELDOM = 10
#: Seconds from one look whether nothing is computed to the next: two in a row make it idle.
GLANCE = 0.25
#: Collections of new objects, or ten times that, after which there is something to look at.
LEAST = 3
#: Messages to a worker that the scheduler keeps, tasks and all; Dask's own 1000 are for debugging.
MESSAGES = 100
MESSAGES_KEPT = "distributed.admin.low-level-log-length"

_NAME = "multimm-garbage"
_usual: tuple[int, int, int] | None = None  #: thresholds, while they are others
_sparing: set[int] = set()  #: clients of clusters that are open, by their identity


def fewer_messages() -> Any:
    """Dask's configuration while a cluster is made; what the user has set lower stays."""
    import dask

    return dask.config.set({MESSAGES_KEPT: min(MESSAGES, dask.config.get(MESSAGES_KEPT))})


def spare_products(client: Client) -> None:
    """Collect between products from now on; the client's scheduler runs in this process."""
    global _usual
    gc.collect()
    gc.freeze()
    _sparing.add(id(client))
    if _usual is None:
        _usual = gc.get_threshold()
        first, *others = _usual
        gc.set_threshold(SELDOM * first, *others)
    client.run_on_scheduler(_watch)


def as_usual(client: Client) -> None:
    """Leave garbage to Python again, all of it, if this was the last of such clusters."""
    global _usual
    _sparing.discard(id(client))
    if _usual is not None and not _sparing:
        gc.unfreeze()
        gc.set_threshold(*_usual)
        _usual = None


def _watch(dask_scheduler: Scheduler) -> None:
    """Look for idle moments, until the scheduler ends."""
    watch = PeriodicCallback(Idle(dask_scheduler), 1000 * GLANCE)
    dask_scheduler.periodic_callbacks[_NAME] = watch
    watch.start()


class Idle:
    """Collects in full when nothing is computed, twice in a row.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._before = scheduler, False

    def __call__(self) -> None:
        """Look once."""
        busy = any(state.processing for state in self._scheduler.workers.values())
        _, young, old = gc.get_count()
        if self._before and not busy and young + 10 * old >= LEAST:
            gc.collect()
        self._before = not busy
