"""The text of a plan: what ``print(plan)`` says before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from multimm.display.units import duration, flops, human
from multimm.planning.cost import communication
from multimm.planning.cost.memory import Terms
from multimm.planning.cost.time import by_phase
from multimm.planning.explain import workers
from multimm.planning.explain.arithmetic import arithmetic
from multimm.planning.limits import MOST_TASKS, TASK_BYTES
from multimm.planning.tiling.grid import Blocks

if TYPE_CHECKING:
    from multimm.planning.plan import MatmulPlan

#: Characters of a line, of the names before the lines, and of the names of figures.
WIDTH, NAME, FIGURE = 88, 11, 32
#: What is less than this share of all is not named by itself: arbitrary.
LITTLE = 0.01
#: Terms of the time that have other names for readers.
_SAID = {
    "packing": "packing for the tensor cores",
    "cutting": "rechunking",
    "decoding": "decoding storage chunks",
    "sums between k-tiles": "sums from range to range",
    "launching": "waiting for launches",
    "scheduling": "Dask's scheduler",
    "starting": "planning and sending tasks",
    "first blocks": "waiting for the first blocks",
    "last sums": "adding parts of k",
    "handing C out": "cutting C into chunks",
}
#: When the parts of the time pass, in the order of `by_phase`.
PHASES = ("one after another", "meanwhile", "before and after")


class Section(NamedTuple):
    """What is said of one side of a plan."""

    name: str
    said: str
    figures: tuple[tuple[str, str], ...] = ()  #: a name and a number with its unit; or a heading


def text(plan: MatmulPlan) -> str:
    """A line for each side of a plan, its name first, and one for each figure; a summary second."""
    product, *others = sections(plan)
    lines = []
    for name, said, figures in (product, Section("in short", summary(plan)), *others):
        lines += _wrapped(f"{name:<{NAME}}{said}", " " * NAME)
        lines += [f"  {label:<{FIGURE}} {value}".rstrip() for label, value in figures]
    return "\n".join(lines)


def _wrapped(line: str, indent: str = "") -> list[str]:
    """In several lines, none of which ends in the middle of 4 x 2."""
    lines = wrap(line.replace(" x ", "\xa0x\xa0"), WIDTH, subsequent_indent=indent)
    return [one.replace("\xa0", " ") for one in lines]


def summary(plan: MatmulPlan) -> str:
    """Seconds, workers, traffic, memory and chunks, in one sentence."""
    used, moved = plan.used.workers, plan.bytes_moved
    move = f"{at_most(plan)}{human(moved)} move{'s' * (used == 1)}" if moved else "nothing moves"
    spilled = f", {human(plan.bytes_spilled)} more spilled" if plan.bytes_spilled > 0 else ""
    memory = f"{human(plan.peak_bytes)} of {human(plan.budget_bytes)} memory"
    fits = "About" if plan.fits else "Does not fit. About"
    return (
        f"{fits} {duration(plan.seconds)} on {workers.counted(plan.used)}; {move}; "
        f"{memory}{' each' * (used > 1)}{spilled}; {_chunks(plan)}."
    )


def sections(plan: MatmulPlan) -> Iterator[Section]:
    """All sides of a plan, as a user asks for them."""
    layout, cluster = plan.layout, plan.cluster
    yield Section("product", _product(plan))
    gpu = plan.used.slowest.kind == "gpu"
    yield Section("computed", arithmetic(layout, plan.precision, gpu=gpu))
    yield Section("work", _work(plan))
    yield Section("workers", _workers(plan))
    if cluster.workers > 1:
        yield Section("links", workers.links(cluster))
    yield Section("rates", workers.rates(cluster))
    yield Section("layout", _layout(plan))
    yield Section("blocks", _blocks(plan))
    yield Section("k", _k(plan))
    if notes := [*_operands(plan)]:
        yield Section("operands", "; ".join(notes))
    if layout.result.hands_out:
        yield Section("chunks", _handed_out(plan))
    yield Section("tasks", _tasks(plan))
    yield Section("moves", *_moves(plan))
    if layout.problem.downloaded:
        yield Section("host", _host(plan))
    yield Section("memory", *_memory(plan))
    yield Section("time", *_time(plan))


def _product(plan: MatmulPlan) -> str:
    p = plan.layout.problem
    times = f"{p.batch} times " if p.batch > 1 else ""
    given = " and ".join(dict.fromkeys((p.a.dtype, p.b.dtype)))
    of = f" of {given}" if given != p.dtype else ""
    symmetric = ", symmetric" * p.symmetric
    return f"{times}{plan.m} x {plan.k} @ {plan.k} x {plan.n} -> {p.dtype}{of}{symmetric}"


def _work(plan: MatmulPlan) -> str:
    p, mirrors = plan.layout.problem, plan.layout.mirrors
    half = f" of {flops(p.flops)}: one triangle of C is computed and mirrored" if mirrors else ""
    return f"{flops(plan.flops)}{half}"


def _workers(plan: MatmulPlan) -> str:
    cluster, used = plan.cluster, plan.used.workers
    some = f", {used} of them used" if used < cluster.workers else ""
    told = cluster.numbers and plan.layout.tasks > 1  # one task runs where its operands are
    anew = ", in the order in which blocks lie on them" if told else ""
    return f"{workers.named(cluster)}{some}{anew}"


def _layout(plan: MatmulPlan) -> str:
    grid = plan.grid
    if grid.workers == 1:
        return f"{plan.strategy}: {plan.reason}" if plan.strategy == "one task" else plan.reason
    ranges = " x ranges of k" if grid.p_k > 1 else ""
    return f"{grid.sides} workers (rows x columns of C{ranges}), {plan.strategy}: {plan.reason}"


def _blocks(plan: MatmulPlan) -> str:
    layout = plan.layout
    sides = (*layout.batch_blocks, *layout.work.sides)
    text = f"C in {_many(sides)} of {_sizes(sides)}"
    if (own := layout.in_place) is None:
        return text
    parted = f" in {own.count} partial products" if own.joined else ""
    elsewhere = sum(own.fetched.values())
    but = f" but for {human(elsewhere)}" if elsewhere else ""
    joined = f",{' added' * own.adds} and joined" if own.joined else ""
    return f"{text}, made{parted} where {own.large.upper()} lies{but}{joined}"


def _many(sides: Iterable[Blocks]) -> str:
    """How many blocks: ``4 x 4 blocks``, ``one block``."""
    counts = [len(blocks) for blocks in sides]
    return f"{' x '.join(map(str, counts))} blocks" if prod(counts) > 1 else "one block"


def _sizes(sides: Iterable[Blocks]) -> str:
    """How long along each side: ``1000 x 1200``; ``3136..4096 x 2000`` of uneven ones."""
    ends = ((min(blocks), max(blocks)) for blocks in sides)
    return " x ".join(str(high) if low == high else f"{low}..{high}" for low, high in ends)


def _chunks(plan: MatmulPlan) -> str:
    """In what C comes."""
    count, largest = prod(map(len, plan.chunks)), " x ".join(str(max(x)) for x in plan.chunks)
    if count == 1:
        return f"C in one chunk of {largest}"
    return f"C in {count:,} chunks of {largest}"


def _k(plan: MatmulPlan) -> str:
    k_tiles, layout = plan.layout.k_tiles, plan.layout
    if len(k_tiles) == 1:
        return f"{plan.k} at once"
    per_task = min(layout.k_tiles_per_task, layout.steps)
    many = "all" if layout.in_place is not None else per_task if per_task > 1 else "one"
    each = f"each task multiplies {many}"
    at_once = min(layout.fan_in, layout.parts)
    sums = f"; {at_once} sums added at once" if at_once > 2 else ""
    return f"{len(k_tiles)} ranges of {_sizes([k_tiles])}, {each}{sums}"


def _operands(plan: MatmulPlan) -> Iterator[str]:
    """How A and B come into the blocks."""
    layout, operands = plan.layout, plan.layout.operands
    if roles := tuple(operands.in_place):
        yield f"{names(roles)} used where {_lie(roles)}"
    if layout.in_place is None:
        if cut := operands.cut_within:
            yield f"{names(cut)} rechunked by each task"
    elif layout.in_place.partial_products.coalesced:
        yield f"{layout.in_place.small.upper()} sent in one piece by each worker"
    if operands.packed:
        are = "it is" if len(operands.packed) == 1 else "they are"
        yield f"{names(operands.packed)} packed once for the tensor cores, where {are} kept"
    elif layout.on_tensor_cores:
        yield "packed for the tensor cores by each task"
    if layout.by_block:
        yield "blocks read or made by each product for itself"
    elif layout.stream:
        read = "taken from host memory" if layout.problem.from_host else "read or made"
        yield f"blocks {read} when they are needed, range of k by range of k"
    if layout.k_order:
        yield "k in the order in which it lies on workers"


def _lie(roles: Iterable[str]) -> str:
    return "it lies" if len([*roles]) == 1 else "they lie"


def _handed_out(plan: MatmulPlan) -> str:
    result = plan.layout.result
    joined = plan.bytes_joined or not result.cut_out
    how = " and joined" if joined else " where they lie"
    return f"C in {_many(result.chunks)[:-7]} of {_sizes(result.chunks)}, cut out of blocks{how}"


def _tasks(plan: MatmulPlan) -> str:
    count, layout = plan.tasks, plan.layout
    # Without workers Dask orders tasks: of passes there is what is read again in each.
    panels = 1 if layout.alone and not layout.stream else layout.row_panels
    after = ", one after another" * (not layout.alone)
    passes = f", in {panels} passes over the rows of C{after}" if panels > 1 else ""
    burden = ""
    if count > MOST_TASKS:
        burden = f" (more than Dask can take: {human(count * TASK_BYTES)} in client and scheduler)"
    placed = ", placed by Dask, which makes few chunks of operands ahead" * plan.layout.queued
    return f"{count:,}{burden}{passes}{placed}"


def _moves(plan: MatmulPlan) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Bytes between workers, each with what they are for."""
    if not plan.bytes_moved:
        return "nothing: all blocks are in place", ()
    layout, figures = plan.layout, []
    if plan.bytes_received:
        figures += [
            ("while blocks are multiplied", human(plan.bytes_received)),
            ("to the busiest worker", human(plan.bytes_busiest)),
        ]
        if bound := plan.bytes_bound:
            figures += [("least of any rows x columns", human(bound))]
        problem, node = layout.problem, plan.used.node
        if far := communication.share_between_nodes(problem, plan.grid, node):
            figures += [("between nodes, about", f"{far:.0%}")]
    if plan.bytes_recut:
        roles = names(layout.roles if layout.problem.from_host else layout.operands.cut_again)
        figures += [(f"rechunking {roles}", _recut(plan) + human(plan.bytes_recut))]
    if plan.bytes_added:
        figures += [("C that is added", _unless_known(plan, "c") + human(plan.bytes_added))]
    if plan.bytes_joined:
        figures += [("joining chunks of C", human(plan.bytes_joined))]
    return f"{at_most(plan)}{human(plan.bytes_moved)} between workers", tuple(figures)


