"""Products whose k is cut into slices: each is summed into a workspace, then all are added.

Whatever kernel computes a slice, the grid's z numbers the slices, and the sums are added in a fixed
tree by `add_partials`, with P as one more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from multimm.gpu import add
from multimm.gpu.compiled import Launches
from multimm.gpu.layout import ABSENT, Axis, ProductShape, Stack
from multimm.gpu.recall import Run
from multimm.gpu.tiles import STRIP
from multimm.gpu.workspace import workspace

Array = Any
#: A, B, C, P and D: arrays, or None, and where they lie.
Operands = Sequence[tuple[Array, Stack]]
#: Prepares the launches of a kernel from the arguments before the operands, where these lie, and
#: the axes of the stack.
Prepare = Callable[[tuple[float, ...], Sequence[Stack], Sequence[Axis]], Launches]


def can_be_added(shape: ProductShape, operands: Operands) -> bool:
    """Whether slices can be added: along rows, which no column of a wider array has."""
    return shape.n != 1 or all(x is None or stack.ld == 1 for x, stack in operands[2:])


def in_slices(
    prepare: Prepare,
    device: int,
    operands: Operands,
    shape: ProductShape,
    slices: int,
    length: int,
    alpha: float,
    beta: float,
    sides: tuple[bool, bool],
) -> Run:
    """Return what computes D = alpha * (op(A) op(B) + P) + beta * C in slices of k.

    Parameters
    ----------
    prepare : callable
        Of the kernel that sums a slice.
    device : int
    operands : sequence of (cupy.ndarray of float32 or None, Stack)
        A, B, C, P and D; a stack has one product.
    shape : ProductShape
    slices, length : int
        How many, and the length of all but the last.
    alpha, beta : float
    sides : (bool, bool)
        Whether A and B are stored as the transposes of op(A) and op(B).

    Returns
    -------
    callable
        Takes the addresses of the operands, and launches on the current stream. It may be called
        again for other operands of the same kind.
    """
    m, n, k = shape.m, shape.n, shape.k
    (_, a), (_, b), *_ = operands
    step = -(-m * n // STRIP) * STRIP  # all sums are aligned: they are added 16 bytes at a time
    size = slices, step
    steps = (length * (a.ld if sides[0] else 1), length * (1 if sides[1] else b.ld), 0, 0, step)
    sums = Stack(0, m, n, n, False, ())
    products = prepare(
        (m, n, k, length, 1.0, 0.0), (a, b, ABSENT, ABSENT, sums), [Axis(slices, steps)]
    )
    c, partial, out = (x if x is None else x[(0,) * (x.ndim - 2)] for x, _ in operands[2:])
    given = {3: partial, 2: None if beta == 0 else c, 4: out}
    places = [i for i, x in given.items() if x is not None]
    some, release = workspace(size, device)
    addends = [*some[:, : m * n].reshape(slices, m, n), *(given[i] for i in places)]
    adding = add.prepared_sum(addends, (0, 1), alpha, beta if 2 in places else 0.0)
    release()
    offsets = [4 * step * i for i in range(slices)]

    def run(pointers: Sequence[int]) -> None:
        memory, release = workspace(size, device)
        first: int = memory.data.ptr
        products((pointers[0], pointers[1], 0, 0, first))
        adding([*(first + offset for offset in offsets), *(pointers[i] for i in places)])
        release()

    return run
