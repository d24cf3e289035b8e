"""Figures of several GPUs, of the suite `scaling`: rates, bytes and a timeline."""

from __future__ import annotations

import textwrap
from math import prod

from multimm_benchmarks.records import Record
from multimm_benchmarks.report import style, sweep
from multimm_benchmarks.report.runs import SCALING, Runs
from multimm_benchmarks.report.style import Axes, Figure

#: Colour and hatch of what a worker does.
_KINDS = {
    "multiply": ("#0b559f", ""),
    "pack": ("#c58a00", "//"),
    "transfer": ("#c44e12", "\\\\"),
    "read": ("#3c8d40", ".."),
}
_OTHER = ("#8c8c8c", "xx")
#: Intervals of a timeline that can be told apart in a picture.
READABLE = 400
#: Characters of a title above one of three panels.
TITLE = 24


def strong(figure: Figure, runs: Runs) -> None:
    """TFLOP/s against GPUs at a fixed size: a row per case, a column per accuracy."""
    found = sweep.scaled(runs.of(SCALING), "strong")
    _scaling(figure, list(filter(sweep.is_square, found)), per_worker=False)


def oblong(figure: Figure, runs: Runs) -> None:
    """The same of tall and of rectangular products."""
    found = sweep.scaled(runs.of(SCALING), "strong")
    _scaling(figure, [r for r in found if not sweep.is_square(r)], per_worker=False)


def weak(figure: Figure, runs: Runs) -> None:
    """TFLOP/s per GPU against GPUs at a fixed share of memory."""
    _scaling(figure, sweep.scaled(runs.of(SCALING), "weak"), per_worker=True)


def _scaling(figure: Figure, records: list[Record], *, per_worker: bool) -> None:
    cases, promises, scale = sweep.cases(records), _promises(records), sweep.scale(records)
    counts = sorted({sweep.workers(r) for r in records})
    figure.set_size_inches(style.WIDTH, 1.3 + 2.0 * len(cases))
    grid = figure.subplots(len(cases), len(promises), squeeze=False)
    for row, case in zip(grid, cases, strict=True):
        for axes, promise in zip(row, promises, strict=True):
            here = [r for r in records if (r["case"], sweep.promise(r)) == (case, promise)]
            _panel(axes, here, scale, per_worker)
            axes.set_title(f"{case}, {promise}")
            style.counts(axes, counts, f"{scale.worker}s")
            if per_worker:
                style.from_zero(axes)
            else:
                style.doubling(axes)  # the ideal is a straight line
        row[0].set_ylabel(f"{scale.unit} per {scale.worker}" if per_worker else scale.unit)
    if any(sweep.ideal(r) for r in records):
        label = f"ideal: every {scale.worker} at its own rate, all running"
        grid[-1, -1].plot([], [], color="black", linestyle="--", linewidth=1, label=label)
    style.legend(figure, 2)


def _promises(records: list[Record]) -> list[str]:
    names = "FP32", "TF32", "FP64"
    return [name for name in names if any(sweep.promise(r) == name for r in records)]


def _panel(axes: Axes, records: list[Record], scale: sweep.Scale, per_worker: bool) -> None:
    """A line per system, and beside each of ours its ideal."""
    for name in dict.fromkeys(sweep.system(r) for r in records):
        here = [r for r in records if sweep.system(r) == name]
        counts = [sweep.workers(r) for r in here]
        factor = {count: scale.factor / (count if per_worker else 1) for count in counts}
        points = [(at, r["tflops"] * factor[at]) for at, r in zip(counts, here, strict=True)]
        style.line(axes, name, points, label=sweep.label(here[-1]))
        best = [(sweep.workers(r), sweep.ideal(r)) for r in here]
        limits = [(count, rate * factor[count]) for count, rate in best if rate is not None]
        if limits:
            xs, ys = zip(*sorted(limits), strict=True)
            axes.plot(xs, ys, color=style.look(name).colour, linestyle="--", linewidth=1)


