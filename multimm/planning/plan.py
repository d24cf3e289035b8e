"""The whole decision about one product, made before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from multimm.errors import MemoryBudgetError
from multimm.planning import cost, memory, traffic
from multimm.planning.grid import Blocks, Grid
from multimm.planning.layout import Layout
from multimm.planning.memory import Held, Terms
from multimm.planning.spec import SHARED_MEMORY, ClusterSpec


@dataclass(frozen=True)
class MatmulPlan:
    """How one product will be computed: ``print(plan)`` is the dry run.

    Attributes
    ----------
    layout : Layout
        Blocks, slabs, grid and waves.
    cluster : ClusterSpec
        The workers it was made for, by rank.
    precision : str
        ``"float32"``, ``"ieee"`` or ``"tf32"``.
    strategy, reason : str
        What was chosen, and why.
    m, n, k, flops, tasks : int
    grid : Grid
        p_m x p_n x p_k.
    seconds : float
        Predicted time, from the call of compute to the last block.
    bytes_received : int
        What all workers together receive from each other.
    bytes_recut : int
        What workers exchange beforehand to bring operands into the plan's blocks: at most, unless
        it is known where those lie.
    bytes_added : int
        What workers receive of the C that is added: at most, unless it is known where that lies.
    bytes_moved : int
        The three together.
    bytes_bound : int
        The least that any two-dimensional arrangement of these workers receives.
    peak_bytes, budget_bytes : int
        Of the fullest worker: what it holds at once and cannot spill, and what it may use.
    """

    layout: Layout
    cluster: ClusterSpec
    precision: str
    strategy: str
    reason: str

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
        """Tasks of the product; making the operands comes on top."""
        return self.layout.tasks

    @property
    def grid(self) -> Grid:
        """Workers as p_m x p_n x p_k."""
        return self.layout.grid

    @cached_property
    def used(self) -> ClusterSpec:
        """The workers that have a place in the grid; a single task may run on any."""
        return self.cluster if self.tasks == 1 else self.cluster.first(self.grid.workers)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each worker receives, by rank; workers that receive none are absent."""
        return dict(traffic.received(self.layout, self.used.workers))

    @property
    def bytes_received(self) -> int:
        """What all workers together receive from each other."""
        return sum(self.received.values())

    @cached_property
    def bytes_recut(self) -> int:
        """What workers exchange beforehand to bring operands into the plan's blocks.

        At most, unless it is known where they lie, in the grid.
        """
        return traffic.brought(self.layout, self.used.workers)

    @cached_property
    def bytes_added(self) -> int:
        """What workers receive of the C that is added: at most, as `bytes_recut`."""
        return traffic.added(self.layout, self.used.workers)

    @property
    def bytes_moved(self) -> int:
        """All that workers receive: of the product, of operands that are cut, of the C added."""
        return self.bytes_received + self.bytes_recut + self.bytes_added

    @property
    def bytes_bound(self) -> int:
        """The least that a two-dimensional arrangement of the workers in use receives."""
        return traffic.bound_2d(self.layout.problem, self.used.workers)

    @cached_property
    def time_terms(self) -> Terms:
        """Predicted seconds of the slowest worker, by name."""
        busiest = max(self.received.values(), default=0)
        shared = (self.bytes_recut + self.bytes_added) / self.used.workers
        spilled = memory.excess(self._memory, self.used)
        return cost.seconds(self.layout, self.used, busiest + shared, spilled)

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return cost.total_seconds(self.time_terms)

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
    def peak_bytes(self) -> int:
        """What the fullest worker holds at once and cannot spill."""
        return int(sum(self.memory_terms.values()))

    @property
    def budget_bytes(self) -> int:
        """What the smallest worker in use may use."""
        return self.used.budget_bytes

    def check(self) -> MatmulPlan:
        """Return the plan if every worker can hold its share.

        Raises
        ------
        MemoryBudgetError
            Names the worker with the least memory, what it would need, what it may use and
            what would fit.
        """
        if self.peak_bytes <= self.budget_bytes:
            return self
        worst = min(
            range(self.used.workers), key=lambda rank: self.cluster.devices[rank].memory_bytes
        )
        name = self.cluster.addresses[worst] if self.cluster.addresses else f"worker {worst}"
        device = self.cluster.devices[worst]
        biggest = max(self.memory_terms, key=lambda term: self.memory_terms[term])
        needed = int(self.peak_bytes / self.budget_bytes * device.memory_bytes)
        raise MemoryBudgetError(
            f"{name} ({device.name}) would hold {human(self.peak_bytes)} at once, mostly "
            f"{biggest} ({human(self.memory_terms[biggest])}), and may use "
            f"{human(self.budget_bytes)} of its {human(device.memory_bytes)}; give each worker "
            f"{human(needed)}, or use about {self._workers_that_fit()} such workers, or pass "
            "smaller blocks= and slabs="
        )

    def _workers_that_fit(self) -> int:
        return -(-self.used.workers * self.peak_bytes // self.budget_bytes)

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {text}" for name, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        layout, problem = self.layout, self.layout.problem
        times = {name: value for name, value in self.time_terms.items() if value > 0}
        lines = [
            ("product", self._product_line()),
            ("workers", self._cluster_line()),
            ("grid", f"{self.grid} (p_m x p_n x p_k): {self.strategy}, because {self.reason}"),
            (
                "blocks",
                f"C in {blocks_text(layout.m_blocks)} x {blocks_text(layout.n_blocks)}, "
                f"k in slabs of {blocks_text(layout.slabs)}"
                f"{self._cut_text()}{self._packed_text()}",
            ),
            ("order", self._order_line()),
            ("moved", self._moved_line()),
            ("memory", self._memory_line(self.memory_terms)),
        ]
        if self.spill_terms:
            size = sum(self.spill_terms.values())
            names = ", ".join(f"{n} {human(v)}" for n, v in self.spill_terms.items())
            more = self.peak_bytes + size - self.budget_bytes
            over = f", {human(more)} more than all workers hold without" if more > 0 else ""
            lines.append(("", f"and {human(size)} that may be spilled ({names}){over}"))
        detail = ", ".join(f"{name} {value:.3g}" for name, value in times.items())
        rate = self.flops / max(self.seconds, 1e-12) / 1e9
        lines.append(("time", f"{self.seconds:.3g} s, {rate:.4g} GFLOP/s ({detail})"))
        if problem.batch > 1:
            lines.insert(1, ("batch", " x ".join(map(blocks_text, layout.batch_blocks))))
        return lines

    def _cut_text(self) -> str:
        within = not self.layout.cut_once and self.layout.cut_again
        return f", {names(within)} cut by every product" if within else ""

    def _packed_text(self) -> str:
        packed = names(self.layout.packed)
        if packed:
            return f", {packed} packed where {'it is' if len(packed) == 1 else 'they are'} kept"
        return ", packed by every product" if self.layout.on_tensor_cores else ""

    def _product_line(self) -> str:
        problem = self.layout.problem
        batch = f"{problem.batch} times " if problem.batch > 1 else ""
        where = " on tensor cores" if self.layout.on_tensor_cores else ""
        half = f" of {problem.flops:.4g}" if self.layout.mirrors else ""
        return (
            f"{batch}{self.m} x {self.k} @ {self.k} x {self.n} -> {problem.dtype}, "
            f"precision {self.precision}{where}, {self.flops:.4g}{half} flop"
        )

    def _cluster_line(self) -> str:
        names = sorted({device.name for device in self.cluster.devices})
        threads = f", {self.cluster.threads} threads each" if self.cluster.threads > 1 else ""
        nodes = ""
        if self.cluster.node < self.cluster.workers:
            nodes = f", {self.cluster.node} per node, {self.cluster.between.name} between nodes"
        link = self.cluster.link.name
        of = " and ".join(names)
        some = f", {self.used.workers} of them used" * (self.used.workers < self.cluster.workers)
        workers = f"{self.cluster.workers} of {of}{some}{threads}"
        told = self.cluster.numbers and self.tasks > 1  # one task runs where its operands are
        anew = ", numbered in the order in which blocks lie on them" if told else ""
        return f"{workers}{anew}, {link}{nodes}, {rates_text(self.cluster)}"

    def _order_line(self) -> str:
        layout = self.layout
        waves = "one wave" if layout.waves == 1 else f"{layout.waves} waves"
        reads = ", operand blocks read slab by slab" if layout.stream else ""
        half = ", one triangle of C computed and mirrored" if layout.mirrors else ""
        at_once = min(layout.fan_in, layout.parts)
        sums = f", {at_once} parts of k added at once" if at_once > 2 else ""
        slabs = min(layout.slabs_per_task, layout.steps)
        fused = f", {slabs} slabs multiplied by each" if slabs > 1 else ""
        p = layout.problem
        sides = {"k": p.order, "rows": p.rows, "columns": p.columns}
        sorted_by = [side for side, order in sides.items() if order]
        lie = "it lies" if sorted_by == ["k"] else "they lie"
        lying = f", {' and '.join(sorted_by)} in the order in which {lie} on workers" * bool(
            sorted_by
        )
        tasks = f"{self.tasks} task{'s' * (self.tasks > 1)}"
        return f"{tasks} in {waves}{fused}{reads}{half}{sums}{lying}"

    def _moved_line(self) -> str:
        more = self._recut_text() if self.bytes_recut else ""
        more += self._added_text() if self.bytes_added else ""
        lying = names(self.layout.lying)
        lying = f", {lying} used where {'it lies' if len(lying) == 1 else 'they lie'}" * bool(lying)
        if not self.received:
            return f"nothing: all is at home{more}"
        worst = max(self.received.values(), default=0)
        bound = self.bytes_bound
        against = f", {self.bytes_received / bound:.2f} x the 2D bound" if bound else ""
        return (
            f"{human(self.bytes_received)} between workers, {human(worst)} to the busiest"
            f"{against}{self._nodes_text()}{lying}{more}"
        )

    def _recut_text(self) -> str:
        layout = self.layout
        size = f"{self._at_most(layout.cut_again)}{human(self.bytes_recut)}"
        return f", and {size} before to cut {names(layout.cut_again)} into these blocks"

    def _added_text(self) -> str:
        return f", and {self._at_most('c')}{human(self.bytes_added)} of the C that is added"

    def _at_most(self, roles: Iterable[str]) -> str:
        layout = self.layout
        known = all(layout.spec(x).owners and not layout.lies_beyond(x) for x in roles)
        return "" if known else "at most "

    def _nodes_text(self) -> str:
        problem, grid = self.layout.problem, self.layout.grid
        far = traffic.share_between_nodes(problem, grid, self.used.node)
        return f", about {far:.0%} between nodes" if far else ""

    def _memory_line(self, terms: Terms) -> str:
        names = ", ".join(f"{name} {human(value)}" for name, value in terms.items())
        return f"{human(self.peak_bytes)} of {human(self.budget_bytes)} per worker ({names})"


def rates_text(cluster: ClusterSpec) -> str:
    """Whether the rates behind the prediction were measured, when, and which were not."""
    days = {"products": min(device.measured for device in cluster.devices)}
    if cluster.node > 1 and cluster.link.name != SHARED_MEMORY.name:
        days["transfers"] = cluster.link.measured
    if cluster.node < cluster.workers:
        days["transfers between nodes"] = cluster.between.measured
    if not any(days.values()):
        return "rates as shipped"
    missing = " and ".join(name for name, day in days.items() if not day)
    oldest = min(day for day in days.values() if day)
    return f"rates measured {oldest}" + f" except for {missing}" * bool(missing)


def names(roles: Iterable[str]) -> str:
    """Operands as they are written.

    >>> names(("a", "b"))
    'A and B'
    """
    return " and ".join(role.upper() for role in roles)


def blocks_text(blocks: Blocks) -> str:
    """Block sizes in a few characters: ``4 of 16384``, or ``3 of 4096 to 5000``.

    >>> blocks_text((4096, 4096, 10))
    '3 of 10 to 4096'
    """
    low, high = min(blocks), max(blocks)
    return f"{len(blocks)} of {high}" if low == high else f"{len(blocks)} of {low} to {high}"


def human(size: float) -> str:
    """Bytes in a unit that a person reads.

    >>> human(2_000_000_000)
    '2 GB'
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
