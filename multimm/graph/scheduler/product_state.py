"""One product on a scheduler: which rank is which address, and how far each has come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING

from distributed.comm.addressing import get_address_host

from multimm.graph.block_task import BlockTask, Key
from multimm.planning.tiling.grid import Coordinate, Grid

if TYPE_CHECKING:
    from distributed.scheduler import TaskState


def ours(ts: TaskState) -> BlockTask | None:
    """What a task runs, if it is one of a product of ours, with a place."""
    return ts.run_spec if isinstance(ts.run_spec, BlockTask) else None


When = tuple[int, ...]  #: a row panel, and a step of it


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
        Blocks that it was asked to fetch, with the row panel that needs them.
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


@dataclass
class Product:
    """Who does what in one product.

    Parameters
    ----------
    token : str
        What its tasks' places name it by.
    grid : Grid
    workers : list of str
        The address of each rank; one address may hold several ranks.
    pinned : dict
        Tasks that were given a worker, and the place that decides which.
    progress : dict
        How far each rank has come.
    """

    token: str
    grid: Grid
    workers: list[str]
    pinned: dict[Key, Coordinate] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=lambda: defaultdict(Progress))

    def address(self, at: Coordinate) -> str:
        """The worker at a place in the grid."""
        return self.workers[self.grid.rank(at)]

    def progress_at(self, at: Coordinate) -> Progress:
        """How far the worker at a place has come."""
        return self.progress[self.grid.rank(at)]

    def replace(self, gone: Collection[str], able: Collection[str]) -> bool:
        """Give the ranks of workers that are gone to those with the fewest; False if none is able.

        Of equals, those on other hosts come first: the rest of a lost worker's host may be going,
        too.
        """
        hosts = {address: get_address_host(address) for address in able}
        load = Counter(dict.fromkeys(able, 0))
        load.update(address for address in self.workers if address in load)
        if not load:
            return False
        for rank, address in enumerate(self.workers):
            if address in gone:
                host = get_address_host(address)
                replacement = min(load, key=lambda a: (load[a], hosts[a] == host, a))
                self.workers[rank] = replacement
                load[replacement] += 1
        return True

    def make_room(self, joined: str) -> bool:
        """Give a new worker ranks of those that hold two more, the most first; False if none."""
        while True:
            load = Counter(self.workers)
            busiest = max(load, key=lambda a: (load[a], a))
            if load[busiest] <= load[joined] + 1:
                return joined in load
            last = len(self.workers) - 1 - self.workers[::-1].index(busiest)
            self.workers[last] = joined
