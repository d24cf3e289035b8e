"""matmul, gemm, transpose and plan: what each promises, and the call of `multimm.products`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike

from multimm.contractions import labelled
from multimm.contractions.plans import ContractionPlan, plan_einsum, plan_tensordot
from multimm.errors import DTypeError, OptionError, ShapeError
from multimm.gpu.dtypes import requested, result_dtype
from multimm.gpu.emulated.packed import check_promise
from multimm.gpu.kernel_selection import Precision, check_precision
from multimm.gpu.problem import check_beta
from multimm.gpu.runtime import launch_cache
from multimm.graph.tasks import multiply
from multimm.operands import Array, Planned, Transposed, as_array, is_dask, plain_scalar
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.plan import MatmulPlan
from multimm.products import NOTHING_FIXED, Scalar, checked, options
from multimm.result_chunks import AUTO
from multimm.shapes import check_flags

if TYPE_CHECKING:
    from dask.array import Array as DaskArray
    from numpy.typing import ArrayLike, NDArray
    from xarray import DataArray

    from multimm.gpu.emulated.packed import PackedBlock
    from multimm.operands import AnyScalar, GpuArray, Lazy, OnGpu, Operand


@overload
def matmul(a: Lazy, b: Operand, **options: Unpack[Planned]) -> DaskArray: ...
@overload
def matmul(a: Operand, b: Lazy, **options: Unpack[Planned]) -> DaskArray: ...
@overload
def matmul(a: PackedBlock, b: PackedBlock, **options: Unpack[Planned]) -> Any: ...
@overload
def matmul(
    a: GpuArray | PackedBlock, b: GpuArray | PackedBlock, **options: Unpack[Planned]
) -> GpuArray: ...
@overload
def matmul(a: DataArray, b: DataArray, **options: Unpack[Planned]) -> DataArray: ...
@overload
def matmul(a: ArrayLike, b: ArrayLike, **options: Unpack[Planned]) -> NDArray[Any]: ...
def matmul(
    a: Array,
    b: Array,
    *,
    dtype: DTypeLike | None = None,
    precision: Precision = "float32",
    blocks: int | tuple[int, int] | None = None,
    slabs: int | None = None,
    p_k: int | None = None,
    chunks: Any = AUTO,
) -> Array:
    """The matrix product of two arrays, with the semantics of `numpy.matmul`.

    Parameters
    ----------
    a : array_like or dask.array.Array, shape (..., m, k) or (k,)
    b : array_like or dask.array.Array, shape (..., k, n) or (k,)
        Dense NumPy or CuPy arrays, or Dask arrays of such blocks, in any chunks. Both in host
        memory or both on a GPU; blocks in the host memory of GPU workers are multiplied on the
        GPUs. Dimensions before the last two are broadcast. In place of one or both of two CuPy
        matrices, what `multimm.gpu.pack` has made of it for this precision. Beside a Dask array
        nothing is read at the call: lists of Dask arrays are stacked lazily, and what can be
        sliced, such as an `h5py.Dataset` or a `zarr.Array`, is read block by block. NumPy arrays
        of more than 16 MiB, and those that map a file, are not copied either: leave them as they
        are until the product is computed. Without a Dask array all is computed at once. Two
        xarray.DataArrays are multiplied as xarray does it: over the dimensions that both have.
    dtype : dtype, optional
        Of the result and of its sums. Default: NumPy's for the operands' dtypes. Operands are cast
        by NumPy's rule "same_kind": integers to floats, but no float to an integer. bool, int8,
        uint8, int16 and uint16 are multiplied exactly, by whatever is fast for their numbers: an
        element that `dtype` holds is exact, one that a float or complex dtype does not hold is
        rounded once, and one that an integer dtype does not hold wraps around, as in NumPy.
        Nothing is converted before it is multiplied: int8 travels as int8. Integers of 32 and 64
        bits wrap around as NumPy's. Of two DataArrays it has to hold every value, as that of
        `einsum`.
    precision : {"float32", "ieee", "tf32", "float64"}
        What float32 products promise. ``"float32"``: no element is less accurate than an FP32
        dot product's bound; the fastest kernel that keeps it runs. ``"ieee"``: FP32 fused
        multiply-adds and nothing else. ``"tf32"``: significands of 11 bits, summed in FP32, on
        GPUs with kernels for it. Of complex64 products it is promised of the real and of the
        imaginary part. Other dtypes follow NumPy; float16 and bfloat16 are summed in float32.
        ``"float64"``, for results and sums of float64 and complex128 alone: no element is less
        accurate than an FP64 dot product's bound; the fastest kernel that keeps it runs. That is
        what such products promise at ``"float32"`` and ``"tf32"``, too. Large ones of float64 run
        on a Hopper GPU's INT8 tensor cores where the bound is proved for the operands; with
        ``"ieee"`` in FP64 alone.
    blocks : int or (int, int), optional
        Rows and columns of what one task makes of the result. Default: planned.
    slabs : int, optional
        Length of the ranges of k that one task multiplies. Default: planned.
    p_k : int, optional
        Parts of k that different workers sum side by side. Default: planned. With the same
        `blocks`, `slabs` and `p_k` the result has the same bits on any number of workers.
    chunks : {"auto", "operands"} or chunk sizes
        What a lazy result comes in. ``"auto"``: the blocks that tasks make, where these are
        regular, all equal but a smaller last one in each dimension; else regular chunks of them.
        ``"operands"``: the chunks of Dask's own product, rows as in `a` and columns as in `b`. Or
        anything that `dask.array.core.normalize_chunks` takes for the result's shape. Bits depend
        on the blocks, not on the chunks: these are cut out of blocks by the workers that have them,
        or joined. A result that is computed at once has none.

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray, shape (..., m, n)
        Of the operands' kind, and of their blocks' kind: lazy if one is a Dask array, else
        computed at once. Of two NumPy vectors a scalar. NumPy's result dtype, whatever the chunks.
        Of two DataArrays a DataArray, with the other dimensions and their coordinates.

    Raises
    ------
    ShapeError
        Shapes that do not fit, 0-d operands, unknown chunk sizes; from tasks, of a block that is
        not what its array's chunks say.
    DTypeError
        Dtypes without a matrix product, such as object and strings; a `dtype` that operands are not
        cast to; from tasks, of a block that its array's dtype cannot hold.
    ArrayTypeError
        Sparse or masked blocks and other subclasses of an ndarray, but for np.matrix, np.recarray
        and np.memmap, which are taken as the arrays that they are; CPU and GPU mixed, lazy objects
        that are no Dask array, Dask's array query planning; from tasks also, of a block that is
        None or such a subclass.
    OptionError
        Any of the options outside its range, ``precision="float64"`` of another dtype; a setting
        of Dask that a call reads, ``array.chunk-size`` or ``num_workers``, outside its range.
    MemoryBudgetError
        Dask arrays far beyond what all workers can hold, or Dask can schedule: 1000 times their
        memory, or 10 million tasks. What merely does not fit, `plan` says.

    Warns
    -----
    IntegerOverflowWarning
        Once, where sums of narrow integers can leave the dtype of the result: of int8 NumPy's is
        int8. Not if that `dtype` was asked for.

    Notes
    -----
    Lazy transposes and conjugates of Dask arrays, such as ``x.conj().T``, are not made: tasks
    multiply the blocks below them. Of ``x.T @ x`` and ``x.conj().T @ x`` one half is computed
    where that saves something, which the plan says, and the result is symmetric, or Hermitian, bit
    by bit.

    Examples
    --------
    >>> import dask.array as da, numpy as np, multimm
    >>> x = da.arange(6, chunks=2).reshape(2, 3)
    >>> multimm.matmul(x, x.T).compute()
    array([[ 5, 14],
           [14, 50]])
    """
    check_precision(precision)
    fixed = options(blocks, slabs, p_k)
    cut_by_caller = fixed is not NOTHING_FIXED or chunks is not AUTO
    plain = dtype is None and not cut_by_caller
    if plain and (done := launch_cache.product(a, b, precision)) is not None:
        return done  # two CuPy arrays of a kind that was multiplied before
    if labelled.both_labelled(a, b):
        return labelled.matmul(a, b, dtype=dtype, precision=precision, others=cut_by_caller)
    if check_promise(a, b, precision):
        return _packed_gemm(1, a, b, 0, None, False, False, precision, dtype)
    product = checked(
        a, b, stacks=True, precision=precision, options=fixed, chunks=chunks, dtype=dtype
    )
    return product.result()


@overload
def gemm(
    alpha: AnyScalar, a: Lazy, b: Operand, beta: AnyScalar = ..., c: Operand | None = ...,
    **options: Unpack[Transposed],
) -> DaskArray: ...  # fmt: skip
@overload
def gemm(
    alpha: AnyScalar, a: Operand, b: Lazy, beta: AnyScalar = ..., c: Operand | None = ...,
    **options: Unpack[Transposed],
) -> DaskArray: ...  # fmt: skip
@overload
def gemm(
    alpha: AnyScalar, a: Operand, b: Operand, beta: AnyScalar, c: Lazy,
    **options: Unpack[Transposed],
) -> DaskArray: ...  # fmt: skip
@overload
def gemm(
    alpha: AnyScalar, a: PackedBlock, b: PackedBlock, beta: AnyScalar = ..., c: OnGpu | None = ...,
    **options: Unpack[Transposed],
) -> Any: ...  # fmt: skip
@overload
def gemm(
    alpha: AnyScalar, a: GpuArray | PackedBlock, b: GpuArray | PackedBlock, beta: AnyScalar = ...,
    c: GpuArray | None = ...,
    **options: Unpack[Transposed],
) -> GpuArray: ...  # fmt: skip
@overload
def gemm(
    alpha: AnyScalar, a: ArrayLike, b: ArrayLike, beta: AnyScalar = ..., c: ArrayLike | None = ...,
    **options: Unpack[Transposed],
) -> NDArray[Any]: ...  # fmt: skip
def gemm(
    alpha: AnyScalar,
    a: Array,
    b: Array,
    beta: AnyScalar = 0,
    c: Array | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision = "float32",
    blocks: int | tuple[int, int] | None = None,
    slabs: int | None = None,
    p_k: int | None = None,
    chunks: Any = AUTO,
) -> Array:
    """alpha op(A) op(B) + beta C: BLAS xGEMM, out of place.

    Parameters
    ----------
    alpha, beta : scalar
        Numbers of any library, or arrays of 0 dimensions; fractions and decimals count as floats.
        They take the arrays' precision, like Python scalars in NumPy: 2 leaves integers integers,
        2.0 makes them float64. Those of bool are 0 and 1, which leave it bool, or floats. With
        ``alpha == 0`` A and B are not read, with ``beta == 0`` C is not.
    a : array, shape (m, k), or (k, m) with `trans_a`
    b : array, shape (k, n), or (n, k) with `trans_b`
    c : array, shape (m, n), optional
        NumPy, CuPy or Dask arrays, or packed operands, as for `matmul`.
    trans_a, trans_b : bool
        op(X) is the transpose of X; nothing is copied for it.
    dtype : dtype, optional
        As for `matmul`; `c` is cast likewise, and neither it nor alpha and beta may ask for more:
        0.5 with int32, say, would. Whole numbers count as floats where `dtype` is one.
    precision, blocks, slabs, p_k, chunks
        As for `matmul`; those of the operands are rows as in op(A) and columns as in op(B).

    Returns
    -------
    dask.array.Array, numpy.ndarray or cupy.ndarray, shape (m, n)
        Of NumPy's dtype for the expression, which depends on types alone: a `c` counts with
        ``beta == 0`` too. alpha, beta and C enter once, after the last k-tile.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError, MemoryBudgetError
        As for `matmul`; `OptionError` also for a `beta` without `c`, and for an integer scalar
        that its array's dtype cannot hold.

    Examples
    --------
    >>> import numpy as np, multimm
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> multimm.gemm(2, x, x, beta=-1, c=x, trans_a=True)
    array([[19., 26.],
           [25., 36.]])
    """
    check_precision(precision)
    check_flags(trans_a, trans_b)
    alpha, beta = plain_scalar(alpha), plain_scalar(beta)
    fixed = options(blocks, slabs, p_k)
    if check_promise(a, b, precision, trans_a, trans_b):
        return _packed_gemm(alpha, a, b, beta, c, trans_a, trans_b, precision, dtype)
    product = checked(
        a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b,
        stacks=False, precision=precision, options=fixed, chunks=chunks, dtype=dtype,
    )  # fmt: skip
    return product.result()


def _packed_gemm(
    alpha: Scalar, a: Array, b: Array, beta: Scalar, c: Array | None, trans_a: bool, trans_b: bool,
    precision: Precision, dtype: DTypeLike | None,
) -> Array:  # fmt: skip
    """As gemm, with an operand that was packed before."""
    if dtype is not None and requested(dtype) != np.float32:
        raise DTypeError(f"dtype={dtype}: products of packed operands are float32; pass the arrays")
    if isinstance(alpha, complex) or isinstance(beta, complex):
        raise OptionError(f"alpha={alpha} and beta={beta}: with a packed operand they must be real")
    check_beta(beta, c)
    step = multiply.Step("float32", "float32", trans_a, trans_b, alpha, beta, precision)
    return multiply.gemm(a, b, c=c if beta != 0 else None, step=step)


@overload
def transpose(a: Lazy) -> DaskArray: ...
@overload
def transpose(a: GpuArray) -> GpuArray: ...
@overload
def transpose(a: ArrayLike) -> NDArray[Any]: ...
def transpose(a: Array) -> Array:
    """The matrix transpose: the last two axes swapped, in C order.

    Parameters
    ----------
    a : array, shape (..., m, n)
        NumPy, CuPy or Dask array of any dtype that a matrix can have.

    Returns
    -------
    array of the same kind, shape (..., n, m)
        Lazy for a Dask array. Its blocks are C-contiguous copies, where `a.T` of the same
        array is a view.

    Raises
    ------
    ShapeError
        Fewer than 2 dimensions, or unknown chunk sizes.
    DTypeError
        Dtypes that no matrix product has, such as strings.
    ArrayTypeError
        Sparse or masked blocks, Dask's array query planning.

    Examples
    --------
    >>> import dask.array as da, multimm
    >>> multimm.transpose(da.ones((2, 3, 4), chunks=2)).shape
    (2, 4, 3)
    """
    a = as_array(a, "a")
    if a.ndim < 2:
        raise ShapeError(
            f"transpose takes at least 2 dimensions, got shape {a.shape}: a[None] is a row"
        )
    result_dtype(a.dtype, a.dtype)
    if not is_dask(a):
        return multiply.swap_axes(a)
    before = tuple(range(a.ndim))
    after = (*before[:-2], before[-1], before[-2])
    meta = np.empty_like(a._meta, shape=(0,) * a.ndim)
    return da.blockwise(multiply.transpose, after, a, before, dtype=a.dtype, meta=meta)


@overload
def plan(
    a: str,
    b: Array | MatrixSpec,
    *more: Array | MatrixSpec,
    dtype: DTypeLike | None = ...,
    optimize: Any = ...,
    precision: Precision = ...,
    cluster: ClusterSpec | None = ...,
) -> ContractionPlan: ...


@overload
def plan(
    a: Array | MatrixSpec,
    b: Array | MatrixSpec,
    *,
    axes: Any,
    precision: Precision = ...,
    cluster: ClusterSpec | None = ...,
) -> ContractionPlan: ...


@overload
def plan(
    a: Array | MatrixSpec,
    b: Array | MatrixSpec,
    *,
    alpha: AnyScalar = ...,
    beta: AnyScalar = ...,
    c: Array | MatrixSpec | None = ...,
    trans_a: bool = ...,
    trans_b: bool = ...,
    dtype: DTypeLike | None = ...,
    precision: Precision = ...,
    blocks: int | tuple[int, int] | None = ...,
    slabs: int | None = ...,
    p_k: int | None = ...,
    chunks: Any = ...,
    cluster: ClusterSpec | None = ...,
) -> MatmulPlan: ...


def plan(
    a: Any,
    b: Any,
    *more: Any,
    axes: Any = None,
    optimize: Any = True,
    alpha: AnyScalar = 1,
    beta: AnyScalar = 0,
    c: Array | MatrixSpec | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision = "float32",
    blocks: int | tuple[int, int] | None = None,
    slabs: int | None = None,
    p_k: int | None = None,
    chunks: Any = AUTO,
    cluster: ClusterSpec | None = None,
) -> MatmulPlan | ContractionPlan:
    """What `matmul` or `gemm` would do: ``print(plan(a, b))`` is the dry run.

    ``plan("txy,tuv->xyuv", a, b)`` is that of `einsum`, ``plan(a, b, axes=2)`` that of `tensordot`.

    Parameters
    ----------
    a, b : array or MatrixSpec
        Operands, or their shapes, dtypes and chunks alone. Where one operand is a Dask array,
        NumPy and CuPy arrays are planned in the blocks that `matmul` cuts them into. Without one
        `matmul` plans nothing: it computes at once, in this process. A vector counts as a row on
        the left, and as a column on the right.
    *more : array or MatrixSpec
        Further operands of `einsum`, whose subscripts, a string, are before all.
    axes, optimize
        As for `tensordot` and `einsum`. Of all else, both take `precision` and `cluster` alone, and
        `einsum` takes `dtype`.
    alpha, beta, c, trans_a, trans_b, dtype, precision, blocks, slabs, p_k, chunks
        As for `gemm`: scalars and C decide the result's dtype, and C takes memory and travels
        where it is read. `c` may be a MatrixSpec.
    cluster : ClusterSpec, optional
        Workers to plan for. Default: those of the current Dask client, or this process.

    Returns
    -------
    MatmulPlan
        Grid, strategy and reason, blocks, bytes moved against the two-dimensional bound, peak
        bytes per worker, predicted seconds. ``plan.check()`` raises `MemoryBudgetError`.
    ContractionPlan
        Of `einsum` and `tensordot`: its ``steps``, each with the MatmulPlan of its product, or None
        of what is no product of matrices; ``seconds``, ``bytes_moved`` and ``tasks`` of all.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError, MemoryBudgetError
        Shapes, dtypes, kinds of arrays, options and sizes that `gemm` refuses.

    Examples
    --------
    >>> from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
    >>> square = MatrixSpec((524288, 524288))
    >>> plan(square, square, cluster=ClusterSpec.homogeneous(H200, 1024)).grid.workers
    1024
    >>> field = MatrixSpec((4000, 160, 320))
    >>> [step.subscripts for step in plan("txy,tuv->xyuv", field, field).steps]
    ['txy,tuv->xyuv']
    """
    check_flags(trans_a, trans_b)
    alpha, beta = plain_scalar(alpha), plain_scalar(beta)
    if isinstance(a, str) or axes is not None or more:
        _check_no_matrices(
            alpha=alpha != 1, beta=beta != 0, c=c is not None, trans_a=trans_a, trans_b=trans_b,
            blocks=blocks is not None, slabs=slabs is not None, p_k=p_k is not None,
            chunks=chunks is not AUTO,
        )  # fmt: skip
        if axes is None:
            return plan_einsum(
                [a, b, *more], dtype=dtype, optimize=optimize, precision=precision, cluster=cluster
            )
        _check_no_matrices(dtype=dtype is not None, more=bool(more))
        return plan_tensordot(a, b, axes, precision=precision, cluster=cluster)
    check_precision(precision)
    fixed = options(blocks, slabs, p_k)
    as_gemm = trans_a or trans_b or alpha != 1 or c is not None
    product = checked(
        a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b,
        stacks=not as_gemm, precision=precision, options=fixed, chunks=chunks, dtype=dtype,
    )  # fmt: skip
    return product.plan(cluster)


def _check_no_matrices(**given: bool) -> None:
    """Refuse options that say how matrices are cut or added, of which einsum has none."""
    if wrong := [name for name, there in given.items() if there]:
        raise OptionError(
            f"plan of einsum or tensordot with {', '.join(wrong)}: give subscripts and operands, "
            "or two and axes=, with precision=, cluster= and, of einsum, dtype= and optimize="
        )
