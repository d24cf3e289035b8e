"""What a system has to do to be measured, and how all of them are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks import sampling
from multimm_benchmarks.harness import Errors
from multimm_benchmarks.sampling import Sample
from multimm_benchmarks.sweep_cases import Product

Array = Any
#: Fewest timed runs, and the seconds after which no further one is begun. A quick sweep has a
#: minute or so for some thirty cases, each with operands to make and to verify.
LEAST_RUNS, ENOUGH_SECONDS = 2, 60.0
QUICK_LEAST_RUNS, QUICK_ENOUGH_SECONDS = 1, 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a system may use."""

    device: str  #: "gpu" or "cpu"
    workers: int  #: GPUs, or worker processes
    memory_bytes: int  #: of one GPU, or of the host
    host_bytes: int  #: of the host
    gflops: float = 0.0  #: of all CPU cores together, roughly
    quick: bool = False  #: figures may be rough


class Run(NamedTuple):
    """A product that was timed."""

    seconds: float
    start: float  #: seconds since the epoch


class System:
    """One way to multiply; subclasses say how. Nothing here runs before `opened`.

    Operands are normal numbers of the product's dtype, made anew for every run; `multiply` returns
    when its result is there, on whatever device that is.
    """

    #: The precisions it promises, each whether it is asked for by name or not.
    promises: ClassVar[tuple[str, ...]] = ("float32",)
    #: What must be importable, on a GPU machine and on one without.
    needs: ClassVar[dict[str, tuple[str, ...]]] = {"cpu": ()}
    #: The device that it runs on, if it is always the same.
    runs_on: ClassVar[str | None] = None
    #: Whether it can use several workers.
    spreads: ClassVar[bool] = True
    #: Its longest run of a product, the first one included, over what FP32 units would take.
    longest: ClassVar[float] = 1.0
    #: Whether operands may come to it in chunks that somebody else has cut.
    chunked: ClassVar[bool] = False
    #: Whether operands may lie in host memory.
    hosts: ClassVar[bool] = False
    #: Whether the first run of a product prepares those that follow.
    warms_up: ClassVar[bool] = True
    #: A quick sweep measures systems of one family in one process, which starts once. Empty: alone.
    family: ClassVar[str] = ""
    #: Whether each number of workers has to be started anew.
    restarts: ClassVar[bool] = False
    #: What it imports first, beside its own module, that takes no GPU.
    imported_ahead: ClassVar[tuple[str, ...]] = ()
    #: Seconds on GPUs, what a quick sweep keeps for it: until it is ready, those for the end of the
    #: system before it included, and for a small case. Rounded up from those of two H200s.
    ready_s: ClassVar[float] = 3.0
    case_s: ClassVar[float] = 2.0

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    @classmethod
    def missing(cls, device: str) -> str:
        """Return why it cannot run here, empty where it can; imports nothing."""
        if device not in cls.needs:
            return f"needs {' or '.join('an NVIDIA GPU' if d == 'gpu' else d for d in cls.needs)}"
        absent = [name for name in cls.needs[device] if find_spec(name) is None]
        return f"{' and '.join(absent)} not installed" if absent else ""

    @classmethod
    def too_large(cls, product: Product, machine: Machine) -> str:
        """Return why a product cannot be made here; empty where it can."""
        have = 0.85 * machine.memory_bytes * (machine.workers if machine.device == "gpu" else 1)
        return cls.beyond(product.bytes, have, "its devices' memory")

    @classmethod
    def beyond_host(cls, product: Product, machine: Machine) -> str:
        """Return why host memory cannot hold a product; samples take some of it, too."""
        return cls.beyond(product.bytes, 0.6 * machine.host_bytes, "the host's memory")

    @staticmethod
    def beyond(need: float, have: float, where: str) -> str:
        """Return what to say where more bytes are needed than there are."""
        if need <= have:
            return ""
        return f"needs {need / 1e9:.3g} GB of {where}, of which {have / 1e9:.3g} GB may be used"

    @contextmanager
    def opened(self, others: Sequence[System] = ()) -> Iterator[None]:
        """Start what it needs, and take it down again; `others` are open in this process."""
        yield

    @property
    def config(self) -> str:
        """What it is configured with, for the record."""
        raise NotImplementedError

    def prepare(self, product: Product, precision: Precision) -> None:
        """Called once, before a product's operands are made for the first time."""

    def operands(self, product: Product, precision: Precision, seed: int) -> Any:
        """Return fresh operands, ready in memory."""
        raise NotImplementedError

    def multiply(self, operands: Any, precision: Precision) -> Any:
        """Return the product; it is complete when this returns."""
        raise NotImplementedError

    def sample(self, operands: Any, result: Any, at: Sample) -> tuple[Array, Array, Array]:
        """Return rows of op(A), columns of B, and where they cross in the result, as NumPy."""
        raise NotImplementedError

    def verify(self, operands: Any, result: Any, precision: Precision) -> None:
        """Check more than a sample, where the system can; WrongResultError if it is wrong."""

    def before(self) -> None:
        """Called before the clock starts, once operands are there."""

    def after(self, result: Any) -> None:
        """Called after the clock has stopped: whether the run was one."""

    def facts(
        self, product: Product, precision: Precision, last: tuple[float, float]
    ) -> dict[str, Any]:
        """Return further keys of the record; `last` are start and end of the last run."""
        return {}


