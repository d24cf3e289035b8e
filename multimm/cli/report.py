"""``multimm report``: tables, figures and a page of the benchmarks' records, from a checkout."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import click

from multimm.cli.options import DEBUG
from multimm.errors import OptionError


@click.command()
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
    help="Folder of records. Default: those of the checkout.",
)
@DEBUG
def report(output: Path, results: Path | None) -> None:
    """Write tables, figures (SVG and PNG) and one HTML page of the newest benchmark records.

    report.html holds everything and needs nothing else. What there are no records of is named in
    its place. Runs from a checkout of the repository.
    """
    _find_benchmarks()
    from benchmarks.records import RESULTS
    from benchmarks.report import files
    from benchmarks.report.runs import Runs

    if not files.drawable():
        raise OptionError("figures are drawn by matplotlib: pip install 'multimm[bench]'")
    folder = RESULTS if results is None else results
    if not any(folder.glob("*.json")):
        raise OptionError(f"--results {folder}: no records there; multimm bench writes some")
    try:
        files.write(output, Runs(folder), click.echo)
    except BrokenPipeError:  # of who reads what this prints
        raise
    except OSError as error:
        raise OptionError(f"--output {output}: {error}") from error


def _find_benchmarks() -> None:
    """Make the repository's package importable; it is no part of what is installed.

    Raises
    ------
    OptionError
        If this is not a checkout.
    """
    import multimm

    root = Path(multimm.__file__).resolve().parents[1]
    if (root / "benchmarks" / "report").is_dir() and str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        found = find_spec("benchmarks.report")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise OptionError(
            "multimm report runs from a checkout of the repository: its package 'benchmarks' "
            "is not installed with multimm"
        )
