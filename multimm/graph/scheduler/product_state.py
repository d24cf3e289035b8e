"""The workers of one product on a scheduler: which rank of the grid is which address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed.comm.addressing import get_address_host

from multimm.graph.block_task import BlockTask, Key
from multimm.graph.scheduler.prefetch import Progress
from multimm.planning.tiling.grid import Coordinate, Grid

if TYPE_CHECKING:
    from distributed.scheduler import TaskState


def ours(ts: TaskState) -> BlockTask | None:
    """What a task runs, if it is one of a product of ours, with a place."""
    return ts.run_spec if isinstance(ts.run_spec, BlockTask) else None


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
    progress: dict[int, Progress] = field(default_factory=dict)

    def address(self, at: Coordinate) -> str:
        """The worker at a place in the grid."""
        return self.workers[self.grid.rank(at)]

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
                heir = min(load, key=lambda a: (load[a], hosts[a] == host, a))
                self.workers[rank] = heir
                load[heir] += 1
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
