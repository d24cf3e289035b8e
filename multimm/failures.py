"""What an error says of the task that it ends: the block, the worker and the cause, in one line.

It is said by a note, which keeps the error's type and travels with it to the client.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from multimm.errors import cause

Key = Any  #: of Dask: a string, or a tuple that begins with one

Given = ParamSpec("Given")
Made = TypeVar("Made")


#: Blocks of an operand that an error names: arbitrary.
NAMED = 4
#: What is said of a task whose workers died.
GIVEN_UP = " was given up"


def told(error: BaseException) -> str:
    """The line that a task has left of its failure, or the error's own type and text."""
    why = cause(error)
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if note.endswith(why) or GIVEN_UP in note), why)


def note(error: BaseException, task: str = "", inputs: Sequence[Key] = ()) -> None:
    """Have an error say which task it ends, on which worker and why, unless it does already.

    Parameters
    ----------
    error : BaseException
    task : str, optional
        What it does; by default the task of a worker that this runs in, if that is known.
    inputs : sequence of Dask key
        Operand blocks that the task is given.
    """
    worker = current_worker()
    task = task or _running(worker)
    why = cause(error)
    if not task or told(error) != why:
        return
    few = _few_of_each(inputs)
    more = f" and {len(inputs) - len(few)} more" if len(few) < len(inputs) else ""
    made_of = f", from {' and '.join(map(repr, few))}{more}," if few else ""
    where = "" if worker is None else f" on {worker.address}"
    error.add_note(f"{task}{made_of} failed{where}: {why}")


def note_given_up(error: BaseException, task: str, died: int, held: Sequence[str]) -> None:
    """Have an error say which task it ends, why its workers died, and what to do.

    Parameters
    ----------
    error : BaseException
    task : str
        What it does.
    died : int
        Workers that died while they ran the task.
    held : sequence of str
        Of those that Dask ended for their memory, how much of their limit each held.
    """
    if held:
        why = (
            f"Dask ended workers for their memory, the last when it held {held[-1]}: give each "
            "worker more memory, run fewer tasks at a time on it, or make blocks smaller"
        )
    else:
        why = (
            "as far as the scheduler was told, not for their memory limit: the system killed them "
            "(its log says so where it was out of memory), or they crashed; see their logs"
        )
    workers = "worker" if died == 1 else "workers"
    error.add_note(f"{task}{GIVEN_UP}, for {died} {workers} died while running it; {why}")


def _few_of_each(inputs: Iterable[Key]) -> list[Key]:
    """The first blocks of each operand."""
    found: dict[Key, list[Key]] = {}
    for key in inputs:
        found.setdefault(key[0] if isinstance(key, tuple) else key, []).append(key)
    return [key for own in found.values() for key in own[:NAMED]]


def named(task: Callable[Given, Made]) -> Callable[Given, Made]:
    """Have a task's errors name it, for tasks that are given no key of their own."""

    @functools.wraps(task)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        try:
            return task(*args, **kwargs)
        except Exception as error:
            note(error)
            raise

    return run


def _running(worker: Any) -> str:
    """What the task that this thread runs for a worker does; empty if there is none."""
    try:
        key = worker.get_current_task()
    except (AttributeError, KeyError):  # no worker, or a thread that the task has started
        return ""
    ts = worker.state.tasks.get(key)
    return str(getattr(ts and ts.run_spec, "label", None) or f"task {key!r}")


def current_worker() -> Any:
    """The worker of Dask's that this thread runs a task for, or None."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None
