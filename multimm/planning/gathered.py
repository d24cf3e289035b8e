"""A tall matrix multiplied where it lies, in few tasks: portions of C's blocks, then joined.

Each of its chunks of rows may be multiplied by a task of its own (`where_they_lie`), but a task
takes Dask's scheduler about a millisecond, and Dask's usual chunks of 128 MB a GPU half of one. To
join neighbours to larger blocks would move most of the matrix, for they lie on workers in turn, and
C's rows are mostly shorter than its own. So each worker multiplies all that it has of a large block
of C at once, and the portions travel:

    chunk of rows      0    1    2    3    4    5    6    7
    lies on worker     w0   w1   w1   w0   w1   w0   w0   w1
    block of C         |        0        |        1        |
    its portions       w0: 0, 3;  w1: 1, 2    w0: 5, 6;  w1: 4, 7

Portions are block rows of the layout, as many for each block of C as there are workers, in their
order, so that they are dealt out as any block rows are; those of nobody have no rows. Columns of a
wide matrix are taken likewise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from multimm.planning.grid import Blocks, Coordinate
from multimm.planning.layout import Layout
from multimm.planning.order import stored_at


class Span(NamedTuple):
    """Rows of a block of C, or columns, that lie together in one of its portions."""

    portion: int  #: block row or block column of the layout
    inside: slice  #: of the portion
    goes_to: slice  #: of the block of C


@dataclass(frozen=True)
class GatheredLayout(Layout):
    """A layout whose block rows, or block columns, are portions of those of C.

    Parameters
    ----------
    by_columns : bool
        Columns of B are taken where they lie, and not rows of A.
    """

    by_columns: bool = False

    @property
    def _portions(self) -> Blocks:
        """Their rows, or columns: in turn of the workers, for one strip of C after another.

        A strip is a block row of C, or a block column.
        """
        return self.n_blocks if self.by_columns else self.m_blocks

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed: all but the portions of nobody."""
        rows, columns = (
            [at for at, size in enumerate(blocks) if size]
            for blocks in (self.m_blocks, self.n_blocks)
        )
        return tuple(product(rows, columns))

    @property
    def blocks(self) -> int:
        """Portions that are computed."""
        return len(self.pairs)

    def cuts_apart(self, role: str) -> bool:
        """What stays where it lies is joined by each product for itself."""
        return role != ("b" if self.by_columns else "a")

    @cached_property
    def strips(self) -> tuple[tuple[int, ...], ...]:
        """The portions of each strip of C, without those of nobody."""
        workers, portions = self.grid.workers, range(len(self._portions))
        turns = (portions[start : start + workers] for start in portions[::workers])
        return tuple(
            tuple(portion for portion in turn if self._portions[portion]) for turn in turns
        )

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of the result's blocks."""
        joined = tuple(sum(self._portions[portion] for portion in strip) for strip in self.strips)
        return (self.m_blocks, joined) if self.by_columns else (joined, self.n_blocks)

    @property
    def _across(self) -> Blocks:
        """Columns of the blocks in a strip that is a block row, or rows of those in a column."""
        return self.m_blocks if self.by_columns else self.n_blocks

    @cached_property
    def joined(self) -> tuple[tuple[int, int], ...]:
        """Strip and block of the other side, of all blocks of C that are joined from portions."""
        several = [at for at, strip in enumerate(self.strips) if len(strip) > 1]
        return tuple(product(several, range(len(self._across))))

    def cell(self, portion: int, across: int) -> tuple[int, int]:
        """Block row and block column of a portion of a strip, of the sums that are computed."""
        return (across, portion) if self.by_columns else (portion, across)

    def strip_of(self, i: int, j: int) -> tuple[int, int]:
        """The strip that a computed block is a portion of, and the block of the other side."""
        portion, across = self.cell(i, j)
        return portion // self.grid.workers, across

    @property
    def finishing(self) -> int:
        """Tasks that join portions."""
        return len(self.joined)

    def keeper_of(self, strip: int) -> Coordinate:
        """Who joins a strip, of those who have a portion of it: in turn."""
        portions = self.strips[strip]
        return Coordinate(*self.cell(portions[strip % len(portions)], 0), 0)

    def result_owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each block of C, as stored; empty where Dask decides."""
        keepers = [self.grid.rank(self.keeper_of(at)) for at in range(len(self.strips))]
        rows, columns = map(len, self.sides)
        if rows * columns == 1:
            return ()
        at = product(range(rows), range(columns))
        return tuple(keepers[column if self.by_columns else row] % workers for row, column in at)

    @cached_property
    def most_joined(self) -> int:
        """Elements of the joined blocks of the worker that keeps the most of them."""
        kept: Counter[int] = Counter()
        for strip, across in self.joined:
            size = sum(self._portions[portion] for portion in self.strips[strip])
            kept[self.grid.rank(self.keeper_of(strip))] += size * self._across[across]
        return max(kept.values(), default=0)

    @property
    def share_result(self) -> int:
        """Elements of C that the busiest worker keeps: portions, and what is joined of them."""
        return self.share_sums + self.most_joined

    def spans(self, strip: int) -> list[Span]:
        """What a strip of C is made of, in the order in which it is stored."""
        problem = self.problem
        order = problem.columns if self.by_columns else problem.rows
        starts = [0, *accumulate(problem.b.chunks[1] if self.by_columns else problem.a.chunks[0])]
        ends, workers = [0, *accumulate(self._portions)], self.grid.workers
        own = range(ends[strip * workers], ends[(strip + 1) * workers])
        spans = enumerate(pairwise(starts))
        chunks = [at for at, (start, end) in spans if start in own and end > start]
        found: list[Span] = []
        for at in sorted(chunks, key=lambda at: stored_at(order, at)):
            portion = bisect_right(ends, starts[at]) - 1
            begin, end = starts[at] - ends[portion], starts[at + 1] - ends[portion]
            to = found[-1].goes_to.stop if found else 0
            if found and found[-1].portion == portion and found[-1].inside.stop == begin:
                last = found.pop()
                begin, to = last.inside.start, last.goes_to.start
            found.append(Span(portion, slice(begin, end), slice(to, to + end - begin)))
        return found
