"""What the callers of `matmul` and `gemm` may pass: checked here, before anything is planned.

Knows NumPy, Dask arrays and, by name only, CuPy; knows no plans and no kernels.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NoReturn,
    Protocol,
    SupportsComplex,
    SupportsFloat,
    TypeAlias,
    TypedDict,
    TypeVar,
)

import dask
import dask.array as da
import numpy as np
from dask.base import is_dask_collection

from multimm import sources
from multimm.blocks import dense_form, is_dense, is_sparse, plain
from multimm.errors import (
    ArrayTypeError,
    ClusterError,
    OptionError,
    ShapeError,
    kind_of,
    one_line,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

    from multimm.gpu.kernel_selection import Precision

    #: Of which the result is lazy: a Dask array, or nested lists that hold one.
    Lazy: TypeAlias = da.Array | Sequence[da.Array] | Sequence[Sequence[da.Array]]
    Operand: TypeAlias = Lazy | ArrayLike
    #: A scalar of any library, or an array of 0 dimensions.
    AnyScalar: TypeAlias = complex | SupportsComplex | SupportsFloat

Array = Any  #: numpy.ndarray, cupy.ndarray or dask.array.Array


class OnGpu(Protocol):
    """A CuPy array, told by what it offers: CuPy may not be installed."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


#: A kind of array on a GPU: what goes in comes out.
GpuArray = TypeVar("GpuArray", bound=OnGpu)


class Promised(TypedDict, total=False):
    """Options of every product."""

    precision: Precision


class Contracted(Promised, total=False):
    """Options of `multimm.einsum`."""

    dtype: DTypeLike | None
    optimize: Any


class Planned(Promised, total=False):
    """Options of products of matrices."""

    dtype: DTypeLike | None
    blocks: int | tuple[int, int] | None
    slabs: int | None
    p_k: int | None
    chunks: Any


class Transposed(Planned, total=False):
    """Options of `multimm.gemm`."""

    trans_a: bool
    trans_b: bool


def as_array(x: Any, name: str, *, lazily: bool = False) -> Array:
    """The operand as a NumPy, CuPy or Dask array; anything else array-like becomes NumPy's.

    Lists and tuples that hold Dask arrays become a Dask array of them. `lazily`, so do what can be
    sliced and lists of it: nothing of it is read. Otherwise NumPy reads it, as in `numpy.matmul`.
    """
    if type(x) is np.ndarray:
        return x
    if is_dask(x):
        return _checked_dask(x, name)
    if isinstance(x, sources.NESTED):
        return _of_list(x, name, lazily)
    _check_kind(x, name)
    if isinstance(x, np.ndarray) or _library(x) == "cupy":
        return plain(x)
    if lazily and sources.is_source(x):
        return sources.lazily(x)
    made = _converted(x, name)
    if made.dtype.kind in "biufc" or hasattr(x, "__array__"):
        return made
    raise ArrayTypeError(f"{name} is a {kind_of(x)}: pass a NumPy, CuPy or Dask array")


def arrays(**given: Any) -> dict[str, Array]:
    """Operands of one call as arrays, by name: beside a Dask array nothing is read or computed."""
    if {*map(type, given.values())} == {np.ndarray}:
        return given  # soon, for a small product takes no longer than its checks
    lazily = any(map(is_lazy, given.values()))
    return {name: as_array(x, name, lazily=lazily) for name, x in given.items()}


def is_lazy(x: Any) -> bool:
    """Whether it is a Dask array, or nested lists that hold one."""
    return is_dask(x) or (isinstance(x, sources.NESTED) and any(map(is_dask, sources.elements(x))))


