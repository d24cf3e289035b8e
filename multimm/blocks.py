"""What an operand or a block of one may be: one rule, at the call and in every task.

A dense array of NumPy or CuPy itself is. So is what NumPy derives from its arrays without giving
their elements another meaning: it is taken as the array that it is. Any other subclass may compute
something else (a mask, units), and is refused, like what is no dense array at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.errors import ArrayTypeError, kind_of

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
    todo = advice or f"have the task that makes it return {dense_form(block, 'block')}"
    raise ArrayTypeError(
        f"{of} is {given}: multimm multiplies dense arrays of NumPy and CuPy; {todo}"
    )


def dense_form(x: Any, name: str, lazy: bool = False) -> str:
    """What to pass in its place, the whole of a `lazy` array of such blocks: an array of values.

    `numpy.asarray` would drop a mask in silence.
    """
    if isinstance(x, np.ma.MaskedArray):
        filled = f"dask.array.ma.filled({name}, value)" if lazy else f"{name}.filled(value)"
        return f"{filled}, with what stands for masked elements"
    if is_sparse(x):
        method = "todense" if type(x).__module__.startswith("sparse.") else "toarray"
        # Without a dtype Dask would try the method on an array that is dense already, and fail.
        each = f".map_blocks(lambda block: block.{method}(), dtype={name}.dtype)"
        return f"{name}{each if lazy else f'.{method}()'}"
    if isinstance(x, np.ndarray):
        made = f"{name}.map_blocks(numpy.asarray)" if lazy else f"numpy.asarray({name})"
        return f"{made}, if an ndarray's arithmetic is meant"
    return "one of these"


def is_sparse(x: Any) -> bool:
    """Of PyData's library, of SciPy or of CuPy."""
    return type(x).__module__.startswith(("sparse.", "scipy.sparse.", "cupyx.scipy.sparse."))
