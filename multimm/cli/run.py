"""Running a graph on workers in front of a user: progress, failures, Ctrl-C."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from multimm.cli.failed import RunError, failed_run
from multimm.cli.stop import STOP
from multimm.cli.terminal import console

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client, Future

    from multimm.planning.plan import MatmulPlan

#: Seconds between two looks at the workers; arbitrary.
INTERVAL = 0.1
#: A cancelled task cannot be stopped; after this long its late write may leave a file behind.
SETTLE_SECONDS = 20.0
#: Of tasks that are not done, on the scheduler and on a worker.
OPEN_STATES = ("waiting", "processing", "queued", "no-worker")
OPEN = ("waiting", "ready", "constrained")


def compute(
    client: Client, array: da.Array, label: str, plan: MatmulPlan | None = None
) -> tuple[da.Array, float]:
    """Persist an array on the workers, with a progress bar where stdout is a terminal.

    Parameters
    ----------
    client : distributed.Client
    array : dask.array.Array
    label : str
        In front of the bar.
    plan : MatmulPlan, optional
        Of the product, for an error to name.

    Returns
    -------
    dask.array.Array, float
        The array on the workers, and the seconds it took.

    Raises
    ------
    RunError
        A task failed, or all workers have left.
    """
    from distributed import futures_of

    start = time.perf_counter()
    with failed_run(client, plan), STOP.held_back():
        names = {str(name) for name in array.dask.layers}
        persisted = client.persist(array)
        futures = futures_of(persisted)
        try:
            _wait(client, futures, names, label)
        except BaseException:
            with suppress(Exception):  # a scheduler that is lost as well
                if client.status == "running":
                    client.cancel(futures, force=True)
                    if client.cluster is None:  # others' workers go on, our own end with this
                        settle(client, names)
            raise
    return persisted, time.perf_counter() - start


def _wait(client: Client, futures: list[Future[Any]], names: set[str], label: str) -> None:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    out = console()
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        bar = progress.add_task(label, total=None)
        while not _finished(futures):
            STOP.check()
            if out.is_terminal:
                left, total = client.run_on_scheduler(tasks_left, names)
                progress.update(bar, total=total, completed=total - left)
            time.sleep(INTERVAL)
        progress.update(bar, total=1, completed=1)


def _finished(futures: list[Future[Any]]) -> bool:
    for future in futures:
        if future.status == "error":
            future.result()
        if future.status in ("cancelled", "lost"):
            raise RunError("the run was cancelled on the scheduler, by somebody else: run it again")
    return all(future.status == "finished" for future in futures)


def settle(client: Client, names: set[str]) -> None:
    """Wait for cancelled tasks that are still running, which might yet write to a file.

    Two looks in a row must find none: a task that was on its way to a worker, and is cancelled by
    the next message to it, may not have been there at the first one.
    """
    deadline, quiet = time.monotonic() + SETTLE_SECONDS, 0
    while time.monotonic() < deadline and quiet < 2:
        quiet = 0 if any(client.run(is_busy, names).values()) else quiet + 1
        time.sleep(INTERVAL)


def is_busy(names: set[str], dask_worker: Any) -> bool:
    """Runs on a worker: whether it still executes a task of these layers, or is about to."""
    state = dask_worker.state
    tasks = (*state.executing, *(task for task in state.tasks.values() if task.state in OPEN))
    return any(isinstance(task.key, tuple) and task.key[0] in names for task in tasks)


def tasks_left(names: set[str], dask_scheduler: Any) -> tuple[int, int]:
    """Runs on the scheduler: unfinished and all tasks of these layers."""
    groups = [dask_scheduler.task_groups[n] for n in names if n in dask_scheduler.task_groups]
    left = sum(group.states[state] for group in groups for state in OPEN_STATES)
    return left, sum(len(group) for group in groups)
