"""The triple loop with Numba on the GPU, and the same with tiles in shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# numba-cuda, up to 0.30.4 its newest, asks NumPy for `row_stack` when it is imported; NumPy 2.5 has
# dropped that name of `vstack`. numba-cuda is only maintained and will not follow
# (github.com/NVIDIA/numba-cuda/issues/907): this goes when its successor, numba-cuda-mlir, is used.
if "row_stack" not in vars(np):
    vars(np)["row_stack"] = np.vstack

from numba import cuda

Array = Any


def on_gpu(
    a: Array, b: Array, kind: str, threads: int, blocks: int | None, transfers: bool
) -> Callable[[], Array]:
    """Return a call that multiplies on the GPU.

    Parameters
    ----------
    a, b : numpy.ndarray of float32
    kind : str
        "naive" or "tiled".
    threads, blocks : int
        Per block, and per grid, along each side; None is as many blocks as cover the result.
    transfers : bool
        Whether each call copies the operands to the GPU and the result back.
    """
    kernel = gpu_kernel(kind, threads)
    m, n = a.shape[0], b.shape[1]
    grid = (blocks or -(-n // threads), blocks or -(-m // threads))
    launch = kernel[grid, (threads, threads)]
    if transfers:

        def call() -> Array:
            out = cuda.device_array((m, n), np.float32)
            launch(cuda.to_device(a), cuda.to_device(b), out)
            return out.copy_to_host()

        return call
    x, y, out = cuda.to_device(a), cuda.to_device(b), cuda.device_array((m, n), np.float32)

    def resident() -> Array:
        launch(x, y, out)
        return out

    return resident


@functools.cache
def gpu_kernel(kind: str, side: int) -> Any:
    """Return a kernel for blocks of side x side threads; a grid of any size covers the result."""

    @cuda.jit
    def naive(a, b, out):  # type: ignore[no-untyped-def]
        x, y = cuda.grid(2)
        step_x, step_y = cuda.gridsize(2)
        for i in range(y, out.shape[0], step_y):
            for j in range(x, out.shape[1], step_x):
                total = np.float32(0)
                for p in range(a.shape[1]):
                    total += a[i, p] * b[p, j]
                out[i, j] = total

    @cuda.jit
    def tiled(a, b, out):  # type: ignore[no-untyped-def]
        a_tile = cuda.shared.array((side, side), numba.float32)
        b_tile = cuda.shared.array((side, side), numba.float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        for row in range(cuda.blockIdx.y * side, out.shape[0], cuda.gridDim.y * side):
            for col in range(cuda.blockIdx.x * side, out.shape[1], cuda.gridDim.x * side):
                i, j = row + ty, col + tx
                total = np.float32(0)
                for first in range(0, a.shape[1], side):
                    a_tile[ty, tx] = b_tile[ty, tx] = np.float32(0)
                    if i < a.shape[0] and first + tx < a.shape[1]:
                        a_tile[ty, tx] = a[i, first + tx]
                    if j < b.shape[1] and first + ty < b.shape[0]:
                        b_tile[ty, tx] = b[first + ty, j]
                    cuda.syncthreads()
                    for p in range(side):
                        total += a_tile[ty, p] * b_tile[p, tx]
                    cuda.syncthreads()
                if i < out.shape[0] and j < out.shape[1]:
                    out[i, j] = total

    return naive if kind == "naive" else tiled
