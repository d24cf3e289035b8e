"""What Dask code calls when it multiplies arrays, and what multimm makes of each call.

Every way from Dask code to a product ends in one of few functions, which `accelerate` wraps:

    x @ y, np.matmul(x, y)         -> dask.array.routines.matmul, looked up at each call
    da.matmul, dot, tensordot, einsum, and np.dot, np.tensordot, np.einsum
                                   -> that name of dask.array
    x.dot(y)                       -> dask.array.Array.dot
    da.cov, da.vdot                -> dask.array.routines.dot
    xr.dot, DataArray @ and .dot   -> da.einsum or da.tensordot, through opt_einsum's table
    np.inner, np.linalg.multi_dot  -> dask.array.Array.__array_function__: Dask has none
    np.vecdot, matvec, vecmat      -> dask.array.Array.__array_ufunc__
    da.linalg.solve, lu, qr, ...   -> products of blocks inside their tasks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.array import einsumfuncs, linalg, routines

from multimm.acceleration_report import described
from multimm.api import matmul
from multimm.contractions.einsum_chunks import einsum_chunks, own_chunks
from multimm.contractions.functions import (
    einsum_steps,
    inner_steps,
    tensordot_steps,
    vecdot_steps,
)
from multimm.contractions.steps import Contraction
from multimm.errors import ShapeError
from multimm.gpu.dtypes import common_dtype
from multimm.operands import Array, as_array, is_dask
from multimm.settings import auto

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: Where products are looked up: owner, attribute.
ENTRIES: tuple[tuple[Any, str], ...] = (
    (routines, "matmul"),
    (routines, "dot"),
    (routines, "tensordot"),
    (routines, "einsum"),
    (einsumfuncs, "einsum"),
    (da, "matmul"),
    (da, "dot"),
    (da, "tensordot"),
    (da, "einsum"),
    (da.Array, "dot"),
    (da.Array, "__array_function__"),
    (da.Array, "__array_ufunc__"),
    (linalg, "tsqr"),
    (linalg, "lu"),
    (linalg, "solve_triangular"),
    (linalg, "_cholesky"),
)
#: Those whose tasks multiply blocks: they run as they are, and their tasks are changed.
OF_BLOCKS = ("tsqr", "lu", "solve_triangular", "_cholesky")


class LeftToDaskError(Exception):
    """Why a call is none of multimm's."""


class Product(NamedTuple):
    """What multimm makes of a call."""

    compute: Callable[[], Array]  #: lazily
    note: str


def product(name: str, args: Args, kwargs: Kwargs) -> Product:
    """What multimm makes of a call of a function with that name.

    Raises
    ------
    LeftToDaskError
        It computes something else, or the same no better.
    MultimmError
        Operands that multimm refuses.
    """
    return _MADE[name](name, args, kwargs)


def inside(name: str, args: Args, kwargs: Kwargs) -> tuple[str, Args, Kwargs] | None:
    """What NumPy hands to a Dask array for it to compute, if that is a product: name, arguments.

    ``__array_function__(self, func, types, args, kwargs)`` and
    ``__array_ufunc__(self, ufunc, method, *inputs, **kwargs)``.
    """
    if name == "__array_function__":
        known = _OF_NUMPY.get(args[1])
        return None if known is None else (known, tuple(args[3]), dict(args[4]))
    known = _UFUNCS.get(args[1])
    return (known, args[3:], kwargs) if known and args[2] == "__call__" else None


def operands_of(args: Sequence[Any]) -> tuple[str, ...]:
    """The arrays among arguments, also of a list of them, for the report."""
    flat = [y for x in args for y in (x if isinstance(x, list | tuple) else [x])]
    return tuple(described(x) for x in flat if isinstance(getattr(x, "shape", None), tuple))


def _two(name: str, args: Args, kwargs: Kwargs, *options: str) -> list[Array]:
    """Two operands that stand before all else, which is no more than these options."""
    if kwargs.keys() - {*options} or len(args) != 2:
        also = "".join(f" and {option}=" for option in options)
        raise LeftToDaskError(f"{name} with other arguments than two operands by position{also}")
    return _arrays(name, args)


