"""How accurate products of float64 are: ours, and the library's, against long doubles.

On Hopper GPUs large ones run on INT8 tensor cores, where their bound is proved; on CPUs NumPy's
BLAS computes ours, too. What is promised of ours is asserted while it is measured.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from multimm_benchmarks.cases import Case
from multimm_benchmarks.distributions import OVER_K, draw_double
from multimm_benchmarks.harness import UNITS, Bench, Errors, Reference, WrongResultError
from multimm_benchmarks.timing import Call

logger = logging.getLogger(__name__)

Array = Any

#: Of every product, on a GPU and without one: as large as residues are taken for, and as small as
#: a laptop multiplies in a moment.
SIDES = {True: 4096, False: 512}
DEPTHS = {True: (2048, 8192, 32768), False: (256, 4096, 16384)}
DEPTH = 4096  #: k of the data that is not OVER_K
#: Data, and of these what residues must be proved for.
DATA = (
    *("normal", "uniform", "integers", "graded rows 10^8", "lognormal 0.5"),
    *("half zeros", "lognormal 1", "graded columns 10^4"),
)
CARRIED = DATA[:4]
#: Rows and columns that are compared: long doubles have no BLAS.
ROWS, COLUMNS = 16, 64


def measure(
    bench: Bench,
    *,
    gpu: bool,
    side: int | None = None,
    depths: Sequence[int] | None = None,
    depth: int = DEPTH,
) -> None:
    """Record errors of side x side products for all data.

    Raises
    ------
    WrongResultError
        If ours broke a promise: after all was measured, with all that was broken.
    """
    side, depths, broken = side or SIDES[gpu], depths or DEPTHS[gpu], list[str]()
    for name in DATA:
        for k in depths if name in OVER_K else (depth,):
            broken += _case(bench, name, Case(side, side, k), gpu)
    for what in broken:
        logger.error("%s", what)
    if broken:
        raise WrongResultError("; ".join(broken))


def _case(bench: Bench, name: str, case: Case, gpu: bool) -> list[str]:
    """Record one product by all systems; return what ours did not keep."""
    import multimm
    from multimm.gpu.arrays import to_numpy
    from multimm.gpu.kernel_selection import Choice, last_choice, note

    xp: Any = _module(gpu)
    library = f"{xp.__name__.lower()}.matmul"
    a, b = draw_double(xp, name, case.m, case.n, case.k)
    product = functools.partial(multimm.matmul, a, b)
    calls: dict[str, Call] = {"multimm": functools.partial(product, precision="float64")}
    if gpu:
        calls["multimm ieee"] = functools.partial(product, precision="ieee")
    calls[library] = functools.partial(xp.matmul, a, b)
    rows, columns = (slice(0, case.m, max(1, case.m // most)) for most in (ROWS, COLUMNS))
    left, right = to_numpy(a[rows]), np.ascontiguousarray(to_numpy(b[:, columns]))
    part = Case(left.shape[0], right.shape[1], case.k)
    reference, out = Reference(np, part, left, right), np.empty((part.m, part.n))
    errors: dict[str, Errors] = {}
    kernels: dict[str, str] = {}
    broken = []
    for system, call in calls.items():
        note(Choice(library, "float64", "no kernel of ours has run since"))
        found = to_numpy(call()[rows, columns])  # type: ignore[index]
        choice = last_choice()
        kernels[system] = choice.kernel if choice else library
        off = reference.off(out, functools.partial(np.copyto, out, found))
        errors[system] = reference.errors(off)
        if system.startswith("multimm"):
            broken += [f"{system}, {kernels[system]}, {what}"
                       for what in _broken(name, case.k, reference, off)]  # fmt: skip
    if kernels["multimm"] == "residues" and not errors["multimm"].rms <= errors[library].rms:
        broken.append(f"multimm, residues, has rms errors larger than those of {library}")
    if gpu and name in CARRIED and kernels["multimm"] != "residues":
        broken.append("multimm did not run residues")
    runs = bench.compare(calls, graphs=False)
    for system, timed in runs.items():
        ratio = round(runs[library].median / timed.median, 4)
        bench.add(f"accuracy float64 {name}", system, (case.m, case.n, case.k), timed,
                  flops=case.flops, precision="ieee" if system.endswith("ieee") else "float64",
                  ratio_vs={library: ratio}, detail=kernels[system],
                  **errors[system].recorded())  # fmt: skip
    return [f"accuracy float64 {name}, k = {case.k}: {what}" for what in broken]


def _module(gpu: bool) -> Any:
    if not gpu:
        return np
    import cupy

    return cupy


def _broken(name: str, k: int, reference: Reference, off: Array) -> Iterator[str]:
    """Say what a product of ours does not keep. Written so that NaN keeps nothing.

    (k + 2) u |A||B|, and one rounding of the result.
    """
    u = UNITS["float64"]
    if not bool((off <= (k + 2) * u * reference.scale + u * abs(reference.exact)).all()):
        yield "is beyond the error bound of float64"
    if name == "integers" and not bool((off == 0).all()):
        yield "is not exact for integers"
