"""Products of complex64, float64 and integers on one GPU, beside cupy.matmul and cuBLAS in FP16."""

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
FLOAT64 = (4096, 8192, 16384)
#: Data of float64 products, and of which size all but the first are.
KINDS, KINDS_OF = ("normal", "uniform", "scaled rows", "small integers"), 8192
#: Of the complex case "x^H x": a product that does not know that it is Hermitian.
GENERAL = "multimm general"
#: Rows, or columns, that are compared with a wider dtype.
COMPARED = 64


def measure(
    bench: Bench, complex_sizes: Sequence[int] = COMPLEX, integer_sizes: Sequence[int] = INTEGERS,
    float64_sizes: Sequence[int] = FLOAT64,
) -> None:  # fmt: skip
    """Record squares of normal complex numbers, their Hermitian products, and all int8 numbers.

    And squares of float64 numbers.
    """
    # Calls that allocate their result are no graphs.
    plain = replace(bench, timer=bench.events or bench.timer)
    assert isinstance(plain.timer, GpuTimer)
    library = Cublas(plain.timer.stream)
    for n in complex_sizes:
        _complex(plain, n)
    for n in integer_sizes:
        _integers(plain, library, n)
    for n in float64_sizes:
        for kind in KINDS if n == KINDS_OF else KINDS[:1]:
            _float64(plain, n, kind)
        _bytes(plain, n)


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


def _float64(bench: Bench, n: int, kind: str) -> None:
    import cupy

    import multimm
    from multimm.gpu.kernel_selection import last_choice

    a, b = _of_kind(n, kind, 1), _of_kind(n, kind, 2).T
    rows, columns = slice(0, n, max(1, n // 16)), slice(0, n, max(1, n // COMPARED))
    exact = cupy.asnumpy(a[rows]).astype(np.longdouble) @ cupy.asnumpy(b[:, columns])
    calls: dict[str, Call] = {
        "multimm": functools.partial(multimm.matmul, a, b),
        "multimm ieee": functools.partial(multimm.matmul, a, b, precision="ieee"),
        "cupy.matmul": functools.partial(cupy.matmul, a, b),
    }
    sizes = cupy.asnumpy(abs(a[rows])) @ cupy.asnumpy(abs(b[:, columns]))
    found = {name: cupy.asnumpy(call()[rows, columns]) for name, call in calls.items()}  # type: ignore[index]
    errors = {
        name: float(np.sqrt((((x - exact) / sizes) ** 2).mean())) for name, x in found.items()
    }
    calls["multimm"]()
    choice = last_choice()
    if errors["multimm"] > errors["cupy.matmul"] or choice is None or choice.kernel != "residues":
        raise WrongResultError(f"float64 of {n}, {kind}: {errors}, by {choice}")
    case = f"float64 {n}" if kind == KINDS[0] else f"float64 {n} {kind}"
    _record(bench, case, calls, errors, 2 * n**3, n, "cupy.matmul")


def _bytes(bench: Bench, n: int) -> None:
    """The products of residues alone: of uniform bytes, for as many moduli as usual."""
    import cupy

    from multimm.gpu.residues.gemm import USUAL
    from multimm.gpu.residues.launch import WORDS, looked_at, multiplied

    operand = looked_at(_of_kind(n, KINDS[0], 1), "a", False, cupy.zeros(WORDS, "uint64"))
    rng = cupy.random.default_rng(0)
    tiles = [rng.integers(-128, 128, (USUAL, n * n), dtype="int32").astype("int8") for _ in "ab"]
    calls = {"int8": functools.partial(multiplied, operand, operand, (tiles[0], tiles[1]), USUAL)}
    _record(bench, f"residues {n}", calls, {}, USUAL * 2 * n**3, n, "int8")


def _of_kind(n: int, kind: str, seed: int) -> Array:
    """A square of float64 numbers."""
    import cupy

    rng = cupy.random.default_rng(seed)
    if kind == "uniform":
        return rng.random((n, n))
    if kind == "small integers":
        return rng.integers(0, 3, (n, n)).astype("float64")
    made = rng.standard_normal((n, n))
    if kind == "scaled rows":
        made *= 10.0 ** (16 * rng.random((n, 1)) - 8)
    return made


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
            f"dtypes {case}", name, (n, n, n), timed, flops=flops, precision=_precision(case, name),
            ratio_vs={peer: round(runs[peer].median / timed.median, 4)},
            sustained=beside(lasting[name], lasting[peer], peer),
            **({"rel_error": float(f"{errors[name]:.3g}")} if name in errors else {}),
        )  # fmt: skip


def _precision(case: str, system: str) -> str:
    if case.startswith("float64"):
        return "ieee" if system == "multimm ieee" else "float64"
    exact = system.startswith("multimm ") and system != GENERAL
    return "exact" if exact or system == "int8" else "float32"


def _normal(n: int, seed: int) -> Array:
    """Both parts normal."""
    import cupy

    rng = cupy.random.default_rng(seed)
    return rng.standard_normal((n, 2 * n), dtype="float32").view("complex64")


def _relative(found: Array, exact: Array) -> float:
    """Norm of the error over that of the product."""
    return math.sqrt(float((abs(found - exact) ** 2).sum() / (abs(exact) ** 2).sum()))
