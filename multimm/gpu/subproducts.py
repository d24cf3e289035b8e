"""The smaller products that one is made of: matrices of a stack, and parts of k.

An array that is given as both operands stays one array in each of them, so that it is packed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = Any


def of_a_stack(
    batch: tuple[int, ...], *stacks: Array
) -> Iterator[tuple[tuple[int, ...], list[Array]]]:
    """Each index of a batch, and the matrices that stand there.

    Parameters
    ----------
    batch : tuple of int
    *stacks : cupy.ndarray of shape (..., r, c), or None
        Whose stacks broadcast to the batch. Views are returned, and None for None.
    """
    import cupy

    whole = {id(x): cupy.broadcast_to(x, (*batch, *x.shape[-2:])) for x in stacks if x is not None}
    for at in np.ndindex(batch):
        views = {key: x[at] for key, x in whole.items()}
        yield at, [None if x is None else views[id(x)] for x in stacks]


def along_k(
    a: Array, b: Array, trans: tuple[bool, bool], length: int
) -> Iterator[tuple[Array, Array]]:
    """Matrices op(A) and op(B) cut into parts of `length` along k, as views.

    Parameters
    ----------
    a, b : cupy.ndarray of two dimensions
    trans : (bool, bool)
        Whether each is stored transposed.
    length : int
    """
    same = a is b and trans[0] != trans[1]
    for start in range(0, a.shape[0 if trans[0] else 1], length):
        at = slice(start, start + length)
        left = a[at] if trans[0] else a[:, at]
        yield left, left if same else b[:, at] if trans[1] else b[at]
