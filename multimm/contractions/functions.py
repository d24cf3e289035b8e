"""einsum, tensordot, inner, vecdot, outer: what each promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import dask.array as da
import numpy as np

from multimm.contractions.einsum_chunks import Rule, limited_chunks
from multimm.contractions.steps import Contraction, contraction
from multimm.contractions.subscripts import of_einsum, of_lists, of_tensordot
from multimm.errors import DTypeError, OptionError, ShapeError, integer
from multimm.gpu.dtypes import requested, result_dtype
from multimm.gpu.kernel_selection import Precision, check_precision
from multimm.operands import Array, Contracted, arrays, as_dask, check_same_device, is_dask

if TYPE_CHECKING:
    from dask.array import Array as DaskArray
    from numpy.typing import ArrayLike, NDArray

    from multimm.operands import GpuArray, Lazy, Operand


@overload
def einsum(
    subscripts: str, a: Lazy, /, *more: Operand, **options: Unpack[Contracted]
) -> DaskArray: ...
@overload
def einsum(
    subscripts: str, a: Operand, b: Lazy, /, *more: Operand, **options: Unpack[Contracted]
) -> DaskArray: ...
@overload
def einsum(
    subscripts: str,
    a: Operand,
    b: Operand,
    c: Lazy,
    /,
    *more: Operand,
    **options: Unpack[Contracted],
) -> DaskArray: ...
@overload
def einsum(
    subscripts: str, a: GpuArray, /, *more: GpuArray, **options: Unpack[Contracted]
) -> GpuArray: ...
@overload
def einsum(
    subscripts: str,
    a: ArrayLike,
    b: ArrayLike = ...,
    c: ArrayLike = ...,
    /,
    **options: Unpack[Contracted],
) -> NDArray[Any]: ...
@overload
def einsum(*operands: Any, **options: Unpack[Contracted]) -> Any: ...
def einsum(
    *operands: Any, dtype: Any = None, optimize: Any = True, precision: Precision = "float32"
) -> Array:
    """Sums of products over any axes, with the semantics of `numpy.einsum`.

    Axes that two operands share and the result has not are summed over by products of matrices,
    as in `matmul`; axes that all three have make stacks of them. Nothing is moved to bring axes
    into that order: blocks are reshaped where they lie. Axes of one operand alone are summed over
    first. Three and more operands are taken two at a time, in the order that opt_einsum finds; of
    orders of up to four that take as few operations, in the one that sums axes in one block first.
    What is no product of matrices, such as a diagonal or an outer product, is Dask's.

    Parameters
    ----------
    *operands : str and arrays, or arrays each followed by its list of axes
        Subscripts, such as ``"ijk,kl->ijl"``, and an array for each. Or ``a, [0, 1], b, [1, 2]``,
        and a list for the result. NumPy, CuPy and Dask arrays, and what `matmul` takes besides; if
        one is a Dask array nothing is read or computed at the call.
    dtype : dtype, optional
        Of the result and of its sums, which has to hold every value of the operands. Default:
        NumPy's for them. Narrow integers travel as they are and are exact, as with the `dtype` of
        `matmul`.
    optimize : bool, str or sequence
        The order for three and more operands: True or False for a good one, a name of
        opt_einsum's, such as ``"greedy"`` or ``"optimal"``, or a path, as `numpy.einsum_path`
        and `opt_einsum.contract_path` return it.
    precision : {"float32", "ieee", "tf32", "float64"}
        As for `matmul`.

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray
        Of the operands' kind: lazy if one is a Dask array. Each axis has its operand's chunks, cut
        where blocks would be larger than Dask's ``array.chunk-size``, or than eight times that on
        GPUs and where the operands' are as large. Sums that are no product of matrices have Dask's.

    Raises
    ------
    OptionError
        Subscripts, lists or paths that NumPy refuses.
    ShapeError
        Shapes that do not fit them; unknown chunk sizes.
    DTypeError, ArrayTypeError, MemoryBudgetError
        As for `matmul`; `DTypeError` also for a `dtype` that cannot hold every value of an operand.

    Examples
    --------
    >>> import dask.array as da, multimm
    >>> x = da.arange(24, chunks=6).reshape(2, 3, 4)
    >>> multimm.einsum("tij,tkj->ik", x, x).compute()
    array([[ 748,  988, 1228],
           [ 988, 1356, 1724],
           [1228, 1724, 2220]])
    """
    check_precision(precision)
    return _scalar(einsum_steps(operands, dtype, optimize).result(precision))


@overload
def tensordot(a: Lazy, b: Operand, axes: Any = ..., *, precision: Precision = ...) -> DaskArray: ...
@overload
def tensordot(a: Operand, b: Lazy, axes: Any = ..., *, precision: Precision = ...) -> DaskArray: ...
@overload
def tensordot(
    a: GpuArray, b: GpuArray, axes: Any = ..., *, precision: Precision = ...
) -> GpuArray: ...
@overload
def tensordot(
    a: ArrayLike, b: ArrayLike, axes: Any = ..., *, precision: Precision = ...
) -> NDArray[Any]: ...
def tensordot(a: Any, b: Any, axes: Any = 2, *, precision: Precision = "float32") -> Array:
    """The sum of products over axes of two arrays, with the semantics of `numpy.tensordot`.

    Parameters
    ----------
    a, b : array_like or dask.array.Array
        As for `einsum`.
    axes : int or two sequences of int
        How many of the last axes of `a` and of the first of `b`, or which axes of each.
    precision : {"float32", "ieee", "tf32", "float64"}
        As for `matmul`.

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray
        The other axes of `a`, then those of `b`, in their order and in the chunks that `einsum`
        gives them.

    Raises
    ------
    OptionError
        Axes that are not there, or twice the same.
    ShapeError
        Axes of different lengths; unknown chunk sizes.
    DTypeError, ArrayTypeError, MemoryBudgetError
        As for `matmul`.

    Examples
    --------
    >>> import dask.array as da, multimm
    >>> x = da.ones((4, 3, 2), chunks=2)
    >>> multimm.tensordot(x, x, axes=((0, 1), (0, 1))).compute()
    array([[12., 12.],
           [12., 12.]])
    """
    check_precision(precision)
    return tensordot_steps(a, b, axes).result(precision)


@overload
def inner(a: Lazy, b: Operand, *, precision: Precision = ...) -> DaskArray: ...
@overload
def inner(a: Operand, b: Lazy, *, precision: Precision = ...) -> DaskArray: ...
@overload
def inner(a: GpuArray, b: GpuArray, *, precision: Precision = ...) -> GpuArray: ...
@overload
def inner(a: ArrayLike, b: ArrayLike, *, precision: Precision = ...) -> NDArray[Any]: ...
def inner(a: Any, b: Any, *, precision: Precision = "float32") -> Array:
    """The sum of products over the last axes of both, with the semantics of `numpy.inner`.

    Parameters
    ----------
    a : array_like or dask.array.Array, shape (..., k)
    b : array_like or dask.array.Array, shape (..., k)
        As for `einsum`. If one has no dimensions, the two are multiplied.
    precision : {"float32", "ieee", "tf32", "float64"}
        As for `matmul`.

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray
        The other axes of `a`, then those of `b`.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, MemoryBudgetError
        As for `tensordot`.

    Examples
    --------
    >>> import numpy as np, multimm
    >>> multimm.inner(np.eye(2), np.array([1.0, 2.0]))
    array([1., 2.])
    """
    check_precision(precision)
    return _scalar(inner_steps(a, b).result(precision))


@overload
def vecdot(a: Lazy, b: Operand, *, axis: int = ..., precision: Precision = ...) -> DaskArray: ...
@overload
def vecdot(a: Operand, b: Lazy, *, axis: int = ..., precision: Precision = ...) -> DaskArray: ...
@overload
def vecdot(
    a: GpuArray, b: GpuArray, *, axis: int = ..., precision: Precision = ...
) -> GpuArray: ...
@overload
def vecdot(
    a: ArrayLike, b: ArrayLike, *, axis: int = ..., precision: Precision = ...
) -> NDArray[Any]: ...
def vecdot(a: Any, b: Any, *, axis: int = -1, precision: Precision = "float32") -> Array:
    """Products of vectors, the first one conjugated, with the semantics of `numpy.vecdot`.

    Parameters
    ----------
    a, b : array_like or dask.array.Array, shapes (..., k) that broadcast
        As for `einsum`.
    axis : int
        Of both, along which the vectors lie.
    precision : {"float32", "ieee", "tf32", "float64"}
        As for `matmul`.

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray, shape (...)

    Raises
    ------
    OptionError
        An axis that is not there.
    ShapeError
        Vectors of different lengths, stacks that do not broadcast; unknown chunk sizes.
    DTypeError, ArrayTypeError, MemoryBudgetError
        As for `matmul`.

    Examples
    --------
    >>> import numpy as np, multimm
    >>> multimm.vecdot(np.array([[1j, 2], [3, 4]]), np.array([1, 1]))
    array([2.-1.j, 7.+0.j])
    """
    check_precision(precision)
    return _scalar(vecdot_steps(a, b, axis).result(precision))


@overload
def outer(a: Lazy, b: Operand) -> DaskArray: ...
@overload
def outer(a: Operand, b: Lazy) -> DaskArray: ...
@overload
def outer(a: GpuArray, b: GpuArray) -> GpuArray: ...
@overload
def outer(a: ArrayLike, b: ArrayLike) -> NDArray[Any]: ...
def outer(a: Any, b: Any) -> Array:
    """Products of all elements of two arrays, with the semantics of `numpy.outer`.

    Parameters
    ----------
    a, b : array_like or dask.array.Array
        As for `einsum`. They count as vectors: all elements in C order.

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray, shape (a.size, b.size)
        In the chunks that `einsum` gives it.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        As for `matmul`.

    Examples
    --------
    >>> import numpy as np, multimm
    >>> multimm.outer(np.arange(2), np.arange(3))
    array([[0, 0, 0],
           [0, 1, 2]])
    """
    vectors = [_vector(x) for x in of_one_kind([a, b])]
    found = of_einsum("i,j->ij", [x.shape for x in vectors])
    return contraction(found, vectors).result("float32")


def _scalar(x: Array) -> Array:
    """NumPy's scalar of an array of 0 dimensions; CuPy and Dask have none."""
    return x if is_dask(x) or x.ndim else x[()]


