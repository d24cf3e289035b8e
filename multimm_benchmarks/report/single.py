"""Figures of one GPU: the ladder, TFLOP/s against n, and where losses are."""

from __future__ import annotations

from multimm_benchmarks.records import Record
from multimm_benchmarks.report import style
from multimm_benchmarks.report.formats import ratio, short
from multimm_benchmarks.report.runs import Runs
from multimm_benchmarks.report.style import Axes, Figure


def ladder(figure: Figure, runs: Runs) -> None:
    """Bars of the rungs and of cuBLAS, the first rung on top."""
    records = runs.of("ladder")
    axes = figure.subplots()
    names = [f"{short(r['system'])}" for r in records]
    colours = [style.look(style.family(r["system"])) for r in records]
    bars = axes.barh(
        range(len(records)), [r["tflops"] for r in records], edgecolor="white",
        color=[shown.colour if "cublas" in r["system"] else style.look("multimm ieee").colour
               for r, shown in zip(records, colours, strict=True)],
        hatch=["//" if "cublas" in r["system"] else "" for r in records],
    )  # fmt: skip
    notes = [f"{r['tflops']:.1f}  {r['detail'] or ''}".strip() for r in records]
    _write_beside(axes, bars, notes, max(r["tflops"] for r in records))
    axes.set_yticks(range(len(records)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"TFLOP/s, n = {records[0]['shape'][0]}, FP32")


def _write_beside(axes: Axes, bars: list[object], notes: list[str], longest: float) -> None:
    """Beside short bars, inside long ones."""
    for bar, note in zip(bars, notes, strict=True):
        width, middle = bar.get_width(), bar.get_y() + bar.get_height() / 2  # type: ignore[attr-defined]
        inside = width > 0.55 * longest
        axes.text(width + (-1 if inside else 1) * 0.01 * longest, middle, note, va="center",
                  ha="right" if inside else "left", color="white" if inside else "black",
                  bbox={"facecolor": bar.get_facecolor(), "edgecolor": "none", "pad": 1}  # type: ignore[attr-defined]
                  if inside else None)  # fmt: skip


def products(figure: Figure, runs: Runs) -> None:
    """TFLOP/s of square products against n: of FP32 accuracy on the left, of TF32 on the right."""
    split = [r for r in runs.of("split") if _is_square(r, "split")]
    ffma = [r for r in runs.of("ffma") if _is_square(r, "ffma")]
    left, right = figure.subplots(1, 2)
    # FP32 multiply-adds from their own suite: between tensor-core products they run slower.
    _against_n(left, split, ("multimm", "multimm packed before"))
    _against_n(left, [_renamed(r) for r in ffma], ("multimm ieee", "cublas"))
    _against_n(right, split, ("multimm tf32", "multimm tf32 packed before", "cublas tf32",
                              "cublas fp16"))  # fmt: skip
    left.set_title("accuracy of FP32")
    right.set_title("accuracy of TF32, and FP16 operands")
    left.set_ylabel("TFLOP/s")
    sizes = sorted({r["shape"][0] for r in (*split, *ffma)})
    for axes in (left, right):
        style.counts(axes, sizes, "n")
        axes.set_ylim(bottom=0)
    style.legend(figure)


def _is_square(entry: Record, suite: str) -> bool:
    return bool(entry["case"] == f"{suite} {entry['shape'][0]} NN" and entry["tflops"])


def _renamed(entry: Record) -> Record:
    """In the suite ffma, ours are FP32 multiply-adds and nothing else."""
    return {**entry, "system": entry["system"].replace("multimm", "multimm ieee")}


def _against_n(axes: Axes, records: list[Record], systems: tuple[str, ...]) -> None:
    """Of the two ways into cuBLAS, the faster one at each n."""
    for system in systems:
        best: dict[float, float] = {}
        for r in records:
            if style.family(r["system"]) == system:
                n = r["shape"][0]
                best[n] = max(r["tflops"], best.get(n, 0.0))
        if best:
            style.line(axes, system, list(best.items()))


def awkward(figure: Figure, runs: Runs) -> None:
    """Times cuBLAS of awkward shapes, sorted: bars left of 1 are where cuBLAS wins."""
    ours = [r for r in runs.of("awkward") if r["system"] == "multimm"]
    ours.sort(key=ratio)
    axes = figure.subplots()
    wins = [ratio(r) >= 1 for r in ours]
    axes.barh(
        range(len(ours)), [ratio(r) - 1 for r in ours], left=1, edgecolor="white",
        color=[style.look("multimm ieee" if won else "cublas").colour for won in wins],
        hatch=["" if won else "//" for won in wins],
    )  # fmt: skip
    axes.set_yticks(range(len(ours)), [r["case"].removeprefix("awkward ") for r in ours])
    axes.tick_params(axis="y", labelsize=6.5, length=0)
    axes.set_ylim(-0.6, len(ours) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times cuBLAS (hatched: cuBLAS is faster)")
