"""Products of 16-bit integers on the tensor cores that FP16 does not carry: by their bytes, exact.

    x = 256 high + low        high: signed as x is; low: 0 to 255
    A B = 2^16 Ah Bh + 2^8 (Ah Bl + Al Bh) + Al Bl

Each product of bytes is one of `tensor_cores`, and adds to what came before. An operand that FP16
carries beside bytes stays whole: two products then, in place of four.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from multimm.gpu.integers import tensor_cores
from multimm.gpu.integers.float_blas import most
from multimm.gpu.kernel_selection import Choice, last_choice, note

Array = Any
DType = np.dtype[Any]

#: Multiplications from which on bytes are faster than an H200's float64 units: sums in int64 take
#: 2.2 times as long as those at 2048 squares, 0.98 at 3072, 0.85 at 4096 and 0.53 at 8192.
LARGE = 2**35
_BITS, _LOW = 8, 255  # of a byte, and its largest value


def product(
    a: Array,
    b: Array,
    trans: tuple[bool, bool],
    shape: tuple[int, ...],
    sums: DType,
    *,
    partial: Array = None,
    lower: bool = False,
) -> Array | None:
    """op(A) op(B) + P of arrays that are `tensor_cores.able`; None for small ones.

    For the parameters see `integers.gemm.product`. Small are products for which float64 units take
    no longer than four products of bytes.

    Returns
    -------
    cupy.ndarray of dtype `sums`, or None
    """
    k = a.shape[-2 if trans[0] else -1]
    if prod(shape[-2:]) * k < LARGE:
        return None
    import cupy

    with cupy.cuda.Device(a.device.id):
        high_first = _bytes(cupy, a)
        of_b = high_first if b is a else _bytes(cupy, b)
        # Of sums in 64 bits, and of floats, which hold no more: modulo 2^64.
        exact = np.dtype("int32" if sums.kind in "iu" and sums.itemsize <= 4 else "int64")
        total: Array = None
        for level in range(len(high_first) + len(of_b) - 1):
            if total is not None:
                total <<= _BITS
            for i, left in enumerate(high_first):
                if 0 <= level - i < len(of_b):
                    total = tensor_cores.product(
                        left, of_b[level - i], trans, shape, exact, partial=total, lower=lower
                    )
        total = total.astype(sums, copy=False)
        if partial is not None:
            total += partial.astype(sums, copy=False)
    if (ran := last_choice()) is not None:
        note(Choice(ran.kernel, "exact", "tensor cores multiply the bytes of integers of 16 bits"))
    return total


def _bytes(xp: Any, x: Array) -> list[Array]:
    """High and low bytes; of what may be multiplied by bytes as it is, that alone."""
    if x.dtype.itemsize == 1 or tensor_cores.plan_for(most(xp, x), _LOW) is not None:
        return [x]
    return [(x >> _BITS).astype(f"{x.dtype.kind}1"), (x & _LOW).astype(np.uint8)]