def _matrices(name: str, args: Args, kwargs: Kwargs) -> Product:
    arrays = _two(name, args, kwargs, *(["dtype"] if name == "matmul" else []))
    ndims = [x.ndim for x in arrays]
    if 0 in ndims:
        raise LeftToDaskError(
            f"{name} of {ndims[0]}-D and {ndims[1]}-D operands is not a matrix product"
        )
    if name == "dot" and max(ndims) != 2:  # of two vectors Dask has a scalar
        last = -1, -min(ndims[1], 2)
        return _steps(_as_dask_sums(tensordot_steps(args[0], args[1], last, own_chunks)))
    wide = _dtype_of_sums(*(x.dtype for x in arrays))
    # Of one chunk along k Dask's matmul sums no blocks: it has NumPy's dtype, and wraps around.
    summed = wide is not None and (
        name == "dot" or any(map(_is_cut_along_k, arrays, (-1, -min(2, ndims[1]))))
    )
    options = {"dtype": wide, **kwargs} if summed else kwargs
    return Product(partial(matmul, *args, **options, chunks="operands"), "1 x product")


def _tensordot(name: str, args: Args, kwargs: Kwargs) -> Product:
    names = dict(zip(("a", "b", "axes"), args, strict=False)) | {
        {"lhs": "a", "rhs": "b"}.get(key, key): value for key, value in kwargs.items()
    }
    if len(args) + len(kwargs) != len(names) or not {"a", "b"} <= names.keys() <= {*"ab", "axes"}:
        raise LeftToDaskError(f"{name} with other arguments than two operands and axes")
    _arrays(name, (names["a"], names["b"]))
    return _steps(_as_dask_sums(tensordot_steps(**names, rule=own_chunks)))