def _vector(x: Array) -> Array:
    if not is_dask(x):
        return x.reshape(-1)
    # Dask cannot reshape what is empty, and no empty blocks.
    kept = tuple(tuple(filter(None, own)) for own in x.chunks)
    return x.rechunk(kept).reshape(-1) if x.size else np.empty_like(x, shape=(0,))


def einsum_steps(
    operands: Sequence[Any],
    dtype: Any = None,
    optimize: Any = True,
    rule: Rule = limited_chunks,
) -> Contraction:
    """What `einsum` does, before it does it."""
    if not operands:
        raise OptionError("einsum without operands: give subscripts and arrays")
    if isinstance(operands[0], str):
        given = of_one_kind(operands[1:])
        found = of_einsum(operands[0], [x.shape for x in given])
    else:
        lists = [*operands[1::2]]
        out = operands[-1] if len(operands) % 2 else None
        given = of_one_kind(operands[: 2 * len(lists) : 2])
        found = of_lists(lists, out, [x.shape for x in given])
    wanted = None if dtype is None else _castable(given, dtype)
    return contraction(found, given, optimize, rule=rule, dtype=wanted)


def tensordot_steps(a: Any, b: Any, axes: Any = 2, rule: Rule = limited_chunks) -> Contraction:
    """What `tensordot` does, before it does it."""
    given = of_one_kind([a, b])
    found = of_tensordot(axes, given[0].shape, given[1].shape)
    return contraction(found, given, rule=rule)


