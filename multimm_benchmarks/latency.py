"""What a product of two small arrays costs its caller: multimm.matmul beside cupy.matmul."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from multimm_benchmarks.cases import square
from multimm_benchmarks.harness import Bench, Reference, operands
from multimm_benchmarks.timing import Call, HostTimer, interleave

Array = Any

SIZES = (32, 64, 128, 256, 512)
#: In a row. A GPU that is slower than its caller then has a short queue, in which nobody waits:
#: it holds about a thousand launches.
CALLS = 50
ROUNDS = 51


def measure(bench: Bench, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> None:
    """Record the host's time per call, an n x n result allocated by each."""
    import cupy

    import multimm

    for n in sizes:
        a, b, out = operands(cupy, square(n))
        products = {"multimm": multimm.matmul, "cupy": cupy.matmul}
        reference = Reference(cupy, square(n), a, b)
        loops: dict[str, Call] = {}
        for name, product in products.items():
            reference.check(out, functools.partial(_into, product, a, b, out))
            loops[name] = functools.partial(_repeat, product, a, b)
        timer = HostTimer(cupy.cuda.Device().synchronize, through=False)
        runs = interleave(timer, loops, rounds, 0)
        for timed in runs.values():
            timed.seconds = [seconds / CALLS for seconds in timed.seconds]
        for name, timed in runs.items():
            ratio = runs["cupy"].median / timed.median
            bench.add(f"latency {n}", name, (n, n, n), timed, ratio_vs={"cupy": round(ratio, 4)})


def _into(product: Any, a: Array, b: Array, out: Array) -> None:
    out[...] = product(a, b)


def _repeat(product: Any, a: Array, b: Array) -> None:
    for _ in range(CALLS):
        product(a, b)
