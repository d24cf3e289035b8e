"""The kernels' verbs on any array module: what the kernels are tested against, and what runs
where there is no kernel of ours.

NumPy arrays stay NumPy arrays and CuPy arrays CuPy arrays: everything here goes through the
arrays' own module. Importing this module imports NumPy alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from multimm.blocks import plain
from multimm.errors import ArrayTypeError
from multimm.gpu.arrays import is_cupy
from multimm.gpu.dtypes import accumulate_dtype, result_dtype, scaled_dtype
from multimm.gpu.integers import gemm as integers
from multimm.gpu.problem import product_shape

#: Long doubles, which NumPy multiplies by a loop that goes down b's columns; and how many of these
#: are copied for it at a time. Squares of 1024: 0.8e8 multiply-adds per second in b's own order,
#: 2.2e8 so, as squares of 400 in either (one core of an x86 server).
WITHOUT_BLAS, COLUMNS = "gG", 64
#: Rows and columns that NumPy turns at a time: what is read down columns stays in the caches. One
#: core of an EPYC turns 4000 squares of float32 in 26 ms so, and all at once in 60; float64 in 38
#: and 65, 4096 squares of float32 in 65 and 130. In squares of 128 it takes 1 to 1.3 times as long.
SQUARE = 512

Array = Any
Scalar = complex | np.generic


def gemm(
    a: Array,
    b: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: Scalar = 1,
    beta: Scalar = 0,
    c: Array = None,
    partial: Array = None,
    accumulate: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    lower: bool = False,
) -> Array:
    """D = alpha * (op(A) @ op(B) + P) + beta * C.

    Parameters
    ----------
    a : array, shape (..., m, k), or (..., k, m) if `trans_a`
    b : array, shape (..., k, n), or (..., n, k) if `trans_b`
        NumPy or CuPy, any layout, never changed. Stacks broadcast as in ``np.matmul``.
    alpha, beta : scalar
        Weakly typed, as Python's numbers are: 1 keeps integers what they are, 1.0 does not.
        beta == 0 never reads C, alpha == 0 never reads A, B or P.
    c, partial : array, shape (..., m, n), optional
        Their stacks may be broadcast to that of the product.
    accumulate : dtype, optional
        Of op(A) @ op(B) + P; by default `accumulate_dtype`.
    dtype : dtype, optional
        Of the result; by default `result_dtype`, widened by alpha and beta where they need it.
    lower : bool, optional
        What is above the diagonal of D is not asked for: it may be anything.

    Returns
    -------
    array, shape (..., m, n)
        New memory, on the device of `a`.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Operands that do not fit together.
    """
    xp = module_of(a, b, c, partial)
    shape = product_shape(a.shape, b.shape, trans_a, trans_b)
    out = result_dtype(a.dtype, b.dtype)
    held = accumulate_dtype(a.dtype, b.dtype) if accumulate is None else np.dtype(accumulate)
    alpha, beta = _plain(alpha), _plain(0 if c is None else beta)
    out = np.dtype(_widened(out, alpha, beta) if dtype is None else dtype)
    if alpha == 0 or (shape.k == 0 and partial is None):
        total = None
    else:
        a, b = aligned(a, b)
        more = {"partial": partial, "lower": lower}
        more |= {"final": out} if alpha == 1 and beta == 0 else {}
        total = _product(xp, a, b, (trans_a, trans_b), held, shape.result, more)
    return _scaled(xp, total, alpha, beta, c, shape.result, held, out)


def add_partials(
    parts: Sequence[Array],
    *,
    alpha: Scalar = 1,
    beta: Scalar = 0,
    c: Array = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """alpha * (sum of the parts) + beta * C, added pairwise: ((p0 + p1) + (p2 + p3)) + ...

    The tree depends on nothing but the number of parts, so the same parts give the same bits.

    Parameters
    ----------
    parts : sequence of array
        At least one, equal in shape; NumPy or CuPy, never changed.
    alpha, beta : scalar
        As in `gemm`.
    c : array, optional
        Of the parts' shape.
    dtype : dtype, optional
        Of the result; by default that of the parts, widened by alpha and beta.

    Returns
    -------
    array
        New memory, of the parts' shape.

    Raises
    ------
    ArrayTypeError
        NumPy and CuPy mixed.
    """
    xp = module_of(*parts, c)
    alpha, beta = _plain(alpha), _plain(0 if c is None else beta)
    held = np.result_type(*(part.dtype for part in parts))
    total = None if alpha == 0 else _tree(parts)
    out = np.dtype(_widened(held, alpha, beta) if dtype is None else dtype)
    return _scaled(xp, total, alpha, beta, c, parts[0].shape, held, out)


def transpose(a: Array) -> Array:
    """Return a C-contiguous copy with the last two axes swapped.

    Parameters
    ----------
    a : array, shape (..., m, n)
        NumPy or CuPy, any dtype, any layout.

    Returns
    -------
    array, shape (..., n, m)
        New memory, on the device of `a`.
    """
    xp, turned = module_of(a), a.swapaxes(-1, -2)
    rows, columns = turned.shape[-2:]
    if is_cupy(a) or max(rows, columns) <= SQUARE:
        return turned.copy(order="C")
    made = xp.empty(turned.shape, a.dtype)
    for row, column in product(range(0, rows, SQUARE), range(0, columns, SQUARE)):
        at = ..., slice(row, row + SQUARE), slice(column, column + SQUARE)
        made[at] = turned[at]
    return made


def module_of(*operands: Array) -> ModuleType:
    """Return the one module that all operands are arrays of, but for those that are None."""
    given = [x for x in operands if x is not None]
    on_gpu = [is_cupy(x) for x in given]
    for x, there in zip(given, on_gpu, strict=True):
        if not there:
            plain(x, "an operand")
    if any(on_gpu) != all(on_gpu):
        raise ArrayTypeError(
            "NumPy and CuPy arrays are mixed: move those of one kind, with cupy.asarray or "
            "cupy.asnumpy"
        )
    return sys.modules["cupy" if any(on_gpu) else "numpy"]


def aligned(*operands: Array) -> tuple[Array, ...]:
    """Return operands, NumPy's that lie at odd addresses as copies; what was one stays one.

    Blocks that come in messages may lie so. NumPy multiplies copies of them, and an array that it
    knows to be its own transpose by another BLAS routine, with other bits.
    """
    lying = {id(x): x for x in operands if isinstance(x, np.ndarray) and not x.flags.aligned}
    copies = {key: x.copy(order="K") for key, x in lying.items()}
    return tuple(copies.get(id(x), x) for x in operands)


def _product(
    xp: ModuleType,
    a: Array,
    b: Array,
    trans: tuple[bool, bool],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    more: dict[str, Any],
) -> Array:
    """op(A) @ op(B) + P in `dtype`, as an array that nobody else holds.

    `more` is what `integers.gemm.product` takes, P among it.
    """
    k = a.shape[-2 if trans[0] else -1]
    if 0 in (*shape, k):
        total = xp.zeros(shape, dtype)
    elif integers.takes(a.dtype, b.dtype, dtype):
        return integers.product(xp, a, b, trans, shape, dtype, **more)
    else:
        left = (a.swapaxes(-1, -2) if trans[0] else a).astype(dtype, copy=False)
        right = (b.swapaxes(-1, -2) if trans[1] else b).astype(dtype, copy=False)
        if dtype.char in WITHOUT_BLAS:
            total = _by_columns(left, right, shape)
        else:
            total = xp.matmul(left, right).astype(dtype, copy=False)
    if more["partial"] is not None:
        total += more["partial"].astype(dtype, copy=False)
    return total


def _by_columns(a: Array, b: Array, shape: tuple[int, ...]) -> Array:
    """a @ b by NumPy's own loop, of a few columns of b at a time, copied one after the other."""
    made = np.empty(shape, a.dtype)
    for start in range(0, shape[-1], COLUMNS):
        at = slice(start, start + COLUMNS)
        columns = b[..., at].swapaxes(-1, -2).copy()
        np.matmul(a, columns.swapaxes(-1, -2), out=made[..., at])
    return made