def sizes(figure: Figure, runs: Runs) -> None:
    """TFLOP/s of square products against n, on the most GPUs that were measured."""
    records = largest_squares(runs)
    promises, scale = _promises(records), sweep.scale(records)
    panels = figure.subplots(1, len(promises), squeeze=False)[0]
    for axes, promise in zip(panels, promises, strict=True):
        here = [r for r in records if sweep.promise(r) == promise]
        for name in dict.fromkeys(sweep.system(r) for r in here):
            points = [(r["shape"][0], scale.factor * r["tflops"]) for r in here
                      if sweep.system(r) == name]  # fmt: skip
            style.line(axes, name, points, label=style.look(name).label)
        style.counts(axes, sorted({r["shape"][0] for r in here}), "n")
        style.from_zero(axes)
        most = max(map(sweep.workers, records))
        axes.set_title(f"{most} {scale.worker}{'s' * (most > 1)}, accuracy of {promise}")
    panels[0].set_ylabel(scale.unit)
    style.legend(figure)


def largest_squares(runs: Runs) -> list[Record]:
    """Square products on the most workers, peers on one GPU included."""
    found = runs.of(SCALING)
    scaled = [*sweep.scaled(found, "strong"), *sweep.scaled(found, "weak")]
    records = list(filter(sweep.is_square, scaled))
    most = max(map(sweep.workers, records), default=0)
    alone = ("cupy", "cublasxt", "numpy")
    return [r for r in records if sweep.workers(r) == most or r["system"] in alone]


def moved(figure: Figure, runs: Runs) -> None:
    """Bytes that all workers receive, predicted (hollow) and measured (filled), per case."""
    scaled = (r for r in sweep.done(runs.of(SCALING)) if r["detail"]["scaling"])
    records = [r for r in scaled if r["bytes_received"]]
    cases = sweep.cases(r for r in records if sweep.moved(r))
    counts = sorted({sweep.workers(r) for r in records if r["case"] in cases})
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure.set_size_inches(style.WIDTH, 1.3 + 2.4 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    for axes, case in zip(grid.flat, cases, strict=False):
        here = [r for r in records if r["case"] == case]
        for name in dict.fromkeys(sweep.system(r) for r in here):
            _bytes(axes, name, [r for r in here if sweep.system(r) == name])
        axes.set_title(textwrap.fill(case, TITLE))
        style.doubling(axes)
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.5, high * 1.5)  # a doubling at least, where values are close
        style.counts(axes, counts, f"{sweep.scale(records).worker}s")
    for row in grid:
        row[0].set_ylabel("GB received")
    style.legend(figure)


def _bytes(axes: Axes, name: str, records: list[Record]) -> None:
    measured = [(sweep.workers(r), r["bytes_received"] / 1e9) for r in records]
    predicted = [(sweep.workers(r), r["bytes_predicted"] / 1e9) for r in records if sweep.moved(r)]
    style.line(axes, name, measured, label=f"{style.look(name).label}, measured")
    if predicted:
        style.line(axes, name, predicted, linestyle=":", markersize=10, fillstyle="none",
                   label=f"{style.look(name).label}, predicted")  # fmt: skip


def timelines(runs: Runs) -> list[Record]:
    """Records that know what each worker did when."""
    return [r for r in sweep.done(runs.of(SCALING)) if r["detail"].get("timeline")]


def timeline(figure: Figure, runs: Runs) -> None:
    """What each worker did in one run: a row per worker, and for what runs beside products.

    The largest readable product on the most workers, in float32 if that was measured.
    """
    entry = max(timelines(runs), key=lambda r: (
        sweep.workers(r), len(r["detail"]["timeline"]) <= READABLE,
        r["precision"] == "float32", prod(r["shape"]),
    ))  # fmt: skip
    steps = entry["detail"]["timeline"]
    begin = min(step[1] for step in steps)
    names = sorted({step[0] for step in steps}, key=lambda name: (len(str(name)), str(name)))
    axes = figure.subplots()
    for kind in dict.fromkeys(step[3] for step in steps):
        colour, hatch = _KINDS.get(kind, _OTHER)
        # Products above, what runs beside them below.
        low, height = (0.0, 0.45) if kind == "multiply" else (-0.4, 0.35)
        for i, name in enumerate(names):
            spans = [(start - begin, end - start) for who, start, end, what in steps
                     if (who, what) == (name, kind)]  # fmt: skip
            axes.broken_barh(spans, (i + low, height), facecolors=colour, hatch=hatch,
                             edgecolor="white", linewidth=0.3)  # fmt: skip
        axes.bar([0], [0], color=colour, hatch=hatch, edgecolor="white", label=kind)
    axes.set_yticks(range(len(names)), [str(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(step[2] for step in steps) - begin)
    axes.set_xlabel("seconds")
    axes.set_ylabel("worker")
    axes.set_title(f"{entry['case']}, {entry['precision']}")
    style.legend(figure, 4)
