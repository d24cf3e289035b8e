"""What `chunks=` asks for: the sizes of a result's chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np
from dask.array.core import common_blockdim, normalize_chunks

from multimm.errors import OptionError
from multimm.operands import is_dask
from multimm.planning.limits import MOST_TASKS
from multimm.planning.matrix import MatrixSpec
from multimm.planning.tiling.grid import Blocks
from multimm.settings import auto
from multimm.shapes import chunk_count, per_axis

AUTO, OPERANDS = "auto", "operands"


def asked_for(
    chunks: Any,
    a: Any,
    b: Any,
    dtype: np.dtype[Any],
    trans_a: bool = False,
    trans_b: bool = False,
) -> tuple[Blocks, ...]:
    """Sizes of the chunks of a product, as a matrix or a stack of them; empty: those of the plan.

    Of a and b as they were given: of vectors the result has a dimension less. Sizes may be given
    in bytes of the product's `dtype`. Raises `OptionError`.
    """
    if isinstance(chunks, str) and chunks == AUTO:
        return ()
    own_a, own_b = _own(a, trans_a), _own(b, trans_b)
    as_dask = _as_dask(own_a, own_b)
    vectors = len(own_a) == 1, len(own_b) == 1
    if isinstance(chunks, str) and chunks == OPERANDS:
        return as_dask
    kept = [*as_dask[:-2], *(x for x, gone in zip(as_dask[-2:], vectors, strict=True) if not gone)]
    rest = iter(_sizes(chunks, tuple(map(sum, kept)), dtype))
    *stack, _, _ = as_dask
    batch = [next(rest) for _ in stack]
    return (*batch, *((1,) if gone else next(rest) for gone in vectors))


def _own(x: Any, transposed: bool) -> tuple[Blocks, ...]:
    """Chunks of an operand; all of it is one, if it is no Dask array, as Dask has it."""
    lazy = isinstance(x, MatrixSpec) or is_dask(x)
    chunks = x.chunks if lazy else tuple((size,) for size in x.shape)
    return (*chunks[:-2], *chunks[:-3:-1]) if transposed else chunks


def _as_dask(a: tuple[Blocks, ...], b: tuple[Blocks, ...]) -> tuple[Blocks, ...]:
    """Chunks of Dask's own product: rows of A, columns of B, and what serves both of a stack."""
    pairs = zip_longest(a[-3::-1], b[-3::-1], fillvalue=(1,))
    batch = [common_chunks(pair) for pair in pairs]
    rows, columns = ((1,) if len(x) == 1 else x[axis] for x, axis in ((a, -2), (b, -1)))
    return (*batch[::-1], rows, columns)


def common_chunks(each: Iterable[Blocks]) -> Blocks:
    """Along an axis that operands share, those that cut none of theirs; length 1 is broadcast."""
    common: Blocks = common_blockdim([own for own in each if own != (1,)] or [(1,)])
    return common or (0,)  # nothing, cut in different ways


def _sizes(chunks: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Blocks, ...]:
    """Chunks of any spelling of Dask's, checked."""
    try:
        given = per_axis(chunks, shape)
        if (count := chunk_count(given, shape)) > MOST_TASKS:  # each is one; to list them is slow
            raise OptionError(
                f"chunks={_short(chunks)} makes {count:.3g} chunks of a result of shape {shape}: "
                f"at most {MOST_TASKS} can be made; give larger ones"
            )
        found = normalize_chunks(auto(shape, dtype.itemsize, given), shape=shape, dtype=dtype)
        sizes = tuple(tuple(operator.index(size) for size in blocks) for blocks in found)
        fits = len(sizes) == len(shape) and all(min(blocks) >= 0 for blocks in sizes)
        fits = fits and tuple(map(sum, sizes)) == shape
    except OptionError:
        raise
    except Exception:  # Dask raises whatever comes of it
        fits = False
    if not fits:
        raise OptionError(
            f"chunks={_short(chunks)} for a result of shape {shape}: give 'auto', 'operands', or "
            "chunk sizes as dask.array takes them, such as 1024 or one size for each dimension"
        )
    return sizes


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
