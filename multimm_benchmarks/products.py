"""The suites of large matrix products: the ladder, FFMA against cuBLAS, and the awkward list."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from multimm_benchmarks.cases import AWKWARD, SQUARES, SUSTAINED, TRANSPOSES, Case, square
from multimm_benchmarks.cublas import Cublas
from multimm_benchmarks.harness import Bench, Reference, operands
from multimm_benchmarks.ladder import RUNGS, run_rung
from multimm_benchmarks.timing import Call, GpuTimer

Array = Any

LADDER_SIZE = 4096


def ladder(bench: Bench, n: int = LADDER_SIZE) -> None:
    """Record every rung against cuBLAS; sustained figures of the last one."""
    case = square(n)
    a, b, out = _operands(case)
    calls: dict[str, Call] = {
        f"{rung.number}_{rung.name}": functools.partial(run_rung, rung, a, b, out) for rung in RUNGS
    }
    details = {f"{rung.number}_{rung.name}": rung.idea for rung in RUNGS}
    last = list(calls)[-1]
    _compare(bench, f"ladder {n}", case, (a, b, out), calls, (last,), details)


def ffma(
    bench: Bench,
    sizes: Sequence[int] = SQUARES,
    sustained: Sequence[int] = SUSTAINED,
) -> None:
    """Record square products in all four transposes."""
    for n in sizes:
        for letters in TRANSPOSES:
            case = square(n, letters)
            steady = ("multimm",) if n in sustained else ()
            _against_cublas(bench, f"ffma {n} {letters}", case, steady)


def awkward(bench: Bench, cases: Sequence[Case] = AWKWARD) -> None:
    """Record the awkward list."""
    for case in cases:
        _against_cublas(bench, f"awkward {case.name}", case, ())


def _operands(case: Case) -> tuple[Array, Array, Array]:
    import cupy

    return operands(cupy, case)


def _against_cublas(bench: Bench, name: str, case: Case, steady: tuple[str, ...]) -> None:
    from multimm.gpu.product import gemm

    a, b, out = _operands(case)
    calls: dict[str, Call] = {
        "multimm": functools.partial(
            gemm, a, b, precision="ieee", trans_a=case.trans_a, trans_b=case.trans_b, out=out
        )
    }
    _compare(bench, name, case, (a, b, out), calls, steady, {})


def _compare(
    bench: Bench,
    name: str,
    case: Case,
    placed: tuple[Array, Array, Array],
    calls: dict[str, Call],
    steady: tuple[str, ...],
    details: dict[str, str],
) -> None:
    """Verify, time in turns with both libraries, and record against the better of them."""
    import cupy

    assert isinstance(bench.timer, GpuTimer), "cuBLAS is compared on a GPU, by a GpuTimer"
    library = Cublas(bench.timer.stream)
    peers = {"cublas sgemm": library.sgemm(case, *placed), "cublas lt": library.lt(case, *placed)}
    calls = calls | {peer: call for peer, call in peers.items() if call is not None}
    reference = Reference(cupy, case, *placed[:2])
    with bench.timer.stream:
        errors = {system: reference.check(placed[2], call) for system, call in calls.items()}
    del reference
    runs = bench.compare(calls)
    best = min((peer for peer in peers if peer in runs), key=lambda peer: runs[peer].median)
    for system, timed in runs.items():
        sustained = bench.steady(calls[system], case.flops) if steady and system in (
            *steady, best) else None  # fmt: skip
        bench.add(name, system, (case.m, case.n, case.k), timed, flops=case.flops,
                  ratio_vs={"cublas": round(runs[best].median / timed.median, 4)},
                  sustained=sustained, detail=details.get(system),
                  **errors[system].recorded())  # fmt: skip
