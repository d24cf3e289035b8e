"""The graph of a check: block tasks, added over block columns, judged by blocks of rows.

No task sees more than one block of A, B, C and C0; what is added and compared are rows of a few
numbers per row of a matrix. Knows Dask's blockwise verbs and nothing below them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.base import compute

from multimm.checks.judge import (
    FIELDS,
    OPEN_ROWS,
    ROWS,
    TABLE,
    WIDTH,
    Kind,
    judge,
    judge_elements,
)
from multimm.checks.operands import Job
from multimm.checks.rule import PRIME, Rule
from multimm.checks.tasks import (
    STATS,
    add,
    add_stats,
    exact_rows,
    hidden,
    keep,
    product_rows,
    sketch_rows,
)
from multimm.gpu.arrays import to_numpy

Row = tuple[int, ...]  #: (batch ..., row) in C


class Swept(NamedTuple):
    """What one pass over all operands says."""

    found: dict[str, float]  #: FIELDS, of all rows together
    suspects: list[Row]  #: the worst rows
    lost: list[Row]  #: some of those that A makes non-finite


def sweep(job: Job, seed: int, hidden: Any = None) -> Swept:
    """One pass over all operands.

    `hidden` marks columns of B that hold non-finite values, shape (batch ..., n).
    """
    rule = job.rule
    vectors = da.from_array(_vectors(job, seed, hidden), chunks=-1)
    width = rule.rounds + (1 if rule.kind == "int" else len(STATS))
    parts = [_contract(sketch_rows, job, job.c, vectors, width, add_stats)]
    if rule.alpha:
        sketch = _contract(sketch_rows, job, job.b, vectors, width, add_stats)
        parts.append(_contract(product_rows, job, job.a, sketch, width, add))
    if rule.beta:
        parts.append(_contract(sketch_rows, job, job.c0, vectors, width, add_stats))
    (verdicts,) = compute(_side_by_side(judge, parts, WIDTH, rule), scheduler=job.scheduler)
    columns = verdicts.reshape(-1, WIDTH).T
    counted = ("wrong", "suspects", "open", "apart", "seen", "lost", "wrapped")
    found = {
        name: float(values.sum() if name in counted else values.max())
        for name, values in zip(FIELDS, columns, strict=False)
    }
    rows = _rows_to_recompute(verdicts, parts[0].chunks[:-1])
    suspects = [place for kind, place in rows if kind > Kind.LOST]
    lost = [place for kind, place in rows if kind == Kind.LOST]
    most = max(ROWS, min(OPEN_ROWS, int(found["open"])))
    return Swept(found, suspects[:most], lost[:OPEN_ROWS])


def hidden_columns(job: Job) -> Any:
    """Where a column of B holds a non-finite value: bool, shape (batch ..., n)."""
    chunks = (*job.b.chunks[:-2], (1,) * job.b.numblocks[-2], job.b.chunks[-1])
    found = job.b.map_blocks(hidden, chunks=chunks, dtype=bool, meta=job.b._meta.astype(bool))
    return to_numpy(compute(found.any(axis=-2), scheduler=job.scheduler)[0])


class Found(NamedTuple):
    """What rows that are recomputed say."""

    worst: float  #: ratio of a difference and its bound
    reason: str  #: what is wrong; empty where nothing is
    bound: float  #: the largest
    seen: float  #: elements that were compared with a finite number


def recompute(job: Job, places: Sequence[Row], columns: bool = False) -> Found:
    """Hold rows of C, or columns of a C whose transpose is given, against float64, each element."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        groups.setdefault(place[:-1], []).append(place[-1])
    rows_of = (_compare_rows(job, batch, rows) for batch, rows in groups.items())
    tables = compute(*rows_of, scheduler=job.scheduler)
    worst, reason, widest, seen = 0.0, "", 0.0, 0.0
    for (batch, rows), table in zip(groups.items(), tables, strict=True):
        block = int(np.argmax(table[:, 0]))
        ratio, column, row, error, bound, *_ = table[block]
        widest, seen = max(widest, table[:, -2].max()), seen + table[:, -1].sum()
        if ratio > worst:
            start = sum(job.c.chunks[-1][:block])
            along = rows[int(row)], start + int(column)
            place = (*batch, *(along[::-1] if columns else along))
            worst, reason = float(ratio), f"c[{', '.join(map(str, place))}] is wrong"
            if bound != 0:  # of integers and bool
                reason += f": off by {error:.2g} where {bound:.2g} is allowed"
    return Found(worst, reason, float(widest), float(seen))


def hidden_places(job: Job, hidden: Any) -> list[Row]:
    """The columns of all matrices of C that are hidden: (batch ..., column)."""
    found = np.argwhere(np.broadcast_to(hidden, (*job.c.shape[:-2], job.c.shape[-1])))
    return [tuple(map(int, at)) for at in found]


