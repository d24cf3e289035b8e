"""The scheduler plugin that puts every block where the plan wants it.

Dask's own heuristics do not know the plan, and annotations on a lazy array are dropped when
it is optimised. So each task carries its label and `Place`, and on the scheduler this plugin

* turns coordinates into live workers and pins tasks strictly to them (a loose pin is
  overridden by work stealing), unless the plan leaves them to Dask;
* pins what makes an operand block to the worker where the block belongs, and what only that
  needs, too; restrictions that the user set are never touched;
* orders a product's tasks k-tile by k-tile, so that few operand blocks are alive at a time;
* has workers fetch what their next step needs during the present one, and drops the copies
  when they have been used, and not before;
* gives a lost worker's tasks to the survivors a moment later, and a joining worker a share at
  once: a strict pin to a worker that is gone would hang for ever; so it would to one that is
  paused, or closing, and stays so, or whose threads tasks have that wait for the product.

It imports with dask, distributed and numpy alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from multimm.graph.block_task import BlockTask, Key
from multimm.graph.scheduler.failover import able, follow, held_up, replace, tell, unpin
from multimm.graph.scheduler.pinning import Owners, fullest, pin_tasks, product_of
from multimm.graph.scheduler.prefetch import fetch_ahead
from multimm.graph.scheduler.product_state import Product, ours
from multimm.graph.scheduler.replicas import let_go, spare_awaited

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

logger = logging.getLogger(__name__)

#: Raised when `Label`, `Place` or the plugin's behaviour changes, so that two releases of multimm
#: can share a scheduler without one taking the other's plugin for its own.
VERSION = 4
NAME = f"multimm-placement-{VERSION}"

#: Seconds from a loss until the lost worker's tasks go to others, together with those of all who
#: are lost meanwhile. A host takes its workers along one after another; tasks that went from one
#: of them to the next at once would be given up (KilledWorker) after a few such steps. So long they
#: stand in "no-worker", which Dask does not count. Arbitrary otherwise.
MOMENT = 0.2
#: Seconds for which a worker may be paused before its tasks go to others: most pauses are short,
#: until enough is spilled. And seconds from one look for such workers to the next. Arbitrary.
PATIENCE, GLANCE = 5.0, 1.0

Recommendations = dict[Key, Any]  #: key -> state

Hook = TypeVar("Hook", bound=Callable[..., None])


def _guarded(hook: Hook) -> Hook:
    """Undo all pins and tell every client if a hook fails: the scheduler would only log it."""

    @wraps(hook)
    def safe(self: BlockPlacement, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            logger.exception("multimm's placement failed in %s", hook.__name__)
            self.release_all(self.scheduler)
            tell(
                self.scheduler,
                f"multimm's placement failed ({type(error).__name__}: {error}); blocks are placed "
                "by Dask alone from now on, which is right but moves more bytes",
            )

    return cast("Hook", safe)


class BlockPlacement(SchedulerPlugin):
    """Places the tasks of block products; see the module's docstring."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.products: dict[str, Product] = {}
        self.owners: Owners = {}
        self.losing = False  #: a worker was lost, and its tasks are not handed over yet
        self.paused: dict[str, float] = {}  #: workers that take no tasks, and since when

    async def start(self, scheduler: Scheduler) -> None:
        """Where the tasks are."""
        self.scheduler = scheduler

    @_guarded
    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        """Pin and order the products that arrive with a graph."""
        arrived: dict[str, dict[TaskState, BlockTask]] = {}
        for key in tasks:
            ts = scheduler.tasks.get(key)
            task = None if ts is None else ours(ts)
            if ts is not None and task is not None and task.place.pinned:
                arrived.setdefault(task.label.product, {})[ts] = task
        for token, own in arrived.items():
            alone = len({task.place.owner for task in own.values()}) == 1
            if alone and (len(own) == 1 or not (at := fullest(scheduler, own.values()))):
                continue  # Dask runs one task where its operands are, or most of what makes them
            self._begin(scheduler, token, own, [at] if alone else [])
        if self.products and NAME not in scheduler.periodic_callbacks:
            spare_awaited(scheduler)
            watch = PeriodicCallback(partial(self._watch, scheduler), 1000 * GLANCE)
            scheduler.periodic_callbacks[NAME] = watch  # so that it ends with the scheduler
            watch.start()

    def _begin(
        self, scheduler: Scheduler, token: str, tasks: dict[TaskState, BlockTask], on: list[str]
    ) -> None:
        """Pin tasks of a product, to a worker if one is given; else to all who are there now."""
        product = self.products.get(token) or product_of(scheduler, next(iter(tasks.values())), on)
        if product is None:
            return
        self.products[token] = product
        pin_tasks(scheduler, product, tasks, self.owners)
        if not product.pinned:
            del self.products[token]  # the user placed it all

    @_guarded
    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Give the lost worker's tasks to the survivors, in a moment."""
        if self.products and not self.losing:
            self.losing = True
            asyncio.get_running_loop().call_later(MOMENT, self._replace_lost, scheduler)

    @_guarded
    def _replace_lost(self, scheduler: Scheduler) -> None:
        """Give the tasks of all who were lost to the survivors."""
        self.losing = False
        lost = self._workers().difference(scheduler.workers)
        replace(scheduler, self.products.values(), lost, "multimm-replace-lost")

    @_guarded
    def _watch(self, scheduler: Scheduler) -> None:
        """Give the tasks of workers that stay paused or held up to others; no hook tells of it."""
        if not self.products or scheduler.plugins.get(NAME) is not self:
            scheduler.periodic_callbacks.pop(NAME).stop()
            self.paused.clear()
            return
        now, idle = time.monotonic(), set(scheduler.workers).difference(able(scheduler))
        self.paused = {address: self.paused.get(address, now) for address in idle}
        gone = {address for address in idle if now - self.paused[address] >= PATIENCE}
        gone |= held_up(scheduler, self.owners)
        if gone := gone & self._workers():
            replace(scheduler, self.products.values(), gone, "multimm-replace-paused")

    @_guarded
    def add_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Let a new worker take over from those that work for two."""
        joined = []
        for product in self.products.values():
            if len(scheduler.workers) == 1:  # the first after none
                product.workers = [worker] * len(product.workers)
                joined.append(product)
            elif worker not in product.workers and product.make_room(worker):
                joined.append(product)
        follow(scheduler, joined, f"multimm-add-worker-{worker}")

    @_guarded
    def transition(
        self, key: Key, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Let go of blocks, and fetch others; forget what the scheduler forgets."""
        done = start == "processing" and finish == "memory"
        if key in self.owners and (done or finish == "processing"):
            ts = self.scheduler.tasks[key]
            if done:
                let_go(self.scheduler, ts, self.owners[key], stimulus_id)
            fetch_ahead(self.scheduler, self.products, ts, stimulus_id, done=done)
        if finish == "forgotten" and (product := self.owners.pop(key, None)) is not None:
            product.pinned.pop(key, None)
            if not product.pinned:
                del self.products[product.token]

    def _workers(self) -> set[str]:
        """Those that have a part in a product."""
        return {address for product in self.products.values() for address in product.workers}

    def release_all(self, scheduler: Scheduler) -> None:
        """Take back every pin: nothing waits for a worker that will not come."""
        for product in self.products.values():
            unpin(scheduler, product)
            product.pinned.clear()
        self.products.clear()
        self.owners.clear()
        stuck: Recommendations = {ts.key: "processing" for ts in scheduler.unrunnable}
        if stuck and scheduler.running:
            scheduler.transitions(stuck, stimulus_id="multimm-release")
