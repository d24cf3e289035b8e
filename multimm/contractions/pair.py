"""The sum over axes that two arrays share, as one product of matrices or of stacks.

    A[b, i.., k..]  B[b, k.., j..]  ->  C[b, i.., j..]      b: batch axes, k: summed over

Axes i are A's rows, axes j are B's columns, and axes k become one. Rows of a product may come in
any order, so those of A are taken as its blocks lie: each block becomes one by itself, and each
block of C is taken apart again. No block leaves its worker for that.
"""

from __future__ import annotations

import numbers
import operator
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.array.core import common_blockdim

from multimm.contractions.einsum_chunks import limited_chunks
from multimm.contractions.subscripts import Label, Labels, written
from multimm.gpu.dtypes import HALVES, accumulate_dtype, common_dtype
from multimm.gpu.integers.bounds import is_narrow
from multimm.gpu.kernel_selection import Precision
from multimm.graph.lazy_views import peel, permuted
from multimm.graph.rearranged import flattened, grouped_chunks, split
from multimm.graph.taken_apart import by_its_tasks, of_stored_blocks, with_makers
from multimm.graph.tasks.dtype_check import as_declared
from multimm.operands import Array, is_dask, on_gpu
from multimm.planning.tiling.grid import Blocks
from multimm.products import NOTHING_FIXED, Product, checked


class Term(NamedTuple):
    """An array, and a label for each of its axes."""

    array: Array
    labels: Labels
    alone: bool = False  #: a product that nobody else needs

    def blocks(self, label: Label) -> Blocks:
        """Chunks of an axis; all of it is one, if the array is no Dask array."""
        axis = self.labels.index(label)
        return self.array.chunks[axis] if is_dask(self.array) else (self.array.shape[axis],)


class Roles(NamedTuple):
    """What the labels of two operands are in their product."""

    batch: Labels
    rows: Labels
    summed: Labels
    columns: Labels

    @property
    def product(self) -> bool:
        """Whether it is one of matrices, and not of elements, rows and columns alone."""
        return bool(self.summed) and bool(not self.batch or self.rows or self.columns)


def roles(a: Labels, b: Labels, out: Labels) -> Roles:
    """The roles of labels each of which is in both operands, or in one and the result."""
    return Roles(
        batch=tuple(x for x in out if x in a and x in b),
        rows=tuple(x for x in a if x not in b),
        summed=tuple(x for x in a if x in b and x not in out),
        columns=tuple(x for x in b if x not in a),
    )


def elementwise(terms: list[Term], out: Labels, dtype: np.dtype[Any] | None = None) -> Array:
    """What is no product of matrices: diagonals, sums of one operand, products of elements.

    Narrow integers are multiplied and added in 64 bits where a `dtype` of floats is asked for,
    and rounded once.
    """
    arrays = [_as_declared(term.array) for term in terms]
    own = common_dtype(*(x.dtype for x in arrays))
    made = own if dtype is None else dtype
    exact = made.kind in "fc" and all(is_narrow(x.dtype) for x in arrays)
    sums = np.dtype("int64") if exact else dtype
    if len(terms) == 1 and {*terms[0].labels} == {*out}:
        # A view, of the operand's dtype whatever is asked for.
        arrays, sums = [x.astype(made) for x in arrays], None
    elif any(x.name in HALVES for x in (made, *(x.dtype for x in arrays))):
        # NumPy's einsum adds float16 up as it is, where 2048 + 1 is 2048, and has no bfloat16.
        sums = accumulate_dtype(made, made)
        arrays = [x.astype(sums) for x in arrays]
    labels, lazy = [term.labels for term in terms], any(map(is_dask, arrays))
    if lazy and len(terms) > 1 and {*out} >= {x for own in labels for x in own}:
        return _spread([x.astype(sums or own) for x in arrays], labels, out, made)
    subscripts = written(labels, out)
    if lazy:
        return da.einsum(subscripts, *arrays, dtype=sums).astype(made)  # Dask's sums are of 64 bits
    if any(map(on_gpu, arrays)):
        import cupy

        return cupy.einsum(subscripts, *arrays, dtype=sums).astype(made, copy=False)
    return np.asarray(np.einsum(subscripts, *arrays, dtype=sums)).astype(made, copy=False)


