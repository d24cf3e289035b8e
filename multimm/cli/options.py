"""Options that several commands share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.stop import STOP
from multimm.errors import OptionError

if TYPE_CHECKING:
    from distributed import Client

    from multimm.planning.hardware import ClusterSpec

Command = Callable[..., Any]


def number(text: str) -> int | float:
    """An integer where the text is one, else a float: 2 leaves integers integers, 2.0 does not."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise click.BadParameter(f"{text!r} is no number")


DEBUG = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    help="Show the traceback of an error, and at once what libraries and workers write to stderr.",
)
PRODUCT = (
    click.option(
        "--dtype",
        metavar="NAME",
        help="Of C and of its sums, such as int32 for files of int8. Default: as NumPy has it.",
    ),
    click.option(
        "--precision",
        default="float32",
        show_default=True,
        help='"float32": at least an FP32 dot product\'s accuracy; "ieee": FP32 multiply-adds; '
        '"tf32": significands of 11 bits; "float64": an FP64 dot product\'s accuracy, for float64 '
        "and complex128.",
    ),
    click.option("--trans-a", is_flag=True, help="Multiply the transpose of A."),
    click.option("--trans-b", is_flag=True, help="Multiply the transpose of B."),
    click.option("--blocks", type=int, metavar="N", help="Edge of C's blocks. Default: planned."),
    click.option("--slabs", type=int, metavar="N", help="Length of k-tiles. Default: planned."),
    click.option("--p-k", type=int, metavar="N", help="Parts of k, summed side by side."),
)


def kind(gpus: str) -> tuple[Command, ...]:
    """GPU or CPU workers; `gpus` says how many GPUs there are by default."""
    return (
        click.option(
            "--gpus", type=int, metavar="N", help=f"GPU workers; 0: CPU. Default: {gpus}."
        ),
        click.option("--workers", type=int, metavar="N", help="CPU workers instead of GPUs."),
    )


SIZE = (
    click.option("--memory-limit", metavar="SIZE", help="Memory of one worker, such as 2GB."),
    click.option("--threads", type=int, metavar="N", help="Tasks at a time per worker."),
)
KIND = kind("all GPUs")
ON_PAPER = (*kind("1"), *SIZE)
CLUSTER = (
    *KIND,
    *SIZE,
    click.option("--protocol", help='"tcp", or "ucxx" (GPU), between workers.'),
    click.option("--scheduler", metavar="ADDRESS", help="Use a running cluster: tcp://host:8786."),
)


def add(*options: Command) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order in which --help shows them."""
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits until the end, and never reaches the processes that are started inside.

    A terminal sends it to every process in the foreground. Workers that get it die with a
    traceback each, before the command that started them can end the run in order. So does
    SIGHUP. SIGTERM waits too, but reaches them: it is what ends those left over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Threads and processes inherit the mask. Starting multiprocessing's tracker lifts SIGINT's,
    # which it ignores by itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with STOP.held_back():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Workers:
    """Where a command computes: a cluster of its own, or a running one."""

    gpus: int | None = None
    workers: int | None = None
    memory_limit: str | None = None
    threads: int | None = None
    protocol: str | None = None
    scheduler: str | None = None

    def open(self) -> Client:
        """Start or reach the workers; closing the client gives them back.

        Raises
        ------
        OptionError
            Numbers out of range, or options that exclude each other.
        ClusterError
            Nothing answers at the address, or the workers do not start.
        """
        from multimm import cluster

        own: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("gpus", "workers", "memory_limit", "threads", "protocol")
            if getattr(self, name) is not None
        }
        if self.scheduler is None:
            with interrupts_held_back():
                return cluster.start(**own)
        if own:
            names = ", ".join("--" + name.replace("_", "-") for name in own)
            raise OptionError(
                f"--scheduler uses the workers of a running cluster; {names} would start others: "
                "leave out one or the other"
            )
        return cluster.connect(self.scheduler)

    def on_paper(self) -> ClusterSpec:
        """The workers as a value, without starting any; GPUs are H200s linked by NVLink."""
        from multimm.cluster.inspect.devices import PROCESS_BYTES, cpu_device
        from multimm.cluster.options import check, cores
        from multimm.planning.devices import H200, LOCAL_TCP, NVLINK
        from multimm.planning.hardware import ClusterSpec, at_once

        threads = 1 if self.threads is None else self.threads
        if self.workers is None and self.gpus != 0:
            if self.memory_limit is not None:
                raise OptionError("--memory-limit is for CPU workers: give --workers as well")
            if self.gpus is not None and self.gpus < 0:
                raise OptionError(f"--gpus {self.gpus}: at least 0 is needed; 0 for CPU workers")
            return ClusterSpec.homogeneous(
                H200, 1 if self.gpus is None else self.gpus, NVLINK, at_once((H200,), threads)
            )
        decided = check(self.gpus, self.workers, threads, self.memory_limit)
        each = max(1, cores() // decided.workers)
        device = cpu_device(decided.memory_limit, each, spills=True, process_bytes=PROCESS_BYTES)
        return ClusterSpec.homogeneous(device, decided.workers, LOCAL_TCP, threads)
