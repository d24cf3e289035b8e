"""Symmetric products C = op(A) op(A)^T: one triangle of C's blocks is computed, the other mirrored.

Block (i, j) with i >= j is computed from the blocks i and j of one operand, whose blocks serve
both sides; block (j, i) is its transpose, made where it lies. So C is symmetric bit by bit:

        j=0   j=1   j=2                 c: computed
    i=0 | d |  m  |  m  |               d: computed below the diagonal, and mirrored
    i=1 | c |  d  |  m  |               m: mirrored
    i=2 | c |  c  |  d  |

Of a block on the diagonal a little more than half is computed: see
`multimm.planning.tiling.triangle`. All of C's operations come to (1 + 1 / d) / 2 of the plain
product's, for d sub-blocks along its diagonal, of 256 rows and more.

A plain cyclic assignment of a triangle leaves some workers with half of the others' work. Whoever
stands at place (i, j) of the grid, or at (j, i), has both operand blocks anyway; the one with
less to do computes the block. In a grid of few rows and one column anybody may: blocks are assigned
diagonal by diagonal, each to a place with the least to do, of these to one that needs the fewest
further operand blocks, and the halves on the diagonal at last. Any number of workers then has even
shares of as many block rows, or of twice as many: with 8 of each, 3 blocks and 2 halves, or 4.
Which blocks are computed never depends on the grid, so that the bits do not either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.triangle import computed, on_diagonal
from multimm.planning.work.cyclic import Spot

#: Blocks are assigned freely among at most so many places, of so many block rows for each: every
#: place is tried for every block, and of finer blocks a cyclic assignment is even enough.
FREE_PLACES, FREE_ROWS = 16, 2

#: Batch block and block row of op(A).
Panel = tuple[int, int]
#: Block row, over all matrices, and block column of C.
Cell = tuple[int, int]


class Assignment(NamedTuple):
    """Who computes which blocks of a triangle, whatever the k-tiles and row panels are."""

    workers: dict[Cell, Spot]  #: by place in the plane, not wrapped around its edges
    work: Counter[Spot]  #: elements that each place computes
    on_diagonal: Counter[Spot]  #: of these, those of sub-blocks that reach the diagonal


@lru_cache(maxsize=256)
def _assigned(p_m: int, p_n: int, blocks: Blocks, batch_sizes: Blocks, dtype: str) -> Assignment:
    rows, free = len(blocks), p_n == 1 and p_m <= FREE_PLACES and len(blocks) <= FREE_ROWS * p_m
    found = Assignment({}, Counter(), Counter())
    panels: dict[Spot, set[int]] = {(row, 0): set() for row in range(p_m)}

    def cyclic(row: int, j: int) -> Spot:
        """Of a block's own place and the mirrored one the one with less to do."""
        own, turned = (row, j), (row - row % rows + j, row % rows)
        here, there = ((at[0] % p_m, at[1] % p_n) for at in (own, turned))
        # Equal places share: which one is asked first changes from block to block.
        return turned if found.work[there] < found.work[here] + (row % rows + j) % 2 else own

    def freely(row: int, j: int) -> Spot:
        """Of all places with the least to do, the one that needs the fewest further blocks."""
        needed = {row, row - row % rows + j}
        at = min(panels, key=lambda at: (found.work[at], len(needed - panels[at]), len(panels[at])))
        panels[at] |= needed
        return at

    for flat, i, j in _order(rows, len(batch_sizes), free):
        row = flat * rows + i
        spot = freely(row, j) if free else cyclic(row, j)
        found.workers[row, j] = spot
        place, matrices = (spot[0] % p_m, spot[1] % p_n), batch_sizes[flat]
        if i == j:
            found.work[place] += matrices * computed(blocks[i], dtype)
            found.on_diagonal[place] += matrices * on_diagonal(blocks[i], dtype)
        else:
            found.work[place] += matrices * blocks[i] * blocks[j]
    return found


