"""Terms of the sums over k in the order in which they lie on workers.

A tall matrix in blocks of rows lies wherever its blocks were made, mostly in turn. Where workers
have parts of k, each is to have the slabs of its own:

    as stored          0    1    2    3    4    5        in order   0    2    4  |  1    3    5
    lies on worker     w0   w1   w0   w1   w0   w1   ->             w0   w0   w0 |  w1   w1   w1

Then nothing of it travels, where else (p - 1) / p of it would with p workers.
"""

from __future__ import annotations

from dataclasses import replace

from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec

Order = tuple[int, ...]


def by_owner(problem: Problem) -> Problem | None:
    """The same product with the blocks of k sorted by the workers that they lie on.

    None where that makes no difference, or none that is known: A and B are in the same blocks along
    k, and the larger one of those that lie on workers has each of these on one worker.
    """
    a, b = problem.a, problem.b
    if problem.batch_shape or any(problem.rereadable) or a.chunks[-1] != b.chunks[-2]:
        return None
    known = [spec for spec in (a, b.T) if spec.owners]
    if not known:
        return None
    owners = _owners_along_k(max(known, key=lambda spec: spec.nbytes))
    order = tuple(sorted(range(len(owners)), key=owners.__getitem__))
    if order == tuple(range(len(order))):
        return None
    return replace(problem, a=_sorted(a, order), b=_sorted(b.T, order).T, order=order)


def _owners_along_k(spec: MatrixSpec) -> tuple[int, ...]:
    """The worker of each block of columns; empty unless each lies on one."""
    columns = len(spec.chunks[1])
    first = spec.owners[:columns]
    rows = range(0, len(spec.owners), columns)
    return first if all(spec.owners[row : row + columns] == first for row in rows) else ()


def _sorted(spec: MatrixSpec, order: Order) -> MatrixSpec:
    """A matrix with its blocks of columns in another order."""
    rows, columns = spec.chunks
    starts = range(0, len(spec.owners), len(columns))
    owners = tuple(spec.owners[start + i] for start in starts for i in order)
    return replace(spec, chunks=(rows, tuple(columns[i] for i in order)), owners=owners)
