"""The chunks that Dask's own einsum would make."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import dask
import dask.array as da
import numpy as np
from dask.array.core import common_blockdim

from multimm.contractions.subscripts import Label, Labels, written
from multimm.planning.tiling.grid import Blocks

Chunks = tuple[Blocks, ...]


def einsum_chunks(
    labels: Sequence[Labels], chunks: Sequence[Chunks], out: Labels
) -> dict[Label, Blocks]:
    """Chunks of the result of `dask.array.einsum`, by label.

    They are those of the operands, where blocks of the result are not much larger than theirs.

    Parameters
    ----------
    labels : sequence of tuple of str
        Of each operand's axes.
    chunks : sequence of tuple of Blocks
        Along them.
    out : tuple of str
        Labels of the result.

    Examples
    --------
    >>> einsum_chunks(["ij", "jk"], [((2, 2), (3,)), ((1, 2), (5,))], "ik")
    {'i': (2, 2), 'k': (5,)}
    """
    found: dict[Label, list[Blocks]] = {label: [] for label in out}
    for names, blocks in zip(labels, chunks, strict=True):
        for label, own in zip(names, blocks, strict=True):
            if label in found:
                found[label].append(own)
    largest = prod(max(map(max, each)) for each in found.values())
    tolerance = dask.config.get("array.chunk-size-tolerance")
    given = max(1, *(prod(map(max, blocks)) for blocks in chunks))
    if len(labels) > 1 and out and largest > tolerance * given:
        return _split(tuple(map(tuple, labels)), tuple(chunks), tuple(out), tolerance)
    return {label: _common(each) for label, each in found.items()}


def _common(each: list[Blocks]) -> Blocks:
    """Of operands that share an axis; those of length 1 are broadcast."""
    longer = [own for own in each if own != (1,)]
    common: Blocks = common_blockdim(longer or each)
    return common


# Dask makes a graph to say it, which takes as long as to plan a product again.
@lru_cache(maxsize=128)
def _split(
    labels: tuple[Labels, ...], chunks: tuple[Chunks, ...], out: Labels, tolerance: float
) -> dict[Label, Blocks]:
    """As Dask itself says, which cuts operands where blocks of the result would be large.

    Of arrays without tasks. What is summed over counts by its longest chunk alone: so it is one,
    and need not be the same axis in both.
    """
    names, paper = [], []
    for n, (own, blocks) in enumerate(zip(labels, chunks, strict=True)):
        each = [x if label in out else (max(x),) for label, x in zip(own, blocks, strict=True)]
        names.append(tuple(x if x in out else f"{x} of {n}" for x in own))
        paper.append(da.Array({}, f"on-paper-{n}", tuple(each), dtype=np.float32))
    with dask.config.set({"array.chunk-size-tolerance": tolerance}):
        made = da.einsum(written(names, out), *paper)
    return dict(zip(out, made.chunks, strict=True))


__all__ = ["einsum_chunks"]
