"""What the next step of a product needs is fetched during the present one.

Dask sends a task when all that it needs is in memory somewhere, and its worker fetches then. The
next product of a chain needs the sum of the present one, so its operand blocks would come when
that is done, and a worker of one or two chains has nothing else to do meanwhile. So the scheduler
has workers fetch what their tasks will need, no more than one step ahead of the first one that is
not over: for so much the plan has memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from distributed.comm.core import CommClosedError

from multimm.graph.block_task import Place
from multimm.graph.scheduler.product_state import Product, Progress, ours

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState


def fetch_ahead(
    scheduler: Scheduler,
    products: Mapping[str, Product],
    ts: TaskState,
    stimulus_id: str,
    *,
    done: bool,
) -> None:
    """Fetch for what waits for a task that begins, or is done, and for what waited for its step."""
    own = ours(ts)
    step = own is not None and not own.label.kind.prepares
    if not (done or step):
        return
    users = list(ts.dependents)
    if done and own is not None and step:
        over = products[own.label.product].progress_at(own.place.owner).done(own.place.step)
        users += [scheduler.tasks[user] for user in over if user in scheduler.tasks]
    for user in users:
        task = ours(user)
        if task is not None and (theirs := products.get(task.label.product)) is not None:
            progress = theirs.progress_at(task.place.owner)
            fetch_for(scheduler, user, task.place, progress, stimulus_id)


def fetch_for(
    scheduler: Scheduler, user: TaskState, place: Place, progress: Progress, stimulus_id: str
) -> None:
    """Have a task's worker fetch what is there of all that the task will need, or do so later."""
    if user.state != "waiting" or not user.waiting_on or not user.worker_restrictions:
        return
    if not progress.near(place.step):
        progress.later[place.step].add(user.key)
        return
    (address,) = user.worker_restrictions
    worker = scheduler.workers.get(address)
    if worker is None:
        return
    row_panel = place.row_panel
    blocks = [
        dts.key
        for dts in user.dependencies
        if dts.who_has and worker not in dts.who_has and (dts.key, row_panel) not in progress.asked
    ]
    if blocks:
        progress.asked.update((block, row_panel) for block in blocks)
        with suppress(CommClosedError):  # of a worker whose loss is about to be noticed
            scheduler.request_acquire_replicas(
                address, blocks, stimulus_id=f"multimm-fetch-{stimulus_id}"
            )
