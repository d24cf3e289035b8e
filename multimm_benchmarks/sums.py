"""Sums of partial results: ours and CuPy's, as shares of what a copy does in the same run."""

from __future__ import annotations

import functools
from typing import Any

from multimm_benchmarks.harness import Bench, U, WrongResultError
from multimm_benchmarks.timing import Call
from multimm_benchmarks.transposes import copy

Array = Any

SHAPES = ((16384, 16384), (10007, 9973))
COUNTS = (2, 3, 4, 8)


def measure(
    bench: Bench,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    counts: tuple[int, ...] = COUNTS,
) -> None:
    """Record sums of stacks of float32 blocks; each reads all of them and writes one."""
    import cupy

    from multimm.gpu.elementwise.reduce import add_partials

    for rows, cols in shapes:
        rng = cupy.random.default_rng(0)
        # Blocks of an odd number of elements begin at addresses that are multiples of 4 only.
        blocks = rng.standard_normal((max(counts), rows, cols), dtype=cupy.float32)
        out = cupy.empty((rows, cols), cupy.float32)
        for count in counts:
            parts = blocks[:count]
            calls: dict[str, Call] = {
                "copy": functools.partial(copy, out, parts[0]),
                "multimm": functools.partial(add_partials, [*parts]),
                "cupy": functools.partial(parts.sum, axis=0, out=out),
            }
            bound = _bound(cupy, parts)
            for name in ("multimm", "cupy"):
                _verify(f"sum of {count} by {name}", calls[name], out, *bound)
            del bound
            runs = bench.compare(calls, graphs=False)
            moved = {name: (2 if name == "copy" else count + 1) * out.nbytes for name in calls}
            copied = moved["copy"] / runs["copy"].median
            for name, timed in runs.items():
                ratio = moved[name] / timed.median / copied
                bench.add(f"add {count} of {rows} x {cols}", name, (count, rows, cols), timed,
                          moved=moved[name], ratio_vs={"copy": round(ratio, 4)})  # fmt: skip


def _bound(xp: Any, parts: Array) -> tuple[Array, Array]:
    """Return the sum in float64, and how far a float32 sum in any order may be off."""
    exact, scale = (xp.zeros(parts.shape[1:], xp.float64) for _ in range(2))
    for part in parts:
        exact += part
        scale += xp.abs(part)
    return exact, U * len(parts) * scale


def _verify(what: str, call: Call, out: Array, exact: Array, bound: Array) -> None:
    out[...] = float("nan")
    made = call()
    if not bool((abs((out if made is None else made) - exact) <= bound).all()):
        raise WrongResultError(f"{what}, shape {out.shape}, is wrong")
