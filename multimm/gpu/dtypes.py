"""Result and accumulator dtypes of products: NumPy's rules, asked of NumPy itself."""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from multimm.errors import DTypeError, OptionError


def named(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype of that name; NumPy knows bfloat16 once ml_dtypes has been imported.

    Raises
    ------
    DTypeError
        If there is none.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        with suppress(ImportError):
            importlib.import_module("ml_dtypes")
    try:
        return np.dtype(dtype)
    except TypeError:
        raise DTypeError(
            f"there is no dtype {dtype!r}: use NumPy's, such as 'int32' or 'float64' (for "
            "'bfloat16' install ml_dtypes)"
        ) from None


def result_dtype(a: DTypeLike, b: DTypeLike) -> np.dtype[Any]:
    """Return the dtype that ``np.matmul`` gives for operands of these dtypes.

    Raises
    ------
    DTypeError
        For dtypes that are no numbers.
    """
    return _result_dtype(np.dtype(a), np.dtype(b))


def accumulate_dtype(a: DTypeLike, b: DTypeLike) -> np.dtype[Any]:
    """Return the dtype that products of these dtypes are summed in.

    That is `result_dtype`, but float32 for float16 and bfloat16.
    """
    return _accumulate_dtype(np.dtype(a), np.dtype(b))


def common_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's dtype of a sum of products of arrays of these dtypes.

    That of all of them at once, which may be narrower than one pair after the other: int16, uint16
    and float32 make float32. bfloat16, of which NumPy knows less, goes by pairs, as in `matmul`.
    """
    if any(dtype.name == "bfloat16" for dtype in dtypes):
        return functools.reduce(result_dtype, dtypes, dtypes[0])
    return np.result_type(*dtypes)


@functools.lru_cache(maxsize=1024, typed=True)
def scaled_dtype(dtype: np.dtype[Any], scalar: complex, of: str = "the product") -> np.dtype[Any]:
    """Return NumPy's dtype of a Python scalar times an array, which the scalar's type decides.

    An integer leaves every dtype as it is: bool as well, which NumPy would make int64.

    Raises
    ------
    OptionError
        For an integer that the dtype cannot hold.
    """
    whole_bool = dtype.kind == "b" and isinstance(scalar, int)
    if whole_bool and scalar in (0, 1):
        return dtype
    if not whole_bool:
        # TypeError: large integers with bfloat16.
        with suppress(OverflowError, TypeError), np.errstate(all="ignore"):
            return (np.zeros(0, dtype) * scalar).dtype
    raise OptionError(
        f"the scalar {scalar} does not fit {dtype}, the dtype of {of}: "
        "convert the operands to a wider one with astype"
    )


def on_devices(dtype: np.dtype[Any]) -> bool:
    """Whether GPUs compute with a dtype; long doubles they do not have.

    >>> on_devices(np.dtype("complex128")), on_devices(np.dtype("longdouble"))
    (True, False)
    """
    return dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def gemm_dtype(
    alpha: complex, product: np.dtype[Any], beta: complex, c: np.dtype[Any] | None
) -> np.dtype[Any]:
    """Return the dtype of alpha (A B) + beta C: that of C counts whatever beta is.

    Parameters
    ----------
    alpha, beta : scalar
        Python's own numbers.
    product : dtype
        Of A B.
    c : dtype, optional
        Without a C beta says nothing.

    Raises
    ------
    DTypeError
        For a C of a dtype that is no number, or that has none in common with A B.
    OptionError
        For an integer scalar that its array's dtype cannot hold.
    """
    left = scaled_dtype(product, alpha)
    if c is None:
        return left
    right = scaled_dtype(_numeric("c", c), beta, "c")
    try:
        return np.result_type(left, right)
    except TypeError:  # bfloat16, with integers and float16
        raise DTypeError(
            f"c has dtype {c} and the product {product}, which have no dtype in common: convert "
            "one of them with astype"
        ) from None


@functools.cache
def _accumulate_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    out = _result_dtype(a, b)
    return np.dtype(np.float32) if out.name in ("float16", "bfloat16") else out


@functools.cache
def _result_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    a, b = _numeric("a", a), _numeric("b", b)
    try:
        product: np.dtype[Any] = np.matmul(np.zeros((1, 1), a), np.zeros((1, 1), b)).dtype
    except TypeError:  # no loop for a pair with bfloat16, in some versions of ml_dtypes
        others = [dtype for dtype in (a, b) if dtype.name != "bfloat16"]
        product = np.result_type(np.float32, *others)
    return product


def numeric(dtype: np.dtype[Any], given: str, todo: str = "") -> np.dtype[Any]:
    """Return a dtype in native byte order.

    Parameters
    ----------
    dtype : dtype
    given, todo : str
        What the error says was given, and what it says to do.

    Raises
    ------
    DTypeError
        For a dtype that has no matrix product.
    """
    if dtype.name == "bfloat16":
        return dtype
    if dtype.kind not in "biufc" or dtype.name.startswith("float8"):
        raise DTypeError(
            f"{given}: allowed are bool, integers of 8 to 64 bits, float16, bfloat16, float32, "
            f"float64, long double and complex{todo}"
        )
    return dtype.newbyteorder("=")


def _numeric(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return numeric(dtype, f"{name} has dtype {dtype}", "; convert it with astype")
