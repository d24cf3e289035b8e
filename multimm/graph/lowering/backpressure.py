"""Barriers, which hold reads of a later k-tile back until a worker is done with an earlier one."""

from __future__ import annotations

from dataclasses import dataclass

from dask._task_spec import List, TaskRef

from multimm.graph.block_task import BlockTask, Key, after, within
from multimm.graph.label import Kind
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.multiply import wait_for
from multimm.planning.schedule import Barrier
from multimm.planning.tiling.grid import Coordinate


@dataclass
class Barriers:
    """Adds the barriers of one product to its tasks, `made`."""

    keys: Keys
    made: dict[Key, BlockTask]

    def key(self, barrier: Barrier, part: int) -> Key:
        """A task that is done when a worker's products of one k-tile are; it returns nothing."""
        layout = self.keys.layout
        key = (self.keys.name("barrier"), *barrier)
        if key not in self.made:
            sums = []
            for row, j in layout.behind(barrier):
                flat, i = divmod(row, len(layout.m_blocks))
                sums.append(
                    TaskRef(self.keys.chain(layout.batch_index(flat), i, j, barrier.k_tile))
                )
            step = layout.step(barrier.k_tile, self.keys.cluster.workers)
            last = len(layout.row_sizes)  # behind every block product of its step
            owner = Coordinate(barrier.row, barrier.col, part)
            order = (barrier.row_panel, step, Kind.MULTIPLY, last, 0)
            place = self.keys.place(owner, order)
            label = self.keys.label(Kind.WAIT, k_tiles=(barrier.k_tile,))
            self.made[key] = BlockTask(key, wait_for, *sums, label=label, place=place)
        return key

    def keep(self) -> None:
        """Have the last task of each worker depend on its barriers, so that Dask keeps them.

        A lost worker's heir needs blocks that others have read and let go of. They are read again;
        a barrier that is gone would be made again, too, from all sums of its worker until then.
        """
        barriers: dict[int, list[BlockTask]] = {}
        last: dict[int, BlockTask] = {}
        for task in self.made.values():
            rank = self.keys.layout.grid.rank(task.place.owner)
            if task.label.kind is Kind.WAIT:
                barriers.setdefault(rank, []).append(task)
            elif rank not in last or task.place.order > last[rank].place.order:
                last[rank] = task
        for rank, own in barriers.items():
            end = last[rank]
            # Where others have a row panel more, the last barriers stand behind this worker's last
            # task.
            kept = [
                TaskRef(barrier.key)
                for barrier in own
                if barrier.place.order[:2] < end.place.order[:2]
            ]
            self.made[end.key] = within(end, after, List(*kept))
