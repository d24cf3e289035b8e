"""Copies of operand blocks: kept while a product waits for them, dropped when it has used them.

Dask's active memory manager drops copies every two seconds. It keeps one for each task that waits,
but not where that task will run, for it does not know: the copy would travel once more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from distributed.active_memory_manager import ReduceReplicas, SuggestionGenerator
from distributed.comm.core import CommClosedError

from multimm.graph.block_task import BlockTask
from multimm.graph.scheduler.product_state import Product, ours

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState


class SpareAwaited(ReduceReplicas):
    """Dask's own policy, except that it leaves alone the blocks that products of ours wait for."""

    def run(self) -> SuggestionGenerator:
        """Suggest which copies to drop."""
        for suggestion in super().run():
            if not any(ours(user) for user in suggestion.ts.waiters or ()):
                yield suggestion


def spare_awaited(scheduler: Scheduler) -> None:
    """Have the scheduler's active memory manager spare what products wait for."""
    manager = scheduler.extensions.get("amm")
    if manager is None:
        return
    for policy in list(manager.policies):
        if type(policy) is ReduceReplicas:  # a user's own policy is left alone
            manager.policies.remove(policy)
            manager.add_policy(SpareAwaited())


def let_go(scheduler: Scheduler, ts: TaskState, product: Product, stimulus_id: str) -> None:
    """Drop copies of a task's operand blocks on its worker, if that has no more use for them.

    Of persisted operands the scheduler itself drops copies every few seconds only, and a worker
    would hold whole panels by then.
    """
    task = ours(ts)
    if task is None or not ts.who_has:
        return
    worker = next(iter(ts.who_has))
    for block, owner in task.place.blocks:
        dts = scheduler.tasks.get(block)
        if dts is None or not dts.who_has or product.address(owner) == worker.address:
            continue
        copies = len(dts.who_has) if worker in dts.who_has else 0
        if copies > 1 and not any(_soon(user, worker.address, task) for user in dts.waiters or ()):
            with suppress(CommClosedError):  # of a worker whose loss is about to be noticed
                scheduler.request_remove_replicas(
                    worker.address, [block], stimulus_id=f"multimm-let-go-{stimulus_id}"
                )


def _soon(user: TaskState, address: str, task: BlockTask) -> bool:
    """Whether a user will run on a worker, in the same row panel if it is of the same product.

    Also where nobody knows where and when it runs.
    """
    theirs = ours(user)
    if theirs is None or not user.worker_restrictions:
        return True
    later = (
        theirs.label.product == task.label.product
        and theirs.place.row_panel != task.place.row_panel
    )
    return address in user.worker_restrictions and not later
