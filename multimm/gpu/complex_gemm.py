"""Products of complex64 on the tensor cores, as products of float32.

A complex number is two float32 in memory, so A is m x 2k real numbers as it lies, and C is m x 2n:

    operands            real product                        beside it
    complex, complex    m x 2k times 2k x 2n                B is written as squares of four numbers
    real, complex       m x k times k x 2n                  nothing, if B's rows are contiguous
    complex, real       2m x k times k x n                  real and imaginary rows are joined
    X^H X, X' X         half of m x 2k times 2k x m, and    X is split into real and imaginary rows,
                        m x k times k x m                   the triangle is mirrored

Each takes as many multiplications as the textbook's formula, half of them where C is Hermitian or
symmetric, and both parts of each element keep the bound of `precision`. What is written beside
costs bytes alone. `conj` is a change of signs in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multimm.gpu import library_gemm, product
from multimm.gpu.elementwise import complex_parts, reduce
from multimm.gpu.kernel_selection import SPLIT, Precision, choose_kernel
from multimm.gpu.problem import operand, product_shape, walkable
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.runtime.workspace import Take, workspaces
from multimm.gpu.strides import GemmSizes
from multimm.gpu.subproducts import of_a_stack

logger = logging.getLogger(__name__)

Array = Any
Options = dict[str, Any]
#: Real products, and what is made of their results.
Way = tuple[list[tuple[Array, Array, Options]], Callable[..., Array]]

COMPLEX = np.dtype("complex64")
FLOAT32 = np.dtype("float32")
#: Multiplications from which on a real times a complex matrix is one real product without tensor
#: cores, too: it takes half of the operations that cuBLAS does, and more launches. Arbitrary.
MIXED = 2**24


def takes(
    a: Array, b: Array, *, accumulate: str, dtype: str, precision: Precision, alpha: complex = 1,
    trans_a: bool = False, trans_b: bool = False,
) -> bool:  # fmt: skip
    """Whether `gemm` is the way to multiply two CuPy arrays.

    Parameters
    ----------
    a, b : cupy.ndarray
        At least one of complex64; or, beside complex scalars, both of floats that float32 holds.
    accumulate, dtype : str
        Of sums, and of the result.
    precision : {"float32", "ieee", "tf32"}
        That operands are packed for.
    alpha : scalar
    trans_a, trans_b : bool
    """
    if accumulate not in ("complex64", "float32") or alpha == 0 or min(a.ndim, b.ndim) < 2:
        return False
    complex_a, complex_b = a.dtype == COMPLEX, b.dtype == COMPLEX
    if not (complex_a or complex_b):
        floats = all(x.dtype.kind == "f" or x.dtype.name == "bfloat16" for x in (a, b))
        return floats and accumulate == "float32" and dtype.startswith("complex")
    shape = product_shape(a.shape, b.shape, trans_a, trans_b)
    m, n, k = shape.m, shape.n, shape.k
    if complex_a and complex_b:
        n, k = 2 * n, 2 * k
    elif complex_b:
        n = 2 * n
    else:
        m = 2 * m
    if (complex_a != complex_b) and not shape.batch and m * n * k >= 2 * MIXED:
        return True
    sizes = GemmSizes(m, n, k, batch=2 if shape.batch else 1)
    return choose_kernel(sizes, precision, device_of(a.device.id)).kernel == SPLIT


def gemm(
    a: Array,
    b: Array,
    *,
    precision: Precision = "float32",
    trans_a: bool = False,
    trans_b: bool = False,
    conj_a: bool = False,
    conj_b: bool = False,
    alpha: complex = 1,
    beta: complex = 0,
    c: Array = None,
    partial: Array = None,
    dtype: str = "complex64",
    lower: bool = False,
    out: Array = None,
) -> Array:
    """D = alpha * (op(A) @ op(B) + P) + beta * C of complex numbers, as products of real ones.

    Parameters
    ----------
    a : cupy.ndarray, shape (..., m, k), or (..., k, m) if `trans_a`
    b : cupy.ndarray, shape (..., k, n), or (..., n, k) if `trans_b`
        Of complex64, or of a dtype that float32 holds; any layout, never changed. Those whose rows
        or columns are contiguous are not copied before.
    precision
        As for `multimm.gpu.gemm`.
    conj_a, conj_b : bool
        op conjugates as well. Of a real operand it says nothing.
    alpha, beta : scalar
        alpha is not 0. Numbers that are not real are applied elementwise, after the product.
    c : cupy.ndarray, shape (..., m, n), optional
    partial : cupy.ndarray of complex64, or of float32 if both operands are real; optional
        Its stack may be broadcast, as C's.
    dtype : str
        Of the result: complex64, or wider for alpha, beta or C.
    lower : bool
        `a` is `b`, transposed on one side: all of D is computed from one triangle, and it is
        Hermitian bit by bit, or symmetric. Alpha is real then, and C is None.
    out : cupy.ndarray of `dtype`, shape (..., m, n), optional
        Written to and returned; rows contiguous, overlapping no operand.

    Returns
    -------
    cupy.ndarray of `dtype`, shape (..., m, n)
        On the device of `a`, in the order of the current stream.

    Raises
    ------
    ShapeError
        Operands that do not fit together.
    """
    conj = conj_a and a.dtype == COMPLEX, conj_b and b.dtype == COMPLEX
    flags = {"precision": precision, "trans_a": trans_a, "trans_b": trans_b, "lower": lower}
    epilogue = {"alpha": alpha, "beta": beta, "c": c, "partial": partial}
    try:
        return _gemm(a, b, conj, flags, epilogue, dtype, out)
    except MemoryError:  # of CuPy's pool, or RMM's
        if lower:
            raise
    logger.warning("no memory is left to write complex operands as real ones in: a product runs "
                   "with cuBLAS, slower and with other bits")  # fmt: skip
    made = library_gemm.gemm(
        a.conj() if conj[0] else a, b.conj() if conj[1] else b, **epilogue,
        trans_a=trans_a, trans_b=trans_b, dtype=dtype,
    )  # fmt: skip
    return made if out is None else _assigned(out, made)


def add_partials(
    parts: Sequence[Array], *, alpha: complex = 1, beta: complex = 0, c: Array = None,
    dtype: str = "complex64",
) -> Array:  # fmt: skip
    """alpha * (sum of the parts) + beta * C, added pairwise, as our kernel adds real numbers.

    Parameters
    ----------
    parts : sequence of cupy.ndarray
        At least one, equal in shape and dtype.
    alpha, beta : scalar
        With numbers that are not real, or other dtypes than complex64, a library adds.
    c : cupy.ndarray, optional
        Of the parts' shape.
    dtype : str
        Of the result.

    Returns
    -------
    cupy.ndarray of `dtype`
        New memory, in the order of the current stream.
    """
    given = [*parts] if c is None else [*parts, c]
    alike = dtype == "complex64" and all(x.dtype == COMPLEX for x in given)
    factor, share = _real(alpha), _real(0 if c is None else beta)
    if not alike or factor is None or share is None or parts[0].ndim < 2:
        return library_gemm.add_partials(parts, alpha=alpha, beta=beta, c=c, dtype=dtype)
    reals = [_as_reals(x) for x in given]
    added = reals.pop() if c is not None else None
    return reduce.add_partials(reals, alpha=factor, beta=share, c=added).view(COMPLEX)


def _gemm(
    a: Array, b: Array, conj: tuple[bool, bool], flags: Options, epilogue: Options, dtype: str,
    out: Array,
) -> Array:  # fmt: skip
    import cupy

    shape = product_shape(a.shape, b.shape, flags["trans_a"], flags["trans_b"])
    alpha, beta = _real(epilogue["alpha"]), _real(epilogue["beta"])
    reals = {**epilogue, "alpha": alpha, "beta": beta}
    pairs = b.dtype == COMPLEX or (a.dtype == COMPLEX and epilogue["c"] is None)
    with cupy.cuda.Device(a.device.id), workspaces(a.device.id) as take:
        if not pairs or alpha is None or beta is None or dtype != "complex64":
            sums = _sums(a, b, conj, flags, epilogue["partial"])
            last = {name: epilogue[name] for name in ("alpha", "beta", "c")}
            if last["c"] is not None:
                last["c"] = cupy.broadcast_to(last["c"], sums.shape)
            made = add_partials([sums], **last, dtype=dtype)
            return made if out is None else _assigned(out, made)
        if shape.batch:
            out = cupy.empty(shape.result, COMPLEX) if out is None else out
            return _one_by_one(a, b, conj, flags, reals, out)
        way = _of_itself if flags["lower"] else _by_complex if b.dtype == COMPLEX else _by_real
        products, finished = way(a, b, conj, flags, reals, out, take)
        return finished(*(
            product.gemm(left, right, precision=flags["precision"], **options)
            for left, right, options in products
        ))  # fmt: skip


def _sums(a: Array, b: Array, conj: tuple[bool, bool], flags: Options, partial: Array) -> Array:
    """op(A) @ op(B) + P alone."""
    if COMPLEX in (a.dtype, b.dtype):
        return gemm(a, b, partial=partial, conj_a=conj[0], conj_b=conj[1], **flags)
    return product.gemm(_float32(a), _float32(b), partial=partial, **flags)


def _assigned(out: Array, made: Array) -> Array:
    out[...] = made
    return out


def _real(scalar: complex) -> float | None:
    """A scalar as a real number, if it is one."""
    return scalar.real if scalar.imag == 0 else None


def _one_by_one(
    a: Array, b: Array, conj: tuple[bool, bool], flags: Options, epilogue: Options, out: Array
) -> Array:
    """The products of a stack, each of which keeps the whole GPU busy."""
    scalars = {name: epilogue[name] for name in ("alpha", "beta")}
    stacks = of_a_stack(out.shape[:-2], a, b, epilogue["c"], epilogue["partial"])
    for at, (x, y, c, partial) in stacks:
        gemm(x, y, c=c, partial=partial, out=out[at], conj_a=conj[0], conj_b=conj[1], **flags,
             **scalars)  # fmt: skip
    return out


def _by_complex(
    a: Array, b: Array, conj: tuple[bool, bool], flags: Options, epilogue: Options, out: Array,
    take: Take,
) -> Way:  # fmt: skip
    """Of a complex B: rows of the real product are pairs, as those of D are."""
    import cupy

    y, trans_b = _by_rows(b, flags["trans_b"])
    if a.dtype == COMPLEX:
        x, trans_a = _by_rows(a, flags["trans_a"])
        left = x.view(FLOAT32)
        if trans_a:
            left = _split(x, 1.0, take).reshape(2 * x.shape[0], x.shape[1])
        right = take((2 * y.shape[0], 2 * y.shape[1]))
        complex_parts.expand(y, right, complex_parts.signs(trans_b, *conj))
    else:
        left, trans_a = _float32(a), flags["trans_a"]
        if trans_b:
            right = _split(y, -1.0 if conj[1] else 1.0, take).reshape(2 * y.shape[0], y.shape[1])
        else:
            right = (cupy.conj(y) if conj[1] else y).view(FLOAT32)
    views = {name: _as_reals(epilogue[name]) for name in ("c", "partial")}
    options = {**epilogue, **views, "trans_a": trans_a, "trans_b": trans_b}
    options["out"] = None if out is None else out.view(FLOAT32)
    return [(left, right, options)], lambda made: made.view(COMPLEX) if out is None else out


def _by_real(
    a: Array, b: Array, conj: tuple[bool, bool], flags: Options, epilogue: Options, out: Array,
    take: Take,
) -> Way:  # fmt: skip
    """Of a complex A and a real B: rows of the real product are real parts, or imaginary ones."""
    import cupy

    x, trans = _by_rows(a, flags["trans_a"])
    k, m = x.shape if trans else x.shape[::-1]
    left = x.view(FLOAT32) if trans else _split(x, 1.0, take).reshape(2 * m, k)
    n = b.shape[-2] if flags["trans_b"] else b.shape[-1]
    rows = take((2 * m, n))

    def finished(_: Array) -> Array:
        made = cupy.empty((m, n), COMPLEX) if out is None else out
        sign, partial = -1.0 if conj[0] else 1.0, _with_rows(epilogue["partial"])
        complex_parts.join(rows, made, sign=sign, alpha=epilogue["alpha"], partial=partial)
        return made

    options = {"trans_a": trans, "trans_b": flags["trans_b"], "out": rows}
    return [(left, _float32(b), options)], finished


def _of_itself(
    a: Array, _: Array, conj: tuple[bool, bool], flags: Options, epilogue: Options, out: Array,
    take: Take,
) -> Way:  # fmt: skip
    """X^H X and the like, X' X and the like: one triangle, mirrored."""
    import cupy

    hermitian = conj[0] != conj[1]
    x, trans = _by_rows(a, flags["trans_a"])
    m = x.shape[1] if trans else x.shape[0]
    # In memory a row of real parts, then one of imaginary ones: two rows, or along k a long one.
    parts = _split(x, -1.0 if all(conj) else 1.0, take)
    turned = (2 * len(x), m) if trans else (m, 2 * x.shape[1])
    whole = other = parts.reshape(turned)
    if not hermitian:  # Xr' Xr - Xi' Xi
        other = _split(x, 1.0 if all(conj) else -1.0, take).reshape(turned)
    # In X^H X the imaginary part is Xr' Xi - Xi' Xr, in X X^H it is Xi Xr' - Xr Xi'.
    first, second = (parts[:, i] for i in ((1, 0) if conj[1] and hermitian else (0, 1)))
    re, s = take((m, m)), take((m, m))

    def finished(*_: Array) -> Array:
        made = cupy.empty((m, m), COMPLEX) if out is None else out
        sign, partial = -1.0 if hermitian else 1.0, _with_rows(epilogue["partial"])
        complex_parts.mirror(re, s, made, sign=sign, alpha=epilogue["alpha"], partial=partial)
        return made

    sides = {"trans_a": trans, "trans_b": not trans}
    products = [
        (whole, other, {**sides, "out": re, "lower": True}), (first, second, {**sides, "out": s})
    ]  # fmt: skip
    return products, finished


