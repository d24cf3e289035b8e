"""The arrays of a product, checked: a value as kernels see it, made once and handed down.

Nothing here launches anything; CuPy is imported where memory is taken.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from multimm.errors import ArrayTypeError, DTypeError, OptionError, ShapeError, kind_of
from multimm.gpu.arrays import is_cupy
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.runtime.workspace import not_captured
from multimm.gpu.strides import (
    ABSENT,
    GemmSizes,
    ProductShape,
    Stack,
    may_overlap,
    repeats,
    stack_of,
)
from multimm.shapes import Shape, broadcast, check_operands, check_result

logger = logging.getLogger(__name__)

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
    config: object = None  #: the configuration that was asked for, or its name

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
        """What `gemm` is told of it besides arrays, where it chooses the configuration."""
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


def copied(x: Array) -> Array:
    """Return a copy of an operand in C order, for what is launched next.

    Parameters
    ----------
    x : cupy.ndarray

    Raises
    ------
    KernelError
        The stream is captured.
    """
    import cupy

    logger.debug("operand of shape %s is copied: strides %s", x.shape, x.strides)
    with cupy.cuda.Device(x.device.id):
        not_captured(f"an operand of shape {x.shape} with strides {x.strides} is copied first",
                     "pass an array with contiguous rows")  # fmt: skip
        return cupy.ascontiguousarray(x)


def check_matrix(name: str, x: Array) -> tuple[Array, Stack]:
    """Check that it is a matrix of float32 on a GPU; return it as `walkable` does, dense.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
    """
    check_arrays({name: x}, np.float32)
    if x.ndim != 2:
        raise ShapeError(f"{name} has shape {x.shape}: one matrix is packed at a time")
    return walkable(operand(x), dense=True)


def check_product(
    a: Array, b: Array, c: Array, partial: Array, out: Array, trans: tuple[bool, bool],
    alpha: float, beta: float, lower: bool,
) -> Problem:  # fmt: skip
    """Check the arrays of a product; return it as kernels see it.

    Of two packed operands, which fit together, C, P and D are checked; they themselves have no
    arrays in it.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
        Operands that do not fit together, or an `out` that cannot be written to.
    """
    check_beta(beta, c)
    packed = a.device_id if isinstance(a, PackedBlock) else None
    named = {} if isinstance(a, PackedBlock) else {"a": a, "b": b}
    named |= {"c": c, "partial": partial, "out": out}
    given = {name: x for name, x in named.items() if x is not None}
    check_arrays(given, np.float32, packed)
    device = a.device.id if packed is None else packed
    shape = product_shape(a.shape, b.shape, *trans)
    if "out" in given:
        check_result("out", given["out"].shape, shape.result)
    if lower and shape.m != shape.n:
        raise ShapeError(
            f"the product is {shape.m} x {shape.n}: only a square one has a lower triangle"
        )
    for name in ("c", "partial"):
        if name in given:
            check_addend(name, given[name].shape, shape)
    found = {name: operand(x) for name, x in given.items()}
    turned = "out" in found and _check_out(found, shape.result).transposed
    unread = [name for name, scalar in (("c", beta), ("partial", alpha)) if scalar == 0]
    all_read = not any(name in given for name in unread)
    a, b, c, partial, out = (
        NOTHING if name in unread else found.get(name, NOTHING)  # nor copied
        for name in ("a", "b", "c", "partial", "out")
    )
    if not turned:
        operands = (a, b, c, partial, out)
        return Problem(shape, trans, alpha, beta, lower, device, operands, turned, all_read)
    others = (operand(None if x is None else x.swapaxes(-1, -2)) for x, _ in (c, partial, out))
    return Problem(
        ProductShape(shape.batch, shape.n, shape.m, shape.k), (not trans[1], not trans[0]),
        alpha, beta, False, device, (b, a, *others), turned, all_read,
    )  # fmt: skip


def product_shape(a: Shape, b: Shape, trans_a: bool = False, trans_b: bool = False) -> ProductShape:
    """Return the sizes of op(A) @ op(B).

    Raises
    ------
    ShapeError
        Fewer than 2 dimensions, lengths of k that differ, or stacks that do not broadcast.
    """
    for name, shape in (("a", a), ("b", b)):
        if len(shape) < 2:
            raise ShapeError(f"{name} has shape {shape}: a matrix or a stack of them is needed")
    check_operands(a, b, trans_a, trans_b)
    m, k = a[:-3:-1] if trans_a else a[-2:]
    n = b[-2] if trans_b else b[-1]
    return ProductShape(broadcast(a[:-2], b[:-2]), m, n, k)


def check_addend(name: str, shape: Shape, product: ProductShape) -> None:
    """Check that C or a partial result has the matrices of the product, and a stack that fits.

    Raises
    ------
    ShapeError
        If not; nothing but the stack is broadcast.
    """
    batch = shape[:-2]
    fits = len(batch) <= len(product.batch) and all(
        size in (1, full) for size, full in zip(batch[::-1], product.batch[::-1], strict=False)
    )
    if shape[-2:] != (product.m, product.n) or not fits:
        raise ShapeError(
            f"{name} has shape {shape}: the result has shape {product.result}; the last two sizes "
            "must be equal, and those before them equal or 1"
        )


def check_arrays(given: dict[str, Array], dtype: DTypeLike, device: int | None = None) -> None:
    """Check that all are CuPy arrays of one dtype on one device.

    Parameters
    ----------
    given : dict of str to array
        By the names that messages use.
    dtype : dtype
    device : int, optional
        Of what is packed already.

    Raises
    ------
    ArrayTypeError, DTypeError
    """
    dtype = np.dtype(dtype)
    for name, x in given.items():
        if not is_cupy(x):
            raise ArrayTypeError(
                f"{name} is a {kind_of(x)}: the kernels take CuPy arrays; move it with cupy.asarray"
            )
        if x.dtype != dtype:
            raise DTypeError(
                f"{name} has dtype {x.dtype}: the kernel takes {dtype}; convert it with astype"
            )
        if x.data.ptr % dtype.alignment:
            raise ArrayTypeError(f"{name} begins at an address that no {x.dtype} has: copy it")
    devices = {} if device is None else {"packed": device}
    devices |= {name: x.device.id for name, x in given.items()}
    if len(set(devices.values())) > 1:
        raise ArrayTypeError(f"operands lie on several devices ({devices}): move them to one")


def check_beta(beta: complex, c: Any) -> None:
    """Raise `OptionError` for a beta of a C that was not given."""
    if beta != 0 and c is None:
        raise OptionError(f"beta={beta!r} scales C, but no c was given: pass c, or beta=0")


def _check_out(given: dict[str, Operand], shape: Shape) -> Stack:
    out, stack = given["out"]
    if not out.size:
        return Stack(out.data.ptr, 0, 0, 0, False, ())  # nothing is written
    if isinstance(stack, str):
        raise ShapeError(f"out cannot be written to: {stack}; pass a contiguous array")
    if repeats(stack, shape[:-2]):
        raise ShapeError(f"out has strides {out.strides}: some elements may share memory")
    for name, (x, other) in given.items():
        if name == "out" or isinstance(other, str):  # what no kernel can address is copied first
            continue
        if may_overlap(stack, shape[:-2], other, x.shape[:-2], out.itemsize):
            raise ShapeError(f"out and {name} may share memory: pass an out of its own")
    return stack
