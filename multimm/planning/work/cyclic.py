"""Blocks of C assigned cyclically to a plane of workers.

Block (i, j) of C is computed at (i mod p_m, j mod p_n); block rows run over the matrices of a stack
first. Or a table says for each block row in which row of the plane it is: where its operands lie.

All that follows from this map is in closed form, for a search looks at hundreds of them.
`multimm.planning.work.symmetric` answers the same questions of a triangle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod

from multimm.planning.tiling.grid import (
    Blocks,
    ceil_div,
    largest_share,
    most_assigned,
)
from multimm.planning.tiling.stacks import Share, share_of, shares
from multimm.shapes import Shape

#: Row and column of a place in a plane of workers.
Spot = tuple[int, int]


@dataclass(frozen=True)
class Cyclic:
    """Who computes what of C, and when.

    Parameters
    ----------
    p_m, p_n : int
        Of the plane.
    batch_blocks : tuple of Blocks
        Per batch dimension.
    m_blocks, n_blocks : Blocks
        Of C's rows, and of its columns.
    shapes : (Shape, Shape)
        Of A and of B: those of a stack may be broadcast.
    per_row_panel : int
        Block rows, over all matrices, that make up a row panel.
    table : tuple of int
        The row of the plane for each block row, which are one row panel then. Empty: in turn.
    """

    p_m: int
    p_n: int
    batch_blocks: tuple[Blocks, ...]
    m_blocks: Blocks
    n_blocks: Blocks
    shapes: tuple[Shape, Shape]
    per_row_panel: int
    table: Blocks = ()

    @cached_property
    def row_sizes(self) -> Blocks:
        """Rows of C, over all matrices, in each block row."""
        counts = [prod(sizes) for sizes in product(*self.batch_blocks)]
        return tuple(count * size for count in counts for size in self.m_blocks)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed, of each matrix."""
        return tuple(product(range(len(self.m_blocks)), range(len(self.n_blocks))))

    @property
    def count(self) -> int:
        """Blocks of C that are computed."""
        return len(self.row_sizes) * len(self.n_blocks)

    def worker(self, row: int, j: int) -> Spot:
        """Who computes a block of C: wrapped around the edges of the plane."""
        return (self.table[row] if self.table else row), j

    def cell(self, row: int, j: int) -> tuple[int, int]:
        """What is computed for a block of C: the block itself."""
        return row, j

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of C's blocks."""
        return self.m_blocks, self.n_blocks

    def spread(self, workers: int) -> bool:
        """Whether several workers may have blocks of C."""
        return self.count > 1

    def finishing(self, *, adds: bool) -> int:
        """Tasks on blocks of C after their last sum."""
        return 0

    # ---------------------------------------------------------------- when

    def stand_in(self, row_panel: int, place: Spot) -> Spot:
        """Who has work in a row panel: this place, or another one where it has none."""
        row, col = place
        row = row if row_panel * self.per_row_panel + row < len(self.row_sizes) else 0
        return row, col if col < len(self.n_blocks) else 0

    def behind(self, row_panel: int, place: Spot) -> Iterator[tuple[int, int]]:
        """The block rows and columns that a place works on in a row panel."""
        start = row_panel * self.per_row_panel
        end = min(start + self.per_row_panel, len(self.row_sizes))
        rows, columns = range(start + place[0], end, self.p_m), range(len(self.n_blocks))
        yield from product(rows, columns[place[1] :: self.p_n])

    @property
    def held_back(self) -> int:
        """Places that wait for the row panel before, over all row panels but the first."""
        starts = range(self.per_row_panel, len(self.row_sizes), self.per_row_panel)
        rows = sum(min(self.p_m, len(self.row_sizes) - start) for start in starts)
        return rows * min(self.p_n, len(self.n_blocks))

    # ---------------------------------------------------------------- what the busiest does

    @cached_property
    def computed(self) -> int:
        """Elements of C that are computed, by all."""
        return sum(self.row_sizes) * sum(self.n_blocks)

    def multiplied(self, k: int) -> int:
        """Multiplications of the busiest place, in so much of k."""
        return self.most_summed * k

    def handed_on(self, steps: int) -> int:
        """Elements of sums that the busiest place's products hand to the next ones."""
        return (steps - 1) * self.most_summed

    @cached_property
    def most_summed(self) -> int:
        """Elements of the blocks that the busiest place computes."""
        return self.most_rows * self.most_columns

    @property
    def most_kept(self) -> int:
        """Elements of C that the busiest place keeps."""
        return self.most_summed

    @cached_property
    def most_in_row_panel(self) -> int:
        """Elements of the blocks that the busiest place computes in one row panel, at most."""
        return self._rows_in_row_panel * self.most_columns

    @cached_property
    def most_rows(self) -> int:
        """Rows of C, over all matrices, of the busiest row of the plane."""
        return max(map(sum, self._shares(self.row_sizes)))

    @property
    def most_blocks(self) -> int:
        """Block rows of the row of the plane that has most of them."""
        return max(Counter(self.table).values(), default=ceil_div(len(self.row_sizes), self.p_m))

    @cached_property
    def most_columns(self) -> int:
        """Columns of C of the busiest column of the plane."""
        return largest_share(self.n_blocks, self.p_n)

    @cached_property
    def _rows_in_row_panel(self) -> int:
        return max(map(sum, self._in_row_panels(self.row_sizes)))

    def _in_row_panels(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """What each row of the plane works on in each row panel, of something by block row."""
        band = self.per_row_panel // self.p_m
        for share in self._shares(rows):
            for start in range(0, max(1, len(share)), band):
                yield share[start : start + band]

    def _shares(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """What each row of the plane has of something by block row."""
        for rank in range(self.p_m):
            if self.table:
                yield [x for x, at in zip(rows, self.table, strict=True) if at == rank]
            else:
                yield rows[rank :: self.p_m]

    # ---------------------------------------------------------------- what it needs

    @cached_property
    def panels(self) -> tuple[int, int]:
        """Elements of A and of B, per unit of k, that the busiest place needs in one row panel."""
        if not self.batch_blocks:
            return self._rows_in_row_panel, self.most_columns
        rows, (of_a, of_b) = len(self.m_blocks), self._share_of
        most_a = most_b = 0
        for row_panel in self._in_row_panels(range(len(self.row_sizes))):
            at = [divmod(row, rows) for row in row_panel]
            used_a = {(of_a[flat], i) for flat, i in at}
            most_a = max(most_a, sum(x.matrices * self.m_blocks[i] for x, i in used_a))
            most_b = max(most_b, sum(x.matrices for x in {of_b[flat] for flat, _ in at}))
        return most_a, most_b * self.most_columns

    @property
    def _share_of(self) -> tuple[dict[int, Share], ...]:
        """Of A and of B, by batch block of C: the batch block that it uses."""
        return tuple(share_of(self.batch_blocks, shape) for shape in self.shapes)

    def row_panels(self, role: str, flat: int, block: int) -> dict[int, dict[int, None]]:
        """By row panel: rows of the plane that use a block of A's rows, or of B's columns.

        In order, and of the batch block whose first user is `flat`.
        """
        return self._row_panels["a", flat, block] if role == "a" else self._row_panels["b", flat, 0]

    @cached_property
    def _row_panels(self) -> dict[tuple[str, int, int], dict[int, dict[int, None]]]:
        found: dict[tuple[str, int, int], dict[int, dict[int, None]]] = {}
        rows, (of_a, of_b) = len(self.m_blocks), self._share_of
        for row in range(len(self.row_sizes)):
            flat, i = divmod(row, rows)
            at = self.worker(row, 0)[0] % self.p_m
            for key in (("a", of_a[flat].users[0], i), ("b", of_b[flat].users[0], 0)):
                used = found.setdefault(key, {})
                used.setdefault(row // self.per_row_panel, {})[at] = None
        return found

    def users(self, role: str, flat: int, block: int) -> Iterator[set[Spot]]:
        """Places that use a block of A's rows, or of B's columns, by row panel."""
        columns: Sequence[int] = range(min(self.p_n, len(self.n_blocks)))
        if role == "b":
            columns = (block % self.p_n,)
        for rows in self.row_panels(role, flat, block).values():
            yield {*product(rows, columns)}

    # ---------------------------------------------------------------- who keeps that

    def in_turn(self, role: str, flat: int, block: int, steps: Sequence[int]) -> list[Spot]:
        """By k-tile: who keeps a block, one of the rows that use it in turn, and of the columns.

        `steps` are the k-tiles' numbers in their parts of k.
        """
        rows, k_tiles = self._rows_with(role, flat, block), range(len(steps))
        if role == "a":
            first = (flat * len(self.m_blocks) + block) // self.p_m
            return [(rows[(s + block) % len(rows)], (s + first) % self.p_n) for s in k_tiles]
        turn, col = divmod(block, self.p_n)
        first = flat + turn
        return [(rows[(s + first) % len(rows)], col) for s in k_tiles]

    def _rows_with(self, role: str, flat: int, block: int) -> Blocks:
        """Rows of the plane that use a block of A's rows, or of B's columns, as rows of C rise."""
        return tuple(dict.fromkeys(chain(*self.row_panels(role, flat, block).values())))

    def travels(self, role: str) -> bool:
        """Whether others use a block than who keeps it.

        A stays where it is kept in a plane of one column, and B in one of one row, unless several
        matrices of a stack share it.
        """
        if role == "b":
            return self.p_m > 1
        shared = any(len(share.users) > 1 for share in shares(self.batch_blocks, self.shapes[0]))
        return self.p_n * (self.p_m if shared else 1) > 1

    def kept(self, role: str, steps: int) -> int:
        """Elements per unit of k that the fullest place keeps, of parts of so many k-tiles at most.

        A row's blocks go round its workers k-tile by k-tile, each row from the next one on. Those
        of a column go round those that use them: rows of the plane may have none of C.
        """
        if role == "a":
            blocks, along, across = self.m_blocks, self.p_m, self.p_n
            if self.table:
                return most_assigned(self.most_blocks, steps, across) * max(blocks)
        else:
            blocks, along, across = self.n_blocks, self.p_n, min(self.p_m, len(self.row_sizes))
        return most_assigned(ceil_div(len(blocks), along), steps, across) * max(blocks)


#: Layouts that differ in their k-tiles only are assigned alike.
cyclic = lru_cache(maxsize=512)(Cyclic)