def _order(rows: int, flats: int, free: bool) -> Iterator[tuple[int, int, int]]:
    """Batch block, block row, block column: first what has no choice; last what is small."""
    diagonal = [(flat, i, i) for flat in range(flats) for i in range(rows)]
    if not free:
        yield from diagonal
        yield from ((flat, i, j) for flat in range(flats) for i in range(rows) for j in range(i))
        return
    steps = [(d, j) for d in range(1, rows) for j in range(rows - d)]
    yield from ((flat, j + d, j) for flat in range(flats) for d, j in steps)
    yield from diagonal


class Symmetric:
    """Who computes what of a triangle, and when: the answers of `work.cyclic.Cyclic`.

    Parameters
    ----------
    p_m, p_n : int
        Of the plane.
    blocks : Blocks
        Of C's rows, and of its columns.
    batch_sizes : Blocks
        Matrices in each batch block.
    dtype : str
        In which sums are made.
    per_row_panel : int
        Block rows, over all matrices, that make up a row panel.
    """

    def __init__(
        self,
        p_m: int,
        p_n: int,
        blocks: Blocks,
        batch_sizes: Blocks,
        dtype: str,
        per_row_panel: int,
    ) -> None:
        self.plane, self.blocks, self.batch_sizes = (p_m, p_n), blocks, batch_sizes
        self.per_row_panel = per_row_panel
        self.assignment = _assigned(p_m, p_n, blocks, batch_sizes, dtype)
        self.count = len(self.assignment.workers)
        self.computed = sum(self.assignment.work.values())

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed, of each matrix."""
        return tuple((i, j) for i in range(len(self.blocks)) for j in range(i + 1))

    def worker(self, row: int, j: int) -> Spot:
        """Who computes a block of C."""
        return self.assignment.workers[row, j]

    def cell(self, row: int, j: int) -> Cell:
        """What is computed for a block of C: the block itself, or the one that it mirrors."""
        first, i = row - row % len(self.blocks), row % len(self.blocks)
        return first + max(i, j), min(i, j)

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of C's blocks."""
        return self.blocks, self.blocks

    def spread(self, workers: int) -> bool:
        """Whether several workers may have blocks of C."""
        return self.count > 1

    def finishing(self, *, adds: bool) -> int:
        """Tasks that mirror blocks off the diagonal, or that add a C to each block."""
        rows = len(self.blocks)
        return len(self.batch_sizes) * (rows * rows if adds else rows * (rows - 1) // 2)

    # ---------------------------------------------------------------- what the busiest does

    def multiplied(self, k: int) -> int:
        """Multiplications of the busiest place, in so much of k."""
        return max(self.assignment.work.values()) * k

    def most_after(self, saved: float) -> float:
        """Elements that the busiest place computes, less such a share of those on the diagonal."""
        on_diagonal = self.assignment.on_diagonal
        return max(n - saved * on_diagonal[at] for at, n in self.assignment.work.items())

    def handed_on(self, steps: int) -> int:
        """Elements of sums that the busiest place's products hand to the next ones."""
        return (steps - 1) * self.most_summed

    @cached_property
    def most_summed(self) -> int:
        """Elements of the blocks that the busiest place computes, whole ones on the diagonal."""
        return self._most(1)

    @cached_property
    def most_kept(self) -> int:
        """The same with the mirror images of the others."""
        return self._most(2)

    def _most(self, times: int) -> int:
        """Elements of the busiest place, those off the diagonal so many times."""
        held: Counter[Spot] = Counter()
        for _, place, row, j in self._cells:
            on_diagonal = row % len(self.blocks) == j
            held[place] += self._size(row, j) * (1 if on_diagonal else times)
        return max(held.values())

    @cached_property
    def most_in_row_panel(self) -> int:
        """Elements of the blocks that the busiest place computes in one row panel."""
        sums: Counter[tuple[int, Spot]] = Counter()
        for row_panel, place, row, j in self._cells:
            sums[row_panel, place] += self._size(row, j)
        return max(sums.values())

    def _size(self, row: int, j: int) -> int:
        """Elements of a block of C, over all matrices."""
        flat, i = divmod(row, len(self.blocks))
        return self.batch_sizes[flat] * self.blocks[i] * self.blocks[j]

    # ---------------------------------------------------------------- when

    @cached_property
    def _cells(self) -> list[tuple[int, Spot, int, int]]:
        """Of all that is computed: row panel, place, block row and block column."""
        p_m, p_n = self.plane
        return [
            (row // self.per_row_panel, (spot[0] % p_m, spot[1] % p_n), row, j)
            for (row, j), spot in self.assignment.workers.items()
        ]

    @cached_property
    def _busy(self) -> dict[int, dict[Spot, list[Cell]]]:
        """By row panel and place: what is computed."""
        found: dict[int, dict[Spot, list[Cell]]] = {}
        for row_panel, place, row, j in self._cells:
            found.setdefault(row_panel, {}).setdefault(place, []).append((row, j))
        return found

    def stand_in(self, row_panel: int, place: Spot) -> Spot:
        """Who has work in a row panel: this place, or another one where it has none."""
        busy = self._busy[row_panel]
        return place if place in busy else min(busy)

    def behind(self, row_panel: int, place: Spot) -> Iterator[Cell]:
        """The block rows and columns that a place works on in a row panel."""
        yield from self._busy[row_panel][place]

    @property
    def held_back(self) -> int:
        """Places that wait for the row panel before, over all row panels but the first."""
        return sum(
            len({self.stand_in(before, at) for at in self._busy[row_panel]})
            for before, row_panel in pairwise(sorted(self._busy))
        )

    # ---------------------------------------------------------------- what it needs

    def row_panels(self, role: str, flat: int, block: int) -> dict[int, set[Spot]]:
        """By row panel: the places that use a block of rows."""
        return self._row_panels[flat, block]

    def users(self, role: str, flat: int, block: int) -> Iterator[set[Spot]]:
        """Places that use a block of rows, in one row panel after another."""
        for _, places in sorted(self._row_panels[flat, block].items()):
            yield places

    @cached_property
    def _row_panels(self) -> dict[Panel, dict[int, set[Spot]]]:
        """By batch block and block of op(A), for its row of C and its column: who, and when."""
        found: dict[Panel, dict[int, set[Spot]]] = {}
        for row_panel, place, row, j in self._cells:
            flat, i = divmod(row, len(self.blocks))
            for block in {i, j}:
                found.setdefault((flat, block), {}).setdefault(row_panel, set()).add(place)
        return found

    @property
    def panels(self) -> tuple[int, int]:
        """Elements of A, per unit of k, that the busiest place needs in one row panel; B is A."""
        needed: Counter[tuple[int, Spot]] = Counter()
        for (flat, block), row_panels in self._row_panels.items():
            size = self.batch_sizes[flat] * self.blocks[block]
            for row_panel, places in row_panels.items():
                needed.update(dict.fromkeys(((row_panel, place) for place in places), size))
        return max(needed.values()), 0

    # ---------------------------------------------------------------- who keeps that

    @cached_property
    def _owners(self) -> dict[Panel, list[Spot]]:
        """The users of each block, which take turns with the others' from block to block."""
        owners = {}
        for (flat, block), row_panels in self._row_panels.items():
            users = sorted(set().union(*row_panels.values()))
            at = block % len(users)
            owners[flat, block] = users[at:] + users[:at]
        return owners

    def in_turn(self, role: str, flat: int, block: int, steps: Sequence[int]) -> list[Spot]:
        """By k-tile: one of a block's users, another one for each k-tile of a part of k."""
        users = self._owners[flat, block]
        return [users[step % len(users)] for step in steps]

    def travels(self, role: str) -> bool:
        """Whether others use a block than who keeps it."""
        p_m, p_n = self.plane
        return p_m * p_n > 1

    def kept(self, role: str, steps: int) -> int:
        """Rows of op(A), over all k-tiles, that the fullest place keeps, of so many at most."""
        held: Counter[Spot] = Counter()
        for (flat, block), users in self._owners.items():
            rounds, rest = divmod(steps, len(users))
            size = self.batch_sizes[flat] * self.blocks[block]
            held.update(dict.fromkeys(users[:rest], size))
            if rounds:
                held.update(dict.fromkeys(users, rounds * size))
        return max(held.values())


#: Layouts that differ in their k-tiles only are assigned alike.
symmetric = lru_cache(maxsize=256)(Symmetric)
