"""What workers exchange to bring A, B and C from their own chunks to the blocks of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from multimm.planning.schedule import Schedule
from multimm.planning.tiling.rechunk import Index, cuts_of, offsets, shape_of, size_of


def brought(layout: Schedule, workers: int) -> int:
    """Bytes that workers exchange to bring operands into these blocks.

    Counted where owners are known. Else at most: blocks that are still to be made may be made where
    they are needed. What lies beyond the grid may travel twice.
    """
    whole = layout.problem.from_host
    roles = layout.roles if whole else layout.operands.cut_again
    return sum(_brought(layout, role, workers, whole=whole) for role in roles)


def added(layout: Schedule, workers: int) -> int:
    """Bytes that workers receive of the C that is added: counted, or at most, as in `brought`."""
    return 0 if layout.problem.c is None else _brought(layout, "c", workers)


def _brought(layout: Schedule, role: str, workers: int, *, whole: bool = False) -> int:
    """Bytes of sub-blocks that do not lie where the blocks that they are of will be needed.

    Or of the `whole` chunks that these are of, each once for a worker.
    """
    spec, grid = layout.spec(role), layout.grid
    if not spec.owners:
        return spec.nbytes if min(grid.workers, workers) > 1 else 0
    lie = dict(zip(product(*(range(len(x)) for x in spec.chunks)), spec.owners, strict=True))
    cuts: Iterable[tuple[int, Index, Index]] = _cuts(layout, role, workers)
    if whole:
        cuts = {(owner, at, size_of(spec.chunks, at)) for owner, at, _ in cuts}
    elements = 0
    for owner, at, shape in cuts:
        cut = shape != size_of(spec.chunks, at)
        elements += prod(shape) * (1 + cut if lie[at] >= grid.workers else lie[at] != owner)
    return elements * spec.itemsize


def _cuts(layout: Schedule, role: str, workers: int) -> Iterator[tuple[int, Index, Index]]:
    """Of each sub-block of the plan's blocks: who needs it, of which chunk it is, and its shape."""
    spec, blocks = layout.spec(role), layout.operand_chunks(role)
    users, lie = [share.users[0] for share in layout.shares(role)], [*map(offsets, spec.chunks)]
    matrices, rows, cols = product(*map(offsets, blocks[:-2])), *map(offsets, blocks[-2:])
    for (flat, where), (r, row), (c, col) in product(
        zip(users, matrices, strict=True), enumerate(rows), enumerate(cols)
    ):
        owner = _needs(layout, role, flat, r, c) % workers
        for at, _, to in cuts_of(lie, (*where, row, col)):
            yield owner, at, shape_of(to)


def _needs(layout: Schedule, role: str, flat: int, row: int, col: int) -> int:
    """The number of the worker that keeps a block of an operand, or adds one of C."""
    if role == "c":
        return layout.completes(layout.row(flat, row), col)
    block, k_tile = (row, col) if role == "a" else (col, row)
    return layout.tiles.owners(role, flat, block)[k_tile]