def _of_list(x: Any, name: str, lazily: bool) -> Array:
    """Nested lists as an array: a Dask array if they hold one, and of sources if `lazily`."""
    kinds = {type(item): item for item in sources.elements(x)}
    for item in kinds.values():
        if not is_dask(item):
            _check_kind(item, f"an element of {name}")
    held = any(map(is_dask, kinds.values()))
    if not (held or (lazily and any(map(sources.is_source, kinds.values())))):
        return _converted(x, name)

    def part(item: Any) -> Any:
        return as_dask(as_array(item, f"an element of {name}", lazily=True))

    try:
        return sources.stacked(x, part)
    except ValueError as error:
        if isinstance(error, ShapeError):
            raise
        raise ShapeError(
            f"{name} is a list of arrays that do not stack ({error}): make one Dask array of them, "
            "with dask.array.stack or dask.array.block"
        ) from None


def _check_kind(x: Any, name: str) -> None:
    """Raise `ArrayTypeError` for what is no dense array, and what NumPy would make another of."""
    if isinstance(x, np.ndarray) or _library(x) == "cupy" or is_sparse(x):
        _plain(x, name)
    elif _library(x) == "dask" and not hasattr(x, "__array__"):
        raise ArrayTypeError(
            f"{name} is a {kind_of(x)}, lazy but no Dask array: make one of it, with "
            "dask.array.from_delayed(value, shape, dtype) of a delayed value"
        )
    elif is_dask_collection(x):
        # NumPy would compute it here, in this process's memory.
        raise ArrayTypeError(
            f"{name} is a {kind_of(x)}, lazy but no Dask array: pass "
            "the one in it, x.data of an xarray.DataArray or x.to_dask_array(lengths=True) of a "
            "Dask DataFrame"
        )
    elif hasattr(type(x), "__array_function__"):  # pint's, say
        raise ArrayTypeError(
            f"{name} is a {kind_of(x)}, which computes by rules of its own: if an ndarray's "
            f"arithmetic is meant, pass the array in it, or numpy.asarray({name})"
        )


def _converted(x: Any, name: str) -> Array:
    try:
        made = np.asanyarray(x)
    except ValueError as error:
        raise ShapeError(f"{name} is no array: {error}") from None
    except (TypeError, RuntimeError) as error:  # a Dataset of xarray, say, or a tensor of PyTorch
        raise ArrayTypeError(
            f"{name} is a {kind_of(x)}, of which NumPy makes no array ({one_line(error)}): pass a "
            "NumPy, CuPy or Dask array"
        ) from error
    if isinstance(made, np.ma.MaskedArray) and not np.ma.is_masked(made):
        made = made.data  # of netCDF4, whether elements are missing or not
    return _plain(made, name)


def is_dask(x: Any) -> bool:
    """Whether `x` is a Dask array, of either of Dask's two kinds."""
    return _is_dask_type(type(x))  # type: ignore[arg-type]  # types are hashable


@functools.cache  # asked several times in each call
def _is_dask_type(kind: type) -> bool:
    return issubclass(kind, da.Array) or (
        kind.__module__.startswith("dask.array") and hasattr(kind, "__dask_graph__")
    )


def check_query_planning(name: str) -> None:
    """Raise `ArrayTypeError` if Dask makes arrays of its other kind, which have no such graphs."""
    if dask.config.get("array.query-planning", False):
        _refuse_query_planning(name)


def _refuse_query_planning(name: str) -> NoReturn:
    raise ArrayTypeError(
        f"{name} belongs to Dask's array query planning, which multimm does not support: "
        "set `array.query-planning` to False (DASK_ARRAY__QUERY_PLANNING=False) before "
        "importing dask.array"
    )


def _checked_dask(x: Any, name: str) -> Any:
    if not hasattr(x, "dask"):
        _refuse_query_planning(name)
    check_query_planning(name)
    if any(math.isnan(size) for chunks in x.chunks for size in chunks):
        raise ShapeError(
            f"{name} has unknown chunk sizes {x.chunks}: call {name}.compute_chunk_sizes() first"
        )
    meta = plain(x._meta, f"a block of {name}", f"pass {dense_form(x._meta, name, lazy=True)}")
    # Empty chunks beside the one that is broadcast would be, too, by Dask.
    alone = {axis: 1 for axis, n in enumerate(x.numblocks) if n > 1 and x.shape[axis] == 1}
    x = x.rechunk(alone) if alone else x
    if is_dense(x._meta):
        return x
    return da.Array(x.dask, x.name, x.chunks, meta=meta)  # tasks convert the blocks


