"""What a layout moves between workers, counted block by block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain, product

from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Coordinate, merges, spans
from multimm.planning.work.owner_computes import OwnerComputes

#: Blocks of one array on both sides that are counted one by one: arbitrary, a few milliseconds.
SHARED = 1000
#: Of blocks with the same users: the bytes of them that each rank keeps, and those users' ranks.
Transfer = tuple[dict[int, int], set[int]]


def received(layout: Schedule, workers: int) -> Counter[int]:
    """Bytes that each worker (by rank) receives, counted block by block.

    Where the grid has more ranks than there are workers, ranks wrap around. Where it has fewer,
    blocks may come from workers beyond it.
    """
    total: Counter[int] = Counter()
    wraps = layout.grid.workers > workers
    if (own := layout.in_place) is not None:
        found = chain(_count_large(own), _count_small(own), _count_partial_products(layout, own))
    else:
        found = chain(_count_operands(layout), _count_sums(layout))
    for kept, users in found:
        if wraps:
            kept, users = _wrapped(kept, workers), {rank % workers for rank in users}
        together = sum(kept.values())
        for user in users:
            if lacks := together - kept.get(user, 0):
                total[user] += lacks
    return total


def _wrapped(kept: dict[int, int], workers: int) -> dict[int, int]:
    found: Counter[int] = Counter()
    for rank, size in kept.items():
        found[rank % workers] += size
    return found


def _count_operands(layout: Schedule) -> Iterator[Transfer]:
    """Copies of a block are let go when a row panel is over."""
    grid, edges = layout.grid, {"a": layout.m_blocks, "b": layout.n_blocks}
    if shares_blocks(layout):
        yield from _count_shared(layout)
        return
    for role in layout.roles:
        for share, (block, size) in product(layout.shares(role), enumerate(edges[role])):
            at = role, share.users[0], block
            used = [*layout.blockwise.users(*at)]
            kept = _kept_by_part(layout, *at, share.matrices * size)
            for (part, own), places in product(enumerate(kept), used):
                yield own, {grid.rank(Coordinate(*place, part)) for place in places}


def shares_blocks(layout: Schedule) -> bool:
    """Whether blocks of A are those of B, too, which travel to a worker once for both."""
    same, blocks = layout.problem.same, {layout.m_blocks, layout.n_blocks}
    blocks |= {layout.k_tiles} if same == "plain" else set()
    as_they_lie = {*layout.operands.in_place} == {"a", "b"} and not layout.operands.packed
    several = bool(layout.batch_blocks) or layout.mirrors or layout.row_panels > 1
    few = len(layout.m_blocks) * len(layout.k_tiles) <= SHARED
    return bool(same) and len(blocks) == 1 and as_they_lie and not several and few


def _count_shared(layout: Schedule) -> Iterator[Transfer]:
    """Block (x, y) of A is block (x, y) of B, or (y, x) where B is A's transpose."""
    grid, used, turned = layout.grid, layout.blockwise.users, layout.problem.same == "turned"
    width, part_of = layout.operands.width("a"), layout.part_of
    for x, rows in enumerate(layout.m_blocks):
        owners = zip(layout.tiles.owners("a", 0, x), layout.k_tiles, strict=True)
        for y, (owner, k_tile) in enumerate(owners):
            column, k = (x, y) if turned else (y, x)
            places = [((row, col), part_of[y]) for one in used("a", 0, x) for row, col in one]
            places += [((row, col), part_of[k]) for one in used("b", 0, column) for row, col in one]
            users = {grid.rank(Coordinate(*place, part)) for place, part in places}
            yield {owner: rows * k_tile * width}, users


def _kept_by_part(
    layout: Schedule, role: str, flat: int, block: int, rows: int
) -> list[dict[int, int]]:
    """By part of k: bytes of so many rows of A, or columns of B, that each rank keeps."""
    kept: list[dict[int, int]] = [{} for _ in range(layout.parts)]
    size = rows * layout.operands.width(role)
    for rank, part, k_tile in zip(
        layout.tiles.owners(role, flat, block), layout.part_of, layout.k_tiles, strict=True
    ):
        own = kept[part]
        own[rank] = own.get(rank, 0) + size * k_tile
    return kept


def _count_sums(layout: Schedule) -> Iterator[Transfer]:
    """Partial sums travel to the worker that keeps the sum: blocks of C whose places are alike."""
    if layout.parts == 1:
        return
    alike: Counter[tuple[int, int]] = Counter()
    for flat, (i, j) in product(range(len(layout.batch_sizes)), layout.work.pairs):
        row = layout.row(flat, i)
        first = layout.grid.rank(layout.worker(row, j, 0))  # the other parts' ranks follow
        alike[first, layout.turns[row, j]] += layout.row_sizes[row] * layout.n_blocks[j]
    for (first, turn), elements in alike.items():
        size = elements * layout.problem.sum_bytes
        for merge in merges(layout.parts, turn, layout.fan_in):
            yield dict.fromkeys([first + x for x in merge.senders], size), {first + merge.owner}


def _count_large(own: OwnerComputes) -> Iterator[Transfer]:
    """Chunks that others multiply than those who have them."""
    for worker, size in own.fetched.items():
        yield {-1: size}, {worker}


def _count_small(own: OwnerComputes) -> list[Transfer]:
    """Chunks of the other operand travel whole to all who need some of them, or are coalesced."""
    spec, partial_products = own.sent, own.partial_products
    along, across = spec.chunks[:: -1 if partial_products.by_columns else 1]
    ends, found = [*accumulate(partial_products.columns)], list[Transfer]()
    coalesced_transfers: dict[int, set[int]] = {}
    users_of = [
        set().union(*partial_products.users[bisect_right(ends, start) : bisect_left(ends, end) + 1])
        for start, end in spans(along)
    ]
    for (at, length), (other, size) in product(enumerate(along), enumerate(across)):
        row, column = own.of(at, other)
        owner = own.owner_of_small(row * len(spec.chunks[1]) + column)
        users = users_of[at] if length * size else set()
        if partial_products.coalesced and users:
            coalesced_transfers.setdefault(owner, set()).update(users)
            users = coalesced_transfers[owner]  # complete at the end
        found.append(({owner: length * size * spec.itemsize}, users))
    return found


def _count_partial_products(layout: Schedule, own: OwnerComputes) -> Iterator[Transfer]:
    """Partial products of C's blocks travel to the worker that joins them; k is in one part."""
    width = layout.joined_bytes
    for output_tile, across in own.joined:
        owner = own.joining(output_tile) % own.workers
        for number in own.output_tiles[output_tile]:
            size = own.partial_products.lengths[number] * own.across[across] * width
            yield {number % own.workers: size}, {owner}
