"""The ``dtype=`` of a product, as `numpy.matmul` has it: that of the result and of its sums."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from multimm.errors import DTypeError
from multimm.gpu import dtypes
from multimm.gpu.dtypes import accumulate_dtype, gemm_dtype, numeric, result_dtype
from multimm.gpu.integers.bounds import is_narrow, sums_dtype

DType = np.dtype[Any]

#: Kinds of numbers, each of which holds those before it.
_KINDS = "bifc"


def named(dtype: DTypeLike) -> DType:
    """A dtype that was asked for, in native byte order.

    Raises
    ------
    DTypeError
        For what is no dtype, or has no matrix product.
    """
    made = dtypes.named(dtype)
    return numeric(made, f"dtype={made}")


@functools.lru_cache(maxsize=1024, typed=True)
def check(a: DType, b: DType, alpha: complex, beta: complex, c: DType | None, dtype: DType) -> None:
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


def scalars(alpha: complex, beta: complex, dtype: DType) -> tuple[complex, complex]:
    """The same numbers, of which none leaves sums integers where the result is to be floats."""
    if dtype.kind in "iub":
        return alpha, beta
    return (alpha if alpha == 1 else alpha * 1.0), (beta if beta == 0 else beta * 1.0)


@functools.lru_cache(maxsize=1024)
def sums(a: DType, b: DType, k: int, dtype: DType) -> DType:
    """What products of operands of dtypes a and b are summed in, for a result of `dtype`.

    >>> int8, float32 = np.dtype("int8"), np.dtype("float32")
    >>> [str(sums(int8, int8, k, float32)) for k in (100, 200_000)]
    ['int32', 'float64']
    """
    if is_narrow(a) and is_narrow(b):
        return sums_dtype(a, b, k, dtype)
    return accumulate_dtype(dtype, dtype)


def _casts(own: DType, dtype: DType) -> bool:
    if "bfloat16" in (own.name, dtype.name):
        return _kind(own) <= _kind(dtype)
    return np.can_cast(own, dtype, "same_kind")


def _kind(dtype: DType) -> int:
    return 2 if dtype.name == "bfloat16" else _KINDS.index("i" if dtype.kind == "u" else dtype.kind)


def _lost(name: str, own: DType, dtype: DType) -> str:
    """What a cast would lose, and what to do."""
    if _kind(own) == 3:
        return f"whose imaginary parts would be lost: pass {name}.real, or ask for {own}"
    if _kind(own) == 2:
        return f"whose fractions would be lost: convert it with astype, or ask for {own}"
    if dtype.kind == "u":
        return "whose negative numbers would be lost: ask for a signed dtype, or convert it"
    return f"which is more: ask for {own}, or convert it with astype"
