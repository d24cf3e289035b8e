"""The rungs of kernels/ladder/: their parameters, what each adds, and how one is launched."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.runtime.launch import kernel_for

Array = Any

_SIZE, _POINTER, _FLOAT = np.int64, np.uint64, np.float32
#: The parameter types that all rungs share, in their order: m, n, k, alpha, A, B, beta, C, D.
SIGNATURE = (
    *(_SIZE, _SIZE, _SIZE, _FLOAT, _POINTER, _SIZE, _POINTER, _SIZE),
    *(_FLOAT, _POINTER, _SIZE, _POINTER, _SIZE),
)


@dataclass(frozen=True, slots=True)
class LadderRung:
    """A file of kernels/ladder/ and the compile-time parameters that it is measured with.

    Every rung computes D = alpha A B + beta C for row-major float32 matrices of any size and any
    leading dimension, and reads no C where beta is 0.
    """

    number: int
    name: str  #: of the file, without its number
    idea: str
    block_m: int  #: the part of D that one thread block computes
    block_n: int
    threads: int
    defines: tuple[tuple[str, int], ...]

    @property
    def file(self) -> str:
        """Path inside kernels/."""
        return f"ladder/{self.number}_{self.name}.cu"

    @property
    def entry(self) -> str:
        """The kernel's name in the file."""
        return f"sgemm_{self.name}"

    @property
    def text(self) -> str:
        """The file with its includes and parameters."""
        return kernel_text(self.file, dict(self.defines))

    def blocks(self, m: int, n: int) -> int:
        """Thread blocks for an m x n result."""
        return -(-m // self.block_m) * -(-n // self.block_n)


def _rung(number: int, name: str, idea: str, threads: int, **defines: int) -> LadderRung:
    block_m = defines.get("BLOCK_M") or defines["BLOCK"]
    block_n = defines.get("BLOCK_N") or defines["BLOCK"]
    return LadderRung(number, name, idea, block_m, block_n, threads, tuple(defines.items()))


RUNGS: tuple[LadderRung, ...] = (
    _rung(1, "naive", "one value of D per thread", 1024, BLOCK=32),
    _rung(2, "coalesced", "lanes take neighbouring columns", 1024, BLOCK=32),
    _rung(3, "shared_tile", "tiles of A and B in shared memory", 1024, BLOCK=32),
    _rung(4, "register_tile_1d", "a column of D per thread, in registers", 512,
          BLOCK_M=64, BLOCK_N=64, BLOCK_K=8, THREAD_M=8),
    _rung(5, "register_tile_2d", "a square of D per thread", 256,
          BLOCK_M=128, BLOCK_N=128, BLOCK_K=8, THREAD_M=8, THREAD_N=8, MIN_BLOCKS=2),
    _rung(6, "vectorized", "16 bytes per instruction", 256,
          BLOCK_M=128, BLOCK_N=128, BLOCK_K=8, THREAD_M=8, THREAD_N=8),
    _rung(7, "warp_tile", "a square of D per warp, the next step under way", 256,
          BLOCK_M=256, BLOCK_N=128, BLOCK_K=8, WARP_M=64, WARP_N=64, THREAD_M=16, THREAD_N=8,
          MIN_BLOCKS=1),
)  # fmt: skip


@functools.cache
def kernel_of(rung: LadderRung, device: int) -> Any:
    """Return the kernel, loaded on a device."""
    return kernel_for(device, rung.file, rung.entry, rung.defines)


def run_rung(
    rung: LadderRung,
    a: Array,
    b: Array,
    out: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
) -> Array:
    """Compute out = alpha a @ b + beta c on the current stream.

    Parameters
    ----------
    rung : LadderRung
    a, b, out, c : cupy.ndarray of float32, 2-D, with contiguous rows
        Of fitting shapes; slices of wider arrays are read as they are. `c` may be left out where
        beta is 0.
    alpha, beta : float

    Returns
    -------
    cupy.ndarray
        `out`.
    """
    (m, k), n = a.shape, b.shape[1]
    blocks = rung.blocks(m, n)
    if blocks == 0:
        return out
    values = [m, n, k, alpha, *_place(a), *_place(b), beta, *_place(c), *_place(out)]
    arguments = tuple(kind(value) for kind, value in zip(SIGNATURE, values, strict=True))
    kernel_of(rung, a.device.id)((blocks, 1, 1), (rung.threads, 1, 1), arguments)
    return out


def _place(x: Array) -> tuple[int, int]:
    """Address and leading dimension of a matrix; null and 0 where there is none."""
    return (0, 0) if x is None else (x.data.ptr, x.strides[0] // x.itemsize)
