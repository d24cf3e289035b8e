"""Figure: error against k, and speed against error."""

from __future__ import annotations

from multimm_benchmarks.distributions import OVER_K, SPLIT_UNITS
from multimm_benchmarks.records import Record
from multimm_benchmarks.report import style
from multimm_benchmarks.report.formats import extents
from multimm_benchmarks.report.runs import Runs
from multimm_benchmarks.report.style import Axes, Figure

_PROMISE = f"{SPLIT_UNITS} u: promised of multimm"


def draw(figure: Figure, runs: Runs) -> None:
    """Errors over k for each kind of data, and TFLOP/s against the rms error."""
    split, accuracy = runs.of("split"), runs.of("accuracy")
    grid = figure.subplots(2, 2)
    *over_k, speed, corner = grid.flat
    for axes, name in zip(over_k, OVER_K, strict=True):
        _over_k(axes, name, [r for r in accuracy if r["case"] == f"accuracy {name}"])
    over_k[0].set_ylabel("error / (u |A||B|), u = 2⁻²⁴")
    _speed(speed, split)
    corner.set_axis_off()
    style.legend(figure, 1, loc="center", bbox_to_anchor=(0.5, 0.5),
                 bbox_transform=corner.transAxes)  # fmt: skip


def _over_k(axes: Axes, name: str, records: list[Record]) -> None:
    """The largest error as a line, the rms error dashed."""
    for system in style.LOOKS:
        here = [r for r in records if style.family(r["system"]) == system]
        if here:
            style.line(axes, system, [(r["shape"][2], r["componentwise_u"]) for r in here])
            style.line(axes, system, [(r["shape"][2], r["rms_u"]) for r in here],
                       linestyle="--", markersize=3, linewidth=1, label=None)  # fmt: skip
    axes.axhline(SPLIT_UNITS, color="#0b559f", linestyle=":", linewidth=1, label=_PROMISE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("k")
    axes.set_title(f"{name} data: largest (lines), rms (dashed)")


def _speed(axes: Axes, records: list[Record]) -> None:
    """TFLOP/s against the rms error at the largest size that was sustained."""
    lasting = [r for r in records if r["sustained"]] or [r for r in records if r["tflops"]]
    case, size = max(((r["case"], r["shape"]) for r in lasting), key=lambda found: found[1])
    for r in lasting:
        system = style.family(r["system"])
        if r["case"] == case and system in style.LOOKS:
            rate = (r["sustained"] or r)["tflops"]
            style.line(axes, system, [(r["rms_u"], rate)], linestyle="")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rms error / (u |A||B|)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{extents(size)}: speed against error")
