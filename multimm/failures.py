"""What an error says of the task that it ends: the block, the worker and the cause, in one line.

It is said by a note, which keeps the error's type and travels with it to the client.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from multimm.errors import cause

Key = Any  #: of Dask: a string, or a tuple that begins with one

Given = ParamSpec("Given")
Made = TypeVar("Made")


#: Blocks of an operand that an error names: arbitrary.
NAMED = 4
#: The topic under which Dask's nannies tell the scheduler of a worker that they end for its memory.
ENDED_FOR_MEMORY = "worker-restart-memory"
#: What is said of a task whose workers died, and of these where Dask's nannies ended them.
GIVEN_UP, ENDED = " was given up", "Dask ended workers"


def told(error: BaseException) -> str:
    """The line that a task has left of its failure, or the error's own type and text."""
    why = cause(error)
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if note.endswith(why) or GIVEN_UP in note), why)


def note(error: BaseException, key: Key = None, inputs: Iterable[Key] = ()) -> None:
    """Have an error say which task it ends, on which worker and why, unless it does already.

    The task is by default the one that runs here, as far as that is known; `inputs` are the keys of
    operand blocks that it is given.
    """
    worker = _worker()
    if key is None and worker is not None:
        with suppress(KeyError):  # a thread that the task has started
            key = worker.get_current_task()
    why = cause(error)
    if key is None or told(error) != why:
        return
    named, given = _few_of_each(inputs)
    own = [_block(x) if _token(x) == _token(key) else repr(x) for x in named]
    more = f" and {given - len(own)} more" if len(own) < given else ""
    made_of = f", from {' and '.join(own)}{more}," if own else ""
    where = "" if worker is None else f" on {worker.address}"
    error.add_note(f"{_block(key)}{made_of} failed{where}: {why}")


def note_given_up(error: BaseException, key: Key, died: int, held: Sequence[str]) -> None:
    """Have an error say which task it ends, how many workers died of it, and what to do.

    `held` says, of those that Dask ended for their memory, how much of their limit each held.
    """
    if held:
        why = (
            f"{ENDED} for their memory, the last when it held {held[-1]}: give each worker more "
            "memory, run fewer tasks at a time on it, or make blocks smaller"
        )
    else:
        why = (
            "as far as the scheduler was told, not for their memory limit: the system killed them "
            "(its log says so where it was out of memory), or they crashed; see their logs"
        )
    workers = "worker" if died == 1 else "workers"
    error.add_note(f"{_block(key)}{GIVEN_UP}, for {died} {workers} died while running it; {why}")


def _few_of_each(inputs: Iterable[Key]) -> tuple[list[Key], int]:
    """Some blocks of each operand, and how many there are of all."""
    found: dict[str, list[Key]] = {}
    for key in inputs:
        found.setdefault(_name(key), []).append(key)
    few = [key for own in found.values() for key in own[:NAMED]]
    return few, sum(map(len, found.values()))


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


def _worker() -> Any:
    """The worker of Dask's that this thread runs a task for, or None."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None


def _block(key: Key) -> str:
    """What a task makes: of products by block, slab, parts of k (keys: `graph.task_keys`)."""
    at = list(key[1:]) if isinstance(key, tuple) else []
    prefix, *roles = _name(key).split("-")[:-1] or [""]
    if prefix != "multimm":
        return f"task {key!r}"
    role = roles[-1]
    if roles[0] == "joined":
        return f"block {_index(at)} of {role.upper()}, joined"
    if roles[0] == "uploaded":
        return f"chunk {_index(at)} of {role.upper()} on its way to a GPU"
    if roles[0] == "downloaded":
        return f"block {_index(at)} of C on its way to host memory"
    if roles[0] == "cut":  # the last is a place in the grid: another worker may be there by now
        return f"part of block {_index(at[:-1])} of {role.upper()}"
    if role in ("a", "b"):
        packed = "packed " if len(roles) > 1 else ""
        return f"{packed}block {_index(at[1:])} of {role.upper()}"  # a wave comes first
    if role == "gate":
        return f"the wait for slab {at[1]}"
    if role == "part":
        return f"block {_index(at[:-1])} of C, slab {at[-1]}"
    if role == "portion":
        return f"portion {_index(at)} of C"
    if role == "bundle":
        return "a bundle of blocks of an operand"
    if role == "sum":
        return f"block {_index(at[:-2])} of C, parts {at[-2]} to {at[-1]} of k"
    return f"block {_index(at)} of C"


def _index(at: list[int]) -> str:
    return f"({', '.join(map(str, at))})"


def _name(key: Key) -> str:
    return str(key[0] if isinstance(key, tuple) else key)


def _token(key: Key) -> str:
    return _name(key).rpartition("-")[2]
