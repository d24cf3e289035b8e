"""A product as kernels see it, before one is chosen: a value, made once and handed down."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from multimm.gpu.runtime.workspace import copied
from multimm.gpu.strides import ABSENT, GemmSizes, ProductShape, Stack, stack_of

Array = Any


class Operand(NamedTuple):
    """An array, or None, and where it lies, or why no kernel can walk it."""

    array: Array
    stack: Stack | str


class Problem(NamedTuple):
    """D = alpha * (op(A) @ op(B) + P) + beta * C of arrays that fit together, as kernels see it."""

    shape: ProductShape
    trans: tuple[bool, bool]  #: whether A and B are used transposed
    alpha: float
    beta: float
    lower: bool  #: whether what is above the diagonal of D is not asked for
    device: int
    operands: tuple[Operand, ...]  #: A, B, C, P and D; None for what is not read, or not made yet
    #: Whether D is the transpose of what the caller calls so, and A is the caller's B: rows of the
    #: transpose are what is contiguous, and D' = op(B)' op(A)'.
    turned: bool = False
    all_read: bool = True  #: whether kernels read whatever was given

    @property
    def arrays(self) -> list[Array]:
        """A, B, C, P and D."""
        return [x.array for x in self.operands]

    @property
    def stacks(self) -> list[Stack]:
        """Where they lie, once all of them are `addressable`."""
        return [x.stack for x in self.operands if isinstance(x.stack, Stack)]

    @property
    def pointers(self) -> list[int]:
        """Their addresses."""
        return [stack.pointer for stack in self.stacks]

    @property
    def head(self) -> tuple[float, ...]:
        """The first arguments of a kernel: m, n, k, a slice of k that is all of it, alpha, beta."""
        _, m, n, k = self.shape
        return (m, n, k, 0, self.alpha, self.beta)

    @property
    def symmetric(self) -> bool:
        """Whether A and B are the same elements, one of them transposed, and half of D is asked."""
        (a, _), (b, _), *_ = self.operands
        return self.lower and a is not None and a is b and self.trans[0] != self.trans[1]

    @property
    def sizes(self) -> GemmSizes:
        """Of what the caller calls A, B and D; a stack of one has a batch of 2, as any other."""
        batch, m, n, k = self.shape
        m, n = (n, m) if self.turned else (m, n)
        return GemmSizes(m, n, k, batch=2 if batch else 1)

    @property
    def options(self) -> dict[str, Any]:
        """What `gemm` is told of it besides arrays."""
        return {
            "trans_a": self.trans[0], "trans_b": self.trans[1], "alpha": self.alpha,
            "beta": self.beta, "lower": self.lower,
        }  # fmt: skip

    def with_result(self) -> Problem:
        """The same, with an array that D is written to, on the current device."""
        if self.operands[-1].array is not None:
            return self
        import cupy

        d = cupy.empty(self.shape.result, np.float32)
        return self._replace(operands=(*self.operands[:4], operand(d)))

    def addressable(self, dense: bool = False) -> Problem:
        """The same, with copies of operands that no kernel can walk.

        Parameters
        ----------
        dense : bool
            Of A and B also those whose rows or columns are repeated by a stride of 0.
        """
        a, b, *others = self.operands
        left = walkable(a, dense=dense)
        right = left if self.symmetric else walkable(b, dense=dense)
        rest = (walkable(x, by_rows=True) for x in others)
        return self._replace(operands=tuple(Operand(*x) for x in (left, right, *rest)))

    def stands_for(self, given: Problem) -> bool:
        """Whether what is decided here holds for all operands that lie like those given.

        An operand that is copied or not read has no place in it.
        """
        same = zip(self.arrays, given.arrays, strict=True)
        return self.all_read and all(x is y for x, y in same)


#: What is not there.
NOTHING = Operand(None, ABSENT)


def operand(x: Array) -> Operand:
    """Return an array with where it lies."""
    return NOTHING if x is None else Operand(x, describe(x))


def describe(x: Array) -> Stack | str:
    """Where a stack of matrices lies, or why no kernel can walk it."""
    return stack_of(x.data.ptr, x.shape, x.strides, x.itemsize)


def is_broadcast(x: Array) -> bool:
    """Whether rows or columns of an array are repeated by a stride of 0."""
    steps = zip(x.shape, x.strides, strict=True)
    return bool(x.size) and any(size > 1 and step == 0 for size, step in steps)


def walkable(x: Operand, *, dense: bool = False, by_rows: bool = False) -> tuple[Array, Stack]:
    """An operand as it is, or a copy in C order if kernels cannot walk it.

    Parameters
    ----------
    x : Operand
    dense : bool
        Whether rows or columns may not be repeated by a stride of 0.
    by_rows : bool
        Whether it has to be rows that are contiguous.
    """
    array, stack = x
    if isinstance(stack, str) or (by_rows and stack.transposed) or (dense and is_broadcast(array)):
        array = copied(array)
        stack = describe(array)
        assert isinstance(stack, Stack), "a C-contiguous array has contiguous rows"
    return array, stack
