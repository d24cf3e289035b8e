"""The whole decision about one product, made before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import NamedTuple

from multimm.errors import MemoryBudgetError, OptionError
from multimm.planning import advice
from multimm.planning.cost import communication, counted_transfers, memory, redistribution, time
from multimm.planning.cost.memory import Held, Terms
from multimm.planning.explain import picture, text
from multimm.planning.explain.comparison import Comparison
from multimm.planning.hardware import ClusterSpec
from multimm.planning.limits import MOST_TASKS
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Blocks, Grid

#: Of plans with more tasks, which take minutes to submit, bytes are not counted block by block,
#: which would take seconds.
COUNTED = 500_000


class Asked(NamedTuple):
    """What a plan was made for, as it was given, and by what."""

    problem: Problem
    options: Options
    planner: Callable[..., MatmulPlan]  #: `multimm.planning.choice.plan_matmul`, for other workers


@dataclass(frozen=True, repr=False)
class MatmulPlan:
    """How one product will be computed: ``print(plan)`` is the dry run.

    Attributes
    ----------
    layout : Schedule
        Blocks, k-tiles, grid and row panels.
    cluster : ClusterSpec
        The workers it was made for, by rank.
    precision : str
        ``"float32"``, ``"ieee"``, ``"tf32"`` or ``"float64"``.
    strategy, reason : str
        What was chosen, and why.
    asked : Asked
        What it was made for, as it was given.
    """

    layout: Schedule
    cluster: ClusterSpec
    precision: str
    strategy: str
    reason: str
    asked: Asked = field(compare=False)

    @property
    def m(self) -> int:
        """Rows of C."""
        return self.layout.problem.m

    @property
    def n(self) -> int:
        """Columns of C."""
        return self.layout.problem.n

    @property
    def k(self) -> int:
        """Length of the contraction."""
        return self.layout.problem.k

    @property
    def flops(self) -> int:
        """Floating-point operations that are executed, over all matrices."""
        return self.layout.flops

    @property
    def tasks(self) -> int:
        """Tasks of the product; to make operands, and to cut and join them, comes on top."""
        return self.layout.tasks + self._handing_out[0]

    @property
    def chunks(self) -> tuple[Blocks, ...]:
        """Sizes of the result's chunks, along all of its dimensions; a vector's are a matrix's."""
        return self.layout.result.chunks

    @cached_property
    def _handing_out(self) -> tuple[int, int]:
        return self.layout.result.handing_out(self.used.workers)

    @property
    def grid(self) -> Grid:
        """Workers as p_m x p_n x p_k."""
        return self.layout.grid

    @cached_property
    def used(self) -> ClusterSpec:
        """The workers that have a place in the grid; a single task may run on any."""
        return self.cluster if self.layout.tasks == 1 else self.cluster.first(self.grid.workers)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each worker receives, by rank; workers that receive none are absent."""
        return dict(counted_transfers.received(self.layout, self.used.workers))

    @cached_property
    def _of_products(self) -> communication.Moved:
        return communication.of_products(self.layout, self.used.workers, COUNTED)

    @property
    def bytes_received(self) -> int:
        """What all workers together receive from each other."""
        return self._of_products.total

    @property
    def bytes_busiest(self) -> float:
        """What the worker receives that receives the most from others."""
        return self._of_products.busiest

    @cached_property
    def bytes_recut(self) -> int:
        """What workers exchange beforehand to bring operands into the plan's blocks.

        At most, unless it is known where those lie, in the grid.
        """
        return redistribution.brought(self.layout, self.used.workers)

    @cached_property
    def bytes_added(self) -> int:
        """What workers receive of the C that is added: at most, as `bytes_recut`."""
        return redistribution.added(self.layout, self.used.workers)

    @property
    def bytes_moved(self) -> int:
        """All that workers receive: of the product, of what is cut, added, and joined."""
        return self.bytes_received + self.bytes_recut + self.bytes_added + self.bytes_joined

    @property
    def bytes_joined(self) -> int:
        """What workers receive to make chunks of C of blocks that others have.

        At most, of more than 20,000 chunks and blocks.
        """
        return self._handing_out[1]

    @property
    def bytes_bound(self) -> int:
        """The least that any two-dimensional arrangement of the workers in use receives."""
        return communication.bound_2d(self.layout.problem, self.used.workers)

    @cached_property
    def time_terms(self) -> Terms:
        """Predicted seconds of the slowest worker, by name."""
        shared = (self.bytes_moved - self.bytes_received) / self.used.workers
        moved, spilled = self.bytes_busiest + shared, self.bytes_spilled
        return time.seconds(self.layout, self.used, moved, spilled)

    @property
    def seconds(self) -> float:
        """Predicted time, from the call of compute to the last block."""
        return time.total_seconds(self.time_terms, self.used.slowest.kind)

    @cached_property
    def memory_terms(self) -> Terms:
        """Bytes that the fullest worker must hold at once, by name."""
        return self._memory[0]

    @cached_property
    def spill_terms(self) -> Terms:
        """Bytes that the fullest worker may hold or spill, by name."""
        return self._memory[1]

    @cached_property
    def _memory(self) -> Held:
        stay, spill = memory.held(self.layout, self.used)
        if all(device.spills for device in self.used.devices):
            return stay, spill
        return stay | spill, {}

    @property
    def bytes_spilled(self) -> float:
        """What the fullest worker has to spill."""
        return memory.excess(self._memory, self.used)

    @property
    def peak_bytes(self) -> int:
        """What the fullest worker holds at once and cannot spill."""
        return int(sum(self.memory_terms.values()))

    @property
    def budget_bytes(self) -> int:
        """What the smallest worker in use may hold at once."""
        return self.used.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether every worker can hold its share, and Dask all tasks."""
        return self.peak_bytes <= self.budget_bytes and self.tasks <= MOST_TASKS

    def compare(self, seconds: float, *, bytes_moved: int | None = None) -> Comparison:
        """What was predicted beside what was measured: ``print(plan.compare(seconds))``.

        Parameters
        ----------
        seconds : float
            That the product took, from the call of compute to the last block.
        bytes_moved : int, optional
            That workers received meanwhile.

        Raises
        ------
        OptionError
            If either is negative, or no number.
        """
        moved = 0 if bytes_moved is None else bytes_moved
        for name, value in (("seconds", seconds), ("bytes_moved", moved)):
            if not (isinstance(value, Real) and 0 <= value < float("inf")):
                raise OptionError(f"{name}={value!r}: a number of 0 or more is needed")
        return Comparison(
            self.seconds, seconds, self.flops, self.bytes_moved, bytes_moved, text.at_most(self)
        )

    def check(self) -> MatmulPlan:
        """Return the plan if it fits.

        Raises
        ------
        MemoryBudgetError
            Names the worker with the least memory, what it would need and what it may use, or how
            many tasks are too many; and what would do, found by planning again.
        """
        if self.fits:
            return self
        raise MemoryBudgetError(advice.refusal(self))

    def __repr__(self) -> str:
        return text.text(self)

    def _repr_html_(self) -> str:
        return picture.page(self)
