"""The operands of a check as Dask arrays of matrices that fit together, or a clear refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from multimm.checks.rule import Rule, make_rule, rank, row_rule, wider
from multimm.checks.tasks import declared
from multimm.cluster.describe import describe
from multimm.errors import DTypeError, MultimmError, OptionError, ShapeError, integer
from multimm.gpu.dtypes import (
    accumulate_dtype,
    check_requested,
    gemm_dtype,
    on_devices,
    requested,
    result_dtype,
    sums_for,
)
from multimm.gpu.integers.bounds import is_narrow
from multimm.gpu.kernel_selection import Precision, check_held
from multimm.operands import (
    as_array,
    check_same_device,
    current_client,
    is_dask,
    is_lazy,
    on_gpu,
)
from multimm.shapes import broadcast, check_operands, check_result
from multimm.sources import in_blocks

DType = np.dtype[Any]
#: Blocks that NumPy and CuPy operands are read in: bounds the float64 copies (arbitrary).
BLOCK_BYTES = 2**25


@dataclass(frozen=True)
class Job:
    """One check: Dask arrays of at least two dimensions, transposed already; c0 may be None."""

    a: Any
    b: Any
    c: Any
    c0: Any
    rule: Rule
    rows: Rule  #: of rows that are wrong by `rule`; another one where A B may have wrapped around
    hosted: bool = False  #: in the host memory of workers with GPUs, which look at them
    scheduler: str | None = None  #: of Dask, where its current one does not compute the check
    hint: str = ""  #: why a right product may be called wrong, and what to do


def prepare(
    a: Any,
    b: Any,
    c: Any,
    c0: Any,
    trans: tuple[bool, bool],
    scale: tuple[complex, complex],
    rounds: int,
    precision: Precision = "float32",
    dtype: Any = None,
) -> Job:
    """Check everything that can be checked before anything is computed."""
    alpha, beta = scale
    lazy = any(map(is_lazy, (a, b, c, c0)))
    a, b, c = as_blocks(a, "a"), as_blocks(b, "b"), as_blocks(c, "c")
    vectors, shapes = (a.ndim == 1, b.ndim == 1), (a.shape, b.shape)
    a, b = _matrix(a, "a", trans[0]), _matrix(b, "b", trans[1])
    check_operands(*shapes, *trans)
    *batch, m, n = *broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]
    shape = (*batch, *(() if vectors[0] else (m,)), *(() if vectors[1] else (n,)))
    check_result("c", c.shape, shape)
    c0, added = _added(c0, c, beta), getattr(c0, "dtype", None)
    check_same_device(a=a, b=b, c=c, c0=c0)
    axes = (..., *(None if vector else slice(None) for vector in vectors))
    given = [x.dtype for x in (a, b, c0) if x is not None]
    k, of_c0 = a.shape[-1], added if c0 is None else c0.dtype
    whole, kept, exact = None, None, False
    if dtype is not None:
        kept, exact = _requested(dtype, a.dtype, b.dtype, c.dtype, of_c0, scale, k)
        given[:2] = c.dtype, c.dtype
    else:
        whole = _whole(a.dtype, b.dtype, of_c0, scale)
        if whole is not None and whole.name == c.dtype.name:  # alpha and C0 explain it
            kept = accumulate_dtype(a.dtype, b.dtype)
    check_held(precision, str(c.dtype), *([] if kept is None else [str(kept)]))
    sizes = math.prod((*batch, m)), n, k
    scale = alpha if k else 0, beta
    rule = make_rule(given, c.dtype, scale, sizes, rounds, kept, precision, exact)
    rows = rule if dtype is not None else row_rule(rule, kept, c.dtype, scale)
    hosted = lazy and _hosted(c, *given)
    hint = _hint(given, c.dtype, whole)
    scheduler = None if lazy else "synchronous"
    c, c0 = c[axes], None if c0 is None else c0[axes]
    return Job(a, b, c, c0, rule, rows, hosted, scheduler, hint)


def _whole(a: DType, b: DType, c0: DType | None, scale: tuple[complex, complex]) -> DType | None:
    """NumPy's dtype for alpha A B + beta C0; None where there is none."""
    try:
        return gemm_dtype(scale[0], result_dtype(a, b), scale[1], c0)
    except MultimmError:
        return None  # what is wrong is said later, with what C allows


