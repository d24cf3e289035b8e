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

An assignment is who computes what. It does not depend on k-tiles, nor on row panels, so that the
many layouts that a search looks at share few assignments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise, product

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


@lru_cache(maxsize=16)
def _order(rows: int, flats: int, free: bool) -> list[tuple[int, int, int]]:
    """Batch block, block row, block column: first what has no choice; last what is small."""
    diagonal = [(flat, i, i) for flat in range(flats) for i in range(rows)]
    if free:
        steps = [(d, j) for d in range(1, rows) for j in range(rows - d)]
        return [(flat, j + d, j) for flat in range(flats) for d, j in steps] + diagonal
    return diagonal + [(flat, i, j) for flat in range(flats) for i in range(rows) for j in range(i)]


class Assignment:
    """The computed blocks of C, assigned to the places of a plane of workers.

    Parameters
    ----------
    p_m, p_n : int
    blocks : Blocks
        Of C's rows, and of its columns.
    batch_sizes : Blocks
        Matrices in each batch block.
    dtype : str
        In which sums are made.

    Attributes
    ----------
    cells : list of (int, int, int)
        Batch block, block row and block column of all that is computed, in the order of dealing.
    places : list of Spot
        Of each: who computes it.
    turned : list of bool
        Of each: whether that is the mirrored place.
    sizes : list of int
        Of each: elements, over all matrices.
    computed_in_all, most_computed : int
        Elements of C that are computed, by all places and by the busiest one.
    """

    def __init__(
        self, p_m: int, p_n: int, blocks: Blocks, batch_sizes: Blocks, dtype: str = "float32"
    ) -> None:
        self.plane = p_m, p_n
        self.blocks = blocks
        self.batch_sizes = batch_sizes
        self.cells = _order(len(blocks), len(batch_sizes), self.free)
        self.places: list[Spot] = []
        self.turned: list[bool] = []
        self.sizes = [batch_sizes[flat] * blocks[i] * blocks[j] for flat, i, j in self.cells]
        self._panels: dict[Spot, set[Panel]] = {(row, 0): set() for row in range(p_m)}
        self._work: Counter[Spot] = Counter()
        self._squares: Counter[Spot] = Counter()
        halves = [computed(size, dtype) for size in blocks]
        choose = self._freely if self.free else self._cyclic
        for (flat, i, j), size in zip(self.cells, self.sizes, strict=True):
            place, turned = choose(flat, i, j)
            self._work[place] += size if i != j else batch_sizes[flat] * halves[i]
            if i == j:
                self._squares[place] += batch_sizes[flat] * on_diagonal(blocks[i], dtype)
            self.places.append(place)
            self.turned.append(turned)
        self.computed_in_all = sum(self._work.values())
        self.most_computed = max(self._work.values())

    def most_after(self, saved: float) -> float:
        """`most_computed`, where this share is saved of sub-blocks on the diagonal."""
        return max(work - saved * self._squares[place] for place, work in self._work.items())

    @property
    def free(self) -> bool:
        """Any place may compute any block."""
        p_m, p_n = self.plane
        return p_n == 1 and p_m <= FREE_PLACES and len(self.blocks) <= FREE_ROWS * p_m

    def _cyclic(self, flat: int, i: int, j: int) -> tuple[Spot, bool]:
        """Of a block's own place and the mirrored one the one with less to do."""
        (p_m, p_n), first = self.plane, flat * len(self.blocks)
        here, there = ((first + i) % p_m, j % p_n), ((first + j) % p_m, i % p_n)
        # Equal places share: which one is asked first changes from block to block.
        if self._work[there] < self._work[here] + (i + j) % 2:
            return there, True
        return here, False

    def _freely(self, flat: int, i: int, j: int) -> tuple[Spot, bool]:
        """Of all places with the least to do, the one that needs the fewest further blocks."""
        panels, have, work = {(flat, i), (flat, j)}, self._panels, self._work
        place = min(have, key=lambda at: (work[at], len(panels - have[at]), len(have[at])))
        have[place] |= panels
        return place, False

    @cached_property
    def workers(self) -> dict[Cell, Spot]:
        """By cell: its own place (i, j), or the mirrored one (j, i), not wrapped around the grid.

        Or, assigned freely, any place.
        """
        found = {}
        for (flat, i, j), place, turned in zip(self.cells, self.places, self.turned, strict=True):
            first = flat * len(self.blocks)
            own = (first + j, i) if turned else (first + i, j)
            found[first + i, j] = place if self.free else own
        return found

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
        for (_, i, j), place, size in zip(self.cells, self.places, self.sizes, strict=True):
            held[place] += size if i == j else times * size
        return max(held.values())

    @cached_property
    def lines(self) -> dict[Panel, tuple[set[Spot], list[Spot]]]:
        """By batch block and block row of op(A), where this block is used.

        As rows of C, by these places; and as columns of C, by those, from the diagonal down.
        """
        rows = range(len(self.blocks))
        places = dict(zip(self.cells, self.places, strict=True))
        return {
            (flat, i): (
                {places[flat, i, j] for j in rows[: i + 1]},
                [places[flat, below, i] for below in rows[i:]],
            )
            for flat, i in product(range(len(self.batch_sizes)), rows)
        }

    @cached_property
    def users(self) -> dict[Panel, list[Spot]]:
        """By batch block and block row of op(A): the places that use it, in order."""
        return {panel: sorted(along.union(down)) for panel, (along, down) in self.lines.items()}

    @cached_property
    def owners(self) -> dict[Panel, list[Spot]]:
        """The users of each block, the one first that keeps its first k-tile, and few others."""
        begin: Counter[Spot] = Counter()
        owners = {}
        for (flat, block), users in self.users.items():
            at = min(range(len(users)), key=lambda i: (begin[users[i]], (i - block) % len(users)))
            begin[users[at]] += 1
            owners[flat, block] = users[at:] + users[:at]
        return owners

    def rows_of(self, panel: Panel) -> int:
        """Rows of a block of op(A), over all its matrices."""
        return self.batch_sizes[panel[0]] * self.blocks[panel[1]]


