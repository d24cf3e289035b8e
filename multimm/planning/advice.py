"""What to do about a plan that does not fit: found by planning again, never by a rule of three."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil, log10
from typing import TYPE_CHECKING

from multimm.display.units import human
from multimm.errors import MemoryBudgetError
from multimm.planning import hardware
from multimm.planning.hardware import ClusterSpec
from multimm.planning.limits import MOST_TASKS, TASK_BYTES
from multimm.planning.options import Options
from multimm.planning.tiling.counts import LEAST_EDGE

if TYPE_CHECKING:
    from multimm.planning.plan import MatmulPlan

#: Memory and workers are doubled so often, at most: arbitrary, 1024 times as much.
DOUBLINGS = 10
#: No more workers than so many are looked at, unless there are: each takes longer to plan for.
MOST_WORKERS = 256
#: Neither more memory nor more workers are looked for where a plan has so many times the tasks that
#: are allowed: arbitrary.
FAR = 100
#: Plans between the last two of these: what is advised is a quarter too much, at most. No clock
#: ends the search, so that the same plan is refused in the same words on any machine.
HALVINGS = 2
#: Blocks that are tried where the planner has found none: parts of its shortest edge, or as many
#: times the longest of a plan with too many tasks.
OTHER_EDGES = (4, 16)

#: What fits, with a number of bytes or workers.
Fits = Callable[[int], bool]


def refusal(plan: MatmulPlan) -> str:
    """What a plan that does not fit lacks, and what would do."""
    lacks = _memory_text(plan) if plan.peak_bytes > plan.budget_bytes else _tasks_text(plan)
    return f"{lacks}; {_advice(plan)}"


def _memory_text(plan: MatmulPlan) -> str:
    worst = _worst(plan)
    name = plan.cluster.addresses[worst] if plan.cluster.addresses else f"worker {worst}"
    device = plan.cluster.devices[worst]
    biggest = max(plan.memory_terms, key=lambda term: plan.memory_terms[term])
    return (
        f"{name} ({device.name}) would hold {human(plan.peak_bytes)} at once, mostly "
        f"{biggest} ({human(plan.memory_terms[biggest])}), and may use "
        f"{human(plan.budget_bytes)} of its {human(device.memory_bytes)}"
    )


def _tasks_text(plan: MatmulPlan) -> str:
    return (
        f"{plan.tasks} tasks: Dask takes {human(plan.tasks * TASK_BYTES)} for so many in client "
        f"and scheduler, and {plan.time_terms['scheduling'] / 3600:.2g} h at least; "
        f"{MOST_TASKS} are allowed"
    )


def _worst(plan: MatmulPlan) -> int:
    """The worker with the least memory for blocks, of those in use."""
    return min(range(plan.used.workers), key=lambda rank: plan.cluster.devices[rank].budget_bytes)


def _advice(plan: MatmulPlan) -> str:
    """All that would do, of memory, workers and blocks."""
    if plan.layout.slow_to_vary:
        return "use smaller matrices, or larger blocks or chunks if they were given"
    found = _memory_and_workers(plan) if plan.tasks <= FAR * MOST_TASKS else []
    found += _blocks_that_fit(plan)
    if not found:
        return "nothing that would do was found: use smaller matrices"
    return ", or ".join(found)


def _memory_and_workers(plan: MatmulPlan) -> list[str]:
    """How much memory, and how many workers, would do."""
    cluster, device = plan.cluster, plan.cluster.devices[_worst(plan)]
    found = []

    def of_memory(size: int) -> bool:
        devices = tuple(replace(x, memory_bytes=max(size, x.memory_bytes)) for x in cluster.devices)
        return _does(plan, replace(cluster, devices=devices))

    def of_workers(count: int) -> bool:
        more = replace(cluster, devices=(device,) * count, addresses=(), numbers=())
        return _does(plan, more)

    most = device.memory_bytes * 2**DOUBLINGS
    if (size := _least(device.memory_bytes, most, of_memory)) is not None:
        found.append(f"give each worker {human(size)}")
    most = min(max(MOST_WORKERS, 2 * cluster.workers), hardware.MOST_WORKERS)
    if (count := _least(cluster.workers, most, of_workers)) is not None:
        found.append(f"use about {count} such workers")
    return found


def _least(have: int, most: int, fits: Fits) -> int | None:
    """About the least number that fits, more than `have`; None where none up to `most` does."""
    low, high = have, have
    while not (high > have and fits(high)):
        low, high = high, 2 * high
        if high > most:
            return None
    for _ in range(HALVINGS):
        middle = _rounded((low + high) // 2)
        if not low < middle < high:
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _rounded(number: int) -> int:
    """Up to three digits, as `human` shows them."""
    unit = int(10 ** max(0, int(log10(number)) - 2))
    return ceil(number / unit) * unit


def _blocks_that_fit(plan: MatmulPlan) -> Iterator[str]:
    """Other blocks than were given, or smaller ones than are planned by themselves."""
    options = plan.asked.options
    if options.given:
        names = [f"{x}=" for x in ("blocks", "slabs", "p_k") if getattr(options, x) is not None]
        if _does(plan, plan.cluster, Options()):
            yield f"leave out {' and '.join(names)}"
        return
    if plan.tasks > MOST_TASKS:
        edges = [max(*plan.layout.m_blocks, *plan.layout.n_blocks) * n for n in OTHER_EDGES]
    else:
        edges = [LEAST_EDGE[plan.cluster.slowest.kind] // 2 // n for n in OTHER_EDGES]
    for edge in edges:
        if _does(plan, plan.cluster, Options(blocks=edge, slabs=edge)):
            yield f"pass blocks={edge} and slabs={edge}"
            return


def _does(plan: MatmulPlan, cluster: ClusterSpec, options: Options | None = None) -> bool:
    """Whether the same product fits in these workers, in these blocks or those that were given."""
    problem, asked, planner = plan.asked
    # Half of C is assigned block by block, which takes long; all of it needs about as much memory.
    problem = replace(problem, symmetric=False)
    with suppress(MemoryBudgetError):
        made = planner(problem, cluster, precision=plan.precision, options=options or asked)
        return made.fits
    return False
