"""Result and accumulator dtypes of products: NumPy's rules, asked of NumPy itself.

And the ``dtype=`` of a product, as `numpy.matmul` has it: that of the result and of its sums.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from multimm.errors import DTypeError, OptionError
from multimm.gpu.integers.bounds import is_narrow, sums_dtype

DType = np.dtype[Any]

#: Products of these are summed in float32.
HALVES = ("float16", "bfloat16")
#: Kinds of dtypes, each of which holds those before it but for rounding and range.
KINDS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
FLOATS = KINDS["f"]


def named(dtype: DTypeLike) -> DType:
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


def result_dtype(a: DTypeLike, b: DTypeLike) -> DType:
    """Return the dtype that ``np.matmul`` gives for operands of these dtypes.

    Raises
    ------
    DTypeError
        For dtypes that are no numbers.
    """
    return _result_dtype(np.dtype(a), np.dtype(b))


def accumulate_dtype(a: DTypeLike, b: DTypeLike) -> DType:
    """Return the dtype that products of these dtypes are summed in.

    That is `result_dtype`, but float32 for float16 and bfloat16.
    """
    return _accumulate_dtype(np.dtype(a), np.dtype(b))


def common_dtype(*dtypes: DType) -> DType:
    """NumPy's dtype of a sum of products of arrays of these dtypes.

    That of all of them at once, which may be narrower than one pair after the other: int16, uint16
    and float32 make float32. bfloat16, of which NumPy knows less, goes by pairs, as in `matmul`.
    """
    if any(dtype.name == "bfloat16" for dtype in dtypes):
        return functools.reduce(result_dtype, dtypes, dtypes[0])
    return np.result_type(*dtypes)


@functools.lru_cache(maxsize=1024, typed=True)
def scaled_dtype(dtype: DType, scalar: complex, of: str = "the product") -> DType:
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


def on_devices(dtype: DType) -> bool:
    """Whether GPUs compute with a dtype; long doubles they do not have.

    >>> on_devices(np.dtype("complex128")), on_devices(np.dtype("longdouble"))
    (True, False)
    """
    return dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def gemm_dtype(alpha: complex, product: DType, beta: complex, c: DType | None) -> DType:
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
def _accumulate_dtype(a: DType, b: DType) -> DType:
    out = _result_dtype(a, b)
    return np.dtype(np.float32) if out.name in HALVES else out


@functools.cache
def _result_dtype(a: DType, b: DType) -> DType:
    a, b = _numeric("a", a), _numeric("b", b)
    try:
        product: DType = np.matmul(np.zeros((1, 1), a), np.zeros((1, 1), b)).dtype
    except TypeError:  # no loop for a pair with bfloat16, in some versions of ml_dtypes
        others = [dtype for dtype in (a, b) if dtype.name != "bfloat16"]
        product = np.result_type(np.float32, *others)
    return product


def numeric(dtype: DType, given: str, todo: str = "") -> DType:
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


def _numeric(name: str, dtype: DType) -> DType:
    return numeric(dtype, f"{name} has dtype {dtype}", "; convert it with astype")


def requested(dtype: DTypeLike) -> DType:
    """A dtype that was asked for, in native byte order.

    Raises
    ------
    DTypeError
        For what is no dtype, or has no matrix product.
    """
    made = named(dtype)
    return numeric(made, f"dtype={made}")


@functools.lru_cache(maxsize=1024, typed=True)
def check_requested(
    a: DType, b: DType, alpha: complex, beta: complex, c: DType | None, dtype: DType
) -> None:
    """Check that NumPy casts A, B, and what alpha, beta and C make of their product, to `dtype`.

    It casts by its rule "same_kind": to more or fewer bits, and integers to floats, but no float to
    an integer, no complex number to a real one, no signed integer to an unsigned one.

    Raises
    ------
    DTypeError
    """
    for name, own in (("a", a), ("b", b)):
        result_dtype(own, own)  # is it a number?
        if not _casts(own, dtype):
            raise DTypeError(f"dtype={dtype}: {name} has dtype {own}, {_lost(name, own, dtype)}")
    whole = gemm_dtype(alpha, dtype, beta, c)
    if not _casts(whole, dtype):
        given = f"alpha={alpha}" + ("" if c is None else f", beta={beta} and a c of {c}")
        raise DTypeError(
            f"dtype={dtype}: {given} make{'s' if c is None else ''} the result {whole}, which it "
            f"cannot hold: ask for dtype={whole}, or convert them"
        )


def scalars_for(alpha: complex, beta: complex, dtype: DType) -> tuple[complex, complex]:
    """The same numbers, of which none leaves sums integers where the result is to be floats."""
    if dtype.kind in "iub":
        return alpha, beta
    return (alpha if alpha == 1 else alpha * 1.0), (beta if beta == 0 else beta * 1.0)


@functools.lru_cache(maxsize=1024)
def sums_for(a: DType, b: DType, k: int, dtype: DType) -> DType:
    """What products of operands of dtypes a and b are summed in, for a result of `dtype`.

    >>> int8, float32 = np.dtype("int8"), np.dtype("float32")
    >>> [str(sums_for(int8, int8, k, float32)) for k in (100, 200_000)]
    ['int32', 'float64']
    """
    if is_narrow(a) and is_narrow(b):
        return sums_dtype(a, b, k, dtype)
    return accumulate_dtype(dtype, dtype)


def _casts(own: DType, dtype: DType) -> bool:
    if "bfloat16" in (own.name, dtype.name):
        return kind(own) <= kind(dtype)
    return np.can_cast(own, dtype, "same_kind")


def kind(dtype: DType) -> int:
    """The number of its kind in `KINDS`; less than 0 for what is no number."""
    return FLOATS if dtype.name == "bfloat16" else KINDS.get(dtype.kind, -1)


def _lost(name: str, own: DType, dtype: DType) -> str:
    """What a cast would lose, and what to do."""
    if kind(own) > FLOATS:
        return f"whose imaginary parts would be lost: pass {name}.real, or ask for {own}"
    if kind(own) == FLOATS:
        return f"whose fractions would be lost: convert it with astype, or ask for {own}"
    if dtype.kind == "u":
        return "whose negative numbers would be lost: ask for a signed dtype, or convert it"
    return f"which is more: ask for {own}, or convert it with astype"
