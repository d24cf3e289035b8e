"""The chunks of a contraction's result: the operands' own, cut where large, or those of Dask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import ceil, prod
from typing import Any

import dask
import dask.array as da
import numpy as np

from multimm.contractions.subscripts import Label, Labels, written
from multimm.planning.tiling.grid import Blocks, regular
from multimm.result_chunks import common_chunks
from multimm.settings import check_count, chunk_bytes, chunk_tolerance

#: Blocks of a result are at most so many times as large as Dask's limit: arbitrary, 1 GiB as Dask
#: comes, which a GPU computes in some milliseconds.
TIMES = 8

Chunks = tuple[Blocks, ...]
#: Of operands' labels and chunks, of a result's labels, dtype, and whether it lies on GPUs: its
#: chunks by label.
Rule = Callable[
    [Sequence[Labels], Sequence[Chunks], Labels, np.dtype[Any], bool], dict[Label, Blocks]
]


def own_chunks(
    labels: Sequence[Labels], chunks: Sequence[Chunks], out: Labels, *_: Any
) -> dict[Label, Blocks]:
    """Those of the operands, as Dask's tensordot has them."""
    return {label: common_chunks(each) for label, each in _found(labels, chunks, out).items()}


def limited_chunks(
    labels: Sequence[Labels], chunks: Sequence[Chunks], out: Labels, dtype: np.dtype[Any], gpu: bool
) -> dict[Label, Blocks]:
    """Those of the operands, cut where blocks would be larger than theirs and than Dask's limit.

    That is ``array.chunk-size``, or `TIMES` that where the operands' chunks are as large, and on
    GPUs: small pieces would take a task each, and a copy. Batch axes are cut first, then the first
    axes that the operands alone give to the result: a piece of one is a piece of rows, or columns,
    as they lie in memory.

    Parameters
    ----------
    labels, chunks, out
        As for `einsum_chunks`.
    dtype : dtype
        Of the result.
    gpu : bool
        Whether it lies on GPUs.

    Examples
    --------
    >>> with dask.config.set({"array.chunk-size": 4000}):
    ...     limited_chunks(["kij", "kl"], [((1, 1), (30,), (20,)), ((1, 1), (4,))], "ijl",
    ...                    np.dtype("float32"), gpu=False)
    {'i': (15, 15), 'j': (20,), 'l': (2, 2)}
    """
    made = own_chunks(labels, chunks, out)
    usual = chunk_bytes() // dtype.itemsize
    given = max(prod(map(max, each)) for each in chunks)
    most = TIMES * usual if gpu else max(usual, min(given, TIMES * usual))
    shape = tuple(sum(own) for own in made.values())
    check_count(prod(shape) // max(1, most), shape)
    uses = Counter(x for own in labels for x in {*own})
    alone = [[x for x in own if x in made and uses[x] == 1] for own in labels]
    turns = [[x] for x in out if uses[x] > 1]
    turns += [[x for x in labels if x] for labels in zip_longest(*alone)]
    for labels_in_turn in turns:
        together = [label for label in labels_in_turn if max(made[label]) > 1]
        # Equal ones are cut alike: else X'X of one array twice would be no symmetric product.
        alike = len({made[x] for x in together}) == 1
        parts = 1
        for n, label in enumerate(together):
            if n == 0 or not alike:
                over = prod(map(max, made.values())) / max(1, most)
                parts = ceil(max(1, over) ** (1 / (len(together) - n)))
            made[label] = _finer(made[label], parts)
    return made


def _finer(own: Blocks, parts: int) -> Blocks:
    """Each block in so many parts; in more where only so all but the last one are equal."""
    size = max(own)
    parts = min(parts, size)
    if parts < 2:
        return own
    if len(own) == 1:
        return regular(size, ceil(size / parts))
    even = next(n for n in range(parts, size + 1) if size % n == 0)
    return tuple(x for block in own for x in regular(block, size // even))


def einsum_chunks(
    labels: Sequence[Labels], chunks: Sequence[Chunks], out: Labels, *_: Any
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
    found = _found(labels, chunks, out)
    largest = prod(max(1, *map(max, each)) for each in found.values())  # as Dask counts
    tolerance = chunk_tolerance()
    given = max(1, *(prod(map(max, blocks)) for blocks in chunks))
    if len(labels) > 1 and out and largest > tolerance * given:
        return _split(tuple(map(tuple, labels)), tuple(chunks), tuple(out), tolerance)
    return {label: common_chunks(each) for label, each in found.items()}


def _found(
    labels: Sequence[Labels], chunks: Sequence[Chunks], out: Labels
) -> dict[Label, list[Blocks]]:
    """What the operands have along each axis of the result."""
    found: dict[Label, list[Blocks]] = {label: [] for label in out}
    for names, blocks in zip(labels, chunks, strict=True):
        for label, own in zip(names, blocks, strict=True):
            if label in found:
                found[label].append(own)
    return found


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
