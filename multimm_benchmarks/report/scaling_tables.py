"""Tables of the suite `scaling`: rates, bytes, what each peer was, and who wins."""

from __future__ import annotations

import re
from collections.abc import Iterator

from multimm_benchmarks.records import Record
from multimm_benchmarks.report import sweep
from multimm_benchmarks.report.formats import Rows, figures, markdown
from multimm_benchmarks.report.style import look


def rates(records: list[Record]) -> str:
    """Rates by workers; of ours, the share of what the workers reach each on its own.

    Who is absent everywhere has no row: `peers` says why.
    """
    counts, scale = sorted({sweep.workers(r) for r in records}), sweep.scale(records)
    rows: Rows = []
    for case in sweep.cases(records):
        here = [r for r in records if r["case"] == case]
        for name in dict.fromkeys(sweep.system(r) for r in here):
            at = {sweep.workers(r): r for r in here if sweep.system(r) == name}
            if all(r["detail"]["status"] == "absent" for r in at.values()):
                continue
            error = _largest(at, "rel_error")
            cells = [_rate(at.get(count), scale) for count in counts]
            rows.append((case, look(name).label, *cells, error))
    heads = [f"{count} {scale.worker}{'s' * (count > 1)}" for count in counts]
    text = (
        f"{scale.unit}, and in brackets the share of all {scale.worker}s' own rates with all of "
        "them running:\n\n"
    )
    table = markdown(("case", "system", *heads, "relative error"), rows, words=2)
    return text + table + "".join(_stalls(records))


def _stalls(records: list[Record]) -> Iterator[str]:
    """A line for each case that is about runs in a row."""
    for r in sweep.done(records):
        if ratio := r["detail"].get("slowest_over_median"):
            yield (
                f"\n{r['case']}, {look(sweep.system(r)).label}, {sweep.workers(r)} workers: the "
                f"slowest of {len(r['seconds'])} runs took {ratio:.2f} times the median.\n"
            )


def _rate(entry: Record | None, scale: sweep.Scale) -> str:
    if entry is None or sweep.not_come_to(entry):
        return ""
    if entry["detail"]["status"] != "done":
        return str(entry["detail"]["status"])
    best = sweep.ideal(entry)
    share = f" ({100 * entry['tflops'] / best:.0f} %)" if best else ""
    return f"{figures(scale.factor * entry['tflops'])}{share}"


def _largest(found: dict[int, Record], key: str) -> str:
    values = [r[key] for r in found.values() if r[key] is not None]
    return f"{max(values):.1e}" if values else ""


def verdict(records: list[Record]) -> str:
    """Ours beside the fastest peer of the same accuracy or better; below 1 the peer wins."""
    scale = sweep.scale(records)
    rows: Rows = [
        (pair.case, pair.promise, f"{pair.workers}", figures(scale.factor * pair.ours["tflops"]),
         look(sweep.system(pair.peer)).label, figures(scale.factor * pair.peer["tflops"]),
         f"{pair.times:.2f}" if pair.times >= 1 else f"**{pair.times:.2f}**")
        for pair in sweep.beside(records)
    ]  # fmt: skip
    head = ("case", "accuracy of", f"{scale.worker}s", f"multimm, {scale.unit}", "fastest peer",
            scale.unit, "times the peer")  # fmt: skip
    return markdown(head, rows, words=2)


def moved(records: list[Record]) -> str:
    """GB that all workers receive, predicted and measured, and the fullest worker's memory."""
    rows: Rows = [
        (r["case"], look(sweep.system(r)).label, f"{sweep.workers(r)}",
         _gb(r["bytes_predicted"]), _gb(r["bytes_received"]),
         f"{r['bytes_received'] / r['bytes_predicted']:.3f}" if sweep.moved(r) else "",
         _gb(r["peak_bytes"]))
        for r in sweep.done(records) if r["bytes_received"] is not None
    ]  # fmt: skip
    worker = sweep.scale(records).worker
    head = ("case", "system", f"{worker}s", "GB predicted", "GB received", "received / predicted",
            f"peak GB of a {worker}")  # fmt: skip
    return markdown(head, rows, words=2)


def _gb(size: float | None) -> str:
    return "" if size is None else figures(size / 1e9)


def starts(records: list[Record]) -> str:
    """From the call to the first task: plan, graph, scheduler. Of what ran as Dask tasks."""
    rows: Rows = [
        (r["case"], look(sweep.system(r)).label, f"{sweep.workers(r)}",
         f"{r['detail']['tasks']}", f"{1e3 * r['detail']['first_task_s']:.1f}")
        for r in sweep.done(records) if "first_task_s" in r["detail"]
    ]  # fmt: skip
    if not rows:
        return "This run did not record them yet.\n"
    counts = f"{sweep.scale(records).worker}s"
    return markdown(("case", "system", counts, "tasks", "first task after, ms"), rows, words=2)


def peers(records: list[Record]) -> str:
    """What each system was configured with, and why one is absent or failed.

    Texts that differ in numbers alone, such as that of the workers, stand there once.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for r in records:
        detail = r["detail"]
        said = detail.get("config") if detail["status"] == "done" else detail.get("reason")
        cells = rows.setdefault((look(sweep.system(r)).label, detail["status"]), {})
        if said:
            cells[re.sub(r"\d+", "#", said)] = " ".join(said.replace("|", "/").split())
    table: Rows = [(*key, "; ".join(said.values())) for key, said in rows.items()]
    return markdown(("system", "", "configured with, or reason"), table, words=3)
