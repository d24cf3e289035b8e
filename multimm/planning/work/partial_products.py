"""A large matrix multiplied where it lies: few tasks make partial products, others join them.

Its chunks lie on workers in turn, mostly, in rows or in two dimensions. Each may be multiplied by a
task of its own, but a task takes Dask's scheduler about a millisecond, and Dask's usual chunks of
128 MB a GPU half of one. To join neighbours to larger blocks would move most of the matrix. So each
worker multiplies all chunks that it has of an output tile of C in one task, and these partial
products travel:

    chunk of rows      0    1    2    3    4    5    6    7
    lies on worker     w0   w1   w1   w0   w1   w0   w0   w1
    block of C         |        0        |        1        |
    partial products   w0: 0, 3;  w1: 1, 2    w0: 5, 6;  w1: 4, 7

Partial products are block rows of the schedule, as many for each output tile of C as there are
workers, in their order, so that they are assigned as any block rows are; those of nobody have no
rows. Columns of a wide matrix, B, are taken likewise; "rows" means them, too, where nothing else is
said.

Of long vectors, with few rows of chunks and many k-tiles, each partial product has all rows of its
output tile: they are then sums of parts of k, which lie anywhere.

An *output tile* is some neighbouring rows of chunks, and of C; a *partial product* what a worker
makes for an output tile, of all chunks that it multiplies there:

    chunks of A          s = 0   s = 1       partial products of an output tile of C
    rows 0                w0      w0         w0: rows 0 of both k-tiles; 1 of s = 0; 2 of s = 1
    rows 1                w0      w1         w1: rows 3 of both k-tiles; 1 of s = 1; 2 of s = 0
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

from multimm.planning.tiling.grid import Blocks, spans

#: The workers that multiply the chunks of a row, k-tile by k-tile. Rows with the same ones are
#: alike.
Kind = tuple[int, ...]


class Group(NamedTuple):
    """Chunks that are multiplied k-tile after k-tile: the same rows of each."""

    rows: tuple[int, ...]  #: numbers of rows of chunks
    k_tiles: tuple[int, ...]


class PartialProduct(NamedTuple):
    """What a worker makes for an output tile: its groups' rows, one group after another."""

    groups: tuple[Group, ...]
    starts: dict[Kind, int]  #: where rows of a kind begin


class Run(NamedTuple):
    """Rows of an output tile that are of one kind: they stay together in partial products."""

    found: tuple[tuple[int, slice], ...]  #: by partial product: where
    goes_to: tuple[tuple[slice, slice], ...]  #: which of these rows go where in the output tile


class Totals(NamedTuple):
    """What groups come to: of the busiest worker, and of all."""

    handed_on: int  #: rows of sums that its products hand to the next ones
    walked: int  #: lengths of the k-tiles of its groups
    sub_blocks: int  #: chunks that are not multiplied by themselves
    joined: int  #: elements of those that are joined to others of their group
    gathered: int  #: rows of partial products that several groups are gathered in, of all
    products: int  #: k-tiles of groups that the busiest worker multiplies


