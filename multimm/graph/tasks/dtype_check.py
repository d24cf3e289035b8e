"""Blocks against what their arrays declare: a dtype that is wrong would change the bits unseen.

Results, plans and kernels go by the kind and the dtype of the array. Blocks that functions of the
user make may be of any other, for Dask never looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.errors import ArrayTypeError, DTypeError
from multimm.graph.block_task import Block

DType = np.dtype[Any] | None


def as_declared(block: Block, dtype: DType, of: str = "an operand") -> Block:
    """A dense block of the dtype that its array declares, converted if nothing is lost by that.

    In the byte order of this machine, whatever is declared: GPUs know no other.

    Parameters
    ----------
    block : array
        Or what `multimm.graph.tasks.multiply.pack` has made of one, which is float32.
    dtype : dtype or None
        None: nothing is declared, and the block, or its absence, is taken as it is.
    of : str
        What it is a block of, for messages.

    Raises
    ------
    ArrayTypeError
        Of what is no array, such as None, and no dense one: see `multimm.blocks.plain`.
    DTypeError
        Of a dtype that the declared one cannot hold. Zeros are the same in any: `da.linalg.lu`, and
        many a function, makes blocks of them with ``numpy.zeros(shape)``.
    """
    if dtype is None:
        return block
    held = getattr(block, "dtype", None)
    if held is None:
        kind = f"a {type(block).__module__}.{type(block).__qualname__}"
        raise ArrayTypeError(
            f"a block of {of} is {'None' if block is None else kind}, its array says "
            f"{dtype}: have the task that makes it return a NumPy or CuPy array"
        )
    block = plain(block, f"a block of {of}")
    dtype = dtype.newbyteorder("=")
    if held == dtype:
        return block
    if not (np.can_cast(held, dtype, "safe") or _is_zero(block)):
        raise DTypeError(
            f"a block of {of} is {held}, its array says {dtype}, which cannot hold all of "
            f"it: declare dtype='{held}' where the array is made, or convert its blocks there with "
            f".astype('{dtype}')"
        )
    return block.astype(dtype)


def _is_zero(block: Block) -> bool:
    return block.dtype.kind in "biuf" and not bool(block.any())