def _plain(x: Any, name: str) -> Array:
    """The dense array that an operand is; `ArrayTypeError` says what to pass instead."""
    return x if is_dense(x) else plain(x, name, f"pass {dense_form(x, name)}")


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def on_gpu(x: Array) -> bool:
    """Whether the array, or a Dask array's blocks, live on a GPU."""
    return _library(x._meta if is_dask(x) else x) == "cupy"


def check_same_device(**operands: Array | None) -> None:
    """Raise `ArrayTypeError` if some operands are on the CPU and some on a GPU."""
    given = {name: on_gpu(x) for name, x in operands.items() if x is not None}
    if len(set(given.values())) > 1:
        where = ", ".join(f"{name} on the {'GPU' if gpu else 'CPU'}" for name, gpu in given.items())
        raise ArrayTypeError(
            f"operands on different devices: {where}; move one, with cupy.asarray / cupy.asnumpy "
            "or x.map_blocks(...) of them for a Dask array"
        )


def as_dask(x: Array) -> Any:
    """A Dask array of the operand; see `multimm.sources` for blocks of an array in memory."""
    return x if is_dask(x) else sources.in_memory(x)


def plain_scalar(scalar: Any) -> complex:
    """A Python scalar, so that it never raises the arrays' precision."""
    value = as_number(scalar)
    if not isinstance(value, int | float | complex):
        shape = getattr(scalar, "shape", ())
        sized = isinstance(shape, tuple) and shape  # of what is lazy, it may be anything
        given = f"of shape {shape}" if sized else repr(scalar)
        raise OptionError(
            f"alpha and beta are numbers, got {type(scalar).__name__} {given}: give one that "
            "float() or complex() takes, or a NumPy or CuPy array of 0 dimensions"
        )
    return value


def as_number(scalar: Any) -> Any:
    """A number of any library as Python's int, float or complex; anything else as it is.

    Also the one in an array of 0 dimensions. A CuPy array is waited for.
    """
    if type(scalar) in (bool, int, float, complex):
        return scalar
    value = scalar
    if isinstance(value, np.generic) or (is_dense(value) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, numbers.Number) or isinstance(value, bool):
        return value
    try:
        if isinstance(value, numbers.Integral):
            return int(value)
        # Fractions are real, decimals no more than numbers; long doubles have no Python type.
        real = isinstance(value, numbers.Real) or not isinstance(value, numbers.Complex)
        return float(value) if real else complex(value)  # type: ignore[arg-type, call-overload]
    except (TypeError, ValueError, OverflowError):
        return scalar


def check_waits(name: str, call: str) -> None:
    """Raise `ClusterError` in the event loop of the client that would compute: nothing may wait.

    `name` is who would wait there; `call` is what `asyncio.to_thread` is to be given in its place.
    """
    client = current_client()
    if client is not None and client.asynchronous:
        raise ClusterError(
            f"{name} waits for what it computes, which an asynchronous client in its event loop "
            f"cannot: run `await asyncio.to_thread({call})`, or use a synchronous client"
        )


def current_client() -> Any:
    """The distributed client that Dask would compute with, or None; see `multimm._forked`."""
    if "distributed" not in sys.modules:
        return None
    from distributed import Client

    client = scheduler = dask.config.get("scheduler", None)
    if not isinstance(scheduler, Client):
        if str(scheduler or "distributed").lower() not in ("distributed", "dask.distributed"):
            return None
        try:
            client = Client.current()
        except ValueError:
            return None
    return None if getattr(client, "of_parent_process", False) else client
