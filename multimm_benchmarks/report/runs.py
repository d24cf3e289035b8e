"""The newest run of every suite in a folder of records.

Runs on GPUs come before those on CPU workers. Sweeps on one model of GPU count as one run: each may
have had another number of GPUs, other cases or other peers. What the newest did not come to is
taken from an older one, where driver and versions are the same, and the tables say of which commit.
But a case in which multimm failed is not replaced by one of an older commit in which it did not.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from multimm.errors import OptionError
from multimm.gpu.kernel_selection import PRECISIONS
from multimm_benchmarks.agenda import key_of
from multimm_benchmarks.records import RESULTS, Record, load
from multimm_benchmarks.report.formats import Rows, markdown, short
from multimm_benchmarks.report.sweep import not_come_to
from multimm_benchmarks.sweep_cases import KINDS

SCALING = "scaling"
REHEARSAL = "rehearsal"


class Computer(NamedTuple):
    """What the runs of one machine, or of several alike, are found by."""

    gpu: str = ""
    cores: str = ""


#: All suites, as their files are called.
SUITES = (
    *("scaling", "rehearsal", "split", "ffma", "awkward", "matvec"),
    *("accuracy", "transpose", "add", "latency", "ladder", "python", "dtypes", "contractions"),
    "wide-range",
)


class Runs:
    """Records by suite.

    Parameters
    ----------
    folder : Path
        What the benchmarks wrote.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self._found: dict[str, dict[Computer, list[Record]]] = {}

    def of(self, suite: str) -> list[Record]:
        """Return the records of the newest run on GPUs, or else on CPUs; none if none was made."""
        found = self._by_computer(suite)
        newest = [one for one in found if one.gpu] or list(found)
        return found[newest[-1]] if newest else []

    def on_cpus(self, suite: str) -> list[Record]:
        """Return the records of the newest run on CPUs; none if none was made."""
        found = [records for one, records in self._by_computer(suite).items() if not one.gpu]
        return found[-1] if found else []

    def per_gpu(self, suite: str) -> dict[str, list[Record]]:
        """Return the records of the newest run on each model of GPU."""
        return {one.gpu: records for one, records in self._by_computer(suite).items() if one.gpu}

    def _by_computer(self, suite: str) -> dict[Computer, list[Record]]:
        """The one that ran last comes last."""
        if suite not in self._found:
            found: dict[Computer, list[Record]] = {}
            for path in sorted(self.folder.glob(f"{suite}-*.json")):
                records = _load(path)
                if records:
                    one = _computer(records)
                    older = found.pop(one, [])
                    found[one] = _JOINED.get(suite, _newest)(older, records)
            self._found[suite] = found
        return self._found[suite]


def _together(older: list[Record], newer: list[Record]) -> list[Record]:
    """Both; of what both have, the newer, or what was measured."""
    found, first = {key_of(record): record for record in newer}, newer[0]
    for record in older:
        other, same = found.get(key_of(record)), record["commit"] == first["commit"]
        if not same and _software(record) != _software(first):
            continue
        if other is None:  # also what has no room there; what failed may not fail any more
            fits = same or record["detail"]["status"] != "failed"
        else:
            failed = record["system"] == "multimm" and not same and not not_come_to(other)
            fits = _measured(record) and not _measured(other) and not failed
        if fits:
            found[key_of(record)] = record
    return sorted(found.values(), key=_place)


def _of_a_day(older: list[Record], newer: list[Record]) -> list[Record]:
    """Both, of one day: a case as it was measured last."""
    cases = {record["case"] for record in newer}
    same_day = [x for x in older if _date(x)[:10] == _date(newer[0])[:10]]
    return [*(x for x in same_day if x["case"] not in cases), *newer]


def _newest(older: list[Record], newer: list[Record]) -> list[Record]:
    return newer


#: How runs on one computer become one, of suites that take too long for one.
_JOINED = {SCALING: _together, "dtypes": _of_a_day}


