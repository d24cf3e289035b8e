"""Products of complex64, float64 and integers on one GPU, beside cupy.matmul and cuBLAS in FP16."""

from __future__ import annotations

import functools
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
#: Data of float64 products, and of which size all but the first are, and Hermitian products.
KINDS, KINDS_OF = ("normal", "uniform", "scaled rows", "small integers"), 8192
#: Of the complex case "x^H x": a product that does not know that it is Hermitian.
GENERAL = "multimm general"
#: Of complex64: as real products of FP16 parts.
IN_PARTS = "multimm FP16 parts"
#: Rows and columns that are compared with a wider dtype.
ROWS, COMPARED = 16, 64


def measure(
    bench: Bench, complex_sizes: Sequence[int] = COMPLEX, integer_sizes: Sequence[int] = INTEGERS,
    float64_sizes: Sequence[int] = FLOAT64,
) -> None:  # fmt: skip
    """Record squares of complex and of float64 numbers, Hermitian products, and all int8 numbers.

    Raises
    ------
    WrongResultError
        A product of ours is no product by residues, or errs more than `cupy.matmul`'s.
    """
    # Calls that allocate their result are no graphs.
    plain = replace(bench, timer=bench.events or bench.timer)
    assert isinstance(plain.timer, GpuTimer)
    library = Cublas(plain.timer.stream)
    for dtype in ("complex64", "complex128"):
        for n in complex_sizes:
            _by_residues(plain, dtype, n, KINDS[0])
        if KINDS_OF in complex_sizes:
            _hermitian(plain, dtype, KINDS_OF)
    for n in integer_sizes:
        _integers(plain, library, n)
    for n in float64_sizes:
        for kind in KINDS if n == KINDS_OF else KINDS[:1]:
            _by_residues(plain, "float64", n, kind)
        _bytes(plain, n)


def _hermitian(bench: Bench, dtype: str, n: int) -> None:
    from multimm.graph.lowering.symmetric import link_diagonal
    from multimm.graph.tasks.multiply import Step, gemm

    a = _of_kind(dtype, n, KINDS[0], 1)
    step = Step(dtype, dtype, trans_a=True, conj_a=True)
    calls: dict[str, Call] = {
        "multimm": functools.partial(link_diagonal, a, step=step, complete=True),
        GENERAL: functools.partial(gemm, a, a, step=step),
    }
    errors = _errors(calls, a.conj().T, a)
    _record(bench, f"{dtype} x^H x {n}", calls, errors, 8 * n**3, n, GENERAL)


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


def _by_residues(bench: Bench, dtype: str, n: int, kind: str) -> None:
    import cupy

    import multimm
    from multimm.gpu import complex_gemm
    from multimm.gpu.kernel_selection import last_choice

    a, b = _of_kind(dtype, n, kind, 1), _of_kind(dtype, n, kind, 2).T
    calls: dict[str, Call] = {"multimm": functools.partial(multimm.matmul, a, b)}
    if dtype == "complex64":
        calls[IN_PARTS] = functools.partial(complex_gemm.gemm, a, b)
    elif dtype == "float64":
        calls["multimm ieee"] = functools.partial(multimm.matmul, a, b, precision="ieee")
    calls["cupy.matmul"] = functools.partial(cupy.matmul, a, b)
    errors = _errors(calls, a, b)
    calls["multimm"]()
    choice = last_choice()
    if errors["multimm"] > errors["cupy.matmul"] or choice is None or choice.kernel != "residues":
        raise WrongResultError(f"{dtype} of {n}, {kind}: {errors}, by {choice}")
    case = f"{dtype} {n}" if kind == KINDS[0] else f"{dtype} {n} {kind}"
    flops = (2 if dtype == "float64" else 8) * n**3
    _record(bench, case, calls, errors, flops, n, "cupy.matmul")


def _errors(calls: Mapping[str, Call], a: Array, b: Array) -> dict[str, float]:
    """Of some elements: the root of the mean square, relative to |A||B|."""
    import cupy

    n = len(a)
    rows, columns = slice(0, n, max(1, n // ROWS)), slice(0, n, max(1, n // COMPARED))
    left, right = cupy.asnumpy(a[rows]), cupy.asnumpy(b[:, columns])
    exact = left.astype(np.longdouble if left.dtype.kind == "f" else np.clongdouble) @ right
    sizes = abs(left).astype("f8") @ abs(right)
    found = {name: cupy.asnumpy(call()[rows, columns]) for name, call in calls.items()}  # type: ignore[index]
    return {
        name: float(np.sqrt((abs((x - exact) / sizes) ** 2).mean())) for name, x in found.items()
    }


def _bytes(bench: Bench, n: int) -> None:
    """The products of residues alone: of uniform bytes, for as many moduli as usual."""
    import cupy

    from multimm.gpu.residues.formats import FORMATS
    from multimm.gpu.residues.gemm import WORDS, looked_at, multiplied

    count = FORMATS["float64"].usual
    operand = looked_at(
        _of_kind("float64", n, KINDS[0], 1), "a", False, cupy.zeros(WORDS, "uint64")
    )
    rng = cupy.random.default_rng(0)
    tiles = [rng.integers(-128, 128, (count, n * n), dtype="int32").astype("int8") for _ in "ab"]
    calls = {"int8": functools.partial(multiplied, operand, operand, (tiles[0], tiles[1]))}
    _record(bench, f"residues {n}", calls, {}, count * 2 * n**3, n, "int8")


def _of_kind(dtype: str, n: int, kind: str, seed: int) -> Array:
    """A square of numbers; of complex ones both parts are normal."""
    import cupy

    rng = cupy.random.default_rng(seed)
    if dtype != "float64":
        reals = "float32" if dtype == "complex64" else "float64"
        return rng.standard_normal((n, 2 * n), dtype=reals).view(dtype)
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
    if case.startswith(("float64", "complex128")):
        return "ieee" if system == "multimm ieee" else "float64"
    exact = case.startswith(("int8", "residues")) and system != "cublas fp16"
    return "exact" if exact else "float32"
