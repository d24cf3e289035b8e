"""The comparison that people learn GPUs with: one product, from a Python loop to shared memory.

The three CPU versions and the two on the GPU are the same triple loop, written as a beginner with
Numba would. NumPy, multimm and cuBLAS (through CuPy) say what there is to gain. The CPU part runs
without a GPU, and without Numba only the Python loop and NumPy do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from multimm_benchmarks.harness import Bench, WrongResultError
from multimm_benchmarks.timing import HostTimer, Runs, interleave

Array = Any
Product = Callable[[], Array]  #: makes the product and returns it, on the host or a device

SIZES = (32, 64, 128, 256, 512, 1024)
#: The Python loop takes some 2 s here, and eight times as long at each doubling.
LARGEST_LOOP = 256
TILE = 16  #: of the comparison over sizes: the block of 16 x 16 threads of most tutorials
SWEEP_SIZE = 1024
SWEEP_THREADS = (4, 8, 16, 32)  #: per block and side
SWEEP_BLOCKS = (8, 16, 32, 64, 128)  #: per grid and side


def python_loop(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """Multiply lists of rows in pure Python."""
    inner, columns = range(len(b)), range(len(b[0]))
    result = []
    for row in a:
        sums = []
        for j in columns:
            total = 0.0
            for k in inner:
                total += row[k] * b[k][j]
            sums.append(total)
        result.append(sums)
    return result


def cpu_products(a: Array, b: Array, largest_loop: int = LARGEST_LOOP) -> dict[str, Product]:
    """Return what multiplies two arrays on the CPU, by name."""
    products: dict[str, Product] = {}
    if len(a) <= largest_loop:
        rows_a, rows_b = a.tolist(), b.tolist()
        products["CPU, Python loop"] = lambda: python_loop(rows_a, rows_b)
    if find_spec("numba") is not None:
        from multimm_benchmarks.numba_cpu import compiled, compiled_parallel

        products["CPU, compiled"] = lambda: compiled(a, b)
        products["CPU, compiled, parallel"] = lambda: compiled_parallel(a, b)
    products["NumPy"] = lambda: a @ b
    return products


def gpu_products(a: Array, b: Array, transfers: bool) -> dict[str, Product]:
    """Return what multiplies two arrays on the GPU, by name: from and to the host, or not."""
    import cupy

    from multimm.gpu.product import gemm
    from multimm_benchmarks.numba_gpu import on_gpu

    products = {
        "GPU, naive": on_gpu(a, b, "naive", TILE, None, transfers),
        "GPU, shared-memory tile": on_gpu(a, b, "tiled", TILE, None, transfers),
    }
    if transfers:
        products["multimm"] = lambda: gemm(cupy.asarray(a), cupy.asarray(b), precision="ieee").get()
        products["CuPy (cuBLAS)"] = lambda: cupy.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    else:
        x, y = cupy.asarray(a), cupy.asarray(b)
        out = cupy.empty((len(a), b.shape[1]), cupy.float32)
        products["multimm"] = lambda: gemm(x, y, precision="ieee", out=out)
        products["CuPy (cuBLAS)"] = lambda: cupy.matmul(x, y, out=out)
    return products


def measure(
    bench: Bench,
    *,
    gpu: bool,
    sizes: tuple[int, ...] = SIZES,
    largest_loop: int = LARGEST_LOOP,
    sweep_size: int = SWEEP_SIZE,
) -> None:
    """Record the comparison over sizes and, on a GPU, over threads and blocks."""
    # Numba warns of small grids; they are part of what is compared.
    warnings.filterwarnings("ignore", message=".*Grid size")
    for n in sizes:
        rng = np.random.default_rng(n)
        a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        cpu = cpu_products(a, b, largest_loop)
        _record(bench, f"python {n}", n, a @ b, cpu, HostTimer(), "on the host")
        if gpu:
            for transfers, words in ((False, "without transfers"), (True, "with transfers")):
                timer = HostTimer(_wait)
                _record(bench, f"python {n}", n, a @ b, gpu_products(a, b, transfers), timer, words)
    if gpu:
        _sweep(bench, sweep_size)


def _sweep(bench: Bench, n: int) -> None:
    from multimm_benchmarks.numba_gpu import on_gpu

    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    for kind in ("naive", "tiled"):
        products = {
            f"{kind}, {threads} x {threads} threads, {blocks} x {blocks} blocks":
                on_gpu(a, b, kind, threads, blocks, False)
            for threads in SWEEP_THREADS for blocks in SWEEP_BLOCKS
        }  # fmt: skip
        _record(bench, f"python grid {n}", n, a @ b, products, HostTimer(_wait), kind)


def _wait() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def _record(
    bench: Bench,
    case: str,
    n: int,
    expected: Array,
    products: dict[str, Product],
    timer: HostTimer,
    words: str,
) -> None:
    for name, product in products.items():
        got = product()
        got = np.asarray(got.copy_to_host() if hasattr(got, "copy_to_host") else _host(got))
        # As coarse as a comparison of float32 and float64 sums in any order may be.
        if not np.abs(got - expected).max() <= 1e-5 * n:
            raise WrongResultError(f"{name} is wrong for n = {n}")
    runs: dict[str, Runs] = interleave(timer, products, bench.rounds, bench.target)
    for name, timed in runs.items():
        bench.add(case, name, (n, n, n), timed, flops=2 * n**3, detail=words)


def _host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x
