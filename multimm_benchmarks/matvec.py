"""Products that memory limits, as shares of what a copy does in the same run, beside cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from multimm_benchmarks.cases import THIN, Case
from multimm_benchmarks.cublas import Cublas
from multimm_benchmarks.harness import Bench, Reference, operands
from multimm_benchmarks.timing import Call, GpuTimer
from multimm_benchmarks.transposes import copy

Array = Any

COPIED = 2**30  # bytes: far more than a cache holds


def measure(bench: Bench, cases: Sequence[Case] = THIN) -> None:
    """Record products with a vector, or with a few rows, columns or terms."""
    import cupy

    assert isinstance(bench.timer, GpuTimer), "cuBLAS is compared on a GPU, by a GpuTimer"
    source, target = (cupy.zeros(COPIED, cupy.uint8) for _ in range(2))
    for case in cases:
        a, b, out = operands(cupy, case)
        calls = _calls(Cublas(bench.timer.stream), case, a, b, out)
        reference = Reference(cupy, case, a, b)
        with bench.timer.stream:
            errors = {system: reference.check(out, call) for system, call in calls.items()}
        del reference
        copied = bench.compare({"copy": functools.partial(copy, target, source)}, graphs=False)
        runs = bench.compare(calls)
        best = min(runs[system].median for system in runs if system != "multimm")
        slowest = case.moved * copied["copy"].median / (2 * COPIED)  # at the speed of the copy
        for system, timed in {**copied, **runs}.items():
            plain = system == "copy"
            ratios = {} if plain else {"cublas": round(best / timed.median, 4)}
            ratios["copy"] = 1.0 if plain else round(slowest / timed.median, 4)
            error = None if plain else float(f"{errors[system].relative:.3g}")
            bench.add(f"matvec {case.name}", system, (case.m, case.n, case.k), timed,
                      moved=2 * COPIED if plain else case.moved, ratio_vs=ratios,
                      rel_error=error)  # fmt: skip


def _calls(library: Cublas, case: Case, a: Array, b: Array, out: Array) -> dict[str, Call]:
    """Return our product, cuBLAS in all its ways on the same memory, and CuPy's way to it."""
    import cupy

    from multimm.gpu.product import gemm

    left, right = a.T if case.trans_a else a, b.T if case.trans_b else b
    calls: dict[str, Call | None] = {
        "multimm": functools.partial(
            gemm, a, b, precision="ieee", trans_a=case.trans_a, trans_b=case.trans_b, out=out
        ),
        "cublas sgemm": library.sgemm(case, a, b, out),
        "cublas lt": library.lt(case, a, b, out),
        "cublas sgemv": library.sgemv(case, a, b, out),
        "cupy": functools.partial(cupy.matmul, left, right, out=out),
    }
    return {system: call for system, call in calls.items() if call is not None}
