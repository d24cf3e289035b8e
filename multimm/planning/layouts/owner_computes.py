"""A large matrix multiplied where it lies, in few tasks: portions of C's blocks, then joined.

Its chunks lie on workers in turn, mostly, in rows or in two dimensions. Each may be multiplied by a
task of its own, but a task takes Dask's scheduler about a millisecond, and Dask's usual chunks of
128 MB a GPU half of one. To join neighbours to larger blocks would move most of the matrix. So each
worker multiplies all chunks that it has of a strip of C in one task, and these portions travel (see
`multimm.planning.layouts.partial_products`):

    chunk of rows      0    1    2    3    4    5    6    7
    lies on worker     w0   w1   w1   w0   w1   w0   w0   w1
    block of C         |        0        |        1        |
    its portions       w0: 0, 3;  w1: 1, 2    w0: 5, 6;  w1: 4, 7

Portions are block rows of the layout, as many for each strip of C as there are workers, in their
order, so that they are dealt out as any block rows are; those of nobody have no rows. Columns of a
wide matrix, B, are taken likewise; "rows" means them, too, where nothing else is said.

Of long vectors, with few rows of chunks and many slabs, each portion has all rows of its strip:
they are then sums of parts of k, which lie anywhere.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from math import prod
from operator import ne
from typing import NamedTuple

from multimm.planning.layouts.cyclic import Layout
from multimm.planning.layouts.partial_products import Portions
from multimm.planning.layouts.rechunk import Recut, spans
from multimm.planning.matrix import MatrixSpec
from multimm.planning.tiling.grid import Blocks, Coordinate


def _of_several(blocks: Blocks, chunks: Blocks) -> list[bool]:
    """Whether blocks have parts of more than one chunk.

    >>> _of_several((2, 3), (1, 1, 3))
    [True, False]
    """
    ends = [*accumulate(chunks)]
    return [bisect_right(ends, start) < bisect_left(ends, end) for start, end in spans(blocks)]


class Arriving(NamedTuple):
    """What a worker is sent of operands."""

    chunks: float  #: or bundles
    nbytes: float


@dataclass(frozen=True)
class GatheredLayout(Layout):
    """A layout whose block rows, or block columns, are portions of those of C.

    Parameters
    ----------
    portions : Portions
        Of A; of B transposed, with `by_columns`.
    by_columns : bool
        B is taken where it lies, and not A.
    bundled : bool
        What each worker has of the other operand travels as one block: a hundred small chunks take
        a tenth of a second.
    """

    portions: Portions = field(kw_only=True)
    by_columns: bool = False
    bundled: bool = False

    @property
    def large(self) -> str:
        """What is taken where it lies."""
        return "b" if self.by_columns else "a"

    @property
    def small(self) -> str:
        """What travels to all who need it."""
        return "a" if self.by_columns else "b"

    @property
    def across(self) -> Blocks:
        """Columns of C's blocks, or rows of those whose columns are in portions."""
        return self.m_blocks if self.by_columns else self.n_blocks

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

    def cell(self, portion: int, across: int) -> tuple[int, int]:
        """Block row and block column of a portion, of the sums that are computed."""
        return (across, portion) if self.by_columns else (portion, across)

    # ---------------------------------------------------------------- what is joined

    @cached_property
    def strips(self) -> tuple[tuple[int, ...], ...]:
        """The portions of each strip of C, without those of nobody."""
        workers, lengths = self.grid.workers, self.portions.lengths
        turns = (range(start, start + workers) for start in range(0, len(lengths), workers))
        return tuple(tuple(at for at in turn if lengths[at]) for turn in turns)

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of the result's blocks."""
        joined = self.portions.heights
        return (self.m_blocks, joined) if self.by_columns else (joined, self.n_blocks)

    @cached_property
    def joined(self) -> tuple[tuple[int, int], ...]:
        """Strip and block of the other side, of all blocks of C that are joined from portions."""
        several = [at for at, strip in enumerate(self.strips) if len(strip) > 1]
        return tuple(product(several, range(len(self.across))))

    @property
    def finishing(self) -> int:
        """Tasks that join portions."""
        return len(self.joined)

    @cached_property
    def adds(self) -> bool:
        """Whether some rows are in several portions: none is finished before they are added."""
        return sum(self.portions.lengths) > sum(self.portions.heights)

    @property
    def joined_bytes(self) -> int:
        """Bytes of an element of the portions that are joined."""
        return self.problem.sum_bytes if self.adds else self.problem.out_bytes

    def keeper_of(self, strip: int) -> Coordinate:
        """Who joins a strip, of those who have a portion of it: in turn."""
        portions = self.strips[strip]
        return Coordinate(*self.cell(portions[strip % len(portions)], 0), 0)

    @property
    def block_owners(self) -> tuple[int, ...]:
        """The number of the worker that makes each block of the result, as stored."""
        keepers = [self.grid.rank(self.keeper_of(at)) for at in range(len(self.strips))]
        at = product(*(range(len(blocks)) for blocks in self.sides))
        return tuple(keepers[column if self.by_columns else row] for row, column in at)

    def placed(self, workers: int) -> bool:
        """Whether several workers make portions; else Dask decides on one."""
        return len({number % workers for strip in self.strips for number in strip}) > 1

    @property
    def most_joined(self) -> int:
        """Elements of the joined blocks of the worker that keeps the most of them."""
        return self._of_keepers[0]

    @property
    def portions_received(self) -> int:
        """Elements of others' portions that one worker joins, at most."""
        return self._of_keepers[1]

    @cached_property
    def _of_keepers(self) -> tuple[int, int]:
        joined, received = Counter[int](), Counter[int]()
        for strip, across in self.joined:
            keeper = self.grid.rank(self.keeper_of(strip))
            joined[keeper] += self.portions.heights[strip] * self.across[across]
            for portion in self.strips[strip]:
                if portion % self.grid.workers != keeper:
                    received[keeper] += self.portions.lengths[portion] * self.across[across]
        return max(joined.values(), default=0), max(received.values(), default=0)

    @property
    def share_result(self) -> int:
        """Elements of C that the busiest worker keeps: portions, and what is joined of them."""
        return self.work.most_summed + self.most_joined

    # ---------------------------------------------------------------- what is multiplied

    @property
    def steps(self) -> int:
        """A task multiplies all slabs."""
        return 1

    @property
    def tasks(self) -> int:
        """One for each portion, for each block of C that has several, and for each bundle."""
        return self.blocks + self.finishing + len(self.bundlers)

    @cached_property
    def bundlers(self) -> tuple[int, ...]:
        """The workers that bundle what they have of the small operand."""
        chunks = enumerate(product(*self.spec(self.small).chunks)) if self.bundled else ()
        return tuple(sorted({self.keeper_of_small(at) for at, size in chunks if prod(size)}))

    @property
    def first_use(self) -> dict[str, int]:
        """Bytes of each operand that a worker's first product multiplies, by role, at most.

        Of a small operand in bundles, all that the worker bundles comes before that.
        """
        k, small = self.problem.k, self.spec(self.small)
        of_small = max(self.across) * k * small.itemsize
        if self.bundled:
            of_small = small.fullest or small.nbytes // self.grid.workers
        of_large = max(self.portions.lengths) * k * self.laid.itemsize
        return {self.small: of_small, self.large: of_large}

    @property
    def share_flops(self) -> int:
        """Floating-point operations of the busiest worker."""
        return 2 * max(self.portions.multiplied.values()) * sum(self.across)

    @property
    def handed_on(self) -> int:
        """Elements of sums that the busiest worker's products hand to the next ones."""
        return self.portions.handed_on * sum(self.across)

    @property
    def packed_by_products(self) -> dict[str, int]:
        """Elements of each operand that the busiest worker packs, if its products do so."""
        large = max(self.portions.multiplied.values()) * len(self.across)
        return {self.large: large, self.small: self.portions.walked * sum(self.across)}

    # ---------------------------------------------------------------- where operands are

    @cached_property
    def laid(self) -> MatrixSpec:
        """The large matrix, as if it were A."""
        return self.problem.b.T if self.by_columns else self.problem.a

    @cached_property
    def lying(self) -> dict[str, tuple[int, ...]]:
        """Tasks take chunks as they come: none is a block of the layout."""
        return {}

    @cached_property
    def cut_again(self) -> tuple[str, ...]:
        """Nor is one brought into such blocks before."""
        return ()

    @property
    def cut_within(self) -> tuple[str, ...]:
        """Each task joins rows of chunks for itself."""
        return (self.large,)

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """And packs what it multiplies."""
        return ()

    @cached_property
    def recut(self) -> Recut:
        """The chunks that are multiplied, and bytes of those that are joined."""
        times, pieces = len(self.across), len(self.portions.rows) * len(self.slabs)
        copied = self.portions.joined * self.laid.itemsize
        return Recut(0, 0, 0, times * pieces, times * copied)

    @cached_property
    def fetched(self) -> Counter[int]:
        """Bytes of the large matrix that each worker multiplies and does not have."""
        spec, found = self.laid, Counter[int]()
        chunks = zip(spec.owners, self.portions.at, product(*spec.chunks), strict=True)
        for owner, worker, (row, column) in chunks:
            if owner != worker:
                found[worker] += row * column * spec.itemsize
        return found

    @property
    def in_use(self) -> dict[str, int]:
        """Bytes of what a worker is sent, at most: all of the small matrix, by role."""
        most = max(self.fetched.values(), default=0)
        return {self.small: self.spec(self.small).nbytes} | ({self.large: most} if most else {})

    @cached_property
    def arriving(self) -> Arriving:
        """What a worker is sent: the small operand, and its share of what others have.

        The latter for all of its tasks at once: 51 chunks of 134 MB took a worker 0.1 s more than
        their bytes would, which its products did not hide.
        """
        small, workers = self.spec(self.small), self.grid.workers
        chunks = len(self.bundlers) or small.blocks
        away = 1 - 1 / workers if chunks >= workers else 1
        moved = sum(map(ne, self.laid.owners, self.portions.at)) / workers
        most = max(self.fetched.values(), default=0)
        return Arriving(chunks * away + moved, small.nbytes * away + most)

    def arrives(self, role: str) -> bool:
        """Whether a worker is sent some of an operand."""
        return role in self.in_use

    @cached_property
    def at_home(self) -> dict[str, int]:
        """Bytes of each operand on the worker that keeps the most of it, by role, at most."""
        small = self.spec(self.small)
        return {self.large: self.laid.fullest, self.small: small.fullest or small.nbytes}

    @property
    def joined_small(self) -> int:
        """Bytes of those slabs of the small operand that are cut from several chunks."""
        small = self.spec(self.small)
        along, across = small.chunks[:: -1 if self.by_columns else 1]
        wide = any(_of_several(self.across, across))
        cut = zip(self.slabs, _of_several(self.slabs, along), strict=True)
        length = sum(slab for slab, several in cut if several or wide)
        return length * max(self.across) * small.itemsize

    def keeper_of_small(self, chunk: int) -> int:
        """The worker with a chunk of the small matrix: where it lies, or in turn."""
        owners = self.spec(self.small).owners
        return owners[chunk] if owners else chunk % self.grid.workers