def _recut(plan: MatmulPlan) -> str:
    """Of whole chunks in host memory, some go again in later passes."""
    if plan.layout.problem.from_host:
        return "about "
    return _unless_known(plan, plan.layout.operands.cut_again)


def at_most(plan: MatmulPlan) -> str:
    """Whether fewer bytes may move than are said; or others, where Dask decides."""
    if plan.layout.queued:
        return "about "
    said = _recut(plan) if plan.bytes_recut else ""
    return said or (_unless_known(plan, "c") if plan.bytes_added else "")


def _unless_known(plan: MatmulPlan, roles: Iterable[str]) -> str:
    layout = plan.layout
    known = all(layout.spec(x).owners and not layout.lies_beyond(x) for x in roles)
    return "" if known else "at most "


def _host(plan: MatmulPlan) -> str:
    problem, layout = plan.layout.problem, plan.layout
    roles = layout.uploaded
    size = layout.read_bytes if problem.from_host else sum(layout.spec(x).nbytes for x in roles)
    up = f"{human(size)} of {names(roles)} to the GPUs, " if roles else ""
    return f"{up}{human(problem.result_bytes)} of C from there"


def _memory(plan: MatmulPlan) -> tuple[str, tuple[tuple[str, str], ...]]:
    held, budget = human(plan.peak_bytes), human(plan.budget_bytes)
    figures = [(name, human(size)) for name, size in named(plan.memory_terms)]
    if plan.spill_terms:
        size = sum(plan.spill_terms.values())
        more = plan.peak_bytes + size - plan.budget_bytes
        over = f"{human(more)} more than all workers hold without" if more > 0 else ""
        figures += [("and what may be spilled", human(size))]
        figures += [(f"  {name}", human(x)) for name, x in named(plan.spill_terms)]
        figures += [(f"  {over}", "")] if over else []
    return f"{held} of {budget} on the fullest worker", tuple(figures)