class Symmetric:
    """Who computes what of a triangle, and when: the answers of `work.cyclic.Cyclic`.

    Parameters
    ----------
    assignment : Assignment
    per_row_panel : int
        Block rows, over all matrices, that make up a row panel.
    """

    def __init__(self, assignment: Assignment, per_row_panel: int) -> None:
        self.assignment = assignment
        self.per_row_panel = per_row_panel
        self.count = len(assignment.cells)
        self.computed = assignment.computed_in_all
        self.most_summed, self.most_kept = assignment.most_summed, assignment.most_kept

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed, of each matrix."""
        return tuple((i, j) for i in range(len(self.assignment.blocks)) for j in range(i + 1))

    def worker(self, row: int, j: int) -> Spot:
        """Who computes a block of C."""
        return self.assignment.workers[row, j]

    def cell(self, row: int, j: int) -> Cell:
        """What is computed for a block of C: the block itself, or the one that it mirrors."""
        first, i = row - row % len(self.assignment.blocks), row % len(self.assignment.blocks)
        return first + max(i, j), min(i, j)

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of C's blocks."""
        return self.assignment.blocks, self.assignment.blocks

    def spread(self, workers: int) -> bool:
        """Whether several workers may have blocks of C."""
        return self.count > 1

    def finishing(self, *, adds: bool) -> int:
        """Tasks that mirror blocks off the diagonal, or that add a C to each block."""
        rows = len(self.assignment.blocks)
        return len(self.assignment.batch_sizes) * (rows * rows if adds else rows * (rows - 1) // 2)

    def multiplied(self, k: int) -> int:
        """Multiplications of the busiest place, in so much of k."""
        return self.assignment.most_computed * k

    def handed_on(self, steps: int) -> int:
        """Elements of sums that the busiest place's products hand to the next ones."""
        return (steps - 1) * self.most_summed

    # ---------------------------------------------------------------- when

    @cached_property
    def _cells(self) -> dict[int, dict[Spot, list[Cell]]]:
        """By row panel and place: what is computed."""
        found: dict[int, dict[Spot, list[Cell]]] = {}
        for (flat, i, j), place in zip(self.assignment.cells, self.assignment.places, strict=True):
            row = flat * len(self.assignment.blocks) + i
            found.setdefault(row // self.per_row_panel, {}).setdefault(place, []).append((row, j))
        return found

    def stand_in(self, row_panel: int, place: Spot) -> Spot:
        """Who has work in a row panel: this place, or another one where it has none."""
        busy = self._cells[row_panel]
        return place if place in busy else min(busy)

    def behind(self, row_panel: int, place: Spot) -> Iterator[Cell]:
        """The block rows and columns that a place works on in a row panel."""
        yield from self._cells[row_panel][place]

    @property
    def held_back(self) -> int:
        """Places that wait for the row panel before, over all row panels but the first."""
        return sum(
            len({self.stand_in(before, at) for at in self._cells[row_panel]})
            for before, row_panel in pairwise(sorted(self._cells))
        )

    @cached_property
    def most_in_row_panel(self) -> int:
        """Elements of the blocks that the busiest place computes in one row panel."""
        assignment, sums = self.assignment, Counter[tuple[int, Spot]]()
        for (flat, i, _), place, size in zip(
            assignment.cells, assignment.places, assignment.sizes, strict=True
        ):
            sums[(flat * len(assignment.blocks) + i) // self.per_row_panel, place] += size
        return max(sums.values())

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
        return {panel: self._row_panels_of(panel) for panel in self.assignment.lines}

    def _row_panels_of(self, panel: Panel) -> dict[int, set[Spot]]:
        along, down = self.assignment.lines[panel]
        row, at, found = panel[0] * len(self.assignment.blocks) + panel[1], 0, {}
        while at < len(down):
            row_panel = (row + at) // self.per_row_panel
            end = (row_panel + 1) * self.per_row_panel - row
            found[row_panel] = set(down[at:end])
            at = end
        found[row // self.per_row_panel] |= along
        return found

    @property
    def panels(self) -> tuple[int, int]:
        """Elements of A, per unit of k, that the busiest place needs in one row panel; B is A."""
        return max(self._needed.values()), 0

    @cached_property
    def _needed(self) -> Counter[tuple[int, Spot]]:
        needed: Counter[tuple[int, Spot]] = Counter()
        for panel, row_panels in self._row_panels.items():
            size = self.assignment.rows_of(panel)
            for row_panel, places in row_panels.items():
                for place in places:
                    needed[row_panel, place] += size
        return needed

    # ---------------------------------------------------------------- who keeps that

    def in_turn(self, role: str, flat: int, block: int, steps: Sequence[int]) -> list[Spot]:
        """By k-tile: one of a block's users, another one for each k-tile of a part of k."""
        users = self.assignment.owners[flat, block]
        return [users[step % len(users)] for step in steps]

    def travels(self, role: str) -> bool:
        """Whether others use a block than who keeps it."""
        p_m, p_n = self.assignment.plane
        return p_m * p_n > 1

    def kept(self, role: str, steps: int) -> int:
        """Rows of op(A), over all k-tiles, that the fullest place keeps, of so many at most."""
        return max(self._kept_rows(steps).values())

    def _kept_rows(self, steps: int) -> Counter[Spot]:
        held: Counter[Spot] = Counter()
        for panel, users in self.assignment.owners.items():
            rounds, rest = divmod(steps, len(users))
            size = self.assignment.rows_of(panel)
            held.update(dict.fromkeys(users[:rest], size))
            if rounds:
                held.update(dict.fromkeys(users, rounds * size))
        return held


#: Layouts that differ in their k-tiles only are assigned alike.
assigned = lru_cache(maxsize=256)(Assignment)


@lru_cache(maxsize=256)
def symmetric(
    p_m: int, p_n: int, blocks: Blocks, batch_sizes: Blocks, dtype: str, per_row_panel: int
) -> Symmetric:
    """The work map of a triangle; `dtype` is that of sums."""
    return Symmetric(assigned(p_m, p_n, blocks, batch_sizes, dtype), per_row_panel)