def measure(
    system: System,
    product: Product,
    precision: Precision,
    repeats: int,
    step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Verify a product, time it, and return what is recorded of it.

    Parameters
    ----------
    system : System
        Opened.
    product : Product
    precision : str
    repeats : int
        Timed runs; fewer, but at least two, where they take minutes. Quick, where they take
        seconds: at least one, and that may be the verified one, where it prepared nothing.
    step : callable
        Called after each run.
    clock : callable
        Seconds.

    Raises
    ------
    WrongResultError
        If the product is wrong; nothing is timed then.
    """
    quick = system.machine.quick and not product.repeats  # runs in a row stay as many
    least, enough = (
        (QUICK_LEAST_RUNS, QUICK_ENOUGH_SECONDS) if quick else (LEAST_RUNS, ENOUGH_SECONDS)
    )
    errors, first = _verified(system, product, precision, clock)
    step()
    runs = [first] if quick and not system.warms_up and first.seconds > enough else []
    while len(runs) < repeats:
        if len(runs) >= least and sum(run.seconds for run in runs) > enough:
            break
        operands = system.operands(product, precision, seed=len(runs) + 1)
        result, run = timed(system, operands, precision, clock)
        runs.append(run)
        if len(runs) < repeats:
            del operands, result
        step()
    last = (runs[-1].start, runs[-1].start + runs[-1].seconds)
    facts = system.facts(product, precision, last)
    return {"seconds": [run.seconds for run in runs], "errors": errors.recorded(), **facts}


def _verified(
    system: System, product: Product, precision: Precision, clock: Callable[[], float]
) -> tuple[Errors, Run]:
    """Also warms up: kernels are compiled, connections made."""
    system.prepare(product, precision)
    operands = system.operands(product, precision, seed=0)
    result, run = timed(system, operands, precision, clock)
    elements = sampling.QUICK_ELEMENTS if system.machine.quick else sampling.ELEMENTS
    at = sampling.choose(product.m, product.n, product.k, elements=elements)
    left, right, found = system.sample(operands, result, at)
    errors = sampling.check(left, right, found, precision)
    system.verify(operands, result, precision)
    return errors, run


def timed(
    system: System,
    operands: Any,
    precision: Precision,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Any, Run]:
    """Return a product, and when and how long it was computed."""
    system.before()
    wall, start = time.time(), clock()
    result = system.multiply(operands, precision)
    seconds = clock() - start
    system.after(result)
    return result, Run(seconds, wall)


def crossing(a: Array, b: Array, c: Array, at: Sample) -> tuple[Array, Array, Array]:
    """Return the sample of arrays that NumPy's indexing works on, still where they lie."""
    return a[at.rows], b[:, at.columns], c[at.rows][:, at.columns]


def normal(rows: int, columns: int, seed: int | list[int], dtype: str = "float32") -> Array:
    """Return a matrix of normal numbers on the host; one thread draws 4e7 a second."""
    made = np.empty((rows, columns), dtype)
    stripes = np.array_split(made, min(rows, 4 * (os.cpu_count() or 1)))
    seeds = np.random.SeedSequence(seed).spawn(len(stripes))

    def draw(stripe: Array, own: np.random.SeedSequence) -> None:
        np.random.default_rng(own).standard_normal(dtype=made.dtype, out=stripe)

    with ThreadPoolExecutor() as pool:
        list(pool.map(draw, stripes, seeds))
    return made
