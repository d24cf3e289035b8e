"""Running a graph on workers in front of a user: progress, failures, Ctrl-C.

A run that fails gets one line that says why, and one that would wait for ever is given up.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from multimm.cli import FAILED_RUN
from multimm.cli.stop import STOP
from multimm.cli.terminal import console
from multimm.cluster.progress import Progress
from multimm.display.units import human
from multimm.failures import told

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client, Future

    from multimm.planning.plan import MatmulPlan

#: Seconds between two looks at the workers; arbitrary.
INTERVAL = 0.1
#: Seconds without a single worker before a run is given up; a killed worker process is
#: replaced within a few.
NO_WORKERS_SECONDS = 60.0
#: And without one that takes or runs a task: they are paused while they spill to disk, which takes
#: a while. Arbitrary.
PAUSED_SECONDS = 300.0
#: Seconds between two looks; arbitrary.
GLANCE = 0.5
#: Options that help where workers lack memory, in commands that have them; the first few are
#: about workers that the command starts itself.
REMEDIES = ("--memory-limit", "--threads", "--workers", "--blocks", "--size")
ABOUT_OWN = 3
DEBUG_SHOWS = "--debug shows what they say as they end"


def compute(
    client: Client, array: da.Array, label: str, plan: MatmulPlan | None = None
) -> tuple[da.Array, float]:
    """Persist an array on the workers, with a progress bar where stdout is a terminal.

    Gives the array on the workers and the seconds it took; raises `RunError` if a task failed, or
    all workers have left. Errors name what the plan, if there is one, foresaw.
    """
    from distributed import futures_of

    start, out = time.perf_counter(), console()
    shown = Progress(plan, out.file, label) if out.is_terminal else nullcontext()
    with failed_run(client, plan), STOP.held_back(), shown:
        persisted = client.persist(array)
        futures = futures_of(persisted)
        try:
            while not _finished(futures):
                STOP.check()
                time.sleep(INTERVAL)
        except BaseException:
            with suppress(Exception):  # a scheduler that is lost as well
                if client.status == "running":
                    client.cancel(futures, force=True)  # of what is written later nothing stays
            raise
        seconds = time.perf_counter() - start
    return persisted, seconds


def _finished(futures: list[Future[Any]]) -> bool:
    for future in futures:
        if future.status == "error":
            future.result()
        if future.status in ("cancelled", "lost"):
            raise RunError("the run was cancelled on the scheduler, by somebody else: run it again")
    return all(future.status == "finished" for future in futures)


class RunError(click.ClickException):
    """A run that was started and did not succeed."""

    exit_code = FAILED_RUN


@contextmanager
def failed_run(client: Client, plan: MatmulPlan | None = None) -> Iterator[None]:
    """Turn whatever a run dies of into exit code 1, and end it where it would wait for ever."""
    address = getattr(client.scheduler, "address", "")
    with _ended_without_workers(client) as given_up:
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if given_up:
                why = given_up[0]
            elif client.status != "running":
                why = (
                    f"the connection to the scheduler at {address} is lost, because its process "
                    "ended or the network failed: see its log, start it, and run this again"
                )
            elif isinstance(error, click.ClickException):
                raise
            else:
                why = told(error)
            raise RunError(f"the run failed: {why}{_of_memory(client, why, plan)}") from error


def _of_memory(client: Client, why: str, plan: MatmulPlan | None) -> str:
    """Of workers that lacked memory: which options help, and what the plan foresaw."""
    if "more memory" not in why:
        return ""
    context = click.get_current_context(silent=True)
    known = {name for param in context.command.params for name in param.opts} if context else set()
    fit = REMEDIES if client.cluster is not None else REMEDIES[ABOUT_OWN:]
    options = [name for name in fit if name in known]
    text = f" ({', '.join(options)})" if options else ""
    if plan is not None:
        needed, budget = human(plan.peak_bytes), human(plan.budget_bytes)
        text += f"; the plan foresaw {needed} of the {budget} that it may use per worker"
    return text


@contextmanager
def _ended_without_workers(client: Client) -> Iterator[list[str]]:
    """Cancel whatever is computed inside once there is no worker to do it; gives the reason."""
    reasons: list[str] = []
    over = threading.Event()

    def watch() -> None:
        some = able = time.monotonic()  # when a worker was seen, and one that takes or runs tasks
        while not over.wait(GLANCE):
            with suppress(Exception):  # the client says itself that the scheduler is gone
                there, at_work = client.run_on_scheduler(workers_at_work)
                now = time.monotonic()
                some, able = now if there else some, now if at_work or not there else able
                if reason := _no_workers(client, now - some) or _all_paused(now - able):
                    reasons.append(reason)
                    client.loop.add_callback(_cancel_all, client)  # type: ignore[union-attr]
                    return

    threading.Thread(target=watch, name="multimm-workers", daemon=True).start()
    try:
        yield reasons
    finally:
        over.set()


def workers_at_work(dask_scheduler: Any) -> tuple[int, int]:
    """Runs on the scheduler: all workers, and those that take tasks or run some."""
    there = dask_scheduler.workers.values()
    return len(there), sum(ws.status.name == "running" or bool(ws.executing) for ws in there)


def _no_workers(client: Client, seconds: float) -> str:
    """Why not to wait any longer where there was no worker for so long; empty: some may come."""
    own = [] if client.cluster is None else list(client.cluster.workers.values())
    if own and all(nanny.status.name in ("closing", "closed", "failed") for nanny in own):
        return f"all workers died, and none could be started again: {DEBUG_SHOWS}"
    if seconds > NO_WORKERS_SECONDS:
        logs = DEBUG_SHOWS if own else "look at their logs"
        return f"no worker left for {NO_WORKERS_SECONDS:.0f} s: {logs}"
    return ""


def _all_paused(seconds: float) -> str:
    """Why not to wait any longer where no worker took or ran a task for so long."""
    if seconds <= PAUSED_SECONDS:
        return ""
    return (
        f"no worker has taken a task for {PAUSED_SECONDS:.0f} s: Dask pauses workers that hold "
        "more than 0.8 of their memory limit; give each more memory, or make blocks smaller"
    )


def _cancel_all(client: Client) -> None:
    """Runs in the client's event loop, as where distributed loses the scheduler."""
    for state in client.futures.values():
        state.cancel(reason="no workers")