def inner_steps(a: Any, b: Any) -> Contraction:
    """What `inner` does, before it does it."""
    a, b = of_one_kind([a, b])
    if not (a.ndim and b.ndim):
        return tensordot_steps(a, b, 0)
    if a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"inner of shapes {a.shape} and {b.shape}: last axes must be of one size")
    return tensordot_steps(a, b, (-1, -1))


def vecdot_steps(a: Any, b: Any, axis: Any = -1) -> Contraction:
    """What `vecdot` does, before it does it."""
    left, right = of_one_kind([a, b])
    call = f"vecdot of shapes {left.shape} and {right.shape}"
    if not (left.ndim and right.ndim):
        raise ShapeError(f"{call}: operands need at least 1 dimension; multiply by a scalar with *")
    number = integer(axis)
    if number is None or any(not -x.ndim <= number < x.ndim for x in (left, right)):
        raise OptionError(f"{call} along axis={axis!r}: give an axis that both have")
    if left.shape[number] != right.shape[number]:
        raise ShapeError(f"{call} along axis {axis}: vectors must be of one length")
    left = left.conj() if left.dtype.kind == "c" else left
    x, y = (np.moveaxis(x, number, -1) for x in (left, right))
    found = of_einsum("...z,...z->...", [x.shape, y.shape])
    return contraction(found, [x, y])


def of_one_kind(operands: Sequence[Any]) -> list[Array]:
    """Operands as arrays of one kind, which can be multiplied."""
    if not operands:
        raise OptionError("einsum with subscripts alone: give an array for each operand")
    found = arrays(**{f"operand {n}": x for n, x in enumerate(operands)})
    lazy = any(map(is_dask, found.values()))
    if lazy or len({*map(type, found.values())}) > 1:
        check_same_device(**found)
    given = [_empty_at_once(as_dask(x)) if lazy else x for x in found.values()]
    for x in given:
        result_dtype(x.dtype, given[0].dtype)
    return given


def _empty_at_once(x: da.Array) -> da.Array:
    """Axes of length 0 in one chunk each: operands that cut them otherwise have none in common."""
    chunks = tuple(own if size else (0,) for own, size in zip(x.chunks, x.shape, strict=True))
    return x if chunks == x.chunks else da.empty_like(x, chunks=chunks)


def _castable(given: list[Array], dtype: Any) -> np.dtype[Any]:
    """The dtype that was asked for; NumPy takes one that holds every value of each operand."""
    wanted = requested(dtype)
    for x in given:
        if not np.can_cast(x.dtype, wanted, "safe"):
            raise DTypeError(
                f"einsum with dtype={wanted} of an operand of {x.dtype}: not every value can be "
                "cast; give a dtype that holds all of them, or cast it before with astype"
            )
    return wanted


__all__ = ["einsum", "inner", "outer", "tensordot", "vecdot"]