def _measured(record: Record) -> bool:
    return bool(record["detail"]["status"] == "done")


def _software(record: Record) -> tuple[object, ...]:
    """What a rate depends on, beside our own code and the number of GPUs."""
    machine = record["machine"]
    return record["versions"], *(machine.get(name) for name in ("driver", "cuda"))


def _date(record: Record) -> str:
    return str(record["date"])


def _place(record: Record) -> tuple[Any, ...]:
    """Where a record stands among those of several sweeps: as one sweep of all would have it."""
    kind = (i for i, kind in enumerate(KINDS) if record["case"].startswith(kind))
    size, precision = math.prod(record["shape"]), PRECISIONS.index(record["precision"])
    return record["detail"]["workers"], next(kind, len(KINDS)), size, record["case"], precision


def _load(path: Path) -> list[Record]:
    """The records of a file; one that holds none, or others, is bad input of whoever asked."""
    try:
        return load(path)
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}: no JSON: {error}") from error
    except ValueError as error:
        raise OptionError(f"{error}") from error


def _on_gpus(records: list[Record]) -> bool:
    """Whether multimm ran on GPUs: on a machine that has some it may have had CPU workers."""
    details = (r["detail"] for r in records if r["system"] == "multimm")
    devices = {d["device"] for d in details if isinstance(d, dict) and "device" in d}
    return bool(records[0]["machine"]["gpu"]) and devices != {"cpu"}


def _computer(records: list[Record]) -> Computer:
    machine = records[0]["machine"]
    if _on_gpus(records):
        return Computer(machine["gpu"])
    return Computer(cores=f"{machine.get('cores')} {machine.get('cpu')}")


def command(suite: str) -> str:
    """Return what measures a suite."""
    if suite == REHEARSAL:
        return "python -m multimm_benchmarks.rehearsal"
    return "multimm bench" if suite == SCALING else f"python -m multimm_benchmarks.kernels {suite}"


def missing(suite: str) -> str:
    """Return the line that stands in the place of records."""
    return f"Not measured yet: `{command(suite)}`."


def _machine(records: list[Record]) -> str:
    """The newest machine, with the most GPUs of all."""
    machine = max(records, key=_date)["machine"]
    if not _on_gpus(records):
        return f"{machine['cores']} cores, no GPU"
    count = max(record["machine"]["count"] or 1 for record in records)
    return f"{count} x {machine['gpu']}" if count > 1 else str(machine["gpu"])


def origin(records: list[Record]) -> str:
    """Return the line that says on what, when and of which commit records were measured."""
    first = max(records, key=_date)
    text = f"{_machine(records)}, {first['date'][:10]}, commit {first['commit'][:8]}"
    measured = (record for record in records if record.get("seconds"))
    done = sorted(measured, key=_date, reverse=True)
    older = dict.fromkeys((r["commit"][:8], r["system"]) for r in done
                          if r["commit"] != first["commit"])  # fmt: skip
    commits = {commit: [s for c, s in older if c == commit] for commit, _ in older}
    beside = "; ".join(f"{' and '.join(names)} in part at {c}" for c, names in commits.items())
    return f"{text}{f' ({beside})' if beside else ''}."


def sources(runs: Runs) -> str:
    """Return a table of all records: suite, machine, date, commit and systems."""
    rows: Rows = []
    for suite in SUITES:
        found: dict[tuple[str, ...], list[str]] = {}
        for r in sorted(runs.of(suite), key=_date, reverse=True):
            key = (f"`{command(suite)}`", _machine([r]), r["date"][:10], r["commit"][:8])
            if r.get("seconds"):
                found.setdefault(key, []).append(short(r["system"]))
        rows += [(*key, ", ".join(dict.fromkeys(names))) for key, names in found.items()]
    return markdown(("measured by", "machine", "date", "commit", "systems"), rows, words=5)
