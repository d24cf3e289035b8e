"""Products of data whose range within a row FP16 parts do not carry, beside cuBLAS and our FP32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from multimm_benchmarks.accuracy import PRECISIONS
from multimm_benchmarks.cases import Case, square
from multimm_benchmarks.cublas import COMPUTE_TF32, Cublas
from multimm_benchmarks.distributions import draw
from multimm_benchmarks.harness import Bench, Errors, Reference, U, WrongResultError, beside
from multimm_benchmarks.timing import Call, GpuTimer

Array = Any

#: Data and sizes.
CASES = (
    ("exponents 2^40", 8192), ("lognormal 4", 8192), ("graded columns 10^6", 8192),
    ("exponents 2^40", 16384),
)  # fmt: skip
#: What the rate of each of our systems is divided by; the last one's only in turns.
PEERS = {"multimm": "multimm ieee", "multimm tf32": "cublas tf32", "multimm ieee": "cublas sgemm"}


def measure(bench: Bench, cases: Sequence[tuple[str, int]] = CASES) -> None:
    """Record squares in all precisions, in turns and sustained, and what ran."""
    assert isinstance(bench.timer, GpuTimer)
    library = Cublas(bench.timer.stream)
    for kind, n in cases:
        _product(bench, library, kind, square(n))


def _product(bench: Bench, library: Cublas, kind: str, case: Case) -> None:
    import cupy

    from multimm.gpu.product import gemm

    assert isinstance(bench.timer, GpuTimer)
    name = f"wide-range {kind}, {case.n}"
    a, b = draw(cupy, kind, case.m, case.n, case.k)
    out = cupy.empty((case.m, case.n), cupy.float32)
    calls: dict[str, Call] = {
        system: functools.partial(gemm, a, b, precision=PRECISIONS[system], out=out)
        for system in PEERS
    }
    calls["cublas sgemm"] = library.sgemm(case, a, b, out)
    calls["cublas tf32"] = library.gemm_ex(case, a, b, out, COMPUTE_TF32)
    reference = Reference(cupy, case, a, b)
    with bench.timer.stream:
        verified = {
            system: _verified(reference, name, case, system, call, out)
            for system, call in calls.items()
        }
    del reference
    runs = bench.compare(calls)
    lasting = {
        system: bench.steady(call, case.flops)
        for system, call in calls.items()
        if system != "cublas sgemm"
    }
    for system, timed in runs.items():
        errors, ran = verified[system]
        ratio, steady = None, lasting.get(system)
        if peer := PEERS.get(system):
            ratio = {peer: round(runs[peer].median / timed.median, 4)}
            steady = beside(steady, lasting.get(peer), peer)
        bench.add(name, system, (case.m, case.n, case.k), timed, flops=case.flops,
                  precision=PRECISIONS[system], ratio_vs=ratio, detail=ran, sustained=steady,
                  **errors.recorded())  # fmt: skip


def _verified(
    reference: Reference, name: str, case: Case, system: str, call: Call, out: Array
) -> tuple[Errors, str | None]:
    """Compare a product; return its errors, and of ours what ran: the right kernel."""
    from multimm.gpu.emulated.broad import WHAT
    from multimm.gpu.kernel_selection import FFMA, SPLIT, last_choice

    precision = PRECISIONS[system]
    coarse = 2.0**-9 + 2 * case.k * U if precision == "tf32" else None
    errors = reference.check(out, call, coarse)
    if system not in PEERS:
        return errors, None
    choice = last_choice()
    stays = precision != "ieee" and _stays(case, precision, out)
    what = f": {WHAT[precision]}" if stays else ""
    wanted = SPLIT if stays else FFMA
    if choice is None or choice.kernel != wanted or not choice.reason.endswith(what):
        raise WrongResultError(f"{name}: {system} ran {choice}, not {wanted}{what}")
    return errors, f"{choice.kernel}{what}"


def _stays(case: Case, precision: str, out: Array) -> bool:
    """Whether a product of such data is to stay on the tensor cores."""
    from multimm.gpu.emulated.configs import broad_pays
    from multimm.gpu.runtime.launch import device_of

    return broad_pays(case.m, case.n, case.k, precision, device_of(out.device.id))