def _tree(parts: Sequence[Array]) -> Array:
    """Sum pairwise into new memory; a part without a partner waits for the next round."""
    if len(parts) == 1:
        return parts[0].copy()
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def _scaled(
    xp: ModuleType,
    total: Array,
    alpha: complex,
    beta: complex,
    c: Array,
    shape: tuple[int, ...],
    held: np.dtype[Any],
    dtype: np.dtype[Any],
) -> Array:
    """alpha * total + beta * C in `dtype`, in C order; a total of None counts as zero.

    Nobody else holds `total`, so that it may be returned as it is.
    """
    if total is not None:
        total = _times(total, alpha)
    if beta != 0:
        # With integers bfloat16 has no dtype in common; float32 holds it.
        own = np.dtype(np.float32) if c.dtype.name == "bfloat16" else c.dtype
        addend = _times(c.astype(np.result_type(held, own), copy=False), beta)
        if total is None:
            return xp.broadcast_to(addend, shape).astype(dtype, order="C", copy=True)
        total = total + addend
    if total is None:
        return xp.zeros(shape, dtype)
    return total.astype(dtype, order="C", copy=False)


def _plain(scalar: Scalar) -> complex:
    """A scalar as Python's own number, which NumPy types weakly."""
    number: complex = scalar.item() if isinstance(scalar, np.generic) else scalar
    return number


def _times(x: Array, scalar: complex) -> Array:
    """x * scalar; a scalar of 1 changes the dtype at most, and costs nothing where it does not."""
    return x.astype(scaled_dtype(x.dtype, scalar), copy=False) if scalar == 1 else x * scalar


def _widened(dtype: np.dtype[Any], alpha: complex, beta: complex) -> np.dtype[Any]:
    """The dtype after scaling."""
    return scaled_dtype(scaled_dtype(dtype, alpha), beta)
