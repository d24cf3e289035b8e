"""What a sweep says, in a table and a few sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from multimm_benchmarks.limit import TIME_IS_UP
from multimm_benchmarks.records import Record
from multimm_benchmarks.sweep_cases import STEADY_RATIO


def table(records: Sequence[Record]) -> Table:
    """One row a record, or one of a system that is absent from all cases for one reason."""
    columns = ("case", "system", "workers", "precision", "seconds", "predicted", "TFLOP/s",
               "% of ideal", "error, u", "remark")  # fmt: skip
    folds = ("case", "remark")
    shown = Table(*(Column(name, no_wrap=name not in folds) for name in columns), box=SIMPLE_HEAD)
    missing = _missing(records)
    for name, reason in missing.items():
        shown.add_row("all", name, *[""] * 7, f"absent: {reason}")
    for record in records:
        if record["system"] in missing:
            continue
        detail = record["detail"]
        measured: tuple[str, ...] = ("", "", "", "", "")
        if detail["status"] == "done":
            share, expected = efficiency(record), detail.get("predicted_seconds")
            measured = (f"{record['median']:.4g}", f"{expected:.4g}" if expected else "",
                        f"{record['tflops']:.4g}",
                        f"{100 * share:.0f}" if share else "",
                        f"{record['componentwise_u']:.3g}")  # fmt: skip
        remark = "" if detail["status"] == "done" else f"{detail['status']}: {detail['reason']}"
        where = f"{detail['workers']} {detail['device']}"
        shown.add_row(
            record["case"], record["system"], where, record["precision"], *measured, remark
        )
    return shown


def _missing(records: Sequence[Record]) -> dict[str, str]:
    """Why systems are absent that are so from all cases, for one reason."""
    found: dict[str, set[str]] = {}
    for record in records:
        detail = record["detail"]
        reason = detail["reason"] if detail["status"] == "absent" else ""
        found.setdefault(record["system"], set()).add(reason)
    return {name: why for name, (why, *more) in found.items() if why and not more}


def efficiency(record: Record) -> float | None:
    """Return the rate over the sum of every worker's own."""
    ideal = record["detail"]["one_worker_tflops"]
    return float(record["tflops"] / ideal) if ideal else None


def verdict(records: Sequence[Record]) -> Iterator[str]:
    """Yield sentences: what is right, how good predictions are, what time was too short for, how
    fast it is beside each peer, where a peer wins.
    """
    done = [record for record in records if record["detail"]["status"] == "done"]
    ours = [record for record in done if record["system"] == "multimm"]
    if ours:
        errors: dict[str, float] = {}
        for r in ours:
            if kind := {"float64": "FP64", "tf32": ""}.get(r["precision"], "FP32"):
                errors[kind] = max(errors.get(kind, 0.0), r["componentwise_u"])
        worst = [f", {kind} errors of at most {u:.3g} u |A||B|" for kind, u in errors.items()]
        yield f"multimm: right in all {len(ours)} cases{''.join(worst)}"
    else:
        yield "multimm: nothing was measured"
    yield from _predictions(ours)
    yield from _too_late(records)
    for peer in dict.fromkeys(r["system"] for r in done if r["system"] != "multimm"):
        yield from _beside(peer, ours, [record for record in done if record["system"] == peer])
    for record in ours:
        if (ratio := record["detail"].get("slowest_over_median")) is not None:
            kept = "at most" if record["detail"]["steady"] else "NOT at most"
            yield (
                f"{len(record['seconds'])} runs in a row: the slowest took {ratio:.3f} x the "
                f"median, {kept} {STEADY_RATIO}"
            )


def _predictions(ours: Sequence[Record]) -> Iterator[str]:
    """How many predictions of seconds are near what was measured."""
    predicted = [(r["detail"].get("predicted_seconds"), r["median"]) for r in ours]
    ratios = sorted(expected / median for expected, median in predicted if expected)
    if ratios:
        near, far = (sum(abs(x - 1) <= limit for x in ratios) for limit in (0.15, 0.3))
        yield (
            f"predicted seconds, of {len(ratios)} cases: {near} within 15 % of the median, {far} "
            f"within 30 %; {ratios[0]:.2f} to {ratios[-1]:.2f} times"
        )


def _too_late(records: Sequence[Record]) -> Iterator[str]:
    """What a quick sweep did not come to, of multimm as of its peers."""
    late = [r["system"] for r in records if r["detail"]["reason"].endswith(TIME_IS_UP)]
    if not late:
        return
    all_there = late + [r["system"] for r in records if r["detail"]["status"] == "done"]
    counts = (f"{late.count(s)} of {all_there.count(s)} of {s}" for s in dict.fromkeys(late))
    yield f"{TIME_IS_UP}; cases not measured: {', '.join(counts)}"


def _beside(peer: str, ours: Sequence[Record], theirs: Sequence[Record]) -> Iterator[str]:
    gains: dict[str, float] = {}
    for record in theirs:
        rivals = [mine for mine in ours if _comparable(mine, record)]
        if rivals:
            fastest = min(mine["median"] for mine in rivals)
            workers = f" on {record['detail']['workers']}" if record["system"] != "numpy" else ""
            double = " of float64" if record["precision"] == "float64" else ""
            gains[record["case"] + double + workers] = record["median"] / fastest
    if not gains:
        return
    mean = math.exp(sum(map(math.log, gains.values())) / len(gains))
    text = f"beside {peer}: {mean:.2f} x as fast (geometric mean of {len(gains)})"
    lost = [f"{case} ({gain:.2f} x)" for case, gain in gains.items() if gain < 1]
    yield text + (f"; {peer} wins {', '.join(lost)}" if lost else "")


def _comparable(mine: Record, theirs: Record) -> bool:
    """The same product at the same promise; NumPy, with all cores, meets any number of workers."""
    same = all(mine[key] == theirs[key] for key in ("case", "shape", "precision"))
    workers = mine["detail"]["workers"] == theirs["detail"]["workers"]
    return same and bool(workers or theirs["system"] == "numpy")


def failed(records: Sequence[Record]) -> list[Record]:
    """Return the cases that multimm failed in."""
    return [r for r in records if r["system"] == "multimm" and r["detail"]["status"] == "failed"]
