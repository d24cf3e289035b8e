"""How tables and their figures are written."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from multimm_benchmarks.records import Record

Rows = list[Sequence[str]]

_SHORT = {
    "cublas sgemm": "cuBLAS", "cublas lt": "cublasLt", "cublas sgemv": "cublasSgemv",
    "cublas tf32": "cuBLAS TF32", "cublas fp16": "cuBLAS FP16", "cupy": "CuPy",
    "xla bf16 x3": "XLA BF16_X3", "xla bf16 x6": "XLA BF16_X6", "xla tf32 x3": "XLA TF32_X3",
}  # fmt: skip


def markdown(head: Sequence[str], rows: Rows, words: int = 1) -> str:
    """Return a table whose first `words` columns are words, and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    lines = [head, rule, *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def figures(value: float) -> str:
    """Three significant figures, without an exponent."""
    return f"{float(f'{value:.3g}'):,.12g}"


def extents(shape: Sequence[int]) -> str:
    """2 x 3 x 4."""
    return " x ".join(map(str, shape))


def short(system: str) -> str:
    """The name of a system in a table."""
    return _SHORT.get(system, system)


def ratio(entry: Record, peer: str = "cublas") -> float:
    """How many times as fast as a peer."""
    return float(entry["ratio_vs"][peer])


def percent(entry: Record, peer: str) -> str:
    """The same in percent."""
    return f"{100 * ratio(entry, peer):.1f}"


def means(ours: Iterable[Record], peer: str = "cublas", name: str = "cuBLAS") -> str:
    """One line about many ratios."""
    ratios = [ratio(r, peer) for r in ours]
    if not ratios:
        return ""
    mean = statistics.geometric_mean(ratios)
    return f"Times {name}: geometric mean {mean:.3f}, least {min(ratios):.3f}.\n"
