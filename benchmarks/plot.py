"""docs/accuracy.svg: error against k, and speed against error, of the newest records.

Drawn where matplotlib is installed. Whether a drawing is that of the newest records can be told
without: it names them.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.distributions import OVER_K, SPLIT_UNITS
from benchmarks.records import RESULTS, ROOT, Record, newest

PATH = ROOT / "docs" / "accuracy.svg"
SUITES = ("split", "accuracy")

Axes = Any


class _Style(NamedTuple):
    """Told apart by shape as well as by colour, for print."""

    colour: str
    marker: str
    label: str


_STYLES = {
    "multimm": _Style("#0b559f", "o", "multimm"),
    "multimm packed before": _Style("#0b559f", "D", "multimm, packed before"),
    "multimm ieee": _Style("#3c8d40", "^", "multimm ieee"),
    "multimm tf32": _Style("#7a4fa3", "v", "multimm tf32"),
    "multimm tf32 packed before": _Style("#7a4fa3", "P", "multimm tf32, packed before"),
    "cublas": _Style("#c44e12", "s", "cuBLAS"),
    "cublas tf32": _Style("#c58a00", "X", "cuBLAS TF32"),
    "cublas fp16": _Style("#666666", "*", "cuBLAS FP16"),
    "xla bf16 x3": _Style("#8c8c8c", "<", "XLA BF16_X3"),
    "xla bf16 x6": _Style("#8c8c8c", ">", "XLA BF16_X6"),
    "xla tf32 x3": _Style("#8c8c8c", "d", "XLA TF32_X3"),
}
_PROMISE = f"{SPLIT_UNITS} u: promised of multimm"
_FONTS: dict[Any, Any] = {
    "svg.hashsalt": "multimm",  # the same drawing is the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}


def stamp(folder: Path = RESULTS) -> str | None:
    """Return what a drawing of the newest records says about them; None where some are missing."""
    first = [newest(suite, folder)[:1] for suite in SUITES]
    if not all(first):
        return None
    return "; ".join(
        f"{suite} {r['date']} {r['commit']}" for suite, (r,) in zip(SUITES, first, strict=True)
    )


def stale(path: Path = PATH, folder: Path = RESULTS) -> bool:
    """Whether there are records that the drawing does not show."""
    wanted = stamp(folder)
    return wanted is not None and (not path.exists() or wanted not in path.read_text("utf-8"))


def write(path: Path = PATH, folder: Path = RESULTS) -> str:
    """Draw anew if need be, and return what was done, in one line."""
    if not stale(path, folder):
        return f"{path}: as it was"
    if find_spec("matplotlib") is None:
        return f"{path}: left alone, matplotlib is not installed (pip install multimm[bench])"
    text = draw(newest("split", folder), newest("accuracy", folder), stamp(folder) or "")
    path.write_text(text, "utf-8")
    return f"{path}: written"


def draw(split: list[Record], accuracy: list[Record], description: str) -> str:
    """Return the drawing as SVG.

    Parameters
    ----------
    split, accuracy : list of records
        Of one run each.
    description : str
        Kept in the file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_FONTS):
        figure = Figure(figsize=(10, 3.7), layout="constrained")
        *over_k, speed = figure.subplots(1, len(OVER_K) + 1)
        for axes, name in zip(over_k, OVER_K, strict=True):
            _over_k(axes, name, [r for r in accuracy if r["case"] == f"accuracy {name}"])
        over_k[0].set_ylabel("error / (u |A||B|), u = 2⁻²⁴")
        shown = _speed(speed, split)
        labelled: dict[str, Any] = {}
        for axes in (*over_k, speed):
            handles, labels = axes.get_legend_handles_labels()
            labelled = dict(zip(labels, handles, strict=True)) | labelled  # lines before points
        figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=4,
                      frameon=False)  # fmt: skip
        machine = f"{shown}, {split[0]['date'][:10]}" if split else ""
        figure.suptitle(machine, fontsize=9)
        file = io.StringIO()
        # Neither a date nor a version of matplotlib: they would differ where nothing else does.
        notes = {"Date": None, "Creator": None, "Description": description}
        figure.savefig(file, format="svg", metadata=notes)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _over_k(axes: Axes, name: str, records: list[Record]) -> None:
    """The largest error as a line, the rms error dashed."""
    axes.axhline(SPLIT_UNITS, color="#0b559f", linestyle=":", linewidth=1, label=_PROMISE)
    for system, style in _STYLES.items():
        points = sorted(
            (r["shape"][2], r["componentwise_u"], r["rms_u"])
            for r in records if _system(r["system"]) == system
        )  # fmt: skip
        if points:
            ks, largest, rms = zip(*points, strict=True)
            axes.plot(ks, largest, color=style.colour, marker=style.marker, label=style.label)
            axes.plot(ks, rms, color=style.colour, marker=style.marker, linestyle="--",
                      markersize=3, linewidth=1)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("k")
    axes.set_title(f"{name} data: largest (lines), rms (dashed)", fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.5)


def _speed(axes: Axes, records: list[Record]) -> str:
    """TFLOP/s against the rms error at the largest size that was sustained; returns the GPU."""
    lasting = [r for r in records if r["sustained"]] or [r for r in records if r["tflops"]]
    case, size = max(((r["case"], r["shape"]) for r in lasting), key=lambda found: found[1])
    for r in lasting:
        if r["case"] == case and _system(r["system"]) in _STYLES:
            style = _STYLES[_system(r["system"])]
            rate = (r["sustained"] or r)["tflops"]
            axes.plot([r["rms_u"]], [rate], color=style.colour, marker=style.marker,
                      linestyle="", label=style.label)  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rms error / (u |A||B|)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{size[0]} x {size[1]} x {size[2]}: speed against error", fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.5)
    return str(records[0]["machine"]["gpu"])


def _system(name: str) -> str:
    return "cublas" if name in ("cublas sgemm", "cublas lt") else name
