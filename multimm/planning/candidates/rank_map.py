"""Workers numbered in the order in which blocks lie on them.

Places in a grid go by number, and so does who is left out of it: the first ones have a place. A
matrix that lies on worker 1 of two would be sent to worker 0, and one in blocks of rows that
begins on worker 1 would be sent round, for want of a name alone:

    block row          0    1    2    3    4    5    6    7
    lies on worker     1    2    3    0    1    2    3    0       all of it would travel
    its number, anew   0    1    2    3    0    1    2    3       nothing does

So the blocks of the largest operand that lies on workers are gone through row by row, as they are
multiplied, and then those of the others; who appears first is number 0. In this order ranks run
through a grid, too, so that a product that becomes an operand, transposed or not, finds its grid
again; and parts of k are numbered so, whatever the workers' addresses are.

COSTA (Kabić and others, 2021), which brings matrices into COSMA's layout, finds the numbers by a
matching of least bytes for the one layout that is wanted. Here numbers are needed before layouts:
they decide how many workers and which arrangement the search takes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import Problem


def renumbered(problem: Problem, cluster: ClusterSpec) -> tuple[Problem, ClusterSpec]:
    """The same product and workers, numbered in the order in which blocks lie on them.

    Both as they are given where they are in that order already. Workers without blocks come last.
    Workers of a node stay together: nodes come in the order of their first blocks, and within each
    its workers. Where a node has fewer workers than others, nobody is numbered anew.
    """
    order = _order(problem, cluster)
    if order == tuple(range(cluster.workers)):
        return problem, cluster
    ranks = {worker: rank for rank, worker in enumerate(order)}

    def anew(spec: MatrixSpec) -> MatrixSpec:
        return replace(spec, owners=tuple(map(ranks.get, spec.owners, spec.owners)))

    c = None if problem.c is None else anew(problem.c)
    return replace(problem, a=anew(problem.a), b=anew(problem.b), c=c), cluster.reordered(order)


def _order(problem: Problem, cluster: ClusterSpec) -> tuple[int, ...]:
    """The workers, by their present numbers, in the order of their first blocks."""
    workers, node = range(cluster.workers), cluster.node
    given = [spec for spec in (problem.a, problem.b, problem.c) if spec is not None]
    owners = chain(*(x.owners for x in sorted(given, key=lambda x: x.nbytes, reverse=True)))
    first = {worker: at for at, worker in enumerate(dict.fromkeys(owners))}
    if not first or cluster.workers % node:
        return tuple(workers)
    nodes: dict[int, int] = {}
    for worker, at in first.items():
        nodes.setdefault(worker // node, at)
    last = len(first)
    return tuple(sorted(workers, key=lambda w: (nodes.get(w // node, last), first.get(w, last))))
