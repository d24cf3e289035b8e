"""What a check does with one block of A, B, C or C0: pure functions, in the block's own module.

What is as large as a block stays where the block is, and rows of a few numbers are NumPy's: each
operation on another kind of array is a kernel, which CuPy compiles on the first day of a machine.

A sketch row is ``[row of block @ vectors | STATS]``; integers have no STATS. A product row is
``[row of A (B X) | SIZES]``. Rows of blocks side by side are added, largest values compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.checks.rule import PRIME, SHRINK, Rule
from multimm.errors import DTypeError
from multimm.failures import named
from multimm.gpu.arrays import to_numpy
from multimm.graph.block_task import check_shape
from multimm.graph.tasks.dtype_check import as_declared
from multimm.graph.tasks.host_offload import on_device

#: sum and largest of the absolute values that count; how many elements are non-finite, finite,
#: and finite where none of its kind is right: their vector entry is zero (a column of B is not
#: finite), or they have a fraction where sums are whole numbers
STATS = ("total", "peak", "bad", "good", "never")
#: |A| times the bounds of the norms of B's rows, |A| times totals, |A| times peaks; how many
#: elements are non-finite in the row of A, and in all of B
SIZES = ("norm", "total", "peak", "bad_a", "bad_b")
#: Elements of a block that are looked at together. All of a block in float64, with its absolute
#: values and what is finite of it, took seven times the block's own memory, which operands that
#: fill a GPU do not leave. Arbitrary: half a GB of float64 in all, and work for a whole GPU.
STRIP = 2**24

_Task = Callable[..., Any]


def checking(task: _Task) -> _Task:
    """Have errors name a task, which looks at overflow itself, whatever the user has NumPy do."""

    @functools.wraps(task)
    def run(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return task(*args, **kwargs)

    return named(run)


@checking
def declared(block: Any, dtype: np.dtype[Any], block_info: Any = None) -> Any:
    """A block that is what its array declares; of others a check would look at a part."""
    of = "what is checked"
    block = as_declared(block, dtype, of)
    check_shape(block, tuple(block_info[None]["chunk-shape"]), of=of)
    return block


@checking
def add(block: Any, axis: Any, keepdims: bool) -> Any:
    """Add over block columns."""
    return block.sum(axis=axis, keepdims=keepdims)


@checking
def add_stats(block: Any, axis: Any, keepdims: bool) -> Any:
    """Add over block columns, except that the peak of STATS, if there are any, is the largest."""
    total = block.sum(axis=axis, keepdims=keepdims)
    if block.dtype.kind == "u":
        return total
    peak = STATS.index("peak") - len(STATS)
    total[..., peak] = block[..., peak].real.max(axis=axis, keepdims=keepdims)
    return total


def _in_strips(total: _Task) -> Callable[[_Task], _Task]:
    """Have a task look at a strip of its block at a time, along the block's longer edge.

    Rows of the result stand side by side, columns of the block are added by `total`. So the other
    operand, which lies on the host, goes to the block's GPU a few times at most: 16 rows of a
    million columns at a time took it there 128 times. With ``hosted=True`` each strip is brought to
    the worker's GPU. Results are NumPy's.
    """

    def wrapped(task: _Task) -> _Task:
        @functools.wraps(task)
        def run(block: Any, other: Any, rule: Rule, hosted: bool = False) -> Any:
            block = plain(block, "a block that is checked")

            def look(strip: Any, other: Any) -> Any:
                there = functools.partial(_as_rows, task, other, rule)
                return on_device(there, strip) if hosted and block.size else there(strip)

            rows, columns = block.shape[-2:]
            longer = max(rows, columns)
            step = max(1, STRIP * longer // max(1, block.size))
            cuts = [slice(at, at + step) for at in range(0, longer, step)]
            if len(cuts) < 2:
                return look(block, other)
            if rows >= columns:
                return np.concatenate([look(block[..., at, :], other) for at in cuts], axis=-3)
            parts = [look(block[..., at], other[..., at, :]) for at in cuts]
            return total(np.concatenate(parts, axis=-2), axis=parts[0].ndim - 2, keepdims=True)

        return run

    return wrapped


def _as_rows(task: _Task, other: Any, rule: Rule, strip: Any) -> Any:
    return to_numpy(task(strip, other, rule))


@checking
@_in_strips(add_stats)
def sketch_rows(block: Any, vectors: Any, rule: Rule) -> Any:
    """(rows, columns) @ (columns, rounds) and STATS; a new axis stands for the block column."""
    values = _converted(block, rule)
    if rule.kind == "int":
        return _residues(block, values, vectors, rule)
    size = np.abs(values)
    total, keep = to_numpy(size.sum(axis=-1)), to_numpy(vectors)[..., 0] != 0
    none = np.zeros_like(total)
    counts = none, none + block.shape[-1], _fractions(values) if rule.whole else none
    if keep.ndim > 1 or not keep.all() or not np.isfinite(total).all():
        values, counts = _used(values, np.asarray(keep[..., None, :], like=block), rule)
        size = np.abs(values)
        total = to_numpy(size.sum(axis=-1))
    peak = to_numpy(size.max(axis=-1)) if size.shape[-1] else total
    stats = np.stack([total, peak, *counts], axis=-1)
    sketch = np.matmul(values, np.asarray(vectors, like=block).astype(np.float64))
    return np.concatenate([to_numpy(sketch), stats.astype(rule.dtype)], axis=-1)[..., None, :]


def _converted(block: Any, rule: Rule) -> Any:
    """The block in the check's dtype; `DTypeError` for long doubles that are infinite in it."""
    values = block.astype(rule.dtype)
    wider = block.dtype.itemsize > values.dtype.itemsize
    if wider and (np.isfinite(block) & ~np.isfinite(values)).any():
        raise DTypeError(
            f"verify computes in float64, and is given values of {block.dtype} beyond its range: "
            "scale operands and product by powers of two"
        )
    return values


