"""Operands of float16 and bfloat16, whose products are summed in float32.

Our kernels multiply float32, which holds both exactly. Their significands have no more than the 11
bits of one tensor-core product of `tf32`, so that one is all that `float32` takes for them: its
operands are exact, and what is left is the rounding of sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.gpu.kernel_selection import Precision
from multimm.graph.block_task import Block

FLOAT32 = np.dtype("float32")
HALVES = ("float16", "bfloat16")


def float32_holds(dtype: Any) -> bool:
    """Whether float32 holds a floating-point dtype, given by itself or by its name."""
    return dtype == FLOAT32 or str(dtype) in HALVES


def becomes_float32(dtype: Any) -> bool:
    """Whether kernels take a dtype as float32: what that holds, or float64, for ``dtype=float32``.

    Without that nothing that float64 is part of is summed in float32.
    """
    return float32_holds(dtype) or str(dtype) == "float64"


def as_float32(block: Block) -> Block:
    """A block of another dtype converted; None and what is packed stay what they are."""
    dtype = getattr(block, "dtype", FLOAT32)
    return block if dtype == FLOAT32 else block.astype(FLOAT32)


def as_complex64(block: Block) -> Block:
    """A block of a wider complex dtype converted; real ones stay what they are."""
    return block.astype("complex64", copy=False) if block.dtype.kind == "c" else block


def scheme_of(precision: Precision, a: Any, b: Any) -> Precision:
    """What operands of these dtypes are packed for, to keep a promise.

    >>> scheme_of("float32", "float16", "float16"), scheme_of("ieee", "float16", "float16")
    ('tf32', 'ieee')
    """
    if precision != "float32" or a == FLOAT32 or b == FLOAT32:  # names of dtypes take 2 us each
        return precision
    return "tf32" if str(a) in HALVES and str(b) in HALVES else precision
