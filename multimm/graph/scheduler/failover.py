"""Who does the part of workers that are lost, paused, closing or held up, on the scheduler."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Container, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from multimm.graph.block_task import Key
from multimm.graph.scheduler.product_state import Product

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger(__name__)

#: Seconds for which tasks of others may have all threads of a worker before a product's tasks there
#: go to idle workers, as Dask's own would at once. Arbitrary.
HELD = 2.0


def tell(scheduler: Scheduler, message: str) -> None:
    """Show a warning in every connected client; where there is none, in the scheduler's log."""
    # A scheduler in the client's process would say it a second time: Python itself prints
    # warnings of loggers that nobody has configured.
    heard = any(name != "fire-and-forget" for name in scheduler.clients)
    logger.log(logging.INFO if heard else logging.WARNING, message)
    payload = {"message": pickle.dumps(message), "category": pickle.dumps(RuntimeWarning)}
    scheduler.log_event(["warn", "multimm"], payload)


def _takes_tasks(ws: WorkerState) -> bool:
    """Whether a worker starts what it is sent: one that joins will, at once."""
    return ws.status in (Status.init, Status.running)


def able(scheduler: Scheduler) -> list[str]:
    """The workers that take tasks; all of them where none does."""
    found = sorted(address for address, ws in scheduler.workers.items() if _takes_tasks(ws))
    return found or sorted(scheduler.workers)


def held_up(scheduler: Scheduler, owners: Mapping[Key, Product]) -> set[str]:
    """Workers where products wait for threads that others' tasks have, while another is idle.

    Such a task may wait for the product itself: it computes it, and did not secede. What makes a
    product's operands or uses its blocks does not, however long it takes.
    """
    if all(ws.processing or not _takes_tasks(ws) for ws in scheduler.workers.values()):
        return set()
    found = set()
    for address, ws in scheduler.workers.items():
        # What a worker last told may be over.
        at_work = ws.processing - ws.long_running
        long = [ts for ts, seconds in ws.executing.items() if ts in at_work and seconds >= HELD]
        if len(long) < ws.nthreads:
            continue
        ready = ws.processing - ws.executing.keys()
        pinned = {key for ts in ready if ts.key in owners for key in owners[ts.key].pinned}
        if pinned and not any(_is_around(ts, pinned) for ts in long):
            found.add(address)
    return found


def _is_around(ts: TaskState, pinned: Container[Key]) -> bool:
    """Whether a task is one of those, or one needs it, or it needs one."""
    for towards in attrgetter("dependents"), attrgetter("dependencies"):
        level, seen = {ts}, {ts}
        while level:
            if any(found.key in pinned for found in level):
                return True
            level = {found for task in level for found in towards(task)} - seen
            seen |= level
    return False


def replace(
    scheduler: Scheduler, products: Collection[Product], gone: set[str], stimulus_id: str
) -> None:
    """Give the part of some workers in all products to others, also what they have been sent."""
    for product in products:
        hand_over(scheduler, product, gone)
    follow(scheduler, products, stimulus_id, gone)


def hand_over(scheduler: Scheduler, product: Product, gone: set[str]) -> None:
    """Give a product's ranks on some workers to those that take tasks."""
    leaving = gone.intersection(product.workers)
    if not leaving:
        return
    there = able(scheduler)
    if not product.replace(leaving, [x for x in there if x not in leaving] or there):
        unpin(scheduler, product)
    left = sorted(leaving.intersection(scheduler.workers))
    held = [address for address in left if _takes_tasks(scheduler.workers[address])]
    if paused := [address for address in left if address not in held]:
        tell(
            scheduler,
            f"workers that take no tasks: {', '.join(paused)} "
            f"({scheduler.workers[paused[0]].status.name}); others do their part of a product. "
            "Dask pauses a worker whose memory is short: free some of it, or start it again",
        )
    if held:
        tell(
            scheduler,
            f"workers all of whose threads other tasks hold: {', '.join(held)}; others do their "
            "part of a product. A task that waits for a product is to call distributed.secede() "
            "first, or to compute it inside `with distributed.worker_client():`",
        )


def follow(
    scheduler: Scheduler,
    products: Iterable[Product],
    stimulus_id: str,
    gone: Container[str] = (),
) -> None:
    """Bring restrictions in line with the products' workers, and start what was stuck."""
    wanted: dict[Key, Any] = {}
    for product in products:
        for key, at in product.pinned.items():
            ts = scheduler.tasks.get(key)
            address = product.address(at)
            if ts is None or ts.worker_restrictions == {address}:
                continue
            if address in scheduler.workers and not _runs(ts, gone):
                ts.worker_restrictions = {address}
                if ts.state == "no-worker":
                    wanted[key] = "processing"
                elif ts.state == "processing":  # sent to a worker that does not start it
                    wanted[key] = "released"
    if wanted:
        scheduler.transitions(wanted, stimulus_id=stimulus_id)


def _runs(ts: TaskState, gone: Container[str]) -> bool:
    """Whether a worker has been sent a task, and it runs there or will."""
    ws = ts.processing_on
    if ws is None:
        return False
    return (_takes_tasks(ws) and ws.address not in gone) or ts in ws.executing


def unpin(scheduler: Scheduler, product: Product) -> None:
    """Let Dask decide where a product's tasks run."""
    for key in product.pinned:
        if (ts := scheduler.tasks.get(key)) is not None:
            ts.worker_restrictions = set()
