"""Blocking of a matrix and arrangement of workers: integers in, tuples of integers out.

Workers stand in a grid of p_m x p_n x p_k. Blocks are assigned cyclically, so that ragged
last blocks and any block count spread evenly:

    C block (i, j), part q of k  ->  worker (i mod p_m, j mod p_n, q)

             j=0    j=1    j=2    j=3             p_m x p_n = 2 x 2, one part
        i=0 | w0  |  w1  |  w0  |  w1  |
        i=1 | w2  |  w3  |  w2  |  w3  |
        i=2 | w0  |  w1  |  w0  |  w1  |

An operand block lives in the grid row (A) or column (B) that uses it; along the other axis
its owner moves on with the k-tile, so that in one step of the product no worker is asked for
everything:

    A block (i, s)  ->  worker (i mod p_m, (s + i div p_m) mod p_n, part of s)
    B block (s, j)  ->  worker ((s + j div p_n) mod p_m, j mod p_n, part of s)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

Blocks = tuple[int, ...]

#: A search asks for the same few again and again: a tenth of its time goes there without this.
remembered = lru_cache(maxsize=4096)


class Coordinate(NamedTuple):
    """A place in a grid of any size; `Grid.rank` wraps it around the grid's edges."""

    row: int
    col: int
    part: int


class Grid(NamedTuple):
    """Workers arranged as p_m x p_n x p_k."""

    p_m: int
    p_n: int
    p_k: int

    @property
    def workers(self) -> int:
        """Ranks in the grid."""
        return self.p_m * self.p_n * self.p_k

    def rank(self, at: Coordinate) -> int:
        """The number of the worker at a place; ranks run along p_k, then p_n, then p_m."""
        row, col, part = at.row % self.p_m, at.col % self.p_n, at.part % self.p_k
        return (row * self.p_n + col) * self.p_k + part

    def place(self, rank: int) -> Coordinate:
        """Where the worker of a number stands."""
        plane, part = divmod(rank, self.p_k)
        return Coordinate(*divmod(plane, self.p_n), part)

    def __str__(self) -> str:
        return f"{self.p_m} x {self.p_n} x {self.p_k}"

    @property
    def sides(self) -> str:
        """For readers: workers along the rows and columns of C, and along k where it is split.

        >>> Grid(4, 2, 1).sides, Grid(4, 2, 2).sides
        ('4 x 2', '4 x 2 x 2')
        """
        return str(self) if self.p_k > 1 else f"{self.p_m} x {self.p_n}"


