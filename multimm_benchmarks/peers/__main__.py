"""One system, in a process group of its own, as the sweep starts it: -m multimm_benchmarks.peers

The first line of stdin is a job, messages leave through stdout, one JSON object a line:

    {"opened": case}   {"step": case}   {"done": case, ...what `base.measure` returns}
    {"failed": case, "reason": text}   {"wrong": case, "reason": text}

where a case is its place in the job. A system is opened before its first case.

Its arguments are systems: their modules are imported while it waits for the job.

stdin stays open as long as the sweep lives. When it ends, so does the whole group: nothing keeps a
GPU or its memory.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from typing import Any, NamedTuple, cast

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.harness import WrongResultError
from multimm_benchmarks.peers import system
from multimm_benchmarks.peers.base import Machine, System, measure
from multimm_benchmarks.sweep_cases import Product

Say = Callable[[dict[str, Any]], None]


class Work(NamedTuple):
    """A case of a group."""

    system: str
    machine: Machine
    product: Product
    precision: str
    repeats: int


def job(work: Sequence[Work]) -> str:
    """Return the line that starts a group."""
    return json.dumps(
        [
            {**one._asdict(), "machine": asdict(one.machine), "product": asdict(one.product)}
            for one in work
        ]
    )


def run(line: str, say: Say) -> None:
    """Do a job, saying what happens."""
    opened: dict[tuple[str, int], System] = {}
    with ExitStack() as stack:
        for number, given in enumerate(json.loads(line)):
            work = _work(**given)
            key = work.system, work.machine.workers
            if key not in opened:
                one = system(work.system)(work.machine)
                stack.enter_context(one.opened(tuple(opened.values())))
                opened[key] = one
                say({"opened": number})
            if not _measured(opened[key], work, number, say):
                return  # what it left behind must not spoil the next: a new group goes on


def _work(machine: dict[str, Any], product: dict[str, Any], **more: Any) -> Work:
    return Work(machine=Machine(**machine), product=Product(**product), **more)


def _measured(one: System, work: Work, number: int, say: Say) -> bool:
    """Whether all is well."""
    try:
        precision = cast("Precision", work.precision)
        done = measure(one, work.product, precision, work.repeats, lambda: say({"step": number}))
        say({"done": number, "config": one.config, **done})
        return True
    except WrongResultError as error:
        say({"wrong": number, "reason": str(error)})
    except Exception as error:  # each system fails in ways of its own
        logging.getLogger(__name__).exception("%s failed", work.product.name)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        say({"failed": number, "reason": text[:300]})
    return False


def _end_with_the_sweep() -> None:
    """Wait for the end of the sweep, and take the whole group along."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Read the job, keep stdout for messages: libraries print to it."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        for module in system(name).imported_ahead:
            import_module(module)
    line = sys.stdin.readline()
    if not line:
        return  # nothing is wanted of it
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    lock = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            messages.write(json.dumps(message) + "\n")
            messages.flush()

    run(line, say)


if __name__ == "__main__":
    main()
