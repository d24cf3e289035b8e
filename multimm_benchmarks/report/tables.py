"""Tables of the suites of one GPU."""

from __future__ import annotations

from multimm_benchmarks.cases import TRANSPOSES
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


def ladder(records: list[Record]) -> str:
    """Rungs: rate, share of cuBLAS, and what each adds."""
    last = next((r for r in records if r["sustained"] and "cublas" not in r["system"]), None)
    rows: Rows = [
        (short(r["system"]), r["detail"] or "", f"{1000 * r['tflops']:.0f}", percent(r, "cublas"))
        for r in records
    ]
    note = ""
    if last:
        steady = last["sustained"]
        note = (
            f"\n{short(last['system'])}, sustained: {steady['tflops']:.1f} TFLOP/s at "
            f"{steady['sm_mhz']:.0f} MHz and {steady['watts']:.0f} W.\n"
        )
    return markdown(("rung", "adds", "GFLOP/s", "% of cuBLAS"), rows, words=2) + note


def transpose(records: list[Record]) -> str:
    """Transposes: GB/s, and share of a copy."""
    rows: Rows = [
        (extents(r["shape"][:2]), short(r["system"]), f"{r['gbs']:.0f}", percent(r, "copy"))
        for r in records
    ]  # fmt: skip
    return markdown(("matrix", "kernel", "GB/s", "% of copy"), rows, words=2)


def add(records: list[Record]) -> str:
    """Sums of blocks: GB/s of what is read and written, and share of a copy."""
    rows: Rows = [
        (extents(r["shape"][1:]), str(r["shape"][0]), short(r["system"]), f"{r['gbs']:.0f}",
         percent(r, "copy"))
        for r in records if r["system"] != "copy"
    ]  # fmt: skip
    return markdown(("block", "blocks", "sum", "GB/s", "% of copy"), rows, words=3)


def matvec(records: list[Record]) -> str:
    """Products that memory limits: GB/s, share of a copy, and the best way into cuBLAS."""
    rows: Rows = []
    for case in dict.fromkeys(r["case"] for r in records):
        here = [r for r in records if r["case"] == case]
        ours = next(r for r in here if r["system"] == "multimm")
        peer = min(
            (r for r in here if r["system"] not in ("multimm", "copy")), key=lambda r: r["median"]
        )
        rows.append(
            (
                case.removeprefix("matvec "),
                f"{ours['gbs']:.0f}",
                percent(ours, "copy"),
                f"{peer['gbs']:.0f}",
                short(peer["system"]),
                f"{ratio(ours):.3f}",
            )
        )
    head = ("m x n x k", "GB/s", "% of copy", "cuBLAS GB/s", "by", "x cuBLAS")
    return markdown(head, rows)


def latency(records: list[Record]) -> str:
    """Microseconds that a call costs its caller."""
    sizes = sorted({r["shape"][0] for r in records})
    rows: Rows = []
    for system in dict.fromkeys(r["system"] for r in records):
        at = {r["shape"][0]: r for r in records if r["system"] == system}
        rows.append((f"`{system}.matmul`", *(f"{1e6 * at[n]['median']:.1f}" for n in sizes)))
    return markdown(("n", *map(str, sizes)), rows)


def ffma(records: list[Record]) -> str:
    """Square products: TFLOP/s and times cuBLAS, sustained where that was measured."""
    ours = {r["case"]: r for r in records if r["system"] == "multimm" and r["tflops"]}
    sizes = sorted({r["shape"][0] for r in ours.values()})
    rows: Rows = []
    for n in sizes:
        found = [ours[f"ffma {n} {letters}"] for letters in TRANSPOSES]
        rows.append((str(n), *(f"{r['tflops']:.1f} ({ratio(r):.3f})" for r in found)))
    parts = [markdown(("n", *TRANSPOSES), rows), means(ours.values())]
    steady = _steady(records)
    if steady:
        head = ("case", "TFLOP/s", "x cuBLAS", "MHz", "W", "GFLOP/J", "cuBLAS GFLOP/J")
        parts.append("Sustained for 3 s and more:\n\n" + markdown(head, steady))
    return "\n".join(parts)


def _steady(records: list[Record]) -> Rows:
    by_case: dict[str, dict[str, Record]] = {}
    for r in records:
        if r["sustained"]:
            side = "cublas" if "cublas" in r["system"] else "multimm"
            by_case.setdefault(r["case"], {})[side] = r["sustained"]
    return [
        (case.removeprefix("ffma "), f"{pair['multimm']['tflops']:.1f}",
         f"{pair['multimm']['tflops'] / pair['cublas']['tflops']:.3f}",
         f"{pair['multimm']['sm_mhz']:.0f}", f"{pair['multimm']['watts']:.0f}",
         f"{pair['multimm']['gflop_per_joule']:.1f}", f"{pair['cublas']['gflop_per_joule']:.1f}")
        for case, pair in by_case.items() if len(pair) == 2
    ]  # fmt: skip


def awkward(records: list[Record]) -> str:
    """Awkward sizes: both rates and the ratio."""
    ours = [r for r in records if r["system"] == "multimm"]
    rows: Rows = [
        (r["case"].removeprefix("awkward "), figures(r["tflops"]),
         figures(r["tflops"] / ratio(r)), f"{ratio(r):.3f}")
        for r in ours
    ]  # fmt: skip
    head = ("m x n x k", "TFLOP/s", "cuBLAS TFLOP/s", "x cuBLAS")
    return markdown(head, rows) + "\n" + means(ours)


def python(records: list[Record]) -> str:
    """Times of the Python comparison, and how many times faster than the compiled loop."""
    over_sizes = [r for r in records if not r["case"].startswith("python grid")]
    sizes = sorted({r["shape"][0] for r in over_sizes})
    parts = []
    for where in ("on the host", "without transfers", "with transfers"):
        here = [r for r in over_sizes if r["detail"] == where]
        rows: Rows = []
        for system in dict.fromkeys(r["system"] for r in here):
            cells = [_time_and_gain(over_sizes, here, system, n) for n in sizes]
            rows.append((system, *cells))
        if rows:
            parts.append(f"{where.capitalize()}:\n\n" + markdown(("", *map(str, sizes)), rows))
    return "\n".join(parts)


def _time_and_gain(all_: list[Record], here: list[Record], system: str, n: int) -> str:
    at = {r["system"]: r for r in here if r["shape"][0] == n}
    base = [r for r in all_ if r["shape"][0] == n and r["system"] == "CPU, compiled"]
    if system not in at:
        return ""
    median = at[system]["median"]
    gain = f" ({figures(base[0]['median'] / median)})" if base else ""
    return f"{figures(1e6 * median)}{gain}"


def python_grid(records: list[Record]) -> str:
    """Threads per block against blocks per grid."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in records:
        if r["case"].startswith("python grid"):
            kind, threads, blocks = r["system"].split(", ")
            cells.setdefault((kind, threads), {})[blocks] = figures(1e3 * r["median"])
    columns = list(dict.fromkeys(name for row in cells.values() for name in row))
    rows: Rows = [(*key, *(row.get(name, "") for name in columns)) for key, row in cells.items()]
    return markdown(("kernel", "per block", *columns), rows, words=2)