@dataclass(frozen=True)
class PartialProducts:
    """Who multiplies which chunks.

    Parameters
    ----------
    rows, columns : Blocks
        Of the chunks; columns are along k.
    at : tuple of int
        The worker that multiplies each chunk, in C order.
    output_tiles : Blocks
        Rows of chunks in each output tile.
    workers : int
    by_columns : bool
        They are of B transposed, which is taken where it lies, and not A.
    coalesced : bool
        What each worker has of the other operand travels as one block: a hundred small chunks take
        a tenth of a second.
    alone : int
        Elements of a chunk from which on it is multiplied by itself. Smaller ones are joined to
        others of their group; 0: all are.
    """

    rows: Blocks
    columns: Blocks
    at: tuple[int, ...]
    output_tiles: Blocks
    workers: int
    by_columns: bool = False
    coalesced: bool = False
    alone: int = 0

    @cached_property
    def k_tiles(self) -> tuple[int, ...]:
        """Which column of chunks each k-tile is: those of no length are none."""
        return tuple(at for at, size in enumerate(self.columns) if size)

    @cached_property
    def heights(self) -> Blocks:
        """Rows of each output tile."""
        ends = [0, *accumulate(self.rows)]
        return tuple(ends[end] - ends[start] for start, end in spans(self.output_tiles))

    @cached_property
    def lengths(self) -> Blocks:
        """Rows of the partial products: in turn of the workers, output tile by output tile."""
        found = []
        for output_tile in range(len(self.output_tiles)):
            held: Counter[int] = Counter()
            for kind, rows in self.alike[output_tile].items():
                height = sum(self.rows[i] for i in rows)
                held.update(dict.fromkeys(kind, height))
            found += [held[worker] for worker in range(self.workers)]
        return tuple(found)

    @cached_property
    def alike(self) -> list[dict[Kind, list[int]]]:
        """The rows of chunks of each output tile, by their kind; but for empty ones."""
        wide, kept = len(self.columns), self.k_tiles
        found = []
        for start, end in spans(self.output_tiles):
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
    def made(self) -> dict[int, PartialProduct]:
        """The partial products that have rows, by number."""
        found: dict[int, PartialProduct] = {}
        for output_tile in range(len(self.output_tiles)):
            alike = self.alike[output_tile]
            own: dict[int, dict[tuple[int, ...], list[Kind]]] = {}
            for kind in alike:
                for worker in dict.fromkeys(kind):
                    k_tiles = tuple(s for s, x in enumerate(kind) if x == worker)
                    own.setdefault(worker, {}).setdefault(k_tiles, []).append(kind)
            for worker, by_k_tiles in own.items():
                found[output_tile * self.workers + worker] = self._partial_product(
                    alike, by_k_tiles
                )
        return found

    def _partial_product(
        self, alike: dict[Kind, list[int]], by_k_tiles: dict[tuple[int, ...], list[Kind]]
    ) -> PartialProduct:
        groups, starts, begin = [], {}, 0
        for k_tiles, kinds in by_k_tiles.items():
            rows = [i for kind in kinds for i in alike[kind]]
            width = max(self.columns[self.k_tiles[s]] for s in k_tiles)
            groups += [Group(own, k_tiles) for own in self._together(rows, width)]
            for kind in kinds:
                starts[kind] = begin
                begin += sum(self.rows[i] for i in alike[kind])
        return PartialProduct(tuple(groups), starts)

    def _together(self, rows: list[int], width: int) -> Iterator[tuple[int, ...]]:
        """Rows of chunks of a width, those together whose chunks are joined."""
        if not self.alone:
            yield tuple(rows)
            return
        own: list[int] = []
        for i in rows:
            own.append(i)
            if sum(self.rows[j] for j in own) * width >= self.alone:
                yield tuple(own)
                own = []
        if own:
            yield tuple(own)

    def runs(self, output_tile: int) -> Iterator[Run]:
        """What an output tile is made of."""
        first = sum(self.output_tiles[:output_tile])
        starts = [*accumulate(self.rows[first : first + self.output_tiles[output_tile]], initial=0)]
        for kind, rows in self.alike[output_tile].items():
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
                number = output_tile * self.workers + worker
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

    @cached_property
    def totals(self) -> Totals:
        """What the groups of all partial products come to."""
        handed_on, walked, products = Counter[int](), Counter[int](), Counter[int]()
        sub_blocks = joined = gathered = 0
        for number, partial_product in self.made.items():
            worker = number % self.workers
            if len(partial_product.groups) > 1:
                gathered += self.lengths[number]
            for rows, k_tiles in partial_product.groups:
                height = sum(self.rows[i] for i in rows)
                length = sum(self.columns[self.k_tiles[s]] for s in k_tiles)
                handed_on[worker] += (len(k_tiles) - 1) * height
                walked[worker] += length
                products[worker] += len(k_tiles)
                joined += height * length * (len(rows) > 1)
                if not self.alone or len(rows) > 1:
                    sub_blocks += len(rows) * len(k_tiles)
        most = [max(x.values(), default=0) for x in (handed_on, walked, products)]
        return Totals(most[0], most[1], sub_blocks, joined, gathered, most[2])

    @cached_property
    def users(self) -> list[set[int]]:
        """By column of chunks: the workers that multiply some of it."""
        wide = len(self.columns)
        rows = [i for i, size in enumerate(self.rows) if size]
        return [
            {self.at[i * wide + s] for i in rows} if size else set()
            for s, size in enumerate(self.columns)
        ]
