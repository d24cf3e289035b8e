"""Tables of the suites `split` and `accuracy`."""

from __future__ import annotations

from collections.abc import Iterable

from multimm_benchmarks.distributions import OVER_K
from multimm_benchmarks.records import Record
from multimm_benchmarks.report.formats import (
    Rows,
    extents,
    figures,
    markdown,
    means,
    percent,
    ratio,
    short,
)

#: By the column's head: our system, and the peer that its rate is divided by.
_SQUARE = {
    "multimm": ("multimm", "cublas"),
    "packed before": ("multimm packed before", "cublas"),
    "tf32": ("multimm tf32", "cublas tf32"),
    "tf32 packed before": ("multimm tf32 packed before", "cublas tf32"),
    "ieee": ("multimm ieee", "cublas"),
}
_THIRD = "a third of cublas fp16"


def split(records: list[Record]) -> str:
    """Products on the tensor cores: squares, sustained, awkward, and packing alone."""
    cases = _by_case(r for r in records if not r["case"].startswith("split pack"))
    squares = {case: found for case, found in cases.items() if "cublas fp16" in found}
    others = {case: found for case, found in cases.items() if case not in squares}
    parts = [
        "Squares, TFLOP/s and in brackets times cuBLAS of that precision:\n\n" + _squares(squares),
        _sustained(squares),
        _awkward(others),
        _packing([r for r in records if r["case"].startswith("split pack")]),
    ]
    return "\n".join(part for part in parts if part)


def _by_case(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    cases: dict[str, dict[str, Record]] = {}
    for r in records:
        cases.setdefault(r["case"].removeprefix("split "), {})[r["system"]] = r
    return cases


def _squares(cases: dict[str, dict[str, Record]]) -> str:
    rows: Rows = []
    for case, found in cases.items():
        cells = [
            f"{found[system]['tflops']:.1f} ({ratio(found[system], peer):.3f})"
            for system, peer in _SQUARE.values()
        ]
        best = max(found[peer]["tflops"] for peer in ("cublas sgemm", "cublas lt") if peer in found)
        others = (found[peer]["tflops"] for peer in ("cublas tf32", "cublas fp16"))
        rows.append((case, *cells, *(f"{rate:.1f}" for rate in (best, *others))))
    return markdown(("n", *_SQUARE, "cuBLAS", "cuBLAS TF32", "cuBLAS FP16"), rows)


def _sustained(cases: dict[str, dict[str, Record]]) -> str:
    rows: Rows = []
    for case, found in cases.items():
        for system, r in found.items():
            steady = r["sustained"]
            if not steady:
                continue
            ratios = steady["ratio_vs"]
            share = f"{100 * ratios[_THIRD]:.1f}" if _THIRD in ratios else ""
            tf32 = f"{ratios['cublas tf32']:.3f}" if "cublas tf32" in ratios else ""
            rows.append(
                (case, short(system), f"{steady['tflops']:.1f}", f"{ratios['cublas']:.3f}", tf32,
                 share, *(_number(steady[key], digits) for key, digits in
                          (("sm_mhz", 0), ("watts", 0), ("gflop_per_joule", 1))))
            )  # fmt: skip
    head = ("n", "system", "TFLOP/s", "x cuBLAS", "x cuBLAS TF32", "% of a third of cuBLAS FP16",
            "MHz", "W", "GFLOP/J")  # fmt: skip
    text = "Sustained for 3 s and more:\n\n" + markdown(head, rows, words=2)
    return text if rows else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _awkward(cases: dict[str, dict[str, Record]]) -> str:
    rows: Rows = []
    for case, found in cases.items():
        ours, before = found["multimm"], found["multimm packed before"]
        rows.append(
            (case, f"{ours['tflops']:.1f}", f"{ratio(ours):.3f}",
             f"{ratio(ours, 'multimm ieee'):.3f}", f"{before['tflops']:.1f}",
             f"{ratio(before):.3f}")
        )  # fmt: skip
    head = ("m x n x k", "multimm, TFLOP/s", "x cuBLAS", "x ieee", "packed before", "x cuBLAS")
    text = "Awkward sizes and layouts:\n\n" + markdown(head, rows) + "\n"
    compared = [found["multimm"] for found in cases.values()]
    return text + means(compared, "multimm ieee", "ieee") if rows else ""


def _packing(records: list[Record]) -> str:
    rows: Rows = [
        (extents(r["shape"]), r["system"].removeprefix("multimm "), f"{r['gbs']:.0f}",
         percent(r, "copy"))
        for r in records
    ]  # fmt: skip
    text = "Packing alone:\n\n"
    head = ("operand", "for", "GB/s", "% of copy")
    return text + markdown(head, rows, words=2) if rows else ""


#: Begin of the cases of float64.
_DOUBLE = "accuracy float64 "


def accuracy(records: list[Record]) -> str:
    """Largest and rms errors in units of u |A||B|: over k, and over data; of float64 apart."""
    double = [r for r in records if r["case"].startswith(_DOUBLE)]
    single = [r for r in records if r not in double]
    parts = [_accuracy(single)] if single else []
    if double:
        parts.append("Of float64, u = 2^-53:\n\n" + _accuracy(double))
    return "\n".join(parts)


def _accuracy(records: list[Record]) -> str:
    cases: dict[tuple[str, int], dict[str, Record]] = {}
    for r in records:
        name = r["case"].removeprefix("accuracy ").removeprefix("float64 ")
        cases.setdefault((name, r["shape"][2]), {})[r["system"]] = r
    systems = list(dict.fromkeys(r["system"] for r in records))
    over_k = {key: found for key, found in cases.items() if key[0] in OVER_K}
    others = {key: found for key, found in cases.items() if key[0] not in OVER_K}
    parts = []
    for found in (over_k, others):
        rows: Rows = [
            (name, str(k), _kernel(here), *(_errors(here.get(system)) for system in systems))
            for (name, k), here in found.items()
        ]
        head = ("data", "k", "multimm ran", *map(short, systems))
        if rows:
            parts.append(markdown(head, rows, words=3))
    return "\n".join(parts)


def _kernel(found: dict[str, Record]) -> str:
    return f"`{found['multimm']['detail']}`"


def _errors(entry: Record | None) -> str:
    return f"{figures(entry['componentwise_u'])} / {figures(entry['rms_u'])}" if entry else ""
