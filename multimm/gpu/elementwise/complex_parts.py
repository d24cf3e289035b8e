"""Complex matrices as real ones on a GPU: kernels/complex_parts.cu and complex_mirror.cu.

A complex number is a pair of float32 in memory, so a matrix whose rows are contiguous is m x 2k
real numbers as it lies. The other operand of a real product has to be written as another matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.gpu.problem import describe
from multimm.gpu.runtime.launch import kernel_for
from multimm.gpu.strides import Stack

Array = Any

#: Compile-time parameters of the kernels.
DEFINES = (("THREADS", 256), ("UNROLL", 4))
MIRROR_DEFINES = (("THREADS", 256), ("TILE", 32))
THREADS, SPAN, TILE = 256, 256 * 4, 32
#: Bytes of a complex number, and what divides the address of each.
PAIR = 8


def signs(trans: bool, conj_a: bool, conj_b: bool) -> tuple[float, float, float]:
    """Signs of `expand` for a right operand: upper right, lower left and lower right of a square.

    Parameters
    ----------
    trans : bool
        It is stored transposed.
    conj_a, conj_b : bool
        The left operand is conjugated, and this one.

    >>> signs(False, False, False), signs(True, False, False), signs(False, True, True)
    ((1.0, -1.0, 1.0), (-1.0, 1.0, 1.0), (-1.0, -1.0, -1.0))
    """
    left, right = (-1.0 if flag else 1.0 for flag in (conj_a, conj_b))
    across = (right, -right * left)
    return (*(across[::-1] if trans else across), left)


def expand(x: Array, y: Array, of: tuple[float, float, float]) -> None:
    """Write each element of a complex matrix as a square of four real ones.

    Parameters
    ----------
    x : cupy.ndarray of complex64, shape (r, c)
        Rows are contiguous, and begin at multiples of `PAIR` bytes.
    y : cupy.ndarray of float32, shape (2 r, 2 c)
        Contiguous. Written in the order of the current stream, of its device.
    of : tuple of float
        See `signs`.
    """
    rows, cols = x.shape
    stack = _rows_of(x)
    _launch(
        _kernel(x, "expand_complex"), x.size,
        (rows, cols, stack.pointer, stack.ld, *map(np.float32, of), y.data.ptr),
    )  # fmt: skip


def split(x: Array, y: Array, sign: float) -> None:
    """Write the real parts of each row, and `sign` times its imaginary parts behind them.

    Parameters
    ----------
    x : cupy.ndarray of complex64, shape (r, c)
        As for `expand`.
    y : cupy.ndarray of float32, shape (r, 2, c)
        Contiguous.
    sign : float
    """
    rows, cols = x.shape
    stack = _rows_of(x)
    _launch(
        _kernel(x, "split_complex"), x.size,
        (rows, cols, stack.pointer, stack.ld, np.float32(sign), y.data.ptr),
    )  # fmt: skip


def join(y: Array, d: Array, *, sign: float, alpha: float, partial: Array = None) -> None:
    """D = alpha (T + P), of the T whose real parts and `sign` times imaginary ones are in `y`.

    Parameters
    ----------
    y : cupy.ndarray of float32, shape (r, 2, c)
        Contiguous.
    d, partial : cupy.ndarray of complex64, shape (r, c)
        As for `expand`.
    sign, alpha : float
    """
    rows, cols = d.shape
    _launch(
        _kernel(d, "join_complex"), d.size,
        (rows, cols, y.data.ptr, np.float32(sign), np.float32(alpha), *_place(partial),
         *_place(d)),
    )  # fmt: skip


def mirror(re: Array, s: Array, d: Array, *, sign: float, alpha: float, partial: Array) -> None:
    """D = alpha (H + P), both triangles, where H = R + i (S + sign S').

    Parameters
    ----------
    re, s : cupy.ndarray of float32, shape (n, n)
        Contiguous. `re` is read below its diagonal, and on it.
    d, partial : cupy.ndarray of complex64, shape (n, n)
        As for `expand`; `partial` is read where `re` is, and may be None.
    sign : float
        -1: D is Hermitian; 1: symmetric.
    alpha : float
    """
    n = len(d)
    tiles = -(-n // TILE)
    blocks = -(-tiles // 2) * (tiles + 1)
    if blocks:
        kernel = kernel_for(d.device.id, "complex_mirror.cu", "mirror_complex", MIRROR_DEFINES)
        arguments = (n, re.data.ptr, s.data.ptr, np.float32(sign), np.float32(alpha),
                     *_place(partial), *_place(d))  # fmt: skip
        kernel((blocks, 1, 1), (THREADS, 1, 1), arguments)


def _kernel(x: Array, entry: str) -> Any:
    return kernel_for(x.device.id, "complex_parts.cu", entry, DEFINES)


def _launch(kernel: Any, elements: int, arguments: tuple[Any, ...]) -> None:
    if elements:
        kernel((-(-elements // SPAN), 1, 1), (THREADS, 1, 1), arguments)


def _place(x: Array) -> tuple[int, int]:
    """Address and leading dimension; of what is not there, zeros."""
    if x is None:
        return 0, 0
    stack = _rows_of(x)
    return stack.pointer, stack.ld


def _rows_of(x: Array) -> Stack:
    stack = describe(x)
    assert isinstance(stack, Stack), stack
    assert not stack.transposed, "rows are contiguous"
    assert stack.pointer % PAIR == 0, "pairs are read at once"
    return stack
