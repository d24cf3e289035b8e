"""What the next step of a product needs is fetched during the present one.

Dask sends a task when all that it needs is in memory somewhere, and its worker fetches then. The
next product of a chain needs the sum of the present one, so its operand blocks would come when
that is done, and a worker of one or two chains has nothing else to do meanwhile. So the scheduler
has workers fetch what their tasks will need, no more than one step ahead of the first one that is
not over: for so much the plan has memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING

from distributed.comm.core import CommClosedError

from multimm.graph.block_task import Key, Place

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

When = tuple[int, ...]  #: a wave, and a step of it


@dataclass
class Progress:
    """How far one worker of a product has come.

    Parameters
    ----------
    left : Counter
        Products and sums of each step that are not done.
    later : dict
        Tasks that something could be fetched for, were it not too early, by step.
    asked : set
        Blocks that it was asked to fetch, with the wave that needs them.
    """

    left: Counter[When] = field(default_factory=Counter)
    later: dict[When, set[Key]] = field(default_factory=lambda: defaultdict(set))
    asked: set[tuple[Key, int]] = field(default_factory=set)
    _first: list[When] | None = None  #: two of `left`; a scheduler has no time to look at them all

    def expect(self, step: When) -> None:
        """One more task of a step is to be done."""
        self.left[step] += 1
        self._first = None

    def near(self, step: When) -> bool:
        """Whether all steps are over that come before another one, except for the last of them."""
        if self._first is None:
            self._first = nsmallest(2, self.left)
        return len(self._first) < 2 or step <= self._first[1]

    def done(self, step: When) -> list[Key]:
        """One task of a step is; return those that it is not too early for any more."""
        self.left[step] -= 1
        if self.left[step] > 0:
            return []
        del self.left[step]
        self._first = None
        ready = [step for step in self.later if self.near(step)]
        return [key for step in ready for key in self.later.pop(step)]


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
    wave = place.wave
    blocks = [
        dts.key
        for dts in user.dependencies
        if dts.who_has and worker not in dts.who_has and (dts.key, wave) not in progress.asked
    ]
    if blocks:
        progress.asked.update((block, wave) for block in blocks)
        with suppress(CommClosedError):  # of a worker whose loss is about to be noticed
            scheduler.request_acquire_replicas(
                address, blocks, stimulus_id=f"multimm-fetch-{stimulus_id}"
            )
