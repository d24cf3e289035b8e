"""All figures: what each shows, of which records, and whether a drawing is that of the newest.

A drawing names the records that it shows and a digest of the text that drew it, so that it can be
told without drawing, and without matplotlib, whether it is stale.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from multimm_benchmarks.report import (
    accuracy,
    headline,
    prediction,
    roofline,
    several,
    single,
    style,
    sweep,
)
from multimm_benchmarks.report.runs import SCALING, Runs, missing
from multimm_benchmarks.report.style import WIDTH, Figure


class Picture(NamedTuple):
    """One figure.

    Attributes
    ----------
    name : str
        Of its files, and in markers.
    title, alt : str
        What it shows, for the page and for who does not see it.
    suites : tuple of str
        Whose newest runs it needs.
    draw : callable
        Takes an empty figure and the runs.
    height : float
        Inches.
    lacks : callable, optional
        Takes the runs; what they do not have, or nothing.
    also : tuple of str, optional
        Suites that it shows where there are records.
    computed : callable, optional
        What it shows beside records, as text.
    """

    name: str
    title: str
    alt: str
    suites: tuple[str, ...]
    draw: Callable[[Figure, Runs], None]
    height: float
    lacks: Callable[[Runs], str] = lambda runs: ""
    also: tuple[str, ...] = ()
    computed: Callable[[], str] = str

    def missing(self, runs: Runs) -> str:
        """Return why it cannot be drawn; nothing if it can."""
        without = [suite for suite in self.suites if not runs.of(suite)]
        return missing(without[0]) if without else self.lacks(runs)

    def worded(self, text: str, runs: Runs) -> str:
        """Return a text of GPUs as one of workers, where CPU workers multiplied."""
        return worded(text, runs) if SCALING in self.suites else text

    def stamp(self, runs: Runs) -> str:
        """Return what a drawing of these runs says about itself."""
        shown = [
            f"{suite} {run}"
            for suite in (*self.suites, *self.also)
            for run in sorted({f"{r['date']} {r['commit']}" for r in runs.of(suite)})
        ]
        return "; ".join((*shown, f"drawn by {self._digest()}"))

    def _digest(self) -> str:
        sources = [style.__file__, inspect.getfile(self.draw)]
        if SCALING in (*self.suites, *self.also):
            sources.append(sweep.__file__)
        text = b"".join(Path(source).read_bytes() for source in sources)
        return hashlib.sha256(text + self.computed().encode()).hexdigest()[:12]

    def svg(self, runs: Runs) -> str:
        """Return it as SVG."""
        return style.svg(
            (WIDTH, self.height), lambda figure: self.draw(figure, runs), self.stamp(runs)
        )

    def png(self, runs: Runs) -> bytes:
        """Return it as PNG."""
        return style.png(
            (WIDTH, self.height), lambda figure: self.draw(figure, runs), self.stamp(runs)
        )


def worded(text: str, runs: Runs) -> str:
    """Return a text of GPUs as one of workers, where CPU workers multiplied."""
    return text.replace("GPU", sweep.scale(runs.of(SCALING)).worker) if runs.of(SCALING) else text


def _no_scaling(kind: str, square: bool = True) -> Callable[[Runs], str]:
    def lacks(runs: Runs) -> str:
        found = sweep.scaled(runs.of(SCALING), kind)
        if any(sweep.is_square(r) == square for r in found):
            return ""
        what = "squares" if square else "tall or rectangular products"
        return f"No {kind} scaling of {what} in the newest records of suite {SCALING}."

    return lacks


def _no_sizes(runs: Runs) -> str:
    sizes = {r["shape"][0] for r in several.largest_squares(runs)}
    wanted = "Square products of two sizes or more"
    return "" if len(sizes) > 1 else f"{wanted}: not in the newest records of suite {SCALING}."


def _no_bytes(runs: Runs) -> str:
    found = any(map(sweep.moved, sweep.done(runs.of(SCALING))))
    return "" if found else f"No bytes received in the newest records of suite {SCALING}."


def _no_timeline(runs: Runs) -> str:
    found = several.timelines(runs)
    return "" if found else f"No timeline in the newest records of suite {SCALING}."


def _no_pairs(runs: Runs) -> str:
    found = headline.pairs(runs)
    return "" if found else f"No peers in the newest records of suite {SCALING}."


def _no_gpus(runs: Runs) -> str:
    """Predictions are of GPUs: not beside records of CPU workers alone."""
    records = runs.of(SCALING)
    on_cpus = bool(records) and sweep.scale(records).worker != "GPU"
    return "These are predictions for GPUs, and stand beside records of GPUs." if on_cpus else ""


PICTURES = (
    Picture("beside", "Each case on the most GPUs: how many times as fast as the fastest peer of "
            "FP32 accuracy", "Bars of the speed over the fastest other system, for each case",
            (SCALING,), headline.draw, 4.2, _no_pairs),
    Picture("strong-scaling", "Strong scaling: the same product on more GPUs",
            "TFLOP/s against the number of GPUs, beside the ideal and the peers",
            (SCALING,), several.strong, 4.2, _no_scaling("strong")),
    Picture("oblong-scaling", "Strong scaling of tall and rectangular products",
            "TFLOP/s against the number of GPUs for products that are not square",
            (SCALING,), several.oblong, 4.2, _no_scaling("strong", square=False)),
    Picture("weak-scaling", "Weak scaling: the same memory per GPU",
            "TFLOP/s per GPU against the number of GPUs, beside the ideal",
            (SCALING,), several.weak, 4.2, _no_scaling("weak")),
    Picture("sizes", "Square products on several GPUs", "TFLOP/s against n for multimm and peers",
            (SCALING,), several.sizes, 3.6, _no_sizes),
    Picture("bytes", "Bytes that the GPUs receive from each other, predicted and measured",
            "Bytes received against the number of GPUs, predicted and measured, for each case",
            (SCALING,), several.moved, 4.4, _no_bytes),
    Picture("timeline", "One run: what each GPU did when",
            "Products, packing and transfers of each GPU over time",
            (SCALING,), several.timeline, 3.6, _no_timeline),
    Picture("prediction", "Beyond one box: predictions of the planner, not measurements",
            "Predicted TFLOP/s per GPU for up to 1024 GPUs, and what the predicted time is made of",
            (), prediction.draw, 3.8, _no_gpus, also=(SCALING,), computed=prediction.summary),
    Picture("products", "Square products on one GPU, beside cuBLAS",
            "TFLOP/s against n for multimm and cuBLAS, of FP32 and of TF32 accuracy",
            ("split", "ffma"), single.products, 3.4),
    Picture("accuracy", "Error against k, and speed against error",
            "Error against k on normal and uniform data, and speed against error",
            ("split", "accuracy"), accuracy.draw, 5.6),
    Picture("roofline", "Products of all shapes under what arithmetic and memory allow",
            "TFLOP/s against flops per byte, below the rates of a copy and of the arithmetic",
            ("split", "ffma", "awkward", "matvec"), roofline.draw, 4.4),
    Picture("ladder", "The ladder: what each kernel adds",
            "Bars of TFLOP/s of the seven kernels of the ladder and of cuBLAS",
            ("ladder",), single.ladder, 2.8),
    Picture("awkward", "Awkward shapes: times cuBLAS, ieee",
            "Bars of the speed over cuBLAS for forty shapes, sorted",
            ("awkward",), single.awkward, 5.6),
)  # fmt: skip


def find(name: str) -> Picture:
    """Return a figure by name.

    Raises
    ------
    ValueError
        If there is none.
    """
    for picture in PICTURES:
        if picture.name == name:
            return picture
    known = ", ".join(picture.name for picture in PICTURES)
    raise ValueError(f"no figure is called {name!r}; known are {known}")


def stale(picture: Picture, path: Path, runs: Runs) -> bool:
    """Whether a drawing is missing, shows other records or was drawn by other text.

    One of which there are no records must not be there.
    """
    if picture.missing(runs):
        return path.exists()
    return not path.exists() or picture.stamp(runs) not in path.read_text("utf-8")