def transposed(job: Job) -> Job:
    """The same check of C transposed, whose rows are the columns of C."""
    a, b, c, c0 = (
        None if x is None else da.swapaxes(x, -1, -2) for x in (job.b, job.a, job.c, job.c0)
    )
    return replace(job, a=a, b=b, c=c, c0=c0)


def _compare_rows(job: Job, batch: tuple[int, ...], rows: list[int]) -> Any:
    rule = job.rule
    parts = [_few(job.c, batch, rows).T]
    if rule.alpha:
        few, columns = _few(job.a, batch, rows).T, _pick(job.b, batch).T
        few = few.rechunk({1: -1})
        count = 4 if rule.shrunk else 2
        parts.append(_contract(exact_rows, job, columns, few, count * len(rows), add))
    if rule.beta:
        parts.append(_few(job.c0, batch, rows).T)
    return _side_by_side(judge_elements, parts, len(TABLE), rule)


def _pick(array: Any, batch: tuple[int, ...]) -> Any:
    """The matrix of a stack that broadcasting pairs with `batch`."""
    own = batch[len(batch) - (array.ndim - 2) :]
    index = (0 if size == 1 else at for at, size in zip(own, array.shape, strict=False))
    return array[tuple(index)]


def _few(array: Any, batch: tuple[int, ...], rows: list[int]) -> Any:
    """Rows of that matrix; Dask divides by the mean chunk, which is 0 where most are empty."""
    matrix = _pick(array, batch)
    return matrix.rechunk({0: tuple(size for size in matrix.chunks[0] if size)})[rows]


def _vectors(job: Job, seed: int, hidden: Any) -> Any:
    """Random signs, with zeros for hidden columns; any residues where C holds integers.

    Two elements that are off by 2**(bits - 1) each would cancel under every choice of signs.
    """
    rng = np.random.default_rng(seed)
    shape = (job.rule.n, job.rule.rounds)
    if job.rule.kind == "int":
        residues = rng.integers(0, 2**64, shape, np.uint64)
        return np.concatenate([residues, rng.integers(0, PRIME, (shape[0], 1), np.uint64)], axis=1)
    signs = rng.integers(0, 2, shape, np.int8) * np.int8(2) - np.int8(1)
    return signs if hidden is None else np.where(hidden[..., None], np.int8(0), signs)


def _contract(
    task: Callable[..., Any], job: Job, matrix: Any, vectors: Any, width: int, total: Any
) -> Any:
    """`task(block, vectors)` for every block of a stack of matrices, added over its columns."""
    ndim, dtype = max(matrix.ndim, vectors.ndim), job.rule.dtype
    index = tuple(range(ndim + 1))
    columns, out = index[-2:]
    vectors = vectors.rechunk({vectors.ndim - 2: matrix.chunks[-1]})
    partial = da.blockwise(
        task,
        index,
        matrix,
        index[ndim - matrix.ndim : -1],
        vectors,
        (*index[ndim - vectors.ndim : -3], columns, out),
        adjust_chunks={columns: 1, out: width},
        dtype=dtype,
        meta=np.empty((0,) * (ndim + 1), dtype),
        rule=job.rule,
        hosted=job.hosted,
    )
    meta = np.empty((0,) * ndim, dtype)
    return da.reduction(partial, keep, total, axis=columns, dtype=dtype, meta=meta)


def _side_by_side(task: Callable[..., Any], parts: Sequence[Any], width: int, rule: Rule) -> Any:
    """`task` of the matching row blocks of all parts: `width` numbers for each block."""
    chunks, ndim = parts[0].chunks[:-1], parts[0].ndim
    index = tuple(range(ndim))
    arguments: list[Any] = []
    for i, part in enumerate(parts):
        whole = part.rechunk((*chunks, (part.shape[-1],)))
        arguments += [whole, (*index[:-1], ndim + i)]
    return da.blockwise(
        task,
        index,
        *arguments,
        new_axes={ndim - 1: width},
        adjust_chunks=dict.fromkeys(index[:-1], 1),
        dtype=np.float64,
        meta=np.empty((0,) * ndim),
        concatenate=True,
        rule=rule,
    )


def _rows_to_recompute(
    verdicts: Any, chunks: tuple[tuple[int, ...], ...]
) -> list[tuple[Kind, Row]]:
    """Places of rows in C, and why they are recomputed: the most pressing first."""
    found = []
    for block in np.ndindex(verdicts.shape[:-1]):
        table = verdicts[block][len(FIELDS) :].reshape(3, OPEN_ROWS).T
        own = list(zip(chunks, block, strict=True))
        size = [chunk[at] for chunk, at in own]
        for kind, score, place in table[table[:, 0] > Kind.NOT]:
            local = np.unravel_index(int(place), size)
            offsets = (sum(chunk[:at]) for chunk, at in own)
            at = tuple(o + int(i) for o, i in zip(offsets, local, strict=True))
            found.append((kind, score, at))
    found.sort(key=lambda one: (-one[0], -one[1], one[2]))
    return [(Kind(int(kind)), at) for kind, _, at in found]