def _as_declared(x: Array) -> Array:
    """The same array; its blocks are what it declares, where Dask takes any, and drops masks."""
    if not is_dask(x):
        return x
    dtype = x.dtype.newbyteorder("=")
    return x.map_blocks(_declared_block, dtype, dtype=dtype, meta=x._meta.astype(dtype))


def _declared_block(block: Any, dtype: np.dtype[Any]) -> Any:
    # One of 0 dimensions may be a scalar, as NumPy's sums are.
    scalar = isinstance(block, np.generic | numbers.Number)
    return as_declared(np.asarray(block) if scalar else block, dtype)


def _spread(arrays: list[Array], labels: list[Labels], out: Labels, dtype: np.dtype[Any]) -> Array:
    """Products of elements of Dask arrays, of which nothing is summed.

    Dask's einsum would cut them until blocks are hardly larger than those of the operands.
    """
    gpu = any(map(on_gpu, arrays))
    chunks = limited_chunks(labels, [x.chunks for x in arrays], out, dtype, gpu)
    found = []
    for array, own in zip(arrays, labels, strict=True):
        x = array.rechunk(tuple(chunks[label] for label in own))
        x = x.transpose([own.index(label) for label in out if label in own])
        found.append(x[tuple(slice(None) if label in own else None for label in out)])
    return reduce(operator.mul, found).astype(dtype)


class Stored(NamedTuple):
    """A stack of matrices as it is stored, and whether it is transposed before a product."""

    array: Array
    turned: bool

    @property
    def stack(self) -> Array:
        """As it is multiplied."""
        return self.array.swapaxes(-1, -2) if self.turned else self.array


class Matrices(NamedTuple):
    """Two operands as stacks of matrices, and what their product is taken apart into."""

    left: Stored
    right: Stored
    made: Labels  #: of the product's axes, before they are taken apart
    groups: list[int]  #: how many of these each of its axes is
    sizes: dict[Label, int]
    chunks: dict[Label, Blocks]  #: of Dask arrays
    alone: tuple[str, ...] = ()  #: names of operands that nobody else needs

    def product(self, precision: Precision, dtype: np.dtype[Any] | None) -> Product:
        """What multiplies them, of options as for `multimm.matmul`."""
        asked: Any = "auto"
        (a, trans_a), (b, trans_b) = self.left, self.right
        if is_dask(a):
            asked = grouped_chunks([self.chunks[x] for x in self.made], self.groups)
        else:  # views
            a, b, trans_a, trans_b = self.left.stack, self.right.stack, False, False
        return checked(
            a, b, trans_a=trans_a, trans_b=trans_b, stacks=True, precision=precision,
            options=NOTHING_FIXED, chunks=asked, dtype=dtype,
        )  # fmt: skip

    def apart(self, product: Array, out: Labels, *, lone: bool = False) -> Array:
        """The axes of their product, in the order of the result; `lone`: workers have a thread."""
        order = tuple(self.made.index(x) for x in out)
        if is_dask(product):
            product = with_makers(of_stored_blocks(product), self.alone, several=lone)
        if order == tuple(range(len(self.made))) and {*self.groups} == {1}:
            return product
        if is_dask(product):
            chunks = tuple(self.chunks[x] for x in self.made)
            return by_its_tasks(split(product, chunks, self.groups, order))
        return product.reshape([self.sizes[x] for x in self.made]).transpose(order)

    def together(self, result: Term) -> Array:
        """The opposite: a result as the stack of matrices that their product is."""
        order = tuple(result.labels.index(x) for x in self.made)
        x = result.array
        if is_dask(x):
            x = x.rechunk(tuple(self.chunks[label] for label in result.labels))
        return _flattened(Term(x, result.labels), order, self.groups, self.chunks)


