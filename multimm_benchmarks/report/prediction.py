"""Beyond one box: what the planner predicts for more GPUs than were measured.

Nothing here is a measurement. The model is that of `multimm plan`: the longest of products,
transfers and scheduling, and what cannot hide behind it. Its rates were measured on H200s, but for
InfiniBand's, which is that of the line.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from multimm.gpu.kernel_selection import Precision
from multimm.planning.cost.memory import Terms
from multimm.planning.spec import H200, NVLINK, ClusterSpec, Link, MatrixSpec
from multimm_benchmarks.records import Record
from multimm_benchmarks.report import style, sweep
from multimm_benchmarks.report.formats import Rows, figures, markdown
from multimm_benchmarks.report.runs import SCALING, Runs
from multimm_benchmarks.report.style import Axes, Figure

#: 400 Gb/s per GPU, all that the line carries: these figures show what would limit then. Plans
#: are made with half of it (`planning.spec.INFINIBAND`), for nobody has measured what Dask's
#: transport makes of that line. The 2 ms are arbitrary, somewhat less than those of NVLink.
FULL_INFINIBAND = Link("InfiniBand", 50.0, 2e-3)
LINKS = (NVLINK, FULL_INFINIBAND)
_NAMES = ("NVLink", "InfiniBand")
#: As planned by default. Beyond, planning itself takes long, and what limits does not change.
PLANNED = (1, 2, 4, 8, 16, 32, 64)
#: In blocks of LARGE, which divide n where the root of the count is whole.
COUNTS = (16, 64, 256, 1024)
PRECISIONS: tuple[Precision, ...] = ("float32", "ieee")
#: n of one GPU; n grows with the root of their number, and the memory of each stays the same.
SHARE = 32768
#: Edge of larger blocks and slabs: an eighth of the tasks for the scheduler.
LARGE = 32768
#: Measured GPU counts end here.
BOX = 8
_TERMS = {"block products": "-", "transfers": "--", "scheduling": ":"}


class Point(NamedTuple):
    """A predicted product on so many GPUs."""

    gpus: int
    n: int
    tasks: int
    seconds: float
    rate: float  #: TFLOP/s per GPU
    terms: Terms


@cache
def predict(gpus: int, precision: Precision, link: Link, edge: int | None) -> Point:
    """Plan a square product of the same memory per GPU.

    Parameters
    ----------
    gpus : int
    precision : str
    link : Link
        Between any two GPUs.
    edge : int or None
        Of blocks and slabs; None leaves them to the planner.
    """
    import multimm

    n = round(SHARE * gpus**0.5)
    spec = MatrixSpec((n, n))
    cluster = ClusterSpec.homogeneous(H200, gpus, link)
    plan = multimm.plan(spec, spec, precision=precision, cluster=cluster, blocks=edge, slabs=edge)
    rate = plan.flops / plan.seconds / gpus / 1e12
    return Point(gpus, n, plan.tasks, plan.seconds, rate, plan.time_terms)


def swept(precision: Precision, link: Link, edge: int | None) -> list[Point]:
    """Predictions for all counts of GPUs that are shown."""
    return [predict(gpus, precision, link, edge) for gpus in (COUNTS if edge else PLANNED)]


def summary() -> str:
    """Return all predictions in a few digits: what a drawing of them shows."""
    points = [
        point for precision in PRECISIONS for link in LINKS for edge in (None, LARGE)
        for point in swept(precision, link, edge)
    ]  # fmt: skip
    return "\n".join(f"{p.gpus} {p.n} {p.tasks} {p.rate:.4g}" for p in points)


def draw(figure: Figure, runs: Runs) -> None:
    """TFLOP/s per GPU for both precisions, and what the time is made of."""
    *panels, parts = figure.subplots(1, len(PRECISIONS) + 1)
    for axes, precision in zip(panels, PRECISIONS, strict=True):
        _rates(axes, precision)
        _measured(axes, runs, precision)
        axes.set_title(f"{precision}: PREDICTED")
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    panels[0].set_ylabel("TFLOP/s per GPU")
    _parts(parts)
    for axes in (*panels, parts):
        axes.axvspan(BOX * 2**0.5, COUNTS[-1] * 1.3, color="#f3ead8", zorder=0)
        style.counts(axes, [1, 8, 64, 1024], "GPUs")
        axes.set_xlim(0.8, COUNTS[-1] * 1.3)
    style.legend(figure, 2)


def _rates(axes: Axes, precision: Precision) -> None:
    colour = style.look("multimm" if precision == "float32" else "multimm ieee").colour
    for name, link, fill in zip(_NAMES, LINKS, ("full", "none"), strict=True):
        for edge, dashes, marker in ((None, ":", "o"), (LARGE, "--", "s")):
            points = swept(precision, link, edge)
            axes.plot([p.gpus for p in points], [p.rate for p in points], color=colour,
                      linestyle=dashes, marker=marker, fillstyle=fill, markersize=4,
                      linewidth=1)  # fmt: skip
            # In the legend without a colour: it means the same in both panels.
            how = f"blocks of {edge}" if edge else "as planned"
            axes.plot([], [], color="black", linestyle=dashes, marker=marker, fillstyle=fill,
                      markersize=4, linewidth=1,
                      label=f"predicted: {name}, {link.gbps:.0f} GB/s, {how}")  # fmt: skip


def _measured(axes: Axes, runs: Runs, precision: Precision) -> None:
    points = [
        (sweep.workers(r), r["tflops"] / sweep.workers(r))
        for r in sweep.scaled(runs.of(SCALING), "weak")
        if (r["system"], r["precision"]) == ("multimm", precision) and sweep.is_square(r)
    ]
    if points:
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, color="black", marker="*", markersize=8, label="measured")


def _parts(axes: Axes) -> None:
    points = swept("float32", FULL_INFINIBAND, LARGE)
    for name, dashes in _TERMS.items():
        axes.plot([p.gpus for p in points], [p.terms[name] for p in points], color="black",
                  linestyle=dashes, linewidth=1)  # fmt: skip
        first = points[0].gpus, points[0].terms[name]
        axes.annotate(name.split()[-1], first, (-3, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=7)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.set_title(f"float32, {FULL_INFINIBAND.name}: PREDICTED")


def table() -> str:
    """Predicted TFLOP/s per GPU, and what limits."""
    rows: Rows = []
    for precision in PRECISIONS:
        for points in zip(*(swept(precision, link, LARGE) for link in LINKS), strict=True):
            limits = max(_TERMS, key=lambda name: points[-1].terms[name])
            cells = [cell for p in points for cell in (figures(p.seconds), f"{p.rate:.1f}")]
            first = points[0]
            rows.append((precision, f"{first.gpus}", f"{first.n}", f"{first.tasks}", *cells,
                         limits))  # fmt: skip
    heads = [head for name in _NAMES for head in (f"{name}, s", "TFLOP/s per GPU")]
    text = (
        "Predicted, not measured: square products of the same memory per GPU, blocks and slabs of "
        f"{LARGE}, {NVLINK.gbps:.0f} GB/s over NVLink (measured through Dask), "
        f"{FULL_INFINIBAND.gbps:.0f} GB/s over InfiniBand (the line's rate).\n\n"
    )
    return text + markdown(("precision", "GPUs", "n", "tasks", *heads, "limited by"), rows)


def check(records: list[Record]) -> str:
    """What the same model predicted for what was measured."""
    rows: Rows = [
        (r["case"], r["precision"], f"{sweep.workers(r)}",
         figures(r["detail"]["predicted_seconds"]), figures(r["median"]),
         f"{r['median'] / r['detail']['predicted_seconds']:.2f}")
        for r in sweep.done(records)
        if r["system"] == "multimm" and r["detail"].get("predicted_seconds")
    ]  # fmt: skip
    counts = f"{sweep.scale(records).worker}s"
    head = ("case", "precision", counts, "predicted, s", "measured, s", "measured / predicted")
    return markdown(head, rows, words=2)


def rehearsed(records: list[Record]) -> str:
    """What products took whose kernels waited as long as predicted."""
    rows: Rows = []
    for r in records:
        detail, expected = r["detail"], r["detail"]["predicted_seconds"]
        bytes_ratio = r["bytes_received"] / r["bytes_predicted"] if r["bytes_predicted"] else 1.0
        rows.append((
            r["case"], r["precision"], f"{detail['workers']}", f"{detail['tasks']}",
            figures(expected), figures(r["median"]), f"{r['median'] / expected:.2f}",
            f"{max(r['seconds']) / r['median']:.2f}", f"{1e3 * detail['first_task_s']:.1f}",
            f"{bytes_ratio:.4f}",
        ))  # fmt: skip
    head = ("case", "precision", "workers", "tasks", "predicted, s", "rehearsed, s",
            "rehearsed / predicted", "slowest / median", "first task, ms",
            "bytes / predicted")  # fmt: skip
    return markdown(head, rows, words=2)
