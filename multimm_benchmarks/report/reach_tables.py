"""Tables of products beyond two float32 matrices: other dtypes, and sums over several axes."""

from __future__ import annotations

import statistics

from multimm_benchmarks.records import Record
from multimm_benchmarks.report.formats import Rows, figures, markdown


def dtypes(records: list[Record]) -> str:
    """Rates beside the peer of each case, in turns and held for 3 s and more."""
    rows: Rows = []
    for r in records:
        steady: Record = r["sustained"] or {}
        held: dict[str, float] = steady.get("ratio_vs") or r["ratio_vs"]
        (peer,) = held
        own = r["system"] != peer
        rows.append((
            r["case"].removeprefix("dtypes "), r["system"], figures(r["tflops"]),
            f"{r['ratio_vs'][peer]:.2f}" if own else "",
            figures(steady["tflops"]) if steady else "",
            f"{held[peer]:.2f} x {peer}" if own and steady else "",
            f"{steady['sm_mhz']:.0f}" if steady.get("sm_mhz") else "",
            f"{steady['watts']:.0f}" if steady.get("watts") else "",
            "" if r["rel_error"] is None else f"{r['rel_error']:.1e}",
        ))  # fmt: skip
    head = ("case", "system", "TFLOP/s", "x peer", "held", "of the peer", "MHz", "W",
            "relative error")  # fmt: skip
    return markdown(head, rows, words=2)


def contractions(records: list[Record]) -> str:
    """Seconds of each case by system, and what travels as a share of what Dask moves."""
    by_case: dict[str, dict[str, Record]] = {}
    for r in records:
        by_case.setdefault(r["case"], {})[r["system"]] = r
    rows: Rows = []
    gains: dict[str, list[float]] = {"dask": [], "matmul": []}
    for case, systems in by_case.items():
        ours = systems["multimm"]
        least = {name: min(r["seconds"]) for name, r in systems.items()}
        ratios = {name: least[name] / least["multimm"] for name in gains if name in least}
        for name, gain in ratios.items():
            gains[name].append(gain)
        moved = ours["bytes_received"], systems["dask"]["bytes_received"]
        rows.append((
            case.removeprefix("contractions "), f"`{ours['detail']['subscripts']}`",
            f"{1e3 * least['multimm']:.1f}",
            *(f"{ratios[name]:.2f}" if name in ratios else "" for name in gains),
            f"{moved[0] / 1e6:.0f}", f"{moved[1] / 1e6:.0f}",
        ))  # fmt: skip
    head = ("case", "subscripts", "ms", "`da.einsum` takes", "`matmul` takes", "MB", "Dask's MB")
    means = ", ".join(f"{name} {statistics.geometric_mean(found):.2f}"
                      for name, found in gains.items() if found)  # fmt: skip
    return f"{markdown(head, rows, words=2)}\nGeometric means, times as long as multimm: {means}.\n"
