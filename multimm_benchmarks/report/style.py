"""How all figures look, and how they become files.

Systems are told apart by markers and hatches as well as by colour, so that they can be read in
print without colour. The same records give the same file, byte for byte.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

Axes = Any
Figure = Any

#: Inches: the text width of a page, so that the text of a figure is printed at its size.
WIDTH = 7.2
#: Dots per inch of PNGs.
DPI = 200
GRID = "#dddddd"
MUTED = "#666666"
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "multimm",  # names inside the file that do not differ from run to run
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "lines.markersize": 5,
    "hatch.linewidth": 0.5,
}


class Look(NamedTuple):
    """Of a system, in every figure."""

    colour: str
    marker: str
    label: str


LOOKS = {
    "multimm": Look("#0b559f", "o", "multimm"),
    "multimm packed before": Look("#0b559f", "D", "multimm, packed before"),
    "multimm ieee": Look("#3c8d40", "^", "multimm ieee"),
    "multimm tf32": Look("#7a4fa3", "v", "multimm tf32"),
    "multimm tf32 packed before": Look("#7a4fa3", "P", "multimm tf32, packed before"),
    "cublas": Look("#c44e12", "s", "cuBLAS"),
    "cublas tf32": Look("#c58a00", "X", "cuBLAS TF32"),
    "cublas fp16": Look(MUTED, "*", "cuBLAS FP16"),
    "xla bf16 x3": Look("#8c8c8c", "<", "XLA BF16_X3"),
    "xla bf16 x6": Look("#8c8c8c", ">", "XLA BF16_X6"),
    "xla tf32 x3": Look("#8c8c8c", "d", "XLA TF32_X3"),
    "dask.array": Look("#b02a4c", "p", "dask.array"),
    "dask.array tf32": Look("#b02a4c", "h", "dask.array TF32"),
    "cupy": Look("#c44e12", "s", "cuBLAS, one GPU"),
    "cupy tf32": Look("#c58a00", "X", "cuBLAS TF32, one GPU"),
    "jax highest": Look("#1a8a8a", "<", "JAX, HIGHEST"),
    "jax default": Look("#1a8a8a", ">", "JAX, default"),
    "cublasxt": Look("#8c6d31", "d", "cuBLASXt, host memory"),
    "numpy": Look("#444444", "*", "NumPy, CPU"),
    "multimm float64": Look("#5a3e9b", "o", "multimm float64"),
    "dask.array float64": Look("#b02a4c", "^", "dask.array float64"),
    "cupy float64": Look("#c44e12", "P", "cuBLAS float64, one GPU"),
    "numpy float64": Look("#444444", "1", "NumPy float64, CPU"),
}


def look(system: str) -> Look:
    """Return how a system is drawn; one without a place of its own is grey."""
    return LOOKS.get(system, Look(MUTED, "x", system))


def family(system: str) -> str:
    """Return the key of LOOKS: both ways into cuBLAS FP32 are one system."""
    return "cublas" if system in ("cublas sgemm", "cublas lt") else system


def line(axes: Axes, system: str, points: Sequence[tuple[float, float]], **more: Any) -> None:
    """Draw points of a system, joined from left to right."""
    shown = look(system)
    xs, ys = zip(*sorted(points), strict=True)
    settings = {"color": shown.colour, "marker": shown.marker, "label": shown.label} | more
    axes.plot(xs, ys, **settings)


def counts(axes: Axes, values: list[int], name: str) -> None:
    """Make x a logarithmic axis of counts, with a tick for each and no others."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value}" for value in values])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(name)


def from_zero(axes: Axes) -> None:
    """Begin the scale of y at 0, and leave room for markers above the largest value."""
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])


def doubling(axes: Axes) -> None:
    """Make y logarithmic, from one tick to another, with one for each doubling, written out."""
    axes.set_yscale("log", base=2)
    low, high = (math.log2(end) for end in axes.get_ylim())
    axes.set_ylim(2.0 ** math.floor(low), 2.0 ** math.ceil(high))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def legend(figure: Figure, columns: int = 3, **where: Any) -> None:
    """One legend for all axes, in the order in which labels first appear."""
    labelled: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            labelled.setdefault(label, handle)
    where = where or {"loc": "outside lower center"}
    figure.legend(labelled.values(), labelled, ncols=columns, frameon=False, **where)


@contextmanager
def _drawn(size: tuple[float, float], draw: Callable[[Figure], None]) -> Iterator[Figure]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure as NewFigure

    with rc_context(_SETTINGS):
        figure = NewFigure(figsize=size, layout="constrained")
        draw(figure)
        yield figure


def svg(size: tuple[float, float], draw: Callable[[Figure], None], description: str) -> str:
    """Return a drawing as SVG.

    Parameters
    ----------
    size : (float, float)
        Width and height in inches.
    draw : callable
        Called with an empty figure.
    description : str
        Kept in the file.
    """
    file = io.StringIO()
    # Neither a date nor a version of matplotlib: they would differ where nothing else does.
    notes = {"Date": None, "Creator": None, "Description": description}
    with _drawn(size, draw) as figure:
        figure.savefig(file, format="svg", metadata=notes)
    return "\n".join(text.rstrip() for text in file.getvalue().splitlines()) + "\n"


def png(size: tuple[float, float], draw: Callable[[Figure], None], description: str) -> bytes:
    """Return a drawing as PNG, with the parameters of `svg`."""
    file = io.BytesIO()
    notes = {"Software": None, "Description": description}
    with _drawn(size, draw) as figure:
        figure.savefig(file, format="png", dpi=DPI, metadata=notes)
    return file.getvalue()
