"""What is said of the workers that a product is planned for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from multimm.display import html
from multimm.display.units import flops, human
from multimm.planning.devices import SHARED_MEMORY

if TYPE_CHECKING:
    from multimm.planning.hardware import ClusterSpec

#: Characters of a device's name, and how many of different ones: arbitrary.
LONGEST_NAME, MOST_NAMES = 60, 3
_KINDS = {"gpu": "GPU", "cpu": "CPU worker"}


def text(cluster: ClusterSpec) -> str:
    """One line: how many, of what, how they are linked, what each may use, and which rates."""
    linked = f"; {links(cluster)}" if cluster.workers > 1 else ""
    memory = f"{human(cluster.budget_bytes)} for blocks{' each' * (cluster.workers > 1)}"
    return f"{named(cluster)}{linked}; {memory}; rates {rates(cluster)}"


def page(cluster: ClusterSpec) -> str:
    """The same for a notebook: a row for each kind of worker."""
    kinds = Counter(cluster.devices)
    rows = [
        (
            shortened(device.name),
            f"{n:,}",
            human(device.memory_bytes),
            human(device.budget_bytes),
            f"{flops(device.gflops * 1e9)}/s",
        )
        for device, n in kinds.most_common(2 * MOST_NAMES)
    ]
    if len(kinds) > len(rows):
        more = sum(kinds.values()) - sum(n for _, n in kinds.most_common(len(rows)))
        rows.append((f"{len(kinds) - len(rows)} other kinds", f"{more:,}", "", "", ""))
    head = ("device", "workers", "memory", "for blocks", "float32 products")
    said = [links(cluster)] * (cluster.workers > 1) + [f"rates {rates(cluster)}"]
    lines = "".join(f"<div>{html.escaped(line)}</div>" for line in said)
    return html.page(named(cluster), html.table(rows, head), lines)


def counted(cluster: ClusterSpec) -> str:
    """How many."""
    count = cluster.workers
    return f"{count:,} {_KINDS[cluster.slowest.kind]}{'s' * (count > 1)}"


def named(cluster: ClusterSpec) -> str:
    """How many, of what, and whether there are any."""
    found = sorted({shortened(device.name) for device in cluster.devices})
    more = f" and {len(found) - MOST_NAMES} others" if len(found) > MOST_NAMES else ""
    devices = " and ".join(found[:MOST_NAMES]) + more
    paper = ", this process" if cluster.link.name == SHARED_MEMORY.name else ", on paper"
    where = "" if cluster.addresses else paper
    threads = f", {cluster.threads} threads each" if cluster.threads > 1 else ""
    return f"{counted(cluster)} ({devices}){where}{threads}"


def shortened(name: str) -> str:
    """No more than fits in a line."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def links(cluster: ClusterSpec) -> str:
    """How blocks travel."""
    link, between = cluster.link, cluster.between
    line = f"{shortened(link.name)}, {human(link.gbps * 1e9)}/s to each worker"
    if cluster.node == cluster.workers:
        return line
    far = f"{shortened(between.name)}, {human(between.gbps * 1e9)}/s between nodes"
    return f"{line} within a node of {cluster.node}; {far}"


def rates(cluster: ClusterSpec) -> str:
    """Whether the rates behind the prediction were measured, when, and which were not."""
    days = {"products": min(device.measured for device in cluster.devices)}
    if cluster.node > 1 and cluster.link.name != SHARED_MEMORY.name:
        days["transfers"] = cluster.link.measured
    if cluster.node < cluster.workers:
        days["transfers between nodes"] = cluster.between.measured
    if not any(days.values()):
        return "as shipped, not measured here"
    missing = " and ".join(name for name, day in days.items() if not day)
    oldest = min(day for day in days.values() if day)
    return f"measured {oldest}" + f" except for {missing}" * bool(missing)
