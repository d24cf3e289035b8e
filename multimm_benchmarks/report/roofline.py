"""Figure: TFLOP/s against flops per byte, under what arithmetic and memory allow, for each GPU."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import NamedTuple

from multimm_benchmarks.records import Record
from multimm_benchmarks.report import style
from multimm_benchmarks.report.runs import Runs
from multimm_benchmarks.report.style import Axes, Figure

#: Of products; the rate of a copy stands in those of memory-bound suites.
PRODUCTS = ("ffma", "awkward", "split")
COPIES = ("matvec", "transpose", "add")
_INTENSITIES = (0.25, 8192.0)


class Roofs(NamedTuple):
    """What a GPU could do."""

    fp32: float | None  #: TFLOP/s of FP32 multiply-adds, from its data sheet
    fp16: float | None  #: TFLOP/s of cuBLAS FP16, measured
    copy: float  #: GB/s of a copy, read and written, measured


#: TFLOP/s of dense FP32, from the vendor's data sheets.
DATA_SHEET = {"NVIDIA H200": 67.0, "NVIDIA H100 80GB HBM3": 67.0, "NVIDIA A100-SXM4-80GB": 19.5}


def draw(figure: Figure, runs: Runs) -> None:
    """One panel per model of GPU."""
    found = {suite: runs.per_gpu(suite) for suite in (*PRODUCTS, *COPIES)}
    gpus = [gpu for gpu in found["split"] if any(gpu in found[suite] for suite in COPIES)]
    panels = figure.subplots(1, len(gpus), squeeze=False)[0]
    for axes, gpu in zip(panels, gpus, strict=True):
        here = {suite: by_gpu.get(gpu, []) for suite, by_gpu in found.items()}
        _roofs(axes, roofs(gpu, here))
        _points(axes, here)
        axes.set_title(gpu)
        axes.set_xlabel("flops per byte of A, B and C")
    panels[0].set_ylabel("TFLOP/s")
    style.legend(figure)


def roofs(gpu: str, records: dict[str, list[Record]]) -> Roofs:
    """Return the largest rates of a copy and of FP16 products, and the data sheet's of FP32."""
    copies = chain.from_iterable(records[suite] for suite in COPIES)
    fp16 = [r["tflops"] for r in records["split"] if r["system"] == "cublas fp16"]
    return Roofs(
        DATA_SHEET.get(gpu),
        max(fp16, default=None),
        max(r["gbs"] for r in copies if r["system"] == "copy"),
    )


def intensity(entry: Record) -> float:
    """Flops of a product per byte that it reads and writes at least, in float32."""
    m, n, k = map(int, entry["shape"])
    return 2 * m * n * k / (4 * (m * k + k * n + m * n))


def _roofs(axes: Axes, limits: Roofs) -> None:
    xs = [_INTENSITIES[0] * 2 ** (i / 4) for i in range(61)]
    levels = [
        (limits.fp16, "-", "cuBLAS FP16, measured"),
        (limits.fp16 and limits.fp16 / 3, "--", "a third of it: three products"),
        (limits.fp32, ":", "FP32 multiply-adds, data sheet"),
    ]
    for level, dashes, label in levels:
        if level:
            ys = [min(level, x * limits.copy / 1000) for x in xs]
            axes.plot(xs, ys, color="black", linestyle=dashes, linewidth=1,
                      label=f"{label}: {level:.0f}")  # fmt: skip
    note = f"a copy: {limits.copy:.0f} GB/s"
    axes.annotate(note, (0.5, 0.5 * limits.copy / 1000), (4, -4), textcoords="offset points",
                  va="top", fontsize=7)  # fmt: skip


def _points(axes: Axes, records: dict[str, list[Record]]) -> None:
    split = [r for r in records["split"] if r["tflops"]]
    others = [r for suite in ("ffma", "awkward") for r in records[suite] if r["tflops"]]
    thin = [_rated(r) for r in records["matvec"]]
    shown = {
        "multimm": [r for r in split if r["system"] == "multimm"],
        "multimm tf32": [r for r in split if r["system"] == "multimm tf32"],
        "multimm ieee": [r for r in (*others, *thin) if r["system"] == "multimm"],
        "cublas": [r for r in (*others, *thin) if style.family(r["system"]) == "cublas"],
    }
    for system, found in reversed(shown.items()):
        if found:
            style.line(axes, system, [(intensity(r), r["tflops"]) for r in found],
                       linestyle="", markersize=3.5, fillstyle="none")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(*_INTENSITIES)


def _rated(entry: Record) -> Record:
    """A thin product, whose suite counts bytes, with its flops."""
    return {**entry, "tflops": 2 * prod(entry["shape"]) / entry["median"] / 1e12}
