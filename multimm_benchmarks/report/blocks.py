"""Blocks between markers in documents: tables and figures of the newest records.

A table stands between ``<!-- table: name -->`` and ``<!-- end of table -->``, a figure between
``<!-- figure: name -->`` and ``<!-- end of figure -->``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from multimm_benchmarks.records import ROOT, Record
from multimm_benchmarks.report import gallery, prediction, reach_tables, scaling_tables, tables
from multimm_benchmarks.report.runs import REHEARSAL, SCALING, Runs, missing
from multimm_benchmarks.report.runs import origin as origin_of
from multimm_benchmarks.report.split_tables import accuracy, split

_ROOT = ROOT or Path()
#: The documents of a checkout that have such blocks.
PAGES = tuple(
    _ROOT / name
    for name in ("README.md", "kernels/README.md", "benchmarks/README.md", "docs/benchmarks.md")
)
FIGURES = _ROOT / "docs" / "figures"
_BLOCK = re.compile(
    r"(<!-- (?P<kind>table|figure): (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=kind) -->)",
    re.DOTALL,
)

#: By the name in the marker: the suite whose newest run is shown, and how.
TABLES: dict[str, tuple[str, Callable[[list[Record]], str]]] = {
    "ladder": ("ladder", tables.ladder),
    "transpose": ("transpose", tables.transpose),
    "add": ("add", tables.add),
    "ffma": ("ffma", tables.ffma),
    "awkward": ("awkward", tables.awkward),
    "matvec": ("matvec", tables.matvec),
    "latency": ("latency", tables.latency),
    "split": ("split", split),
    "wide-range": ("wide-range", reach_tables.wide_range),
    "dtypes": ("dtypes", reach_tables.dtypes),
    "dtypes-on-cpus": ("dtypes", reach_tables.dtypes_on_cpus),
    "contractions": ("contractions", reach_tables.contractions),
    "accuracy": ("accuracy", accuracy),
    "python": ("python", tables.python),
    "python-grid": ("python", tables.python_grid),
    "scaling": (SCALING, scaling_tables.rates),
    "verdict": (SCALING, scaling_tables.verdict),
    "bytes": (SCALING, scaling_tables.moved),
    "starts": (SCALING, scaling_tables.starts),
    "peers": (SCALING, scaling_tables.peers),
    "prediction-check": (SCALING, prediction.check),
    "rehearsal": (REHEARSAL, prediction.rehearsed),
}
#: Those of the newest run on CPUs, where others prefer one on GPUs.
ON_CPUS = ("dtypes-on-cpus",)
#: That of no records.
PREDICTION = "prediction"


def there(name: str, runs: Runs) -> bool:
    """Whether there is what a table shows."""
    if name == PREDICTION:
        return not gallery.find(PREDICTION).missing(runs)
    return bool(_records(name, runs))


def _records(name: str, runs: Runs) -> list[Record]:
    """What a table shows."""
    suite, _ = TABLES[name]
    return runs.on_cpus(suite) if name in ON_CPUS else runs.of(suite)


def table(name: str, runs: Runs, *, origin: bool = True) -> str:
    """Return a table as Markdown, or the line that says why there is none.

    Parameters
    ----------
    name : str
    runs : Runs
    origin : bool
        Whether a line below says on what and of which commits it was measured.

    Raises
    ------
    ValueError
        If no table has this name.
    """
    if name == PREDICTION:
        return prediction.table()
    if name not in TABLES:
        raise ValueError(
            f"no table is called {name!r}; known are {', '.join((*TABLES, PREDICTION))}"
        )
    suite, draw = TABLES[name]
    records = _records(name, runs)
    if not records:
        return f"{missing(suite)}\n"
    return f"{draw(records)}\n{origin_of(records)}\n" if origin else draw(records)


def figure(name: str, runs: Runs, beside: Path) -> str:
    """Return the link to a figure, as seen from a folder, or why there is none."""
    picture = gallery.find(name)
    if why := picture.missing(runs):
        return f"{why}\n"
    link = os.path.relpath(FIGURES / f"{name}.svg", beside)
    return f"![{picture.alt}]({link})\n"


def render(text: str, runs: Runs, beside: Path = _ROOT) -> str:
    """Return a text, which lies in the folder `beside`, with its blocks written anew."""

    def fill(found: re.Match[str]) -> str:
        name = found["name"]
        inside = table(name, runs) if found["kind"] == "table" else figure(name, runs, beside)
        return f"{found[1]}{inside}{found[4]}"

    return _BLOCK.sub(fill, text)


def figures(text: str) -> list[str]:
    """Return the names of the figures that a text shows."""
    return [found["name"] for found in _BLOCK.finditer(text) if found["kind"] == "figure"]
