"""One system, in a process group of its own, as the sweep starts it: -m multimm_benchmarks.peers

The first line of stdin is a job, messages leave through stdout, one JSON object a line:

    {"opened": system}   {"step": case}   {"done": case, ...what `base.measure` returns}
    {"failed": case, "reason": text}   {"wrong": case, "reason": text}

where a case is its place in the job.

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
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.harness import WrongResultError
from multimm_benchmarks.peers import system
from multimm_benchmarks.peers.base import Machine, System, measure
from multimm_benchmarks.sweep_cases import Product

Say = Callable[[dict[str, Any]], None]


def job(name: str, machine: Machine, work: list[tuple[Product, str, int]]) -> str:
    """Return the line that starts a group; `work` is product, precision and repeats."""
    cases = [[asdict(product), precision, repeats] for product, precision, repeats in work]
    return json.dumps({"system": name, "machine": asdict(machine), "work": cases})


def run(line: str, say: Say) -> None:
    """Do a job, saying what happens."""
    given = json.loads(line)
    one = system(given["system"])(Machine(**given["machine"]))
    with one.opened():
        say({"opened": given["system"]})
        for number, (product, precision, repeats) in enumerate(given["work"]):
            if not _measured(one, Product(**product), precision, repeats, number, say):
                return  # what it left behind must not spoil the next: a new group goes on


def _measured(
    one: System, product: Product, precision: Precision, repeats: int, number: int, say: Say
) -> bool:
    """Whether all is well."""
    try:
        done = measure(one, product, precision, repeats, lambda: say({"step": number}))
        say({"done": number, "config": one.config, **done})
        return True
    except WrongResultError as error:
        say({"wrong": number, "reason": str(error)})
    except Exception as error:  # each system fails in ways of its own
        logging.getLogger(__name__).exception("%s failed", product.name)
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
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    lock = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            messages.write(json.dumps(message) + "\n")
            messages.flush()

    run(line, say)


if __name__ == "__main__":
    main()