def _used(values: Any, keep: Any, rule: Rule) -> tuple[Any, tuple[Any, ...]]:
    """Values, with zeros for those that do not count, and how many of a row are of each kind."""
    finite = np.isfinite(values)
    used = finite & keep
    counts = ((keep & ~finite).sum(axis=-1), used.sum(axis=-1), (finite & ~keep).sum(axis=-1))
    values, (bad, good, never) = np.where(used, values, 0), map(to_numpy, counts)
    return values, (bad, good, never + _fractions(values) if rule.whole else never)


def _fractions(values: Any) -> Any:
    """How many elements of a row are no whole numbers."""
    parts = (values.real, values.imag) if values.dtype.kind == "c" else (values,)
    return sum(to_numpy((np.rint(part) != part).sum(axis=-1)) for part in parts)


@checking
@_in_strips(add)
def product_rows(block: Any, sketch: Any, rule: Rule) -> Any:
    """A block of A times the sketch of the rows of B that it meets, and SIZES.

    The norm of a row of B is bounded by sqrt(total * peak): squares would overflow.
    """
    values = _converted(block, rule)
    if rule.kind == "int":
        return _residues(block, values, sketch, rule)
    sketch = to_numpy(sketch)
    total, peak, bad = (sketch[..., rule.rounds + i].real for i in range(3))
    # Ones: of a row of A, what is not finite shows in its sum, whatever it meets.
    norms = np.stack([np.sqrt(total) * np.sqrt(peak), total, peak, np.ones_like(total)], axis=-1)
    norms = np.asarray(norms, like=block)
    sizes = to_numpy(np.matmul(np.abs(values), norms))
    bad_a = np.zeros(values.shape[:-1])
    if not np.isfinite(sizes).all():
        finite = np.isfinite(values)
        values = np.where(finite, values, 0)
        sizes = to_numpy(np.matmul(np.abs(values), norms))
        bad_a = to_numpy((~finite).sum(axis=-1))
    product = np.matmul(values, np.asarray(sketch[..., : rule.rounds], like=block))
    shaped = np.zeros_like(sizes[..., 0])
    counts = np.stack([bad_a + shaped, bad.sum(axis=-1)[..., None] + shaped], -1)
    parts = [to_numpy(product), sizes[..., :3].astype(rule.dtype), counts.astype(rule.dtype)]
    return np.concatenate(parts, axis=-1)[..., None, :]


def _residues(block: Any, values: Any, vectors: Any, rule: Rule) -> Any:
    """A block of integers times vectors modulo 2**64, and times the last of them modulo PRIME."""
    vectors = np.asarray(vectors, like=block)
    signed = block if block.dtype.kind == "u" else block.astype(np.int64)
    exact = np.matmul((signed % PRIME).astype(np.uint64), vectors[..., rule.rounds :] % PRIME)
    product = np.matmul(values, vectors[..., : rule.rounds])
    return np.concatenate([product, exact % PRIME], axis=-1)[..., None, :]


@checking
def hidden(block: Any) -> Any:
    """Whether each column of a block of B holds a non-finite value; one row of these."""
    return (~np.isfinite(plain(block, "a block that is checked"))).any(axis=-2, keepdims=True)


@checking
@_in_strips(add)
def exact_rows(block: Any, rows: Any, rule: Rule) -> Any:
    """A block of B^T times a few rows of A (as columns), and the same of absolute values.

    Of floats both again, with operands times `SHRINK`: there sums of the largest are finite. Of
    absolute values those that are not finite are left out: bounds are those of the others.
    """
    values, rows = block.astype(rule.dtype), np.asarray(rows, like=block).astype(rule.dtype)
    parts = []
    for factor in (1, SHRINK) if rule.shrunk else (1,):
        left, right = (values, rows) if factor == 1 else (values * factor, rows * factor)
        parts += [np.matmul(left, right), np.matmul(_sizes(left), _sizes(right))]
    return np.concatenate([part.astype(rule.dtype) for part in parts], axis=-1)[..., None, :]


def _sizes(values: Any) -> Any:
    """Absolute values, with zeros for what is not finite."""
    sizes = np.abs(values)
    finite = np.isfinite(sizes)
    return sizes if finite.all() else np.where(finite, sizes, 0)


def keep(block: Any, axis: Any, keepdims: bool) -> Any:
    """Leave a block to the step that adds (one block column each, so nothing to add yet)."""
    return block
