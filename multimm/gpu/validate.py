"""Checks that arrays pass before a kernel sees them, and where they lie in memory.

Nothing here launches anything; CuPy is not imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from multimm.errors import ArrayTypeError, DTypeError, OptionError, ShapeError
from multimm.gpu.arrays import is_cupy
from multimm.gpu.strides import Stack, may_overlap, repeats, stack_of
from multimm.shapes import Shape, check_result

Array = Any


def check_arrays(given: dict[str, Array], dtype: DTypeLike) -> None:
    """Check that all are CuPy arrays of one dtype on one device.

    Parameters
    ----------
    given : dict of str to array
        By the names that messages use.
    dtype : dtype

    Raises
    ------
    ArrayTypeError, DTypeError
    """
    dtype = np.dtype(dtype)
    for name, x in given.items():
        if not is_cupy(x):
            raise ArrayTypeError(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}: the kernels take CuPy "
                "arrays; move it with cupy.asarray"
            )
        if x.dtype != dtype:
            raise DTypeError(
                f"{name} has dtype {x.dtype}: the kernel takes {dtype}; convert it with astype"
            )
        if x.data.ptr % dtype.alignment:
            raise ArrayTypeError(f"{name} begins at an address that no {x.dtype} has: copy it")
    devices = {name: x.device.id for name, x in given.items()}
    if len(set(devices.values())) > 1:
        raise ArrayTypeError(f"operands lie on several devices ({devices}): move them to one")


def check_beta(beta: complex, c: Any) -> None:
    """Raise `OptionError` for a beta of a C that was not given."""
    if beta != 0 and c is None:
        raise OptionError(f"beta={beta!r} scales C, but no c was given: pass c, or beta=0")


def describe(x: Array) -> Stack | str:
    """Where a stack of matrices lies, or why no kernel can walk it."""
    return stack_of(x.data.ptr, x.shape, x.strides, x.itemsize)


def is_broadcast(x: Array) -> bool:
    """Whether rows or columns of an array are repeated by a stride of 0."""
    steps = zip(x.shape, x.strides, strict=True)
    return bool(x.size) and any(size > 1 and step == 0 for size, step in steps)


def check_out(given: dict[str, Array], shape: Shape) -> Stack:
    """Check that ``given["out"]`` has the result's shape, can be written to, overlaps nothing.

    Parameters
    ----------
    given : dict of str to array
        With "out"; the others are read while it is written.
    shape : tuple of int
        Of the result.

    Raises
    ------
    ShapeError
    """
    out = given["out"]
    check_result("out", out.shape, shape)
    if not out.size:
        return Stack(out.data.ptr, 0, 0, 0, False, ())  # nothing is written
    stack = describe(out)
    if isinstance(stack, str):
        raise ShapeError(f"out cannot be written to: {stack}; pass a contiguous array")
    if repeats(stack, shape[:-2]):
        raise ShapeError(f"out has strides {out.strides}: some elements may share memory")
    for name, x in given.items():
        other = describe(x)
        if name == "out" or isinstance(other, str):  # what no kernel can address is copied first
            continue
        if may_overlap(stack, shape[:-2], other, x.shape[:-2], out.itemsize):
            raise ShapeError(f"out and {name} may share memory: pass an out of its own")
    return stack


def common_alignment(*lengths: int) -> int:
    """The largest power of two, up to 16, that divides all lengths and addresses."""
    bits = 16
    for length in lengths:
        bits |= length
    return bits & -bits