def _requested(
    dtype: Any,
    a: DType,
    b: DType,
    c: DType,
    c0: DType | None,
    scale: tuple[complex, complex],
    k: int,
) -> tuple[DType | None, bool]:
    """What a product with ``dtype=`` is summed in, and whether no sum of it is rounded."""
    wanted = requested(dtype)
    check_requested(a, b, *scale, c0, wanted)
    if wanted.name != c.name:
        raise DTypeError(
            f"c has dtype {c}, which no product with dtype={wanted} has: check it before it is "
            "converted, or leave dtype out"
        )
    sums = sums_for(a, b, k, wanted)
    exact = is_narrow(a) and is_narrow(b) and wanted.kind in "fc"
    return (None if exact else sums), exact


def _hint(given: list[DType], c: DType, whole: DType | None) -> str:
    """Why a product that was right until it was cast to a wider dtype is wrong, and what to do."""
    if whole is None or not wider(c, whole):
        return ""
    operands = " and ".join(dict.fromkeys(map(str, given)))
    return (
        f"c is {c} and held to its {'range' if c.kind in 'iu' else 'rounding'}, but this product "
        f"of {operands} is {whole}: check it before it is cast, or cast the operands first"
    )


def _hosted(c: Any, *dtypes: DType) -> bool:
    """Whether NumPy blocks go to workers that have GPUs: one thread of a CPU takes 2 s for one of
    8192 x 8192 where a GPU, reached through the link to the host, takes some 40 ms.
    """
    if on_gpu(c) or not all(map(on_devices, (c.dtype, *dtypes))):
        return False
    client = current_client()
    spec = None if client is None or client.asynchronous else describe(client)
    return spec is not None and spec.on_gpus


def draws(rounds: Any, seed: Any) -> tuple[int, int]:
    """`rounds` and `seed` as Python's integers."""
    count, first = integer(rounds), integer(seed)
    if count is None or not 1 <= count <= 1000:
        raise OptionError(f"rounds={rounds!r}: give an integer from 1 to 1000")
    if first is None or first < 0:
        raise OptionError(f"seed={seed!r}: give an integer that is not negative")
    return count, first


def as_blocks(array: Any, name: str) -> Any:
    """`array` as a Dask array of NumPy or CuPy blocks, of a numeric dtype and known chunks."""
    array = as_array(array, name, lazily=True)
    rank(array.dtype, name)
    if is_dask(array):
        return array.map_blocks(declared, array.dtype, dtype=array.dtype, meta=array._meta)
    # Asked again: in Dask's array query planning there are no arrays such as ours.
    return as_array(in_blocks(array, BLOCK_BYTES), name)


def _matrix(array: Any, name: str, transposed: bool) -> Any:
    if array.ndim == 0 or (array.ndim == 1 and transposed):
        what = "0-D" if array.ndim == 0 else f"1-D with trans_{name}=True"
        raise ShapeError(f"{name} is {what}: give an array of {array.ndim + 1} or more dimensions")
    if array.ndim == 1:
        return array[None, :] if name == "a" else array[:, None]
    return da.swapaxes(array, -1, -2) if transposed else array


def _added(c0: Any, c: Any, beta: Any) -> Any:
    """C0 in the shape and chunks of C; None when beta is zero, and then it is not looked at."""
    if not np.any(beta):
        return None
    if c0 is None:
        raise OptionError(f"beta={beta!r} without c0: give the array that was added as c0")
    c0 = as_blocks(c0, "c0")
    try:
        return da.broadcast_to(c0, c.shape).rechunk(c.chunks)
    except ValueError as error:
        raise ShapeError(f"c0 has shape {c0.shape}: it must broadcast to {c.shape}") from error
