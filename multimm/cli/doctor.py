"""``multimm doctor``: what this host has, what does not fit together, what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multimm.cli.options import DEBUG
from multimm.cli.terminal import console, plain

if TYPE_CHECKING:
    from rich.table import Table

    from multimm.cluster.inspect.host_report import Facts

COLOURS = {"problem": "red", "note": "yellow"}


@click.command(short_help="Show what is installed, and what is missing.")
@DEBUG
def doctor() -> None:
    """Show GPUs, driver, links and versions, and what does not fit together.

    Exit code 1 where something found makes multimm fail on this host.
    """
    from rich.text import Text

    from multimm.cluster.inspect.host_report import SHARED_HOST, findings, gather, usable
    from multimm.gpu.runtime import file_cache

    out = console()

    def mark(word: str, colour: str, text: str) -> None:
        out.print(Text.assemble((word, colour), f": {plain(text)}"), soft_wrap=True)

    facts = gather()
    out.print(report(facts))
    found = findings(facts)
    for finding in found:
        mark(finding.level, COLOURS[finding.level], finding.text)
        if finding.remedy:
            out.print(f"  do: {finding.remedy}", soft_wrap=True)
    if why := file_cache.obstacle():
        mark("note", COLOURS["note"], f"kernels and rates are not kept between runs: {why}")
    mark("note", COLOURS["note"], SHARED_HOST)
    if not usable(found):
        raise SystemExit(1)
    workers = f"{len(facts.gpus)} GPU worker(s)" if facts.gpus else "CPU workers"
    mark("ready", "green", f"multimm.cluster.start() will use {workers}")


def report(facts: Facts) -> Table:
    """The facts as a table of names and values."""
    from rich.table import Table

    import multimm

    table = Table("what", "found", show_edge=False)
    table.add_row("Python", facts.python)
    table.add_row("system", facts.system)
    table.add_row("CPU", f"{facts.cores} cores, {facts.memory_bytes / 2**30:.1f} GiB")
    for i, gpu in enumerate(facts.gpus):
        table.add_row(f"GPU {i}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB")
    if not facts.gpus:
        table.add_row("GPU", "none")
    table.add_row("driver", facts.driver or "none")
    table.add_row(
        "CUDA of the driver", "none" if facts.cuda is None else "{}.{}".format(*facts.cuda)
    )
    if len(facts.gpus) > 1:
        table.add_row("NVLink", _links(facts))
    for name, builds in facts.packages.items():
        absent = f"{multimm.__version__} (a checkout)" if name == "multimm" else "not installed"
        table.add_row(name, ", ".join(_build(name, *build) for build in builds) or absent)
    return table


def _links(facts: Facts) -> str:
    pairs = [f"{i}-{j}: {count} links" for (i, j), count in sorted(facts.nvlinks.items())]
    return ", ".join(pairs) or "none: blocks travel through host memory"


def _build(package: str, distribution: str, number: str) -> str:
    return number if distribution == package else f"{number} ({distribution})"
