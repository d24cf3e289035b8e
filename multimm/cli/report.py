"""``multimm report``: tables, figures and a page of the benchmarks' records."""

from __future__ import annotations

from pathlib import Path

import click

from multimm.cli.options import DEBUG
from multimm.cli.terminal import say
from multimm.errors import OptionError, how_to_install


@click.command(short_help="Write tables and figures of the benchmarks.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("report"),
    show_default=True,
    help="Folder that is written.",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of records. Default: that of `multimm bench`.",
)
@DEBUG
def report(output: Path, results: Path | None) -> None:
    """Write tables, figures (SVG and PNG) and one HTML page of the newest benchmark records.

    report.html holds everything and needs nothing else. What there are no records of is named in
    its place.
    """
    from multimm_benchmarks.records import RESULTS
    from multimm_benchmarks.report import files
    from multimm_benchmarks.report.runs import Runs

    if not files.drawable():
        raise OptionError(f"figures are drawn by matplotlib: {how_to_install('bench')}")
    folder = RESULTS if results is None else results
    if not any(folder.glob("*.json")):
        raise OptionError(f"--results {folder}: no records there; multimm bench writes some")
    try:
        files.write(output, Runs(folder), say)
    except OSError as error:
        raise OptionError(f"--output {output}: {error}") from error