def named(terms: Terms, *, least: float = 0.0) -> list[tuple[str, float]]:
    """Terms that are large enough to be named; the rest is one."""
    shown = max(least, LITTLE * sum(terms.values()))
    found = [(_SAID.get(name, name), value) for name, value in terms.items() if value > shown]
    rest = [(name, value) for name, value in terms.items() if 0 < value <= shown]
    if len(rest) == 1:
        return [*found, (_SAID.get(rest[0][0], rest[0][0]), rest[0][1])]
    return [*found, ("all else", sum(value for _, value in rest))] if rest else found


def phases(plan: MatmulPlan) -> list[tuple[str, list[tuple[str, float]]]]:
    """The parts of the predicted time that are worth a name, by when they pass."""
    found = []
    for phase, kinds in zip(PHASES, by_phase(plan.used.slowest.kind), strict=True):
        terms = {name: plan.time_terms[name] for name in kinds}
        if parts := named(terms, least=LITTLE * plan.seconds):
            found.append((phase, parts))
    return found


def _time(plan: MatmulPlan) -> tuple[str, tuple[tuple[str, str], ...]]:
    rate = plan.flops / max(plan.seconds, 1e-12)
    used = plan.used.workers
    each = f", {flops(rate / used)}/s of each worker" if used > 1 else ""
    figures: list[tuple[str, str]] = []
    for phase, parts in phases(plan):
        figures += [(f"{phase}:", "")]
        figures += [(f"  {name}", duration(value)) for name, value in parts]
    return f"{duration(plan.seconds)}, {flops(rate)}/s{each}", tuple(figures)


def names(roles: Iterable[str]) -> str:
    """Operands as they are written.

    >>> names("ab"), names("abc")
    ('A and B', 'A, B and C')
    """
    *others, last = (role.upper() for role in roles)
    return f"{', '.join(others)} and {last}" if others else last