def ceil_div(count: int, size: int) -> int:
    """How many of a size it takes; exact above 2**53 too, where quotients of floats are not.

    >>> ceil_div(7, 2), ceil_div(2**60 + 1, 2**59)
    (4, 3)
    """
    return -(-count // size)


def grids(workers: int, p_k: int | None = None) -> Iterator[Grid]:
    """Every arrangement of `workers` with all of them, or with `p_k` parts of k.

    Where `p_k` does not divide `workers`, the rest is idle; where it is larger, some work for
    several parts. Sums over k then come out the same on any number of workers.
    """
    planes = {workers // parts: parts for parts in divisors(workers)}
    if p_k is not None:
        planes = {max(1, workers // p_k): p_k}
    for plane, parts in planes.items():
        for rows in divisors(plane):
            yield Grid(rows, plane // rows, parts)


def rearrange(grid: Grid, workers: int) -> Grid:
    """The grid for another number of workers than was planned: as square as it can be."""
    plane = max(1, workers // grid.p_k)
    short = max(d for d in divisors(plane) if d * d <= plane)
    rows, cols = (short, plane // short) if grid.p_m <= grid.p_n else (plane // short, short)
    return Grid(rows, cols, grid.p_k)


@remembered
def divisors(number: int) -> list[int]:
    """Every divisor, in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]


@remembered
def even(size: int, count: int) -> Blocks:
    """`size` in `count` blocks that differ by at most 1; fewer where `size` is smaller."""
    if size == 0:
        return (0,)
    count = max(1, min(count, size))
    base, extra = divmod(size, count)
    return (base + 1,) * extra + (base,) * (count - extra)


def regular(size: int, block: int) -> Blocks:
    """Blocks of `block` elements, the last one shorter; one block of 0 for an empty dimension.

    >>> regular(10, 4)
    (4, 4, 2)
    """
    if size == 0:
        return (0,)
    full, rest = divmod(size, block)
    return (block,) * full + ((rest,) if rest else ())


def number_of(at: Sequence[int], blocks: Sequence[int]) -> int:
    """The number of a block in C order.

    >>> number_of((1, 2), (4, 3))
    5
    """
    number = 0
    for index, count in zip(at, blocks, strict=True):
        number = number * count + index
    return number


def spans(blocks: Blocks) -> list[tuple[int, int]]:
    """Where each block begins and ends."""
    return [*pairwise([0, *accumulate(blocks)])]


def is_regular(blocks: Blocks) -> bool:
    """Whether all blocks are equal but a smaller last one: Zarr and HDF5 take no others.

    >>> is_regular((4, 4, 2)), is_regular((4, 2, 4)), is_regular((2, 4))
    (True, False, False)
    """
    return len({*blocks[:-1]}) <= 1 and blocks[-1] <= blocks[0]


@remembered
def made_regular(blocks: Blocks) -> Blocks:
    """The same size in regular blocks, about as many.

    >>> made_regular((31, 28, 31)), made_regular((4, 4, 2))
    ((30, 30, 30), (4, 4, 2))
    """
    if is_regular(blocks):
        return blocks
    return regular(sum(blocks), ceil_div(sum(blocks), len(blocks)))


@remembered
def group_regular(chunks: Blocks, target: int, workers: int, most: float = inf) -> Blocks:
    """As `group`, but regular where the chunks' own boundaries allow that: none above `most`.

    Of several ways, the one that gives the busiest worker least, and of these the fewest blocks.

    >>> [group_regular((4,) * 6, 6, workers, most) for workers, most in ((1, 9), (1, 7), (2, 9))]
    [(8, 8, 8), (4, 4, 4, 4, 4, 4), (4, 4, 4, 4, 4, 4)]
    """
    usual = group(chunks, target)
    if is_regular(usual):
        return usual
    ends = [*accumulate(chunks)]
    known = {*ends}
    near = [end for end in ends if 0 < end <= most and target <= 2 * end <= 3 * target]
    found = [regular(ends[-1], end) for end in near]
    found = [x for x in found if known.issuperset(accumulate(x))]
    return min(found, key=lambda x: (largest_share(x, workers), len(x)), default=usual)


@remembered
def group(chunks: Blocks, target: int) -> Blocks:
    """Join neighbouring chunks into even groups of about `target`; a chunk is never cut.

    >>> group((1, 1, 1, 1, 4, 4), 4)
    (4, 4, 4)
    """
    total = sum(chunks)
    count = max(1, ceil_div(total, max(1, target)))
    joined, taken = [0], 0
    for chunk in chunks:
        # The next group begins where its ideal start lies nearer to this boundary than the
        # middle of the chunk ahead.
        if chunk and joined[-1] and (2 * taken + chunk) * count > 2 * total * len(joined):
            joined.append(0)
        joined[-1] += chunk
        taken += chunk
    return tuple(joined)


@remembered
def parts_of(k_tiles: int, p_k: int) -> Blocks:
    """The part of k that each k-tile belongs to: contiguous, as even as it can be."""
    return tuple(part for part, size in enumerate(even(k_tiles, p_k)) for _ in range(size))


@remembered
def largest_share(blocks: Blocks, workers: int) -> int:
    """Elements of the worker with the most, when blocks are assigned cyclically."""
    return max(sum(blocks[rank::workers]) for rank in range(workers))


def most_assigned(rows: int, columns: int, workers: int) -> int:
    """Blocks of a worker when each row of them is assigned in turn from the next worker on."""
    return min(rows * ceil_div(columns, workers), columns * ceil_div(rows, workers))


class Merge(NamedTuple):
    """One addition of the tree that sums the parts of k."""

    addends: Blocks  #: first part under each of them; the first one names the sum as well
    owner: int  #: part whose worker holds one of them, receives the others and keeps the sum
    senders: Blocks  #: parts whose workers hold the others


@remembered
def merges(parts: int, turn: int, fan_in: int = 2) -> tuple[Merge, ...]:
    """The additions that sum `parts` partial results, in order: a fixed tree of neighbours.

    ((P0 + P1) + (P2 + P3)) + P4, whatever the number of workers. Up to `fan_in` addends, a power of
    two, are whole branches of that tree: added pairwise they have the bits of smaller additions.
    Who keeps a sum depends on the digits of `turn`, so that different C blocks end on different
    workers.

    >>> [merge.addends for merge in merges(5, 0)]
    [(0, 1), (2, 3), (0, 2), (0, 4)]
    >>> [merge.addends for merge in merges(5, 0, fan_in=4)]
    [(0, 1, 2, 3), (0, 4)]
    """
    found: list[Merge] = []
    slots = [(part, part) for part in range(parts)]  # (first part below, owner)
    while len(slots) > 1:
        groups = [slots[i : i + fan_in] for i in range(0, len(slots), fan_in)]
        slots = []
        for group in groups:
            addends, owners = zip(*group, strict=True)
            at = turn % len(group)
            slots.append((addends[0], owners[at]))
            if len(group) > 1:
                found.append(Merge(addends, owners[at], owners[:at] + owners[at + 1 :]))
        turn //= fan_in
    return tuple(found)


def keeper(parts: int, turn: int, fan_in: int = 2) -> int:
    """The part whose worker keeps the sum of all: the owner of the last of `merges`.

    >>> [keeper(5, turn) for turn in range(6)], merges(5, 3)[-1].owner
    ([0, 1, 2, 3, 4, 4], 3)
    """
    levels: list[tuple[int, int]] = []
    while parts > 1:
        levels.append((parts, turn))
        parts, turn = ceil_div(parts, fan_in), turn // fan_in
    at = 0
    for slots, turns in reversed(levels):
        begin = at * fan_in
        at = begin + turns % min(fan_in, slots - begin)
    return at
