"""Transposes: three steps, ours and CuPy's, as shares of what a copy of the same bytes takes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from multimm_benchmarks.harness import Bench, WrongResultError
from multimm_benchmarks.timing import Call

Array = Any

SHAPES = ((16384, 16384), (10007, 9973))
STEPS = ("naive", "tiled", "tiled_free")


def measure(bench: Bench, shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
    """Record all transposes of float32 matrices."""
    import cupy

    from multimm.gpu.elementwise.transpose import transpose

    for rows, cols in shapes:
        a = cupy.random.default_rng(0).standard_normal((rows, cols), dtype=cupy.float32)
        out = cupy.empty((cols, rows), cupy.float32)
        same = cupy.empty_like(a)
        calls: dict[str, Call] = {"copy": functools.partial(copy, same, a)}
        calls |= {name: _step(name, a, out) for name in STEPS}
        calls["multimm"] = functools.partial(transpose, a)
        calls["cupy"] = functools.partial(cupy.copyto, out, a.T)
        for name, call in calls.items():
            if name != "copy":
                _verify(name, a, out, call)
        runs = bench.compare(calls, graphs=False)
        for name, timed in runs.items():
            bench.add(f"transpose {rows} x {cols}", name, (rows, cols), timed, moved=2 * a.nbytes,
                      ratio_vs={"copy": round(runs["copy"].median / timed.median, 4)})  # fmt: skip


def copy(target: Array, source: Array) -> None:
    """Copy contiguous arrays by the device's own copy.

    It is what bandwidth is compared with: outside of a graph, in which the same copy is slower,
    and not by `cupy.copyto`, which is a kernel.
    """
    target.data.copy_from_device_async(source.data, source.nbytes)


def _step(name: str, a: Array, out: Array) -> Call:
    import cupy

    text = Path(__file__).with_name("transposes.cu").read_text("utf-8")
    kernel = cupy.RawKernel(text, f"transpose_{name}", options=("--std=c++17",))
    rows, cols = a.shape
    arguments = (np.int64(rows), np.int64(cols), a, np.int64(cols), out, np.int64(rows))
    blocks = -(-rows // 32) * -(-cols // 32)
    return lambda: kernel((blocks,), (256,), arguments)


def _verify(name: str, a: Array, out: Array, call: Call) -> None:
    out[...] = float("nan")
    made = call()
    if not bool(((out if made is None else made) == a.T).all()):
        raise WrongResultError(f"transpose {name} of {a.shape} is wrong")
