"""Products whose k is cut into slices: each is summed into a workspace, then all are added.

Whatever kernel computes the slices, one launch makes all of them, and the sums are added in a fixed
tree by `add_partials`, with P as one more of them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from multimm.gpu.arch import IF_REFUSED, STRIP, Guard
from multimm.gpu.elementwise import reduce
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import Launches
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.runtime.workspace import workspace
from multimm.gpu.simt.load_paths import Loads
from multimm.gpu.strides import ABSENT, Axis, ProductShape, Stack

logger = logging.getLogger(__name__)

#: Prepares the launches of a kernel from the arguments before the operands, where these lie, and
#: the axes of the stack.
Prepare = Callable[[tuple[float, ...], Sequence[Stack], Sequence[Axis]], Launches]
#: Computes all slices, from the addresses of the product's operands, to an address.
Products = Callable[[Sequence[int], int], None]


class _Sums(NamedTuple):
    """Those of a slice, as far as `reduce.prepared_sum` looks at an array: there is none yet."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    itemsize: int = 4
    data: Any = SimpleNamespace(ptr=0)  #: at the beginning of the workspace, or aligned as that


def can_be_added(problem: Problem) -> bool:
    """Whether slices can be added: along rows, which no column of a wider array has."""
    return problem.shape.n != 1 or all(
        x is None or stack.ld == 1
        for x, stack in zip(problem.arrays[2:], problem.stacks[2:], strict=True)
    )


def slice_step(shape: ProductShape) -> int:
    """Return how many values the sums of neighbouring slices lie apart in the workspace."""
    return -(-shape.m * shape.n // STRIP) * STRIP  # all are aligned: they are added 16 bytes a time


def in_slices(
    prepare: Prepare, problem: Problem, slices: int, length: int, loads: Loads, guard: Guard = (),
) -> Run:  # fmt: skip
    """Return what computes a product in slices of k.

    Parameters
    ----------
    prepare : callable
        Of the kernel that sums a slice; the grid's z numbers the slices.
    problem : Problem
        Its stack has one product.
    slices, length : int
        How many, and the length of all but the last.
    loads : Loads
        Whether A and B are stored as the transposes of op(A) and op(B).
    guard : Guard, optional
        With which the kernel was compiled.

    Returns
    -------
    callable
        Takes the addresses of A, B, C, P and D, and launches on the current stream. It may be
        called again for other operands of the same kind.
    """
    _, m, n, k = problem.shape
    a, b, *_ = stacks = problem.stacks
    step = slice_step(problem.shape)
    along_a, along_b = a.ld if loads["TRANS_A"] else 1, 1 if loads["TRANS_B"] else b.ld
    steps = (length * along_a, length * along_b, 0, 0, step)
    sums = Stack(0, m, n, n, False, ())
    launches = prepare(
        (m, n, k, length, 1.0, 0.0), (a, b, ABSENT, ABSENT, sums), [Axis(slices, steps)]
    )
    whole = functools.partial(prepare, problem.head, stacks, [Axis(1, (0,) * len(stacks))])

    def products(pointers: Sequence[int], to: int) -> None:
        launches((*pointers[:2], 0, 0, to, *pointers[5:]))

    return summed(products, whole, problem, 2, slices, guard)


def summed(
    products: Products, whole: Callable[[], Run], problem: Problem, first: int, slices: int,
    guard: Guard = (),
) -> Run:  # fmt: skip
    """Return what computes slices into a workspace, and D = alpha * (their sum + P) + beta * C.

    Parameters
    ----------
    products : callable
    whole : callable
        Returns what computes D in one piece, where no memory is left for the workspace.
    problem, slices, guard
        As for `in_slices`.
    first : int
        Which of the addresses that what is returned takes is that of C; those of P, D and, with a
        guard, of what packing has counted follow.
    """
    shape, device = problem.shape, problem.device
    size = slices, slice_step(shape)
    c, partial, out = (x if x is None else x[(0,) * (x.ndim - 2)] for x in problem.arrays[2:])
    given = {first + 1: partial, first: c, first + 2: out}
    places = [i for i, x in given.items() if x is not None]
    sums = [_Sums((shape.m, shape.n), (4 * shape.n, 4))] * slices
    beta = 0.0 if c is None else problem.beta
    adding = reduce.prepared_sum([*sums, *(given[i] for i in places)], problem.alpha, beta, guard)
    offsets = [4 * size[1] * i for i in range(slices)]
    places += [first + 3] * bool(guard)

    def run(pointers: Sequence[int]) -> None:  # kept: it must refer to no operand
        try:
            memory, release = workspace(size, device)
        except MemoryError:  # of CuPy's pool, or RMM's
            _warn(size, guard)
            whole()(pointers)
            return
        to: int = memory.data.ptr
        products(pointers, to)
        adding([*(to + offset for offset in offsets), *(pointers[i] for i in places)])
        release()

    return run


def _warn(size: tuple[int, int], guard: Guard) -> None:
    logger.warning(
        "no memory is left to sum %d slices of k in (%d bytes): a product%s runs in one piece, "
        "slower and with other bits", size[0], 4 * math.prod(size),
        ", should its operands be refused," if guard == IF_REFUSED else "",
    )  # fmt: skip