def _by_rows(x: Array, trans: bool = False) -> tuple[Array, bool]:
    """A matrix whose rows are contiguous and pairs, and whether it is the transpose of op(X)."""
    array, stack = walkable(operand(x))
    if stack.transposed:
        return _aligned(array.swapaxes(-1, -2)), not trans
    return _aligned(array), trans


def _with_rows(x: Array) -> Array:
    """C or P, if there is one, of complex64 and with contiguous rows of pairs."""
    if x is None:
        return None
    return _aligned(walkable(operand(x.astype(COMPLEX, copy=False)), by_rows=True)[0])


def _aligned(rows: Array) -> Array:
    """The same numbers, each of which begins where pairs do; a view of float32 may begin between.

    CuPy's own kernels would read pairs there, too, so they are copied as float32.
    """
    if rows.data.ptr % complex_parts.PAIR == 0:
        return rows
    return rows.view(FLOAT32).copy().view(COMPLEX)


def _as_reals(x: Array) -> Array:
    """C or P, m x n, as m x 2n real numbers."""
    return None if x is None else _with_rows(x).view(FLOAT32)


def _split(x: Array, sign: float, take: Take) -> Array:
    """Real parts of each row, and `sign` times the imaginary ones, shape (r, 2, c)."""
    parts = take((x.shape[0], 2, x.shape[1]))
    complex_parts.split(x, parts, sign)
    return parts


def _float32(x: Array) -> Array:
    return x.astype(FLOAT32, copy=False)
