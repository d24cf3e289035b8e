"""Elements that packed parts do not carry, added to a product: kernels/split_residuals.cu."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from multimm.gpu.emulated.configs import PARTS, SLAB, residual_defines
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import device_of, kernel_for

_THREADS = 256
#: Thread blocks on a multiprocessor: what their lists take of its shared memory.
_RESIDENT = 8


class Lists(NamedTuple):
    """A packed operand and its residuals, by their addresses."""

    tiles: int
    exponents: int
    known: int  #: how many residuals there are, unless packing has counted them
    places: int
    values: int


#: Takes A, B, and the addresses of D and of what packing has counted, or 0; launches on the current
#: stream.
Adding = Callable[[Lists, Lists, int, int], None]


def prepared(problem: Problem, scheme: str) -> Adding:
    """Return what adds the residuals of both operands to D: alpha * (R @ B + A' @ S).

    With A = A' + R and B = B' + S, where A' and B' are what the parts carry, the product of the
    parts lacks that.

    Parameters
    ----------
    problem : Problem
        Not empty.
    scheme : {"float32", "tf32"}
    """
    device, (_, m, n, k), ldd = problem.device, problem.shape, problem.stacks[-1].ld
    defines = residual_defines(PARTS[scheme])
    kernel = kernel_for(device, "split_residuals.cu", "split_residuals", defines)
    tiles = -(-m // SLAB) * -(-n // SLAB)
    grid = (min(tiles, _RESIDENT * device_of(device).multiprocessors), 1, 1)
    scalar = np.float32(problem.alpha)

    def run(a: Lists, b: Lists, d: int, counts: int) -> None:
        kernel(grid, (_THREADS, 1, 1), (m, n, k, scalar, *a, *b, d, ldd, counts))

    return run
