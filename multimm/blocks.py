"""What an operand or a block of one may be: one rule, at the call and in every task.

A dense array of NumPy or CuPy itself is. So is what NumPy derives from its arrays without giving
their elements another meaning: it is taken as the array that it is. Any other subclass may compute
something else (a mask, units), and is refused, like what is no dense array at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.errors import ArrayTypeError

#: Kinds of NumPy whose elements are those of an ndarray. Their subclasses may be anything.
ALIKE = (np.matrix, np.memmap, np.recarray)


def is_dense(x: Any) -> bool:
    """Whether it is an array of NumPy or CuPy itself, and of no subclass."""
    kind = type(x)
    if kind is np.ndarray:
        return True
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


def plain(block: Any, of: str = "a block of an operand", advice: str = "") -> Any:
    """The dense array that a block is, without a copy.

    Raises `ArrayTypeError` for anything whose arithmetic is not that of an ndarray: masks, units,
    sparse matrices. `advice` says what to do, by default what the task that makes the block is to.
    """
    if is_dense(block):
        return block
    if type(block) in ALIKE:
        return np.asarray(block)
    given = "None" if block is None else f"a {kind_of(block)}"
    raise ArrayTypeError(
        f"{of} is {given}: multimm multiplies dense arrays of NumPy and CuPy; "
        f"{advice or f'have the task that makes it return {_dense_form(block)}'}"
    )


def kind_of(x: Any) -> str:
    """The name of its type, for messages."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _dense_form(block: Any) -> str:
    """What to return in its place: `numpy.asarray` would drop a mask in silence."""
    if isinstance(block, np.ma.MaskedArray):
        return "block.filled(value), with what stands for masked elements"
    if is_sparse(block):
        return f"block.{dense_method(block)}()"
    if isinstance(block, np.ndarray):
        return "numpy.asarray(block), if an ndarray's arithmetic is meant"
    return "one of these"


def is_sparse(x: Any) -> bool:
    """Of PyData's library, of SciPy or of CuPy."""
    return type(x).__module__.startswith(("sparse.", "scipy.sparse.", "cupyx.scipy.sparse."))


def dense_method(x: Any) -> str:
    """The method that makes a dense array of a sparse one."""
    return "todense" if type(x).__module__.startswith("sparse.") else "toarray"
