"""What a layout moves between workers, counted block by block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, product, starmap

from multimm.planning.gathered import GatheredLayout
from multimm.planning.gram import GramLayout
from multimm.planning.grid import Coordinate
from multimm.planning.layout import Layout
from multimm.planning.recut import spans

#: Of one block: the rank that keeps it, the ranks that use it, its bytes.
Transfer = tuple[int, set[int], int]


def received(layout: Layout, workers: int) -> Counter[int]:
    """Bytes that each worker (by rank) receives, counted block by block.

    Where the grid has more ranks than there are workers, ranks wrap around. Where it has fewer,
    blocks may come from workers beyond it.
    """
    total: Counter[int] = Counter()
    wraps = layout.grid.workers > workers
    if isinstance(layout, GatheredLayout):
        found = chain(_count_large(layout), _count_small(layout), _count_portions(layout))
    elif isinstance(layout, GramLayout):
        found = chain(_count_gram(layout), _count_sums(layout))
    else:
        found = chain(_count_a(layout), _count_b(layout), _count_sums(layout))
    for home, users, size in found:
        if wraps:
            home, users = home % workers, {rank % workers for rank in users}
        total.update(dict.fromkeys(users - {home}, size))
    return total


def _count_a(layout: Layout) -> Iterator[Transfer]:
    grid = layout.grid
    columns = {j % grid.p_n for _, j in layout.pairs}
    for share, (i, size) in product(layout.shares("a"), enumerate(layout.m_blocks)):
        waves = _rows_by_wave(layout, (layout.row(flat, i) for flat in share.users))
        for (s, slab), used in product(enumerate(layout.slabs), waves):
            part = layout.part_of[s]
            home = layout.keeps("a", share.users[0], i, s)
            users = {grid.rank(Coordinate(row, col, part)) for row in used for col in columns}
            yield home, users, share.matrices * size * slab * layout.width("a")


def _count_b(layout: Layout) -> Iterator[Transfer]:
    grid, rows = layout.grid, sorted({i for i, _ in layout.pairs})
    for share in layout.shares("b"):
        waves = _rows_by_wave(layout, starmap(layout.row, product(share.users, rows)))
        for (s, slab), (j, size) in product(enumerate(layout.slabs), enumerate(layout.n_blocks)):
            home = layout.keeps("b", share.users[0], j, s)
            for used in waves:
                users = {grid.rank(Coordinate(row, j, layout.part_of[s])) for row in used}
                yield home, users, share.matrices * size * slab * layout.width("b")


def _rows_by_wave(layout: Layout, rows: Iterable[int]) -> list[set[int]]:
    """Grid rows of some block rows, wave by wave: copies are let go when one is over."""
    found: dict[int, set[int]] = {}
    for row in rows:
        found.setdefault(layout.wave(row), set()).add(row % layout.grid.p_m)
    return list(found.values())


def _count_gram(layout: GramLayout) -> Iterator[Transfer]:
    """The blocks of the one operand serve both sides."""
    grid, rows = layout.grid, len(layout.m_blocks)
    waves = range(layout.waves)
    for (flat, count), i, wave in product(enumerate(layout.batch_sizes), range(rows), waves):
        places = layout.users(flat, i, wave)
        if not places:
            continue
        for s, slab in enumerate(layout.slabs):
            part = layout.part_of[s]
            users = {grid.rank(Coordinate(*place, part)) for place in places}
            home = layout.keeps("a", flat, i, s)
            yield home, users, count * layout.m_blocks[i] * slab * layout.width("a")


def _count_sums(layout: Layout) -> Iterator[Transfer]:
    """Partial sums travel to the worker that keeps the sum."""
    if layout.parts == 1:
        return
    for flat, (i, j) in product(range(len(layout.batch_sizes)), layout.pairs):
        row = layout.row(flat, i)
        size = layout.row_sizes[row] * layout.n_blocks[j] * layout.problem.sum_bytes
        for merge in layout.merges(row, j):
            keeper = layout.grid.rank(layout.owner(row, j, merge.keeper))
            for sender in merge.senders:
                yield layout.grid.rank(layout.owner(row, j, sender)), {keeper}, size


def _count_large(layout: GatheredLayout) -> Iterator[Transfer]:
    """Chunks that others multiply than those who have them."""
    for worker, size in layout.fetched.items():
        yield -1, {worker}, size


def _count_small(layout: GatheredLayout) -> list[Transfer]:
    """Chunks of the other operand travel whole to all who need some of them, or of their bundle."""
    spec, portions = layout.spec(layout.small), layout.portions
    along, across = spec.chunks[:: -1 if layout.by_columns else 1]
    ends, found, bundles = [*accumulate(portions.columns)], list[Transfer](), dict[int, set[int]]()
    users_of = [
        set().union(*portions.users[bisect_right(ends, start) : bisect_left(ends, end) + 1])
        for start, end in spans(along)
    ]
    for (at, length), (other, size) in product(enumerate(along), enumerate(across)):
        index = (other, at) if layout.by_columns else (at, other)
        keeper = layout.keeper_of_small(index[0] * len(spec.chunks[1]) + index[1])
        users = users_of[at] if length * size else set()
        if layout.bundled and users:
            bundles.setdefault(keeper, set()).update(users)
            users = bundles[keeper]  # complete at the end
        found.append((keeper, users, length * size * spec.itemsize))
    return found


def _count_portions(layout: GatheredLayout) -> Iterator[Transfer]:
    """Portions of C's blocks travel to the worker that joins them; k is in one part."""
    for strip, across in layout.joined:
        keeper = layout.grid.rank(layout.keeper_of(strip))
        for portion in layout.strips[strip]:
            row, column = layout.cell(portion, across)
            size = layout.m_blocks[row] * layout.n_blocks[column] * layout.joined_bytes
            yield layout.grid.rank(layout.owner(row, column, 0)), {keeper}, size