def _einsum(name: str, args: Args, kwargs: Kwargs) -> Product:
    more = dict(kwargs)
    dtype, optimize = more.pop("dtype", None), more.pop("optimize", True)
    more.pop("split_every", None)  # sums are made otherwise
    if more or not args:
        raise LeftToDaskError(f"{name} with {', '.join(more) or 'nothing'}")
    given = args[1:] if isinstance(args[0], str) else args[: len(args) // 2 * 2 : 2]
    _arrays(name, given)
    found = einsum_steps(args, dtype, optimize, einsum_chunks)
    return _steps(found if dtype is not None else _as_dask_sums(found))


def _linalg_matmul(name: str, args: Args, kwargs: Kwargs) -> Product:
    return Product(partial(matmul, *_two(name, args, kwargs), chunks="operands"), "1 x product")


def _linalg_tensordot(name: str, args: Args, kwargs: Kwargs) -> Product:
    a, b = _two(name, args, kwargs, "axes")
    return _steps(tensordot_steps(a, b, kwargs.get("axes", 2), own_chunks))


def _inner(name: str, args: Args, kwargs: Kwargs) -> Product:
    _two(name, args, kwargs)
    return _steps(inner_steps(*args), dask_has_none=True)


def _vecdot(name: str, args: Args, kwargs: Kwargs) -> Product:
    _two(name, args, kwargs, "axis")
    return _steps(vecdot_steps(*args, **kwargs), dask_has_none=True)


def _matvec(name: str, args: Args, kwargs: Kwargs) -> Product:
    return _letters(name, "...mn,...n->...m", _two(name, args, kwargs))


def _vecmat(name: str, args: Args, kwargs: Kwargs) -> Product:
    vector, matrix = _two(name, args, kwargs)
    vector = vector.conj() if vector.dtype.kind == "c" else vector
    return _letters(name, "...n,...nm->...m", [vector, matrix])


def _letters(name: str, subscripts: str, arrays: Sequence[Array], **how: Any) -> Product:
    """What einsum makes of operands, of which axes with a letter are not broadcast, as in NumPy."""
    found = einsum_steps([subscripts, *arrays], **how)
    sizes: dict[str, int] = {}
    pairs = [
        pair for term in found.terms for pair in zip(term.labels, term.array.shape, strict=True)
    ]
    for label, size in pairs:
        if not label.startswith("...") and sizes.setdefault(label, size) != size:
            shapes = ", ".join(str(x.shape) for x in arrays)
            raise ShapeError(
                f"{name} of shapes {shapes}: an axis of length {sizes[label]} meets one of "
                f"{size}; axes that are summed over must be of one length"
            )
    return _steps(found, dask_has_none=True)


def _multi_dot(name: str, args: Args, kwargs: Kwargs) -> Product:
    if kwargs or len(args) != 1 or not isinstance(args[0], list | tuple):
        raise LeftToDaskError(f"{name} with other arguments than a list of matrices")
    arrays = _arrays(name, args[0])
    count, ends = len(arrays), [x.ndim for x in (arrays[0], arrays[-1])]
    if count < 2 or any(x.ndim != 2 for x in arrays[1:-1]) or not {*ends} <= {1, 2}:
        raise LeftToDaskError(f"{name} of other operands than matrices, and vectors at its ends")
    if count >= len(ascii_letters):
        raise LeftToDaskError(f"{name} of {count} operands")
    if 1 < [x.dtype.kind for x in arrays].count("b") < count:
        raise LeftToDaskError(f"{name} of bools beside others: a product of two bools is a bool")
    terms = [ascii_letters[n : n + 2] for n in range(count)]
    terms[0], terms[-1] = terms[0][2 - ends[0] :], terms[-1][: ends[1]]
    out = terms[0][: ends[0] - 1] + terms[-1][2 - 1 :]
    return _letters(name, f"{','.join(terms)}->{out}", arrays, rule=einsum_chunks)


def _is_cut_along_k(x: Array, axis: int) -> bool:
    """Whether Dask has several chunks of it along an axis."""
    if is_dask(x):
        return len(x.chunks[axis]) > 1
    usual = auto(x.shape, x.dtype.itemsize)
    chunks = da.core.normalize_chunks(usual, x.shape, dtype=x.dtype)
    return len(chunks[axis]) > 1


def _dtype_of_sums(*dtypes: np.dtype[Any]) -> np.dtype[Any] | None:
    """That of Dask's sums of integers, 64 bits; None for others: they have that of the operands."""
    own = common_dtype(*dtypes)
    if own.kind == "b":
        raise LeftToDaskError("sums of bool: Dask counts blocks in which one is True")
    return np.empty(0, own).sum().dtype if own.kind in "iu" else None


def _as_dask_sums(found: Contraction) -> Contraction:
    """The same, with the dtype of Dask's sums."""
    if not found.products:  # left to Dask for that
        return found
    wide = _dtype_of_sums(*(term.array.dtype for term in found.terms))
    return found if wide is None else found._replace(asked=wide)


def _steps(found: Contraction, *, dask_has_none: bool = False) -> Product:
    """What einsum or one of its like makes of operands, if it is a product of matrices."""
    if not (found.products or dask_has_none):
        raise LeftToDaskError(f"no product of matrices: {found.why_none}")
    others = len(found.steps) - found.products
    counts = (found.products, "product"), (others, "sum or product of elements")
    note = ", ".join(f"{n} x {what}" for n, what in counts if n)
    return Product(partial(found.result, "float32"), note)


def _arrays(name: str, operands: Sequence[Any]) -> list[Array]:
    """Operands one of which is a Dask array, as arrays, all with known chunks."""
    if not any(isinstance(x, da.Array) for x in operands):
        raise LeftToDaskError(f"{name} without a Dask array")
    # Of lists, h5py datasets and the like NumPy would say the shape once it has read them.
    arrays = [x if is_dask(x) else as_array(x, "an operand", lazily=True) for x in operands]
    if any(math.isnan(size) for x in arrays for size in x.shape):
        raise LeftToDaskError("unknown chunk sizes")
    return arrays


_MADE: Mapping[str, Callable[[str, Args, Kwargs], Product]] = {
    "matmul": _matrices,
    "dot": _matrices,
    "tensordot": _tensordot,
    "einsum": _einsum,
    "linalg.matmul": _linalg_matmul,
    "linalg.tensordot": _linalg_tensordot,
    "inner": _inner,
    "vecdot": _vecdot,
    "matvec": _matvec,
    "vecmat": _vecmat,
    "multi_dot": _multi_dot,
}
#: Ufuncs; NumPy has the last two from 2.2 on.
_UFUNCS = {getattr(np, name): name for name in ("vecdot", "matvec", "vecmat") if hasattr(np, name)}
#: Functions of NumPy that Dask has none of.
_OF_NUMPY: Mapping[Any, str] = {
    np.inner: "inner",
    np.linalg.multi_dot: "multi_dot",
    np.linalg.matmul: "linalg.matmul",
    np.linalg.tensordot: "linalg.tensordot",
    np.linalg.vecdot: "vecdot",
}
