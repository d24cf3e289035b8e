"""What a report says first: one sentence, and one picture of each case beside its fastest peer."""

from __future__ import annotations

from multimm_benchmarks.records import Record
from multimm_benchmarks.report import style, sweep
from multimm_benchmarks.report.formats import figures, ratio
from multimm_benchmarks.report.runs import SCALING, Runs
from multimm_benchmarks.report.style import Figure
from multimm_benchmarks.report.sweep import Pair

#: Inches: so wide that its words can be read on a phone.
WIDTH = 5.0


def pairs(runs: Runs) -> list[Pair]:
    """Cases on the most workers, of FP32's accuracy, each with its fastest peer.

    Of a sweep without them those of FP64's.
    """
    beside = sweep.beside(runs.of(SCALING))
    found = [pair for pair in beside if pair.promise == "FP32"]
    found = found or [pair for pair in beside if pair.promise == "FP64"]
    most = max((pair.workers for pair in found), default=0)
    return [pair for pair in found if pair.workers == most]


def sentence(runs: Runs) -> str:
    """Return what the records say in one sentence."""
    records = runs.of(SCALING)
    if found := pairs(runs):
        return f"{where(found[0].ours)} {_beside(found)}."
    if done := [r for r in sweep.done(records) if r["system"] == "multimm"]:
        best, scale = max(done, key=lambda r: r["tflops"]), sweep.scale(records)
        return (
            f"{where(best)} multimm reaches {figures(scale.factor * best['tflops'])} {scale.unit} "
            f"({best['case']}). No other system was measured beside it."
        )
    if squares := [r for r in runs.of("split") if r["system"] == "multimm" and r["ratio_vs"]]:
        best = max(squares, key=lambda r: r["tflops"] or 0)
        return (
            f"On one {best['machine']['gpu']} multimm reaches {figures(best['tflops'])} TFLOP/s "
            f"with float32's accuracy, {ratio(best):.2f} times cuBLAS."
        )
    return "These records have no products beside other systems."


def _beside(found: list[Pair]) -> str:
    times = sorted(pair.times for pair in found)
    if len(found) == 1:
        pair = found[0]
        peer = style.look(sweep.system(pair.peer)).label
        return (
            f"multimm is {pair.times:.2g} times as fast as {peer}, the fastest other system "
            f"({pair.case})"
        )
    lost = sum(one < 1 for one in times)
    beaten = f"; another system is faster in {lost} of them" if lost else ""
    ends = dict.fromkeys(f"{one:.2g}" for one in (times[0], times[-1]))
    return (
        f"multimm is {' to '.join(ends)} times as fast as the fastest other system, "
        f"in {len(found)} products of float{found[0].promise[2:]}'s accuracy{beaten}"
    )


def where(entry: Record) -> str:
    """Return on what a record was measured: ``On 4 NVIDIA H200 GPUs``."""
    count, machine = sweep.workers(entry), entry["machine"]
    many = "s" * (count > 1)
    if entry["detail"]["device"] == "gpu":
        return f"On {count} {machine['gpu']} GPU{many}"
    return f"On {count} CPU worker{many} of a machine with {machine['cores']} cores"


def draw(figure: Figure, runs: Runs) -> None:
    """Bars of times the fastest peer, the shortest on top; left of 1 the peer wins."""
    found = sorted(pairs(runs), key=lambda pair: pair.times)
    scale = sweep.scale(runs.of(SCALING))
    figure.set_size_inches(WIDTH, 0.9 + 0.42 * len(found))
    axes = figure.subplots()
    won = [pair.times >= 1 for pair in found]
    axes.barh(
        range(len(found)), [pair.times for pair in found], height=0.4, edgecolor="white",
        color=[style.look("multimm" if one else "cublas").colour for one in won],
        hatch=["" if one else "//" for one in won],
    )  # fmt: skip
    for i, pair in enumerate(found):
        peer = style.look(sweep.system(pair.peer)).label
        rate = figures(scale.factor * pair.ours["tflops"])
        text = f"{pair.case}: {rate} {scale.unit}, {pair.times:.2f} x {peer}"
        axes.text(0.02, i - 0.25, text, va="bottom", fontsize=7.5,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(len(found) - 0.6, -0.8)
    axes.set_xlim(0, max(1.1, 1.05 * found[-1].times))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(visible=False, axis="y")
    lost = "" if all(won) else " (hatched: the peer is faster)"
    axes.set_xlabel(f"times the fastest peer{lost}")
