"""Tables of products beyond normal float32 numbers and two matrices: data of a wide range, other
dtypes, and sums over several axes.
"""

from __future__ import annotations

import statistics

from multimm_benchmarks.records import Record
from multimm_benchmarks.report.formats import Rows, figures, markdown


def wide_range(records: list[Record]) -> str:
    """Rates in turns and held for 3 s, beside the peer of each of ours, and what ran."""
    rows: Rows = []
    for r in records:
        (peer,) = r["ratio_vs"] or [None]
        kind, _, n = r["case"].removeprefix("wide-range ").rpartition(", ")
        rows.append((
            kind, n, r["system"], r["detail"] or "", *_rates(r, peer),
            figures(r["componentwise_u"]),
        ))  # fmt: skip
    head = ("data", "n", "system", "multimm ran", *_RATES, "largest error, u |A||B|")
    return markdown(head, rows, words=4)


#: In turns, and held for 3 s and more.
_RATES = ("TFLOP/s", "x peer", "held", "of the peer", "MHz", "W")


def _rates(r: Record, peer: str | None) -> tuple[str, ...]:
    """The cells of `_RATES`; of a peer itself without ratios."""
    steady: Record = r["sustained"] or {}
    held: dict[str, float] = steady.get("ratio_vs") or {}
    return (
        figures(r["tflops"]), f"{r['ratio_vs'][peer]:.2f}" if peer else "",
        figures(steady["tflops"]) if steady else "",
        f"{held[peer]:.2f} x {peer}" if peer in held else "",
        *(f"{steady[key]:.0f}" if steady.get(key) else "" for key in ("sm_mhz", "watts")),
    )  # fmt: skip


def dtypes(records: list[Record]) -> str:
    """Rates beside the peer of each case, in turns and held for 3 s and more."""
    rows: Rows = []
    for r in records:
        (peer,) = r["ratio_vs"]
        rows.append((
            r["case"].removeprefix("dtypes "), r["system"],
            *_rates(r, None if peer == r["system"] else peer),
            "" if r["rel_error"] is None else f"{r['rel_error']:.1e}",
        ))  # fmt: skip
    head = ("case", "system", *_RATES, "relative error")
    return markdown(head, rows, words=2)


def dtypes_on_cpus(records: list[Record]) -> str:
    """Times and rates beside the peer of each case."""
    rows: Rows = []
    for r in records:
        (peer,) = r["ratio_vs"]
        gain = "" if peer == r["system"] else figures(r["ratio_vs"][peer])
        rows.append((
            r["case"].removeprefix("dtypes "), r["system"], figures(1e3 * r["median"]),
            figures(1e3 * r["tflops"]), gain,
        ))  # fmt: skip
    return markdown(("case", "system", "ms", "GFLOP/s", "x peer"), rows, words=2)


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
