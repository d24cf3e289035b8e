"""What workers exchange to bring A, B and C from their own chunks to the blocks of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from multimm.planning.matrix import MatrixSpec
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.rechunk import Index, cuts_of, offsets, shape_of, size_of


def brought(layout: Schedule, workers: int) -> int:
    """Bytes that workers exchange to bring operands into these blocks.

    Counted where owners are known. Else at most: blocks that are still to be made may be made where
    they are needed. What lies beyond the grid may travel twice.
    """
    if layout.problem.from_host:
        return sum(_whole_chunks(layout, role, workers) for role in layout.roles)
    return sum(_brought(layout, role, workers) for role in layout.operands.cut_again)


def added(layout: Schedule, workers: int) -> int:
    """Bytes that workers receive of the C that is added: counted, or at most, as in `brought`."""
    return 0 if layout.problem.c is None else _brought(layout, "c", workers)


def _brought(layout: Schedule, role: str, workers: int) -> int:
    spec = layout.spec(role)
    if spec.owners:
        return sum(_sub_blocks_brought(layout, role, workers))
    return spec.nbytes if min(layout.grid.workers, workers) > 1 else 0


def _whole_chunks(layout: Schedule, role: str, workers: int) -> int:
    """Bytes of chunks that lie with another worker than one that takes blocks from them."""
    spec = layout.spec(role)
    if not spec.owners:
        return _brought(layout, role, workers)
    taken = {(owner, at) for owner, at, _ in _cuts(layout, role, workers)}
    owners = _owners(spec)
    sizes = (prod(size_of(spec.chunks, at)) for owner, at in taken if owners[at] != owner)
    return sum(sizes) * spec.itemsize


def _sub_blocks_brought(layout: Schedule, role: str, workers: int) -> Iterator[int]:
    """Bytes of each sub-block that does not lie where the block that it is of will be needed."""
    spec = layout.spec(role)
    lie = _owners(spec)
    for owner, at, shape in _cuts(layout, role, workers):
        lies, whole = lie[at], shape == size_of(spec.chunks, at)
        times = 1 + (not whole) if lies >= layout.grid.workers else lies != owner
        yield times * prod(shape) * spec.itemsize


def _owners(spec: MatrixSpec) -> dict[Index, int]:
    """The worker of each chunk."""
    return dict(zip(product(*(range(len(x)) for x in spec.chunks)), spec.owners, strict=True))


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
