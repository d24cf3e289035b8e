"""Which chunks of a matrix each worker multiplies at once, and what blocks of C are joined from.

A *strip* is some neighbouring rows of chunks, and of C; a *portion* what a worker makes for a
strip, of all chunks that it multiplies there:

    chunks of A          s = 0   s = 1       portions of a strip of C
    rows 0                w0      w0         w0: rows 0 of both slabs; 1 of slab 0; 2 of slab 1
    rows 1                w0      w1         w1: rows 3 of both slabs; 1 of slab 1; 2 of slab 0
    rows 2                w1      w0
    rows 3                w1      w1         rows 1 and 2 are added, 0 and 3 are copied
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from multimm.planning.layouts.rechunk import spans
from multimm.planning.tiling.grid import Blocks

#: The workers that multiply the chunks of a row, slab by slab. Rows with the same ones are alike.
Kind = tuple[int, ...]


class Group(NamedTuple):
    """Chunks that are multiplied slab after slab: the same rows of each."""

    rows: tuple[int, ...]  #: numbers of rows of chunks
    slabs: tuple[int, ...]


class Portion(NamedTuple):
    """What a worker makes for a strip: its groups' rows, one group after another."""

    groups: tuple[Group, ...]
    starts: dict[Kind, int]  #: where rows of a kind begin


class Run(NamedTuple):
    """Rows of a strip that are of one kind: they lie together in the portions that have them."""

    found: tuple[tuple[int, slice], ...]  #: by portion: where
    goes_to: tuple[tuple[slice, slice], ...]  #: which of these rows go where in the strip


@dataclass(frozen=True)
class Portions:
    """Who multiplies which chunks.

    Parameters
    ----------
    rows, columns : Blocks
        Of the chunks; columns are along k.
    at : tuple of int
        The worker that multiplies each chunk, in C order.
    strips : Blocks
        Rows of chunks in each strip.
    workers : int
    """

    rows: Blocks
    columns: Blocks
    at: tuple[int, ...]
    strips: Blocks
    workers: int

    @cached_property
    def slabs(self) -> tuple[int, ...]:
        """Which column of chunks each slab is: those of no length are none."""
        return tuple(at for at, size in enumerate(self.columns) if size)

    @cached_property
    def heights(self) -> Blocks:
        """Rows of each strip."""
        ends = [0, *accumulate(self.rows)]
        return tuple(ends[end] - ends[start] for start, end in spans(self.strips))

    @cached_property
    def lengths(self) -> Blocks:
        """Rows of the portions, in turn of the workers, of one strip after another."""
        found = []
        for strip in range(len(self.strips)):
            held: Counter[int] = Counter()
            for kind, rows in self.alike[strip].items():
                height = sum(self.rows[i] for i in rows)
                held.update(dict.fromkeys(kind, height))
            found += [held[worker] for worker in range(self.workers)]
        return tuple(found)

    @cached_property
    def alike(self) -> list[dict[Kind, list[int]]]:
        """The rows of chunks of each strip, by their kind; but for empty ones."""
        wide, kept = len(self.columns), self.slabs
        found = []
        for start, end in spans(self.strips):
            kinds: dict[Kind, list[int]] = {}
            for i in range(start, end):
                if self.rows[i]:
                    kind = self.at[i * wide : (i + 1) * wide]
                    if len(kept) < wide:
                        kind = tuple(kind[s] for s in kept)
                    kinds.setdefault(kind, []).append(i)
            found.append(kinds)
        return found

    @cached_property
    def made(self) -> dict[int, Portion]:
        """The portions that have rows, by number."""
        found: dict[int, Portion] = {}
        for strip in range(len(self.strips)):
            alike = self.alike[strip]
            own: dict[int, dict[tuple[int, ...], list[Kind]]] = {}
            for kind in alike:
                for worker in dict.fromkeys(kind):
                    slabs = tuple(s for s, x in enumerate(kind) if x == worker)
                    own.setdefault(worker, {}).setdefault(slabs, []).append(kind)
            for worker, by_slabs in own.items():
                found[strip * self.workers + worker] = self._portion(alike, by_slabs)
        return found

    def _portion(
        self, alike: dict[Kind, list[int]], by_slabs: dict[tuple[int, ...], list[Kind]]
    ) -> Portion:
        groups, starts, begin = [], {}, 0
        for slabs, kinds in by_slabs.items():
            groups.append(Group(tuple(i for kind in kinds for i in alike[kind]), slabs))
            for kind in kinds:
                starts[kind] = begin
                begin += sum(self.rows[i] for i in alike[kind])
        return Portion(tuple(groups), starts)

    def runs(self, strip: int) -> Iterator[Run]:
        """What a strip is made of."""
        first = sum(self.strips[:strip])
        starts = [*accumulate(self.rows[first : first + self.strips[strip]], initial=0)]
        for kind, rows in self.alike[strip].items():
            begin, moves = 0, list[tuple[slice, slice]]()
            for i in rows:
                end, to = begin + self.rows[i], slice(*starts[i - first : i - first + 2])
                inside = slice(begin, end)
                if moves and moves[-1][1].stop == to.start:  # neighbours there, too
                    before = moves.pop()
                    inside, to = slice(before[0].start, end), slice(before[1].start, to.stop)
                moves.append((inside, to))
                begin = end
            found = []
            for worker in sorted(set(kind)):
                number = strip * self.workers + worker
                start = self.made[number].starts[kind]
                found.append((number, slice(start, start + begin)))
            yield Run(tuple(found), tuple(moves))

    @cached_property
    def multiplied(self) -> Counter[int]:
        """Elements of the matrix that each worker multiplies."""
        found: Counter[int] = Counter()
        for worker, (row, column) in zip(self.at, product(self.rows, self.columns), strict=True):
            found[worker] += row * column
        return found

    @property
    def handed_on(self) -> int:
        """Rows of sums that the busiest worker's products hand to the next ones."""
        return self._of_groups[0]

    @property
    def walked(self) -> int:
        """Lengths of the slabs of all groups of the busiest worker."""
        return self._of_groups[1]

    @property
    def joined(self) -> int:
        """Elements of chunks that are joined to others of their group."""
        return self._of_groups[2]

    @cached_property
    def _of_groups(self) -> tuple[int, int, int]:
        handed_on, walked, joined = Counter[int](), Counter[int](), 0
        for number, portion in self.made.items():
            for rows, slabs in portion.groups:
                height = sum(self.rows[i] for i in rows)
                length = sum(self.columns[self.slabs[s]] for s in slabs)
                handed_on[number % self.workers] += (len(slabs) - 1) * height
                walked[number % self.workers] += length
                joined += height * length * (len(rows) > 1)
        return max(handed_on.values()), max(walked.values()), joined

    @cached_property
    def users(self) -> list[set[int]]:
        """By column of chunks: the workers that multiply some of it."""
        wide = len(self.columns)
        rows = [i for i, size in enumerate(self.rows) if size]
        return [
            {self.at[i * wide + s] for i in rows} if size else set()
            for s, size in enumerate(self.columns)
        ]
