"""Blocks of k, of rows or of columns in the order in which they lie on workers.

A tall matrix in blocks of rows lies wherever its blocks were made, mostly in turn. Where workers
have parts of k, each is to have the k-tiles of its own:

    as stored          0    1    2    3    4    5        in order   0    2    4  |  1    3    5
    lies on worker     w0   w1   w0   w1   w0   w1   ->             w0   w0   w0 |  w1   w1   w1

Then nothing of it travels, where else (p - 1) / p of it would with p workers. Where each worker has
block rows of C, and those of A lie anywhere, they are assigned to the workers that they lie on in
the same way, and so are columns:

    as stored          0    1    2    3    4    5        in order   0    1    2    3    4    5
    lies on worker     w0   w1   w1   w0   w0   w1   ->             w0   w1   w0   w1   w0   w1
                                                         stored at  0    1    3    2    4    5
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import Problem
from multimm.planning.tiling.grid import Grid

Order = tuple[int, ...]


def by_owner(problem: Problem) -> Problem | None:
    """The same product with the blocks of k sorted by the workers that they lie on.

    None where that makes no difference, or none that is known: A and B are in the same blocks along
    k, and the larger one of those that lie on workers has each of these on one worker.
    """
    a, b, owners = problem.a, problem.b, larger_owners_of_k(problem)
    order = tuple(sorted(range(len(owners)), key=owners.__getitem__))
    if unchanged(order):
        return None
    return replace(problem, a=in_order(a, order), b=in_order(b.T, order).T, order=order)


def larger_owners_of_k(problem: Problem) -> tuple[int, ...]:
    """The worker of each block of k of the larger operand that lies on workers.

    Empty where it is on several, or on none that is known, and where A and B differ along k.
    """
    a, b = problem.a, problem.b
    if problem.batch_shape or any(problem.rereadable) or a.chunks[-1] != b.chunks[-2]:
        return ()
    known = [spec for spec in (a, b.T) if spec.owners]
    return owners_of_columns(max(known, key=lambda spec: spec.nbytes)) if known else ()


def where_they_lie(problem: Problem, workers: int) -> Iterator[tuple[Problem, Grid]]:
    """The same product with block rows, or columns, in the order of the places that have them.

    With the grid of these places. Only where each block row of A, or block column of B, lies on
    one worker, and where that is another order than the one in which they are stored. C has to
    come in the same blocks, if there is one.
    """
    if problem.batch_shape or problem.symmetric or any(problem.rereadable):
        return
    a, b, c = problem.a.T, problem.b, problem.c
    if rows := _in_place(a, None if c is None else c.T, workers):
        c_rows = None if c is None else in_order(c.T, rows).T
        yield replace(problem, a=in_order(a, rows).T, c=c_rows, rows=rows), Grid(workers, 1, 1)
    if columns := _in_place(b, c, workers):
        c = None if c is None else in_order(c, columns)
        yield replace(problem, b=in_order(b, columns), c=c, columns=columns), Grid(1, workers, 1)


def stack_where_it_lies(problem: Problem, workers: int) -> Problem | None:
    """The same stack of products with its blocks in turn of the workers that have them.

    By the larger of the operands that lie on workers. None unless all come in blocks of whole
    matrices, the same for each that is not shared by all.
    """
    a, b, c = problem.a, problem.b, problem.c
    given = [spec for spec in (a, b, c) if spec is not None]
    own = [spec for spec in given if len(spec.shape) > 2 and spec.shape[0] > 1]
    whole = all(len(blocks) == 1 for spec in given for blocks in spec.chunks[-2:])
    alike = len({spec.chunks[0] for spec in own}) == 1
    if len(problem.batch_shape) != 1 or problem.symmetric or any(problem.rereadable):
        return None
    known = [spec for spec in own if spec.owners and spec is not c]
    if not (whole and alike and known):
        return None
    order = _in_turn(max(known, key=lambda spec: spec.nbytes).owners, workers)
    if unchanged(order):
        return problem
    sorted_ = {id(spec): _sorted_stack(spec, order) for spec in own}
    a, b = (sorted_.get(id(spec), spec) for spec in (a, b))
    return replace(problem, a=a, b=b, c=c and sorted_.get(id(c), c), stack=order)


def _sorted_stack(spec: MatrixSpec, order: Order) -> MatrixSpec:
    """A stack with its blocks, of whole matrices, in another order."""
    blocks = spec.chunks[0]
    owners = tuple(spec.owners[i] for i in order) if spec.owners else ()
    return replace(spec, chunks=(tuple(blocks[i] for i in order), *spec.chunks[1:]), owners=owners)


def _in_place(spec: MatrixSpec, c: MatrixSpec | None, workers: int) -> Order:
    """Its columns in turn of the workers that they lie on; empty where they are, or C's others."""
    order = _in_turn(owners_of_columns(spec), workers) if spec.owners else ()
    alike = c is None or c.chunks[1] == spec.chunks[1]
    return order if alike and not unchanged(order) else ()


def stored_at(order: Order, i: int) -> int:
    """Where block `i` of an order is stored."""
    return order[i] if order else i


def as_stored(values: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """What blocks have, in the order in which they are stored."""
    if not order:
        return tuple(values)
    places = sorted(range(len(values)), key=lambda i: stored_at(order, i))
    return tuple(values[i] for i in places)


def unchanged(order: Order) -> bool:
    """Whether blocks are in the order in which they are stored."""
    return order == tuple(range(len(order)))


def _in_turn(owners: Sequence[int], workers: int) -> Order:
    """The blocks so that the i-th lies on worker i modulo their number, as far as there are such.

    >>> _in_turn((1, 1, 0, 1, 0), 2)
    (2, 0, 4, 1, 3)
    """
    own: list[deque[int]] = [deque() for _ in range(workers)]
    places = [len(range(worker, len(owners), workers)) for worker in range(workers)]
    beyond: deque[int] = deque()  # a worker's places: others take it
    for at, owner in enumerate(owners):
        room = owner < workers and len(own[owner]) < places[owner]
        (own[owner] if room else beyond).append(at)
    return tuple((own[i % workers] or beyond).popleft() for i in range(len(owners)))


def owners_of_columns(spec: MatrixSpec) -> tuple[int, ...]:
    """The worker of each block of columns; empty unless each lies on one."""
    columns = len(spec.chunks[1])
    first = spec.owners[:columns]
    rows = range(0, len(spec.owners), columns)
    return first if all(spec.owners[row : row + columns] == first for row in rows) else ()


def in_order(spec: MatrixSpec, order: Order) -> MatrixSpec:
    """A matrix with its blocks of columns in another order."""
    rows, columns = spec.chunks
    starts = range(0, len(spec.owners), len(columns))
    owners = tuple(spec.owners[start + i] for start in starts for i in order)
    return replace(spec, chunks=(rows, tuple(columns[i] for i in order)), owners=owners)
