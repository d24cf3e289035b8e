"""Blocks against what their arrays declare: a dtype that is wrong would change the bits unseen.

Results, plans and kernels go by the kind and the dtype of the array. Blocks that functions of the
user make may be of any other, for Dask never looks: it computes in whatever they are. Here they are
converted to what was declared, as ``astype`` does, where no more than rounding comes of it.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.errors import ArrayTypeError, DTypeError, kind_of
from multimm.gpu.dtypes import FLOATS, kind
from multimm.graph.block_task import Block

DType = np.dtype[Any] | None


def as_declared(block: Block, dtype: DType, of: str = "an operand", rounded: bool = True) -> Block:
    """A dense block of the dtype that its array declares, converted where its values fit that.

    In the byte order of this machine, whatever is declared: GPUs know no other.

    Parameters
    ----------
    block : array
        Or what `multimm.graph.tasks.multiply.pack` has made of one, which is float32.
    dtype : dtype or None
        None: nothing is declared, and the block, or its absence, is taken as it is.
    of : str
        What it is a block of, for messages.
    rounded : bool
        Whether floats may be rounded, with a warning. Otherwise nothing may be lost.

    Raises
    ------
    ArrayTypeError
        Of what is no array, such as None, and no dense one: see `multimm.blocks.plain`.
    DTypeError
        Of complex numbers where reals are declared, and of floats where integers are; of values
        beyond the range of the declared dtype. Zeros are the same in any: `da.linalg.lu`, and many
        a function, makes blocks of them with ``numpy.zeros(shape)``.
    """
    if dtype is None:
        return block
    held = getattr(block, "dtype", None)
    if held is None:
        given = "None" if block is None else f"a {kind_of(block)}"
        raise ArrayTypeError(
            f"a block of {of} is {given}, its array says "
            f"{dtype}: have the task that makes it return a NumPy or CuPy array"
        )
    block = plain(block, f"a block of {of}")
    dtype = dtype.newbyteorder("=")
    if held == dtype:
        return block
    if np.can_cast(held, dtype, "safe"):
        return block.astype(dtype)
    converted = _converted(block, dtype, rounded)
    if converted is None:
        raise DTypeError(
            f"a block of {of} is {held}, its array says {dtype}, which cannot hold all of "
            f"it: declare dtype='{held}' where the array is made, or convert its blocks there with "
            f".astype('{dtype}')"
        )
    return converted


def _converted(block: Block, dtype: np.dtype[Any], rounded: bool) -> Block | None:
    """Its values in another dtype, at most rounded; None where they do not fit."""
    held, wanted = kind(block.dtype), kind(dtype)
    if min(held, wanted) < 0:
        return None
    if held > wanted and (held > FLOATS or bool(block.any())):
        return None
    with np.errstate(all="ignore"):
        converted = block.astype(dtype)
        if bool(((converted == block) | np.isnan(block)).all()):
            return converted
        beyond = bool((np.isfinite(converted) != np.isfinite(block)).any())
    if wanted < FLOATS or not rounded or beyond:
        return None
    warnings.warn(
        f"a block is {block.dtype}, its array says {dtype}: it is rounded to that; declare "
        f"dtype='{block.dtype}' where the array is made to keep all of it",
        UserWarning,
        stacklevel=3,
    )
    return converted
