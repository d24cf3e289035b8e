"""The text of a plan: what ``print(plan)`` says before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from multimm.planning.cost import communication
from multimm.planning.cost.memory import Terms
from multimm.planning.devices import SHARED_MEMORY
from multimm.planning.hardware import ClusterSpec
from multimm.planning.in_place import InPlace
from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.result_chunks import within

if TYPE_CHECKING:
    from multimm.planning.plan import MatmulPlan

#: Memory that Dask takes for a task: 2.3 to 3 kB for the graph in the client, and 4.4 to 5.4 more
#: when it has been sent, of client and scheduler together (products of 4352 and of 22736 tasks).
TASK_BYTES = 7000
#: Tasks that are allowed: 14 GB of these, and a scheduler that does nothing else for 17 minutes at
#: half a millisecond each, and for more than an hour at the 2.1 that it took beside a worker on two
#: cores. Nobody has seen one that survives it.
MOST_TASKS = 2_000_000


def text(plan: MatmulPlan) -> str:
    """A line for each side of a plan, its name first."""
    return "\n".join(f"{name:<9} {line}" for name, line in _lines(plan))


def _lines(plan: MatmulPlan) -> list[tuple[str, str]]:
    lines = [("product", _product_line(plan))]
    if plan.layout.problem.batch > 1:
        lines.append(("batch", " x ".join(map(blocks_text, plan.layout.batch_blocks))))
    lines += [
        ("workers", _cluster_line(plan)),
        ("grid", f"{plan.grid} (p_m x p_n x p_k): {plan.strategy}, because {plan.reason}"),
        ("blocks", _blocks_line(plan)),
        *([("chunks", _chunks_line(plan))] if plan.layout.hands_out else []),
        ("order", _order_line(plan)),
        ("moved", _moved_line(plan)),
        ("memory", _memory_line(plan)),
    ]
    if plan.spill_terms:
        lines.append(("", _spill_line(plan)))
    if plan.layout.problem.downloaded:
        lines.append(("host", _host_line(plan)))
    return [*lines, ("time", _time_line(plan))]


def _product_line(plan: MatmulPlan) -> str:
    problem = plan.layout.problem
    batch = f"{problem.batch} times " if problem.batch > 1 else ""
    where = " on tensor cores" if plan.layout.on_tensor_cores else ""
    half = f" of {problem.flops:.4g}" if plan.layout.mirrors else ""
    promised = f"precision {plan.precision}"
    if problem.exact:
        wraps = problem.dtype.startswith(("int", "uint"))
        promised = f"exact modulo 2^{8 * problem.out_bytes}" if wraps else "exact"
    return (
        f"{batch}{plan.m} x {plan.k} @ {plan.k} x {plan.n} -> {problem.dtype}, "
        f"{promised}{where}, {plan.flops:.4g}{half} flop"
    )


def _cluster_line(plan: MatmulPlan) -> str:
    cluster, used = plan.cluster, plan.used.workers
    devices = " and ".join(sorted({device.name for device in cluster.devices}))
    some = f", {used} of them used" if used < cluster.workers else ""
    threads = f", {cluster.threads} threads each" if cluster.threads > 1 else ""
    told = cluster.numbers and plan.layout.tasks > 1  # one task runs where its operands are
    anew = ", numbered in the order in which blocks lie on them" if told else ""
    nodes = ""
    if cluster.node < cluster.workers:
        nodes = f", {cluster.node} per node, {cluster.between.name} between nodes"
    workers = f"{cluster.workers} of {devices}{some}{threads}{anew}"
    return f"{workers}, {cluster.link.name}{nodes}, {rates_text(cluster)}"


def _blocks_line(plan: MatmulPlan) -> str:
    layout = plan.layout
    rows, columns = layout.work.sides
    within = tuple(role for role in layout.operands.cut_within if role != layout.operands.banded)
    partial_products = ""
    if layout.in_place is not None:
        partial_products, within = _partial_products_text(layout.in_place), ()
    cut = f", {names(within)} cut by every product" if within else ""
    if layout.operands.banded:
        cut += f", {layout.operands.banded.upper()} multiplied chunk by chunk"
    packed = ", packed by every product" if layout.on_tensor_cores else ""
    if layout.operands.packed:
        are = "it is" if len(layout.operands.packed) == 1 else "they are"
        packed = f", {names(layout.operands.packed)} packed where {are} kept"
    return (
        f"C in {blocks_text(rows)} x {blocks_text(columns)}{partial_products}, "
        f"k in k-tiles of {blocks_text(layout.k_tiles)}{cut}{packed}"
    )


def _chunks_line(plan: MatmulPlan) -> str:
    layout = plan.layout
    sizes = " x ".join(map(blocks_text, layout.chunks))
    how = "cut out of these blocks where they lie"
    if plan.bytes_joined or not all(map(within, layout.chunks, layout.own_chunks)):
        how = "cut out of these blocks and joined"
    return f"C in {sizes}, {how}"


def _partial_products_text(own: InPlace) -> str:
    parted = f" in {own.work.count} partial products" if own.work.joined else ""
    elsewhere = human(sum(own.fetched.values())) if own.fetched else ""
    but = f" but for {elsewhere}" if elsewhere else ""
    joined = f",{' added' * own.work.adds} and joined" if own.work.joined else ""
    coalesced = (
        f", {own.small.upper()} coalesced where it lies" if own.partial_products.coalesced else ""
    )
    return f", made{parted} where {own.large.upper()} lies{but}{joined}{coalesced}"


def _order_line(plan: MatmulPlan) -> str:
    layout = plan.layout
    tasks = f"{plan.tasks} task{'s' * (plan.tasks > 1)}"
    if plan.tasks > MOST_TASKS:
        tasks = f"{tasks} ({_burden_text(plan)})"
    row_panels = "one row panel" if layout.row_panels == 1 else f"{layout.row_panels} row panels"
    k_tiles = min(layout.k_tiles_per_task, layout.steps)
    fused = f", {k_tiles} k-tiles multiplied by each" if k_tiles > 1 else ""
    read = "taken from host memory" if layout.problem.from_host else "read"
    reads = f", operand blocks {read} k-tile by k-tile" if layout.stream else ""
    half = ", one triangle of C computed and mirrored" if layout.mirrors else ""
    at_once = min(layout.fan_in, layout.parts)
    sums = f", {at_once} parts of k added at once" if at_once > 2 else ""
    return f"{tasks} in {row_panels}{fused}{reads}{half}{sums}{_sorted_text(plan)}"


def _burden_text(plan: MatmulPlan) -> str:
    return f"more than Dask can take: {human(plan.tasks * TASK_BYTES)} in client and scheduler"


def _sorted_text(plan: MatmulPlan) -> str:
    layout = plan.layout
    rows = "matrices" if layout.batch_blocks else "rows"
    orders = {"k": layout.k_order}
    orders |= {rows: layout.located.rows, "columns": layout.located.columns}
    sides = [side for side, order in orders.items() if order]
    lie = "it lies" if sides == ["k"] else "they lie"
    return f", {' and '.join(sides)} in the order in which {lie} on workers" if sides else ""


def _moved_line(plan: MatmulPlan) -> str:
    more = _rechunk_text(plan) if plan.bytes_recut else ""
    more += _added_text(plan) if plan.bytes_added else ""
    if plan.bytes_joined:
        more += f", and {human(plan.bytes_joined)} of C to join its chunks"
    if not plan.bytes_received:
        return f"nothing: all blocks are in place{more}"
    worst, bound = plan.bytes_busiest, plan.bytes_bound
    against = f", {plan.bytes_received / bound:.2f} x the 2D bound" if bound else ""
    roles = plan.layout.operands.in_place
    lie = "it lies" if len(roles) == 1 else "they lie"
    in_place = f", {names(roles)} used where {lie}" if roles else ""
    return (
        f"{human(plan.bytes_received)} between workers, {human(worst)} to the busiest"
        f"{against}{_nodes_text(plan)}{in_place}{more}"
    )


def _rechunk_text(plan: MatmulPlan) -> str:
    size, roles = human(plan.bytes_recut), plan.layout.operands.cut_again
    if plan.layout.problem.from_host:  # whole chunks, some of them again in later row panels
        what = names(plan.layout.roles)
        return f", and about {size} between host memories to bring {what} into these blocks"
    return f", and {_at_most(plan, roles)}{size} before to cut {names(roles)} into these blocks"


def _added_text(plan: MatmulPlan) -> str:
    return f", and {_at_most(plan, 'c')}{human(plan.bytes_added)} of the C that is added"


def _at_most(plan: MatmulPlan, roles: Iterable[str]) -> str:
    layout = plan.layout
    known = all(layout.spec(x).owners and not layout.lies_beyond(x) for x in roles)
    return "" if known else "at most "


def _nodes_text(plan: MatmulPlan) -> str:
    far = communication.share_between_nodes(plan.layout.problem, plan.grid, plan.used.node)
    return f", about {far:.0%} between nodes" if far else ""


def _memory_line(plan: MatmulPlan) -> str:
    held, budget = human(plan.peak_bytes), human(plan.budget_bytes)
    return f"{held} of {budget} per worker ({_terms_text(plan.memory_terms)})"


def _spill_line(plan: MatmulPlan) -> str:
    size = sum(plan.spill_terms.values())
    more = plan.peak_bytes + size - plan.budget_bytes
    over = f", {human(more)} more than all workers hold without" if more > 0 else ""
    return f"and {human(size)} that may be spilled ({_terms_text(plan.spill_terms)}){over}"


def _host_line(plan: MatmulPlan) -> str:
    problem, layout = plan.layout.problem, plan.layout
    roles = layout.uploaded
    size = layout.read_bytes if problem.from_host else sum(layout.spec(x).nbytes for x in roles)
    up = f"{human(size)} of {names(roles)} to the GPUs, " if roles else ""
    return f"{up}{human(problem.result_bytes)} of C from there"


def _terms_text(terms: Terms) -> str:
    return ", ".join(f"{name} {human(size)}" for name, size in terms.items())


def _time_line(plan: MatmulPlan) -> str:
    terms = ", ".join(f"{name} {value:.3g}" for name, value in plan.time_terms.items() if value > 0)
    rate = plan.flops / max(plan.seconds, 1e-12) / 1e9
    return f"{plan.seconds:.3g} s, {rate:.4g} GFLOP/s ({terms})"


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

    >>> names("ab"), names("abc")
    ('A and B', 'A, B and C')
    """
    *others, last = (role.upper() for role in roles)
    return f"{', '.join(others)} and {last}" if others else last


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
