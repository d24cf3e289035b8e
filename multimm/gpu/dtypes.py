"""Result and accumulator dtypes of products: NumPy's rules, asked of NumPy itself."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from multimm.errors import DTypeError


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


def _numeric(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name == "bfloat16":
        return dtype
    if dtype.kind not in "biufc" or dtype.name.startswith("float8"):
        raise DTypeError(
            f"{name} has dtype {dtype}: allowed are bool, integers, float16, bfloat16, float32, "
            "float64, long double and complex; convert it with astype"
        )
    return dtype.newbyteorder("=")
