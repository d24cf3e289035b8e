"""What workers exchange to bring A, B and C from their own chunks to the blocks of a plan."""

from __future__ import annotations

from math import prod

from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import number_of
from multimm.planning.tiling.rechunk import Index
from multimm.planning.tiling.result_chunks import chunks_of


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
    blocks = layout.operand_chunks(role)
    users = [share.users[0] for share in layout.shares(role)]
    elements, arrived = 0, set[tuple[int, Index]]()
    for (*batch, row, column), _, _, parts in chunks_of(blocks, spec.chunks, spec.owners):
        flat = users[number_of(batch, [*map(len, blocks[:-2])])]
        owner = _needs(layout, role, flat, row, column) % workers
        for rank, own in parts.items():
            for part in own:
                if whole and (owner, part.of) in arrived:
                    continue
                arrived.add((owner, part.of))
                moved = part.size if whole else part.shape
                times = 1 + (moved != part.size) if rank >= grid.workers else rank != owner
                elements += prod(moved) * times
    return elements * spec.itemsize


def _needs(layout: Schedule, role: str, flat: int, row: int, col: int) -> int:
    """The number of the worker that keeps a block of an operand, or adds one of C."""
    if role == "c":
        return layout.completes(layout.row(flat, row), col)
    block, k_tile = (row, col) if role == "a" else (col, row)
    return layout.tiles.owners(role, flat, block)[k_tile]
