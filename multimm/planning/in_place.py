"""Operands of which the larger one is multiplied where it lies, chunk by chunk, and the other sent.

See `multimm.planning.work.owner_computes`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from functools import cached_property
from itertools import accumulate, product
from math import prod
from operator import ne
from typing import TYPE_CHECKING, NamedTuple

from multimm.planning.matrix import MatrixSpec
from multimm.planning.tiling.grid import Blocks, spans
from multimm.planning.tiling.rechunk import Rechunk
from multimm.planning.work.owner_computes import OwnerComputes

if TYPE_CHECKING:
    from multimm.planning.schedule import Schedule


class Arriving(NamedTuple):
    """What a worker is sent of operands."""

    chunks: float  #: or coalesced transfers
    nbytes: float


class InPlace:
    """The operands of a schedule: the answers of `distribution.Distribution`.

    Tasks take chunks as they come: none is a block of the plan, or brought into one before.

    Parameters
    ----------
    schedule : Schedule
    work : OwnerComputes
        Who multiplies what of the large operand, and who joins it.
    """

    in_place: dict[str, tuple[int, ...]] = {}  # noqa: RUF012  (nobody writes to it)
    elsewhere = cut_again = cut_apart = packed = ()

    def __init__(self, schedule: Schedule, work: OwnerComputes) -> None:
        self.schedule, self.work, self.partial_products = schedule, work, work.partial_products
        #: What is taken where it lies, and what travels to all who need it.
        self.large, self.small = "ba" if self.partial_products.by_columns else "ab"
        self.cut_within = (self.large,)  # each task joins rows of chunks for itself

    @cached_property
    def laid(self) -> MatrixSpec:
        """The large matrix, as if it were A."""
        spec = self.schedule.spec(self.large)
        return spec.T if self.partial_products.by_columns else spec

    @property
    def sent(self) -> MatrixSpec:
        """The small one."""
        return self.schedule.spec(self.small)

    def width(self, role: str) -> int:
        """Bytes of an operand's element on its way between workers."""
        return self.schedule.spec(role).itemsize

    @cached_property
    def rechunk(self) -> Rechunk:
        """The chunks that are joined, mostly, and bytes that are."""
        times, totals = len(self.work.across), self.partial_products.totals
        copied = totals.joined * self.laid.itemsize
        return Rechunk(0, 0, 0, times * totals.sub_blocks, times * copied)

    @cached_property
    def fetched(self) -> Counter[int]:
        """Bytes of the large matrix that each worker multiplies and does not have."""
        spec, found = self.laid, Counter[int]()
        chunks = zip(spec.owners, self.partial_products.at, product(*spec.chunks), strict=True)
        for owner, worker, (row, column) in chunks:
            if owner != worker:
                found[worker] += row * column * spec.itemsize
        return found

    @property
    def in_use(self) -> dict[str, int]:
        """Bytes of what a worker is sent, at most: all of the small matrix, by role."""
        most = max(self.fetched.values(), default=0)
        return {self.small: self.sent.nbytes} | ({self.large: most} if most else {})

    def arrives(self, role: str) -> bool:
        """Whether a worker is sent some of an operand."""
        return role in self.in_use

    @cached_property
    def arriving(self) -> Arriving:
        """What a worker is sent: the small operand, and its share of what others have.

        The latter for all of its tasks at once: 51 chunks of 134 MB took a worker 0.1 s more than
        their bytes would, which its products did not hide.
        """
        small, workers = self.sent, self.partial_products.workers
        chunks = self.coalesced_transfers or small.blocks
        away = 1 - 1 / workers if chunks >= workers else 1
        moved = sum(map(ne, self.laid.owners, self.partial_products.at)) / workers
        most = max(self.fetched.values(), default=0)
        return Arriving(chunks * away + moved, small.nbytes * away + most)

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes of each operand on the worker that keeps the most of it, by role, at most."""
        return {self.large: self.laid.fullest, self.small: self.sent.fullest or self.sent.nbytes}

    @cached_property
    def coalesced_transfers(self) -> int:
        """Tasks that coalesce what a worker has of the small operand."""
        chunks = enumerate(product(*self.sent.chunks)) if self.partial_products.coalesced else ()
        return len({self.owner_of_small(at) for at, size in chunks if prod(size)})

    @property
    def first_use(self) -> dict[str, int]:
        """Bytes of each operand that a worker's first product multiplies, by role, at most.

        Of a small operand in coalesced transfers, all that the worker coalesces comes before that.
        """
        k, small = self.schedule.problem.k, self.sent
        of_small = max(self.work.across) * k * small.itemsize
        if self.partial_products.coalesced:
            of_small = small.fullest or small.nbytes // self.partial_products.workers
        of_large = max(self.partial_products.lengths) * k * self.laid.itemsize
        return {self.small: of_small, self.large: of_large}

    @property
    def packed_by_products(self) -> dict[str, int]:
        """Elements of each operand that the busiest worker packs, if its products do so."""
        across = self.work.across
        large = max(self.partial_products.multiplied.values()) * len(across)
        return {self.large: large, self.small: self.partial_products.totals.walked * sum(across)}

    @property
    def launches(self) -> int:
        """Kernels that the busiest worker launches for chunks that it multiplies by themselves."""
        products = self.partial_products.totals.alone * len(self.work.across)
        return products * (1 + self.schedule.on_tensor_cores)

    @property
    def joined_small(self) -> int:
        """Bytes of those k-tiles of the small operand that are cut from several chunks."""
        along, across = self.sent.chunks[:: -1 if self.partial_products.by_columns else 1]
        k_tiles = self.schedule.k_tiles
        wide = any(_of_several(self.work.across, across))
        cut = zip(k_tiles, _of_several(k_tiles, along), strict=True)
        length = sum(k_tile for k_tile, several in cut if several or wide)
        return length * max(self.work.across) * self.sent.itemsize

    def owner_of_small(self, chunk: int) -> int:
        """The worker with a chunk of the small matrix: where it lies, or in turn."""
        owners = self.sent.owners
        return owners[chunk] if owners else chunk % self.partial_products.workers


def _of_several(blocks: Blocks, chunks: Blocks) -> list[bool]:
    """Whether blocks have parts of more than one chunk.

    >>> _of_several((2, 3), (1, 1, 3))
    [True, False]
    """
    ends = [*accumulate(chunks)]
    return [bisect_right(ends, start) < bisect_left(ends, end) for start, end in spans(blocks)]
