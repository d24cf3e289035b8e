"""How accurate products are: ours, cuBLAS's and XLA's against float64, over data and over k.

What is promised of ours is asserted while it is measured. All broken promises are reported, and
fail the suite at its end.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks import xla
from multimm_benchmarks.cases import Case
from multimm_benchmarks.cublas import COMPUTE_TF32, Cublas
from multimm_benchmarks.distributions import CARRIED, DISTRIBUTIONS, OVER_K, SPLIT_UNITS, draw
from multimm_benchmarks.harness import Bench, Errors, Reference, U, WrongResultError
from multimm_benchmarks.timing import Call, HostTimer, interleave

logger = logging.getLogger(__name__)

Array = Any

SIDE = 1024  #: of every product
DEPTHS = (256, 1024, 4096, 16384, 131072)  #: k of the distributions OVER_K
DEPTH = 4096  #: k of the others
ROUNDS = 3

#: By system. Of "ieee" are also those peers that promise it.
PRECISIONS: dict[str, Precision] = {
    "multimm": "float32", "multimm ieee": "ieee", "multimm tf32": "tf32",
    "cublas sgemm": "ieee", "cublas tf32": "tf32",
}  # fmt: skip


def measure(
    bench: Bench,
    side: int = SIDE,
    depths: Sequence[int] = DEPTHS,
    depth: int = DEPTH,
) -> None:
    """Record errors of side x side products for all distributions.

    Raises
    ------
    WrongResultError
        If ours broke a promise: after all was measured, with all that was broken.
    """
    import cupy

    library = Cublas(cupy.cuda.Stream.null)
    broken: list[str] = []
    for name in DISTRIBUTIONS:
        for k in depths if name in OVER_K else (depth,):
            case = Case(side, side, k)
            broken += _case(bench, library, name, case)
    if broken:
        raise WrongResultError("; ".join(broken))


def _case(bench: Bench, library: Cublas, name: str, case: Case) -> list[str]:
    """Record one product by all systems; return what ours did not keep."""
    import cupy

    a, b = draw(cupy, name, case.m, case.n, case.k)
    out = cupy.empty((case.m, case.n), cupy.float32)
    reference = Reference(cupy, case, a, b)
    calls = _calls(library, case, a, b, out)
    errors: dict[str, Errors] = {}
    kernels: dict[str, str | None] = {}
    broken = []
    for system, call in calls.items():
        off = reference.off(out, call)
        kernels[system] = _kernel(system)
        errors[system] = reference.errors(off)
        for what in _broken(system, kernels[system], name, case.k, reference, off):
            broken.append(f"accuracy {name}, k = {case.k}: {system}, {kernels[system]}, {what}")
    broken += _compared(name, case.k, kernels, errors)
    for what in broken:
        logger.error("%s", what)
    # By the host's clock: XLA runs on streams of its own.
    runs = interleave(HostTimer(_wait), calls, min(ROUNDS, bench.rounds), bench.target)
    for system, timed in runs.items():
        ratio = runs["cublas sgemm"].median / timed.median
        bench.add(f"accuracy {name}", system, (case.m, case.n, case.k), timed, flops=case.flops,
                  precision=PRECISIONS.get(system, system), ratio_vs={"cublas": round(ratio, 4)},
                  detail=kernels[system], **errors[system].recorded())  # fmt: skip
    return broken


def _calls(library: Cublas, case: Case, a: Array, b: Array, out: Array) -> dict[str, Call]:
    """Ours take packed operands: of arrays of this size they would choose by speed."""
    from multimm.gpu.emulated.pack import pack
    from multimm.gpu.product import gemm

    calls: dict[str, Call] = {}
    for system in ("multimm", "multimm ieee", "multimm tf32"):
        precision = PRECISIONS[system]
        if precision == "ieee":
            calls[system] = functools.partial(gemm, a, b, precision=precision, out=out)
            continue
        packed = (
            pack(x, side=side, trans=False, scheme=precision) for x, side in ((a, "a"), (b, "b"))
        )
        calls[system] = functools.partial(gemm, *packed, out=out)
    calls["cublas sgemm"] = library.sgemm(case, a, b, out)
    calls["cublas tf32"] = library.gemm_ex(case, a, b, out, COMPUTE_TF32)
    return calls | xla.products(a, b, out)


def _kernel(system: str) -> str | None:
    from multimm.gpu.kernel_selection import last_choice

    choice = last_choice()
    return choice.kernel if choice and system.startswith("multimm") else None


def _wait() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def _broken(
    system: str, kernel: str | None, name: str, k: int, reference: Reference, off: Array
) -> Iterator[str]:
    """Say what a product of ours does not keep. Written so that NaN keeps nothing."""
    from multimm.gpu.emulated.configs import SPLIT_K
    from multimm.gpu.kernel_selection import SPLIT

    if not system.startswith("multimm"):
        return
    precision = PRECISIONS[system]
    if not bool((off <= allowed(reference, precision, k)).all()):
        yield f"is beyond the error bound of {precision}"
    if precision == "float32" and kernel == SPLIT and k >= SPLIT_K:
        limit = SPLIT_UNITS * U * reference.scale + k * 2.0**-149
        if not bool((off <= limit).all()):
            yield f"is beyond {SPLIT_UNITS} u |A||B|"
    if name == "integers" and precision != "tf32" and not bool((off == 0).all()):
        yield "is not exact for integers"
    if precision == "float32" and name in CARRIED and kernel != SPLIT:
        yield f"did not run {SPLIT}"


def allowed(reference: Reference, precision: Precision, k: int) -> Array:
    """Return how far each element may be off, as promised for alpha = 1 and beta = 0.

    (k + 2) u |A||B|, k subnormal roundings, 2u |AB|, and one rounding of the result; of tf32,
    (2^-9 + 2ku) |A||B| in place of the first term.
    """
    factor = 2.0**-9 + 2 * k * U if precision == "tf32" else (k + 2) * U
    return factor * reference.scale + 3 * U * abs(reference.exact) + (k + 0.5) * 2.0**-149


def _compared(
    name: str, k: int, kernels: dict[str, str | None], errors: dict[str, Errors]
) -> list[str]:
    """Say where ours is less accurate than cuBLAS on average."""
    from multimm.gpu.emulated.configs import SPLIT_K
    from multimm.gpu.kernel_selection import SPLIT

    broken = []
    for system, peer in (("multimm", "cublas sgemm"), ("multimm tf32", "cublas tf32")):
        ours, theirs = errors[system].rms, errors[peer].rms
        if kernels[system] == SPLIT and k >= SPLIT_K and not ours <= theirs:
            broken.append(
                f"accuracy {name}, k = {k}: rms error {ours:.3g} u of {system}, {peer} has "
                f"{theirs:.3g} u"
            )
    return broken
