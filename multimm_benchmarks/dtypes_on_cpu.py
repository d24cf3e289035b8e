"""Products of integers and of float64 on CPUs, beside NumPy's.

Those of int8 beside NumPy's of int64, which are exact as well; those of int32 and int64, of all
their numbers and modulo 2^32 and 2^64, and those of float64 beside NumPy's of the same dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm_benchmarks.harness import Bench, WrongResultError
from multimm_benchmarks.timing import Call, Runs, prepare

Array = Any

INTEGERS = (1000, 2000, 4000)
FLOAT64 = (1000, 2000, 4000)
#: Of int8: what is drawn, from and below; all but the first are for one size.
KINDS, KINDS_OF = {"": (-128, 128), " of 0 to 2": (0, 3)}, 2000
#: Of int32 and int64: NumPy takes half a minute for the larger one.
WIDE_INTEGERS = (1000, 2000)
#: The peer of narrow integers: their numbers as NumPy multiplies them without overflow.
WIDE = "numpy.matmul int64"
NUMPY = "numpy.matmul"


def measure(
    bench: Bench, integer_sizes: Sequence[int] = INTEGERS, float64_sizes: Sequence[int] = FLOAT64,
    wide_sizes: Sequence[int] = WIDE_INTEGERS,
) -> None:  # fmt: skip
    """Record squares of all int8 numbers, of genotypes of 0, 1 and 2, and of the other dtypes."""
    for n in integer_sizes:
        for kind, (low, high) in KINDS.items():
            if not kind or n == KINDS_OF:
                _integers(bench, n, f"int8{kind} {n}", low, high)
    for n in wide_sizes:
        for dtype in ("int32", "int64"):
            _wide_integers(bench, n, dtype)
    for n in float64_sizes:
        _float64(bench, n)


def _integers(bench: Bench, n: int, case: str, low: int, high: int) -> None:
    import multimm

    rng = np.random.default_rng(0)
    a, b = (rng.integers(low, high, (n, n), np.int8) for _ in range(2))
    wide = [x.astype(np.int64) for x in (a, b)]
    calls: dict[str, Call] = {
        f"multimm {dtype}": functools.partial(multimm.matmul, a, b, dtype=dtype)
        for dtype in ("int32", "int64", "float32")
    }
    for name, call in calls.items():
        dtype = name.removeprefix("multimm ")
        if not (found := multimm.verify(a, b, call(), dtype=dtype)):
            raise WrongResultError(f"{case} by {name}: {found}")
    calls[WIDE] = functools.partial(np.matmul, *wide)
    exact = calls["multimm int64"]()
    some = slice(0, n, max(1, n // 16))
    if not np.array_equal(exact[some], np.matmul(wide[0][some], wide[1])):  # type: ignore[index]
        raise WrongResultError(f"{case} by multimm int64 is not NumPy's product")
    _record(bench, case, n, _in_turns(bench, calls, WIDE), WIDE, "exact")


def _wide_integers(bench: Bench, n: int, dtype: str) -> None:
    import multimm

    rng, ends = np.random.default_rng(0), np.iinfo(dtype)
    a, b = (rng.integers(ends.min, ends.max, (n, n), dtype, endpoint=True) for _ in range(2))
    calls: dict[str, Call] = {
        "multimm": functools.partial(multimm.matmul, a, b),
        NUMPY: functools.partial(np.matmul, a, b),
    }
    found, some = calls["multimm"](), slice(0, n, max(1, n // 16))
    verdict = multimm.verify(a, b, found)
    if not (verdict and np.array_equal(found[some], np.matmul(a[some], b))):  # type: ignore[index]
        raise WrongResultError(f"{dtype} {n}: {verdict}")
    _record(bench, f"{dtype} {n}", n, _in_turns(bench, calls, NUMPY), NUMPY, "exact")


def _float64(bench: Bench, n: int) -> None:
    import multimm

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)) for _ in range(2))
    calls: dict[str, Call] = {
        "multimm": functools.partial(multimm.matmul, a, b, precision="float64"),
        NUMPY: functools.partial(np.matmul, a, b),
    }
    if not (found := multimm.verify(a, b, calls["multimm"](), precision="float64")):
        raise WrongResultError(f"float64 {n}: {found}")
    _record(bench, f"float64 {n}", n, bench.compare(calls), NUMPY, "float64")


def _in_turns(bench: Bench, calls: dict[str, Call], peer: str) -> dict[str, Runs]:
    """As `Bench.compare`, but the peer, which takes minutes, runs once a turn and not before."""
    bursts = {name: prepare(bench.timer, call, bench.target) for name, call in calls.items()
              if name != peer}  # fmt: skip
    bursts[peer] = calls[peer], Runs("host", 1)
    for _ in range(bench.rounds):
        for burst, runs in bursts.values():
            runs.seconds.append(bench.timer.seconds(burst) / runs.count)
    return {name: runs for name, (_, runs) in bursts.items()}


def _record(
    bench: Bench, case: str, n: int, runs: dict[str, Runs], peer: str, precision: str
) -> None:
    for name, timed in runs.items():
        bench.add(
            f"dtypes {case}", name, (n, n, n), timed, flops=2 * n**3, precision=precision,
            ratio_vs={peer: round(runs[peer].median / timed.median, 4)},
        )  # fmt: skip
