"""The workers of one product on a scheduler: which rank of the grid is which address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from multimm.graph.tasks import Key
from multimm.planning.grid import Coordinate, Grid


@dataclass
class Product:
    """Who does what in one product.

    Parameters
    ----------
    grid : Grid
    workers : list of str
        The address of each rank; one address may hold several ranks.
    pinned : dict
        Tasks that were given a worker, and the place that decides which.
    """

    grid: Grid
    workers: list[str]
    pinned: dict[Key, Coordinate] = field(default_factory=dict)

    def address(self, at: Coordinate) -> str:
        """The worker at a place in the grid."""
        return self.workers[self.grid.rank(at)]

    def replace_lost(self, lost: str, live: Iterable[str]) -> bool:
        """Give a lost worker's ranks to those with the fewest; False if nobody is left."""
        load = Counter(dict.fromkeys(live, 0))
        load.update(address for address in self.workers if address in load)
        if not load:
            return False
        for rank, address in enumerate(self.workers):
            if address == lost:
                heir = min(load, key=lambda a: (load[a], a))
                self.workers[rank] = heir
                load[heir] += 1
        return True

    def make_room(self, joined: str) -> None:
        """Give a new worker ranks of those that hold the most, while they hold two more."""
        while True:
            load = Counter(self.workers)
            busiest = max(load, key=lambda a: (load[a], a))
            if load[busiest] <= load[joined] + 1:
                return
            last = len(self.workers) - 1 - self.workers[::-1].index(busiest)
            self.workers[last] = joined
