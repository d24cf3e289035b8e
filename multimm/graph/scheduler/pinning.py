"""Tasks of a product are pinned to its workers and put into its order, on the scheduler.

So is what makes its operand blocks, and what only that needs, where nobody else has restricted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, cast

from multimm.graph.block_task import BlockTask, Key
from multimm.graph.scheduler.failover import able, hand_over, tell
from multimm.graph.scheduler.product_state import Product, ours
from multimm.planning.tiling.grid import Coordinate, rearrange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Task states in which a new restriction still has an effect.
_UNDECIDED = ("released", "waiting", "no-worker")

#: Behind a task's order: what makes its operand blocks has the same, and comes before it; what that
#: needs comes before both. Consumers of its block come behind it, a step each: what else a consumer
#: needs, then the consumer.
_UPSTREAM, _MAKER, _OWN, _STEP = -1, 0, 1, 2

Order = dict["TaskState", tuple[int, ...]]  #: smaller first

Owners = dict[Key, Product]  #: of each pinned key, the product that pinned it


def fullest(scheduler: Scheduler, tasks: Iterable[BlockTask]) -> str:
    """The worker with most bytes of what a product's tasks need; empty if none has any of it.

    Of what is still to be made, that is what it is made of: it may be no more than another name.
    """
    keys = {key for task in tasks for key, _ in task.place.blocks}
    needed = [scheduler.tasks[key] for key in keys if key in scheduler.tasks]
    held = Counter[str]()
    sources = {source for ts in needed for source in ([ts] if ts.who_has else ts.dependencies)}
    for ts in sources:
        held.update(dict.fromkeys((ws.address for ws in ts.who_has or ()), ts.get_nbytes()))
    return max(sorted(held), key=held.__getitem__, default="")


def product_of(scheduler: Scheduler, task: BlockTask, on: list[str]) -> Product | None:
    """A product that begins, on a given worker or on those that are there; None if there are none.

    The worker is given of a product whose tasks all have the same owner.
    """
    live = sorted(scheduler.workers)  # paused ones, too: plans know them by addresses
    if not live:
        return None  # nothing to pin to: Dask places the blocks when workers come
    place, grid = task.place, task.place.grid
    if len(live) != place.workers:
        # Of a plan that left workers out, as many as it needs may be there still.
        if not grid.workers <= min(len(live), place.workers - 1):
            grid = rearrange(grid, len(live))
        tell(
            scheduler,
            f"a product was planned for {place.workers} workers (grid {place.grid}) and "
            f"runs on {len(live)} (grid {grid}); plan it again for the best speed",
        )
    elif place.numbers:
        live = [live[number] for number in place.numbers]
    live = on or live
    workers = [live[rank % len(live)] for rank in range(grid.workers)]
    product = Product(task.label.product, grid, workers)
    hand_over(scheduler, product, set(live).difference(able(scheduler)))
    return product


def pin_tasks(
    scheduler: Scheduler, product: Product, tasks: dict[TaskState, BlockTask], owners: Owners
) -> None:
    """Pin and order tasks of a product, and what makes their operand blocks."""
    order: Order = {}
    operands: dict[TaskState, Coordinate] = {}
    for ts, task in tasks.items():
        place = task.place
        order[ts] = (*place.order, _OWN)
        # A graph that comes again, or another one of the same blocks, lists what is done, too.
        fresh = ts.key not in product.pinned
        if _pin(product, ts, place.owner, owners) and fresh and not task.label.kind.prepares:
            product.progress_at(place.owner).expect(place.step)
        for key, owner in place.blocks:
            maker = scheduler.tasks.get(key)
            if maker is None or maker.state not in _UNDECIDED or ours(maker):
                continue  # there, as hundreds of chunks may be, or placed by its own product
            operands.setdefault(maker, owner)
            when = (*place.order, _MAKER)
            order[maker] = min(order.get(maker, when), when)
    for maker, owner in operands.items():
        _pin(product, maker, owner, owners)
    _pin_upstream(product, operands, order, owners)
    _follow(tasks, order)
    _reorder(order)


def _pin(product: Product, ts: TaskState, at: Coordinate, owners: Owners) -> bool:
    """Pin a task that is still undecided and that nobody else has restricted."""
    restricted = ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions
    by = owners.get(ts.key)
    free = by is product or (by is None and not restricted)
    if not free or ts.state not in _UNDECIDED:
        return False
    owners[ts.key] = product
    product.pinned[ts.key] = at
    ts.worker_restrictions = {product.address(at)}
    ts.loose_restrictions = False
    return True


def _pin_upstream(
    product: Product, makers: Iterable[TaskState], order: Order, owners: Owners
) -> None:
    """Pin whatever is needed by tasks of one worker only to that worker, level by level."""
    level = makers
    while candidates := {dts for ts in level for dts in ts.dependencies}:
        level = []
        for dts in candidates:
            if ours(dts) or any(user.key not in product.pinned for user in dts.dependents):
                continue
            if users := [order[user] for user in dts.dependents if user in order]:
                order[dts] = (*min(users)[:-1], _UPSTREAM)
            ranks = {product.grid.rank(product.pinned[user.key]) for user in dts.dependents}
            if len(ranks) > 1 or dts.key in product.pinned:
                continue
            if _pin(product, dts, product.grid.place(*ranks), owners):
                level.append(dts)


def _follow(product: Iterable[TaskState], order: Order) -> None:
    """Put what uses blocks of a product, such as a sum, right behind the last block it needs.

    So a block that is used once is gone before the next one is made: C need not fit in memory. What
    else only consumers need, X of ``a @ b - X``, comes right before the first of them.
    """
    consumers: set[TaskState] = set()
    level = set(product)
    while level:
        users = {user for ts in level for user in ts.dependents if user not in order}
        level = {user for user in users - consumers if not ours(user)}
        consumers |= level
    needs = {ts: consumers.intersection(ts.dependencies) for ts in consumers}
    for ts in TopologicalSorter(needs).static_order():
        last = max(order[dts] for dts in ts.dependencies if dts in order)
        order[ts] = (*last[:-1], last[-1] + _STEP)
    level = consumers
    while level:
        needed = {dts for ts in level for dts in ts.dependencies if dts not in order}
        level = {dts for dts in needed if not ours(dts) and order.keys() >= dts.dependents}
        for dts in level:
            first = min(order[user] for user in dts.dependents)
            order[dts] = (*first[:-1], first[-1] + _UPSTREAM)


def _reorder(order: Order) -> None:
    """Assign the tasks' own priorities again, in the product's order.

    The numbers stay among those that `dask.order` gave these tasks, so that they compare
    with everything else on the scheduler as before. The first one in each is what the user set.
    """
    # Others may sit in a sorted queue.
    fresh = {ts: cast("Any", ts.priority) for ts in order if ts.state == "released" and ts.priority}
    sooner = sorted(fresh, key=lambda ts: (fresh[ts][0], order[ts], fresh[ts]))
    for ts, number in zip(sooner, sorted(fresh.values()), strict=True):
        ts.priority = number
