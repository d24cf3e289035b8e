"""What a sweep writes of its items: their records, and a line about each."""

from __future__ import annotations

from typing import Any

from multimm_benchmarks import records
from multimm_benchmarks.agenda import Item
from multimm_benchmarks.group import Message
from multimm_benchmarks.records import INTERRUPTED, Record
from multimm_benchmarks.sweep_cases import STEADY_RATIO


def record_of(item: Item, status: str, reason: str, message: Message | None = None) -> Record:
    """Return the record of an item: measured, failed or absent."""
    product, said = item.product, dict(message or {})
    shape = (product.m, product.n, product.k)
    seconds = said.pop("seconds", [])
    detail = {
        "workers": item.machine.workers, "device": item.machine.device,
        "scaling": product.scaling, "predicted_seconds": None, "one_worker_tflops": None,
        "status": status, "reason": reason, "config": said.pop("config", ""),
        **said.pop("detail", {}),
    }  # fmt: skip
    more: dict[str, Any] = {"precision": item.precision, "detail": detail}
    if not seconds:
        return records.unmeasured(product.name, item.system, shape, **more)
    more |= said.pop("errors")
    more |= {key: said[key] for key in records.KEYS if key in said}
    made = records.record(
        product.name, item.system, shape, seconds, flops=product.flops, timing="host", **more
    )
    if product.kind == "steady":
        ratio = max(seconds) / made["median"]
        detail |= {"slowest_over_median": round(ratio, 4), "steady": ratio <= STEADY_RATIO}
    return made


def unmeasured(item: Item) -> Record:
    """The record of an item that its sweep does not come to."""
    status, reason = ("absent", item.absent) if item.absent else ("failed", INTERRUPTED)
    return record_of(item, status, reason)


def line(record: Record) -> str:
    """One line about a record."""
    detail = record["detail"]
    name = f"{record['case']}, {record['system']}, {detail['workers']} x {detail['device']}"
    if detail["status"] != "done":
        return f"{name}, {record['precision']}: {detail['status']}, {detail['reason']}"
    return (
        f"{name}, {record['precision']}: {record['median']:.4g} s, {record['tflops']:.4g} TFLOP/s, "
        f"off by {record['componentwise_u']} u"
    )
