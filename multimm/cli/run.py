"""Running a graph on workers in front of a user: progress, failures, Ctrl-C."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from multimm.cli import FAILED_RUN
from multimm.cli.stop import STOP
from multimm.cli.terminal import console, plain_streams_for_good
from multimm.failures import told

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client, Future

#: Seconds between two looks at the workers; arbitrary.
INTERVAL = 0.1
#: Seconds without a single worker before a run is given up; a killed worker process is
#: replaced within a few.
NO_WORKERS_SECONDS = 60.0
#: A cancelled task cannot be stopped; after this long its late write may leave a file behind.
SETTLE_SECONDS = 20.0
#: What nannies tell the scheduler of a worker that they end for its memory.
ENDED_FOR_MEMORY = "worker-restart-memory"
OPEN_STATES = ("waiting", "processing", "queued", "no-worker")


class RunError(click.ClickException):
    """A run that was started and did not succeed."""

    exit_code = FAILED_RUN


@contextmanager
def failed_run() -> Iterator[None]:
    """Turn whatever a run dies of into exit code 1."""
    try:
        yield
    except click.ClickException:
        raise
    except Exception as error:
        raise RunError(f"the run failed: {told(error)}") from error


@contextmanager
def saying_who_was_ended(client: Client) -> Iterator[None]:
    """Add to an error of a run that a worker was ended for its memory meanwhile."""
    before = len(_ended(client))
    try:
        yield
    except Exception as error:
        if ended := _ended(client)[before:]:
            event = ended[0][1]
            why = error.message if isinstance(error, click.ClickException) else told(error)
            raise RunError(
                f"the run failed: {why}; worker {event['worker']} was ended when its process held "
                f"{event['rss'] / 1e6:.0f} MB, for Dask ends workers at 0.95 of their memory "
                "limit: give each more (--memory-limit), or use fewer"
            ) from error
        raise


def _ended(client: Client) -> Sequence[Any]:
    """When workers were ended for their memory, and which; empty where nobody answers."""
    with suppress(Exception):
        if client.status == "running":
            return client.get_events(ENDED_FOR_MEMORY)  # type: ignore[no-any-return]
    return ()


def compute(client: Client, array: da.Array, label: str) -> tuple[da.Array, float]:
    """Persist an array on the workers, with a progress bar where stdout is a terminal.

    Parameters
    ----------
    client : distributed.Client
    array : dask.array.Array
    label : str
        In front of the bar.

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
    with failed_run(), saying_who_was_ended(client), STOP.held_back():
        names = {str(name) for name in array.dask.layers}
        if client.cluster is not None:
            client.run(leave_failures_to_us)
        persisted = client.persist(array)
        futures = futures_of(persisted)
        try:
            _wait(client, futures, names, label)
        except BaseException:
            client.cancel(futures, force=True)
            if client.cluster is None:  # others' workers go on, our own end with the command
                settle(client, names)
            else:
                be_quiet()
                with suppress(Exception):  # workers that a signal ended too
                    client.run(be_quiet)
            raise
    return persisted, time.perf_counter() - start


def _wait(client: Client, futures: list[Future[Any]], names: set[str], label: str) -> None:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    out = console()
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        bar = progress.add_task(label, total=None)
        seen = time.monotonic()
        while not _finished(futures):
            STOP.check()
            if client.scheduler_info()["workers"]:
                seen = time.monotonic()
            elif time.monotonic() - seen > NO_WORKERS_SECONDS:
                raise RunError(f"no worker left for {NO_WORKERS_SECONDS:.0f} s: look at their logs")
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
            raise RunError("the scheduler dropped the run: connection lost, or cancelled")
    return all(future.status == "finished" for future in futures)


def be_quiet() -> None:
    """Runs here and on workers about to be closed: their complaints would hide the one line."""
    logging.getLogger("distributed").setLevel(logging.CRITICAL)


def leave_failures_to_us() -> None:
    """Runs on our own workers: they log each failed task with its traceback, before our line."""
    plain_streams_for_good()
    logging.getLogger("distributed.worker").addFilter(no_failed_task)


def no_failed_task(record: logging.LogRecord) -> bool:
    """Whether it tells of something else than a task's error, which comes to the client."""
    return not str(record.msg).startswith("Compute Failed")


def settle(client: Client, names: set[str]) -> None:
    """Wait for cancelled tasks that are still running, which might yet write to a file."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and any(client.run(is_busy, names).values()):
        time.sleep(INTERVAL)


def is_busy(names: set[str], dask_worker: Any) -> bool:
    """Runs on a worker: whether it still executes a task of these layers."""
    keys = (task.key for task in dask_worker.state.executing)
    return any(isinstance(key, tuple) and key[0] in names for key in keys)


def tasks_left(names: set[str], dask_scheduler: Any) -> tuple[int, int]:
    """Runs on the scheduler: unfinished and all tasks of these layers."""
    groups = [dask_scheduler.task_groups[n] for n in names if n in dask_scheduler.task_groups]
    left = sum(group.states[state] for group in groups for state in OPEN_STATES)
    return left, sum(len(group) for group in groups)
