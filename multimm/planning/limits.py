"""What no plan is made for: more tasks than Dask can take, matrices far beyond all memory."""

from __future__ import annotations

from math import isqrt

from multimm.display.units import human
from multimm.errors import MemoryBudgetError
from multimm.planning.devices import MEMORY_SHARE
from multimm.planning.hardware import ClusterSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.tiling.counts import EDGE, MOST_ELEMENTS
from multimm.planning.tiling.grid import ceil_div

#: Memory that Dask takes for a task: 2.3 to 3 kB for the graph in the client, and 4.4 to 5.4 more
#: when it has been sent, of client and scheduler together (products of 4352 and of 22736 tasks).
TASK_BYTES = 7000
#: Tasks that are allowed: 14 GB of these, and a scheduler that does nothing else for 17 minutes at
#: half a millisecond each, and for more than an hour at the 2.1 that it took beside a worker on two
#: cores. Nobody has seen one that survives it.
MOST_TASKS = 2_000_000
#: A, B and C together may be so many times as large as the memory of all workers, what is spilled
#: and read k-tile by k-tile included: arbitrary. A 4 TB disk is that for a worker of 4 GB.
BEYOND = 1000
#: What takes so many times the tasks that are allowed is not laid out, for that alone takes long:
#: arbitrary. Up to there a plan shows what is wrong.
HOPELESS = 5


def refuse_the_hopeless(problem: Problem, cluster: ClusterSpec, options: Options) -> None:
    """Raise where all memory, or all blocks, would be too small by orders of magnitude.

    Raises
    ------
    MemoryBudgetError
        Says what was given and what all workers have together.
    """
    p, workers = problem, cluster.workers
    for name, spec in (("A", p.a), ("B", p.b), ("C", p.c)):
        if spec is not None and spec.blocks > MOST_TASKS:
            raise MemoryBudgetError(
                f"{name} comes in {spec.blocks:.2g} blocks, and Dask's scheduler survives "
                f"{MOST_TASKS} tasks: use larger chunks"
            )
    sizes = {"A": p.a.nbytes, "B": p.b.nbytes, "C": p.result_bytes}
    needed, have = sum(sizes.values()), sum(device.memory_bytes for device in cluster.devices)
    all_of_them = f"all {workers} workers together have" if workers > 1 else "the worker has"
    product = f"{p.m} x {p.k} @ {p.k} x {p.n}" + f", {p.batch} times" * (p.batch > 1)
    if needed > BEYOND * have:
        parts = ", ".join(f"{name} {human(size)}" for name, size in sizes.items())
        raise MemoryBudgetError(
            f"{product} is {human(needed)} ({parts}) and {all_of_them} {human(have)}: at most "
            f"{BEYOND} times that can be planned for, spilled or read chunk by chunk; use smaller "
            "matrices or more workers"
        )
    least = _few_tasks(problem, options, EDGE[cluster.slowest.kind])
    # Of given blocks the tasks are known, and no others are looked for.
    if least > (1 if options.given else HOPELESS) * MOST_TASKS:
        given = " in the given blocks" if options.given else ""
        raise MemoryBudgetError(
            f"{product} takes some {least:.2g} tasks{given}, and Dask's scheduler survives "
            f"{MOST_TASKS}: use smaller matrices{', or larger blocks' * bool(given)}"
        )


def refuse_storage_chunks(problem: Problem, cluster: ClusterSpec) -> None:
    """Raise where a worker cannot even decode the storage chunks that its threads read at once.

    Raises
    ------
    MemoryBudgetError
        Says how large they are, and what memory, or which chunks, would do.
    """
    least = min(cluster.devices, key=lambda device: device.budget_bytes)
    if least.kind == "gpu":  # chunks are decoded in host memory
        return
    budget, threads = least.budget_bytes, cluster.threads
    for role, spec in (("A", problem.a), ("B", problem.b), ("C", problem.c)):
        stored = None if spec is None else spec.storage
        if stored is None or threads * stored.decoding <= budget:
            continue
        needed, size = threads * stored.decoding, stored.chunk_bytes
        memory = least.memory_bytes + (needed - budget) / MEMORY_SHARE[least.kind]
        together = f"{threads} threads hold" if threads > 1 else "reading one holds"
        raise MemoryBudgetError(
            f"{role} is stored in chunks of {human(size)}, of which {together} {human(needed)}, "
            f"and a worker may use {human(budget)} of its {human(least.memory_bytes)}: give each "
            f"worker more than {human(memory)}{', or fewer threads' * (threads > 1)}, or rechunk "
            f"the store to {human(size * budget / needed / 2)} or less"
        )


def _few_tasks(problem: Problem, options: Options, edge: int) -> int:
    """Products of large blocks, of which a stack's matrices may share one: about the fewest."""
    m, n, k = problem.m, problem.n, problem.k
    fewest = 1
    for size, given in zip((m, n, k), (*options.edges, options.slabs), strict=True):
        fewest *= 1 if given is None else ceil_div(max(1, size), given)
    by_area = ceil_div(problem.batch * max(m * n, m * k, k * n), edge * edge)
    # Of a product whose three blocks have so many elements each, all sides are alike.
    by_volume = ceil_div(problem.batch * m * n * k, isqrt(MOST_ELEMENTS**3))
    return max(fewest, by_area, by_volume)
