"""What the figures and tables of the suite `scaling` ask of its records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from multimm_benchmarks.records import INTERRUPTED, LEFT_OUT, Record
from multimm_benchmarks.report.style import look


class Scale(NamedTuple):
    """In which words and units a sweep is shown."""

    worker: str  #: "GPU" or "worker"
    unit: str  #: of rates
    factor: float  #: that a rate in TFLOP/s is multiplied by


def scale(records: Iterable[Record]) -> Scale:
    """Return those that suit a sweep: CPU workers reach billions of operations a second."""
    found = done(records)
    ours = [r for r in found if r["system"] == "multimm"] or found
    worker = "GPU" if any(r["detail"]["device"] == "gpu" for r in ours) else "worker"
    if max((r["tflops"] for r in found), default=1.0) < 1:
        return Scale(worker, "GFLOP/s", 1000.0)
    return Scale(worker, "TFLOP/s", 1.0)


class Pair(NamedTuple):
    """multimm in a case, and the fastest system that keeps the same promise."""

    case: str
    promise: str
    workers: int
    ours: Record
    peer: Record

    @property
    def times(self) -> float:
        """How many times as fast as the peer."""
        return float(self.ours["tflops"] / self.peer["tflops"])


def beside(records: Iterable[Record]) -> list[Pair]:
    """Return each case, number of workers and promise with its fastest peer.

    None where no peer of the same accuracy was measured: the others are slower for being better.
    NumPy, which has all cores, stands beside any number of CPU workers.
    """
    found = done(records)
    on_cpus = scale(found).worker != "GPU"
    pairs = []
    for case, count, name in dict.fromkeys((r["case"], workers(r), promise(r)) for r in found):
        here = [r for r in found if r["case"] == case]
        ours = [r for r in here if r["system"] == "multimm" and promise(r) == name
                and workers(r) == count]  # fmt: skip
        peers = [
            r for r in here
            if r["system"] != "multimm" and _keeps(promise(r), name)
            and (workers(r) == count or (on_cpus and r["system"] == "numpy"
                 and any(r["shape"] == mine["shape"] for mine in ours)))
        ]  # fmt: skip
        if ours and any(promise(r) == name for r in peers):
            best, peer = (max(group, key=lambda r: r["tflops"]) for group in (ours, peers))
            pairs.append(Pair(case, name, count, best, peer))
    return pairs


def _keeps(promised: str, name: str) -> bool:
    """Whether a system stands beside ours: products of float64 are other products."""
    return promised == name or (promised, name) == ("FP32", "TF32")


def done(records: Iterable[Record]) -> list[Record]:
    """Those that have a time; failed and absent ones have none."""
    return [r for r in records if r["detail"]["status"] == "done"]


def not_come_to(entry: Record) -> bool:
    """Whether a sweep was closed before it came to it, or left it out: nothing has failed."""
    reason = entry["detail"].get("reason", "")
    return reason == INTERRUPTED or LEFT_OUT in reason


def workers(entry: Record) -> int:
    """How many workers a record's product ran on."""
    return int(entry["detail"]["workers"])


def system(entry: Record) -> str:
    """Return the key of LOOKS: a system, and what it promises where it promises several things."""
    name, precision = entry["system"], entry["precision"]
    told_apart = name in ("multimm", "dask.array", "cupy") and precision in ("ieee", "tf32")
    return f"{name} {precision}" if told_apart or precision == "float64" else str(name)


def promise(entry: Record) -> str:
    """What may be compared: products of FP32's accuracy, those of TF32's, and those of FP64's."""
    return {"tf32": "TF32", "float64": "FP64"}.get(entry["precision"], "FP32")


def label(entry: Record) -> str:
    """Name a system; a peer below FP32's accuracy with the error that it makes."""
    name = look(system(entry)).label
    error = entry["rel_error"]
    below = promise(entry) == "TF32" and entry["system"] != "multimm" and error is not None
    return f"{name} (relative error {error:.0e})" if below else name


def cases(records: Iterable[Record]) -> list[str]:
    """Names of cases, in the order in which they were measured."""
    return list(dict.fromkeys(r["case"] for r in records))


def scaled(records: list[Record], kind: str) -> list[Record]:
    """Records of strong or of weak scaling."""
    return [r for r in done(records) if r["detail"]["scaling"] == kind]


def is_square(entry: Record) -> bool:
    """Whether m, n and k are the same."""
    return len(set(entry["shape"])) == 1


def ideal(entry: Record) -> float | None:
    """TFLOP/s of all workers together, each at its own rate with all of them running."""
    rate = entry["detail"].get("one_worker_tflops")
    return None if rate is None else float(rate)


def moved(entry: Record) -> bool:
    """Whether bytes were both predicted and measured."""
    return bool(entry["bytes_received"] and entry["bytes_predicted"])