def matrices(a: Term, b: Term, out: Labels, chunks: dict[Label, Blocks]) -> Matrices:
    """Two operands as stacks of matrices.

    Parameters
    ----------
    a, b : Term
        Arrays of one kind, whose labels have `roles`.
    out : tuple of str
    chunks : dict
        By label of the result; not read of arrays that are no Dask arrays.
    """
    if next((x for x in out if (x in a.labels) != (x in b.labels)), None) in b.labels:
        a, b = b, a  # so that rows come before columns
    a, b = as_stored(a), as_stored(b)
    found = roles(a.labels, b.labels, out)
    summed = found.summed
    if a.array.size < b.array.size:  # in the order of the larger one
        summed = tuple(x for x in b.labels if x in summed)
    if is_dask(a.array) and len(summed) > 1:  # both in the same blocks
        shared = {x: common_blockdim([a.blocks(x), b.blocks(x)]) for x in summed}
        chunks = chunks | shared
    left = _matrix(a, found.batch, found.rows, summed, chunks)
    right = _matrix(b, found.batch, summed, found.columns, chunks)
    groups = [*(1 for _ in found.batch), len(found.rows), len(found.columns)]
    made = (*found.batch, *found.rows, *found.columns)
    sizes = {x: n for term in (a, b) for x, n in zip(term.labels, term.array.shape, strict=True)}
    alone = tuple(peel(x.array).array.name for x, term in ((left, a), (right, b)) if term.alone)
    return Matrices(left, right, made, groups, sizes, chunks, alone)


def as_stored(term: Term) -> Term:
    """The array below lazy transposes, with its labels in their order."""
    if not is_dask(term.array):
        return term
    below, order = permuted(term.array)
    labels = tuple(term.labels[order.index(n)] for n in range(len(order)))
    return term._replace(array=below, labels=labels)


def _matrix(
    term: Term, batch: Labels, rows: Labels, columns: Labels, chunks: dict[Label, Blocks]
) -> Stored:
    """A stack of matrices, rows and columns flattened.

    What is last as it is stored stays last: so most blocks are views.
    """
    inner = [x for x in term.labels if x not in batch]
    turned = bool(inner) and inner[-1] in rows
    first, second = (columns, rows) if turned else (rows, columns)
    order = tuple(term.labels.index(x) for x in (*batch, *first, *second))
    groups = [*(1 for _ in batch), len(first), len(second)]
    x = term.array
    if order != tuple(range(x.ndim)) or {*groups} != {1} or len(groups) < 2:
        x = _flattened(term, order, groups, chunks)
    return Stored(x, turned)


def _flattened(
    term: Term, order: tuple[int, ...], groups: list[int], chunks: dict[Label, Blocks]
) -> Array:
    x = term.array
    if not is_dask(x):
        sizes = grouped_chunks([(x.shape[axis],) for axis in order], groups)
        return x.transpose(order).reshape([size for (size,) in sizes])
    own = [group for group in _groups(order, groups) if len(group) > 1]
    grouped = {axis for group in own for axis in group}
    wanted = [
        chunks.get(label, x.chunks[axis]) if axis in grouped else x.chunks[axis]
        for axis, label in enumerate(term.labels)
    ]
    if not all(map(_refines, wanted, x.chunks)):
        x = x.rechunk(tuple(wanted))
    for first, *others in own:
        if all(len(wanted[axis]) == 1 for axis in others):
            # As they are stored: the product cuts rows of these as it likes.
            wanted[first] = x.chunks[first]
    made = flattened(x, order, groups, tuple(wanted))
    return by_its_tasks(made) if term.alone else made


def _groups(order: tuple[int, ...], groups: list[int]) -> list[tuple[int, ...]]:
    """The axes that become one, of each of these."""
    return [order[start:end] for start, end in pairwise(accumulate(groups, initial=0))]


def _refines(new: Blocks, own: Blocks) -> bool:
    """Whether new boundaries are at all of the old ones."""
    return {*np.cumsum(own).tolist()} <= {*np.cumsum(new).tolist()}
