"""Products of complex64 and of integers on one GPU, beside cupy.matmul and cuBLAS in FP16."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from multimm_benchmarks.cases import square
from multimm_benchmarks.cublas import Cublas
from multimm_benchmarks.harness import Bench, WrongResultError, beside
from multimm_benchmarks.timing import Call, GpuTimer

Array = Any

COMPLEX = (4096, 8192, 16384)
INTEGERS = (8192, 16384)
#: Of the complex case "x^H x": a product that does not know that it is Hermitian.
GENERAL = "multimm general"
#: Rows, or columns, that are compared with a wider dtype.
COMPARED = 64


def measure(
    bench: Bench, complex_sizes: Sequence[int] = COMPLEX, integer_sizes: Sequence[int] = INTEGERS
) -> None:
    """Record squares of normal complex numbers, their Hermitian products, and all int8 numbers."""
    # Calls that allocate their result are no graphs.
    plain = replace(bench, timer=bench.events or bench.timer)
    assert isinstance(plain.timer, GpuTimer)
    library = Cublas(plain.timer.stream)
    for n in complex_sizes:
        _complex(plain, n)
    for n in integer_sizes:
        _integers(plain, library, n)


def _complex(bench: Bench, n: int) -> None:
    import cupy

    import multimm
    from multimm.gpu import complex_gemm
    from multimm.graph.lowering.symmetric import link_diagonal
    from multimm.graph.tasks.multiply import Step

    a, b = (_normal(n, seed) for seed in (1, 2))
    some = slice(0, n, max(1, n // COMPARED))
    wide = "complex128"
    exact = a[some].astype(wide) @ b.astype(wide)
    calls: dict[str, Call] = {
        "multimm": functools.partial(multimm.matmul, a, b),
        "cupy.matmul": functools.partial(cupy.matmul, a, b),
    }
    errors = {name: _relative(call()[some], exact) for name, call in calls.items()}  # type: ignore[index]
    if errors["multimm"] > errors["cupy.matmul"]:
        raise WrongResultError(f"complex64 of {n}: less accurate than cupy.matmul, {errors}")
    _record(bench, f"complex64 {n}", calls, errors, 8 * n**3, n, "cupy.matmul")

    step = Step("complex64", "complex64", trans_a=True, conj_a=True)
    exact = a[:, some].conj().T.astype(wide) @ a.astype(wide)
    calls = {
        "multimm": functools.partial(link_diagonal, a, step=step, complete=True),
        GENERAL: functools.partial(complex_gemm.gemm, a, a, trans_a=True, conj_a=True),
    }
    errors = {name: _relative(call()[some], exact) for name, call in calls.items()}  # type: ignore[index]
    _record(bench, f"complex64 x^H x {n}", calls, errors, 8 * n**3, n, GENERAL)


def _integers(bench: Bench, library: Cublas, n: int) -> None:
    import cupy

    import multimm

    rng = cupy.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (n, n), dtype=cupy.int32).astype("int8") for _ in range(2))
    half, out = [x.astype("float16") for x in (a, b)], cupy.empty((n, n), "float32")
    rows = slice(0, n, max(1, n // COMPARED))
    exact = np.rint(cupy.asnumpy(a[rows].astype("float64") @ b.astype("float64"))).astype("int64")
    ours = {
        f"multimm {dtype}": functools.partial(multimm.matmul, a, b, dtype=dtype)
        for dtype in ("int32", "float32")
    }
    for name, call in ours.items():
        if not np.array_equal(cupy.asnumpy(call()[rows]).astype("int64"), exact):
            raise WrongResultError(f"int8 of {n} by {name} is not exact")
    calls: dict[str, Call] = {
        **ours,
        "cublas fp16": library.gemm_ex(square(n), half[0], half[1], out),
    }
    errors = dict.fromkeys(ours, 0.0)
    _record(bench, f"int8 {n}", calls, errors, 2 * n**3, n, "cublas fp16")


def _record(
    bench: Bench, case: str, calls: Mapping[str, Call], errors: Mapping[str, float],
    flops: int, n: int, peer: str,
) -> None:  # fmt: skip
    """Time in turns, and sustained, and record beside a peer."""
    import cupy

    cupy.cuda.Device().synchronize()
    runs = bench.compare(calls)
    lasting = {name: bench.steady(call, flops) for name, call in calls.items()}
    for name, timed in runs.items():
        bench.add(
            f"dtypes {case}", name, (n, n, n), timed, flops=flops, precision=_precision(name),
            ratio_vs={peer: round(runs[peer].median / timed.median, 4)},
            sustained=beside(lasting[name], lasting[peer], peer),
            **({"rel_error": float(f"{errors[name]:.3g}")} if name in errors else {}),
        )  # fmt: skip


def _precision(system: str) -> str:
    return "exact" if system.startswith("multimm ") and system != GENERAL else "float32"


def _normal(n: int, seed: int) -> Array:
    """Both parts normal."""
    import cupy

    rng = cupy.random.default_rng(seed)
    return rng.standard_normal((n, 2 * n), dtype="float32").view("complex64")


def _relative(found: Array, exact: Array) -> float:
    """Norm of the error over that of the product."""
    return math.sqrt(float((abs(found - exact) ** 2).sum() / (abs(exact) ** 2).sum()))
