"""What a sweep is asked for, checked, and the list of measurements that this makes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multimm.cluster.inspect.devices import CPU_CORE_GFLOPS, visible_gpus
from multimm.cluster.options import cores
from multimm.errors import MemoryBudgetError, OptionError
from multimm.gpu.kernel_selection import PRECISIONS, SINGLE
from multimm.planning.spec import H200
from multimm_benchmarks.peers import PEERS, system
from multimm_benchmarks.peers.base import Machine
from multimm_benchmarks.records import LEFT_OUT, Record
from multimm_benchmarks.sweep_cases import KINDS, SIZES, Product, Sizes, chosen, products

COUNTS = (1, 2, 4, 8)
#: Timed runs of a case, in full and quick.
REPEATS, QUICK_REPEATS = 5, 3
#: Cases of a system that a quick sweep keeps time for: with fewer nobody knows what the other says.
FIRST_CASES = 2
#: Bytes that must be free where records and logs are written; they take some MB.
DISK = 200_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A sweep as it was asked for, with all defaults decided."""

    device: str
    counts: tuple[int, ...]
    kinds: tuple[str, ...]
    peers: tuple[str, ...]
    precisions: tuple[str, ...]
    repeats: int
    quick: bool
    longest: float | None = None  #: seconds of a run on FP32 units; None: any

    @property
    def sizes(self) -> Sizes:
        """Extents of the products."""
        return SIZES[self.device, self.quick]

    def as_json(self) -> dict[str, Any]:
        """What JSON makes of it."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


def ask(
    *,
    gpus: str | None = None,
    workers: str | None = None,
    cases: str | None = None,
    peers: str | None = None,
    precisions: str | None = None,
    repeats: int | None = None,
    longest: float | None = None,
    quick: bool = False,
) -> Asked:
    """Check what a user asks for, and decide the rest.

    Parameters
    ----------
    gpus, workers : str, optional
        Counts such as ``"1,2,4,8"``; not both. Default: those of 1, 2, 4, 8 that this host's
        GPUs allow, or its cores where there is no GPU; of these the most, if it is to be quick.
    cases, peers, precisions : str, optional
        Names with commas between them; ``peers="none"`` leaves multimm alone.
    repeats : int, optional
    longest : float, optional
        Seconds: products are left out of which a run on FP32 units would take longer.
    quick : bool

    Raises
    ------
    OptionError
        Unknown names, with the known ones; too few GPUs; numbers out of range.
    """
    found = len(visible_gpus())
    if gpus is not None and workers is not None:
        raise OptionError("--gpus and --workers: give one, for GPU or for CPU workers")
    device = "gpu" if gpus is not None or (workers is None and found) else "cpu"
    given = gpus if device == "gpu" else workers
    counts = _counts(given, "--gpus" if device == "gpu" else "--workers")
    if device == "gpu" and counts and max(counts) > found:
        raise OptionError(f"--gpus {given}: this host has {found} visible to this process")
    if repeats is not None and repeats < 1:
        raise OptionError(f"--repeats {repeats}: at least 1 is needed")
    if longest is not None and longest <= 0:
        raise OptionError(f"--longest {longest:g}: more than 0 seconds are needed")
    usual: tuple[str, ...] = SINGLE if device == "gpu" else SINGLE[:1]  # the same on a CPU
    if quick:
        usual = tuple(name for name in usual if name != "ieee")  # no peer promises that
    return Asked(
        device,
        counts or _default_counts(found if device == "gpu" else cores(), quick),
        chosen(cases, tuple(KINDS), "case"),
        () if peers == "none" else chosen(peers, PEERS, "peer"),
        usual if precisions is None else chosen(precisions, PRECISIONS, "precision"),
        repeats or (QUICK_REPEATS if quick else REPEATS),
        quick,
        longest,
    )


def _default_counts(most: int, quick: bool) -> tuple[int, ...]:
    counts = tuple(count for count in COUNTS if count <= most)
    return counts[-1:] if quick else counts


def _counts(given: str | None, option: str) -> tuple[int, ...]:
    if given is None:
        return ()
    words = [word.strip() for word in given.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise OptionError(f"{option} {given}: counts of at least 1, as in 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def machine_of(device: str, workers: int, quick: bool = False) -> Machine:
    """Return what systems may use here."""
    import psutil  # type: ignore[import-untyped]
    from distributed.system import memory_limit

    host = int(min(memory_limit(), psutil.virtual_memory().available))
    gpus = visible_gpus() if device == "gpu" else ()
    memory = min((gpu.memory_bytes for gpu in gpus), default=host)
    return Machine(device, workers, memory, host, CPU_CORE_GFLOPS * cores(), quick)


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement to make, or the reason why not."""

    system: str
    machine: Machine
    product: Product
    precision: str
    repeats: int
    absent: str = ""
    first: bool = True  #: among those for which a quick sweep keeps time

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What a record of it is found by."""
        return self.product.name, self.system, self.machine.workers, self.precision

    @property
    def group(self) -> tuple[str, int]:
        """Items with the same share a process group."""
        one = system(self.system)
        if not self.machine.quick:
            return self.system, self.machine.workers
        return one.family or self.system, self.machine.workers if one.restarts else 0


def key_of(record: Record) -> tuple[str, str, int, str]:
    """Return the key of the item that a record is of."""
    return record["case"], record["system"], record["detail"]["workers"], record["precision"]


def agenda(asked: Asked) -> list[Item]:
    """Return all measurements, in their order: multimm first, then its peers, for each count.

    A quick sweep may not come to the last ones: see `_by_turns`. It leaves out what nothing is
    compared with.

    Raises
    ------
    OptionError
        If multimm cannot run here, or memory suffices for none of its products.
    """
    if missing := system("multimm").missing(asked.device):
        raise OptionError(f"{missing}: multimm doctor says more; --workers 2 asks for CPU workers")
    names = ("multimm", *asked.peers)
    order = [(name, count) for count in asked.counts for name in names]
    found = [item for name, count in order for item in _items(asked, name, count)]
    if asked.quick:
        found = _by_turns(asked, names, found)
    ours = [item for item in found if item.system == "multimm"]
    if all(item.absent for item in ours):
        reasons = "; ".join(dict.fromkeys(f"{i.product.name} {i.absent}" for i in ours))
        reasons = reasons or f"{asked.device} workers have no case of {', '.join(asked.kinds)}"
        raise OptionError(f"nothing can be measured here: {reasons}")
    return found


def _by_turns(asked: Asked, names: Sequence[str], found: Iterable[Item]) -> list[Item]:
    """The order of a quick sweep: one process group after the other.

    In each: two cases of each system, worker count and precision, and the steady one; then all
    others. Most workers come first, small products before large ones, and cases that nothing is
    compared with last. All systems of a group measure a case before any begins the next.
    """
    compared = {(one.product.name, one.precision) for one in found
                if not one.absent and one.system != "multimm"}  # fmt: skip

    def place(one: Item) -> tuple[bool, bool, int, str]:
        steady = one.product.kind == "steady"
        alone = not steady and (one.product.name, one.precision) not in compared
        return alone, steady or bool(one.product.chunk), one.product.flops, one.product.name

    seen: Counter[tuple[str, int, str]] = Counter()
    ranked = []
    for one in sorted(found, key=place):
        series = one.system, one.machine.workers, one.precision
        steady = one.product.kind == "steady"
        ranked.append(replace(one, first=steady or seen[series] < FIRST_CASES))
        seen[series] += not (steady or one.absent)
    families = list(
        dict.fromkeys(
            one.group[0] for one in sorted(ranked, key=lambda one: names.index(one.system))
        )
    )
    return sorted(
        ranked,
        key=lambda one: (
            families.index(one.group[0]),
            -one.group[1],
            not one.first,
            -one.machine.workers,
            place(one),
            names.index(one.system),
            one.precision,
        ),
    )


def kept_seconds(items: Sequence[Item]) -> float:
    """Return what a quick sweep keeps for a process group: its start, and its first cases."""
    starts = max((system(item.system).ready_s for item in items), default=0.0)
    return starts + sum(system(item.system).case_s for item in items if item.first)


def _items(asked: Asked, name: str, count: int) -> Iterator[Item]:
    one = system(name)
    missing = one.missing(asked.device)
    first = count == asked.counts[0]
    if (missing or not one.spreads) and not first:
        return
    machine = machine_of(one.runs_on or asked.device, count if one.spreads else 1, asked.quick)
    precisions = _precisions(asked, name)
    for product in products(asked.sizes, machine.workers, asked.kinds):
        if product.kind == "steady" and (name != "multimm" or count != asked.counts[-1]):
            continue
        if product.kind == "weak" and asked.quick and machine.workers not in asked.counts:
            continue  # another size than that of all others
        for precision in precisions[:1] if product.kind == "steady" else precisions:
            of = product.at(precision)
            reason = (
                missing
                or ("" if precision in one.promises else "it multiplies no float64 here")
                or _lie_elsewhere(one, of)
                or _too_large(one, of, machine)
                or _too_long(asked, one, of, machine)
            )
            repeats = product.repeats or asked.repeats
            yield Item(name, machine, of, precision, repeats, reason)


def _precisions(asked: Asked, name: str) -> tuple[str, ...]:
    """At which a system is measured: a peer of float32 at its own, whichever of these is asked."""
    if name == "multimm":
        return asked.precisions
    promises = system(name).promises
    single = tuple(one for one in promises if one in SINGLE and {*SINGLE} & {*asked.precisions})
    double = tuple(one for one in promises if one not in SINGLE and one in asked.precisions)
    return single + double or asked.precisions


def _lie_elsewhere(one: Any, product: Product) -> str:
    """Why operands cannot be where a product has them; what lies in host memory may be whole."""
    if product.hosted:
        return "" if one.hosts else "its operands do not lie in host memory"
    return "its operands come in no chunks" if product.chunk and not one.chunked else ""


def _too_large(one: Any, product: Product, machine: Machine) -> str:
    try:
        return str(one.too_large(product, machine))
    except MemoryBudgetError as error:
        return str(error)


def _too_long(asked: Asked, one: Any, product: Product, machine: Machine) -> str:
    gflops = machine.workers * H200.gflops if machine.device == "gpu" else machine.gflops
    seconds = one.longest * product.flops / (gflops * 1e9)
    if asked.longest is None or seconds <= asked.longest:
        return ""
    return f"a run may take {seconds:.0f} s, {LEFT_OUT} {asked.longest:g}"


def check_disk(folder: Path) -> None:
    """Refuse to begin where records could not be written.

    Raises
    ------
    OptionError
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < DISK:
        raise OptionError(
            f"{folder}: {free / 1e6:.0f} MB are free; {DISK / 1e6:.0f} MB are needed for records "
            "and logs: give another place with --output"
        )


def groups(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield items that share a process group, in order."""
    found: dict[tuple[str, int], list[Item]] = {}
    for item in items:
        found.setdefault(item.group, []).append(item)
    yield from found.values()
