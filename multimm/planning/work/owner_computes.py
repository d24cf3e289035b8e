"""Products of which the larger operand is multiplied where it lies, chunk by chunk: what the other
one, and partial products, come to.

See `multimm.planning.work.partial_products`.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import chain, product
from math import prod
from operator import ne
from typing import TYPE_CHECKING

from multimm.planning.matrix import MatrixSpec
from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.rechunk import Rechunk
from multimm.planning.work.cyclic import Cyclic
from multimm.planning.work.partial_products import PartialProducts

if TYPE_CHECKING:
    from multimm.planning.schedule import Schedule


class OwnerComputes:
    """Who makes which partial product, who joins it, and how operands come there.

    The answers of a work map, `work.cyclic.Cyclic`, and of `distribution.Distribution`: tasks take
    chunks as they come, and none is a block of the plan, or brought into one before.

    Parameters
    ----------
    schedule : Schedule
    partial_products : PartialProducts
        Who multiplies what of the large operand.
    plain : Cyclic
        The map of block rows, or columns, of which some have no length.
    """

    in_place: dict[str, tuple[int, ...]] = {}  # noqa: RUF012  (nobody writes to it)
    elsewhere = cut_again = cut_apart = packed = ()
    held_back = 0

    def __init__(
        self, schedule: Schedule, partial_products: PartialProducts, plain: Cyclic
    ) -> None:
        self.schedule, self.partial_products, self.plain = schedule, partial_products, plain
        self.workers = partial_products.workers
        #: What is taken where it lies, and what travels to all who need it.
        self.large, self.small = "ba" if partial_products.by_columns else "ab"
        self.cut_within = (self.large,)  # each task joins rows of chunks for itself
        #: Columns of C's blocks, or rows of those whose columns are in partial products.
        self.across = plain.m_blocks if partial_products.by_columns else plain.n_blocks
        self.worker, self.stand_in, self.behind = plain.worker, plain.stand_in, plain.behind
        self.most_in_row_panel, self.most_summed = plain.most_in_row_panel, plain.most_summed

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and column of what is computed: all but the partial products of nobody."""
        rows, columns = (
            [at for at, size in enumerate(blocks) if size]
            for blocks in (self.plain.m_blocks, self.plain.n_blocks)
        )
        return tuple(product(rows, columns))

    @property
    def count(self) -> int:
        """Partial products that are computed."""
        return len(self.pairs)

    def of(self, partial_product: int, across: int) -> tuple[int, int]:
        """Block row and block column of a partial product."""
        at = across, partial_product
        return at if self.partial_products.by_columns else at[::-1]

    def cell(self, row: int, j: int) -> tuple[int, int]:
        """Of a block of C, the partial product whose maker joins it."""
        output_tile, across = self.of(row, j)
        return self.of(self.joining(output_tile), across)

    def joining(self, output_tile: int) -> int:
        """The partial product of an output tile whose maker joins it: in turn."""
        partial_products = self.output_tiles[output_tile]
        return partial_products[output_tile % len(partial_products)]

    # ---------------------------------------------------------------- what is joined

    @cached_property
    def output_tiles(self) -> tuple[tuple[int, ...], ...]:
        """The partial products of each output tile of C, without those of nobody."""
        workers, lengths = self.workers, self.partial_products.lengths
        turns = (range(start, start + workers) for start in range(0, len(lengths), workers))
        return tuple(tuple(at for at in turn if lengths[at]) for turn in turns)

    @property
    def sides(self) -> tuple[Blocks, Blocks]:
        """Rows and columns of C's blocks."""
        sides = self.across, self.partial_products.heights
        return sides if self.partial_products.by_columns else sides[::-1]

    @cached_property
    def joined(self) -> tuple[tuple[int, int], ...]:
        """Of all blocks of C that are joined: the output tile, and the block of the other side."""
        several = [at for at, output_tile in enumerate(self.output_tiles) if len(output_tile) > 1]
        return tuple(product(several, range(len(self.across))))

    def finishing(self, *, adds: bool) -> int:
        """Tasks that join partial products."""
        return len(self.joined)

    @cached_property
    def adds(self) -> bool:
        """Whether some rows are in several partial products, which are added first."""
        return sum(self.partial_products.lengths) > sum(self.partial_products.heights)

    def spread(self, workers: int) -> bool:
        """Whether several workers make partial products; else Dask decides on one."""
        return len({number % workers for number in chain(*self.output_tiles)}) > 1

    @property
    def most_joined(self) -> int:
        """Elements of the joined blocks of the worker that keeps the most of them."""
        return self._of_owners[0]

    @property
    def most_fetched(self) -> int:
        """Elements of others' partial products that one worker joins, at most."""
        return self._of_owners[1]

    @cached_property
    def _of_owners(self) -> tuple[int, int]:
        joined, received, parts = Counter[int](), Counter[int](), self.partial_products
        for output_tile, across in self.joined:
            owner = self.joining(output_tile) % self.workers
            joined[owner] += parts.heights[output_tile] * self.across[across]
            for number in self.output_tiles[output_tile]:
                if number % self.workers != owner:
                    received[owner] += parts.lengths[number] * self.across[across]
        return max(joined.values(), default=0), max(received.values(), default=0)

    @property
    def most_kept(self) -> int:
        """Elements of C that the busiest worker keeps: partial products, and joined blocks."""
        return self.most_summed + self.most_joined

    # ---------------------------------------------------------------- what the busiest does

    @property
    def computed(self) -> int:
        """Elements of C that are computed, by all."""
        return sum(self.partial_products.rows) * sum(self.across)

    def multiplied(self, k: int) -> int:
        """Multiplications of the busiest worker."""
        return max(self.partial_products.multiplied.values()) * sum(self.across)

    @property
    def most_products(self) -> int:
        """Products that the busiest worker launches, one after another within its tasks."""
        return self.partial_products.totals.products * len(self.across)

    def handed_on(self, steps: int) -> int:
        """Elements of sums that the busiest worker's products hand to the next ones."""
        return self.partial_products.totals.handed_on * sum(self.across)

    # ---------------------------------------------------------------- how operands come

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
        times, totals = len(self.across), self.partial_products.totals
        copied = totals.joined * self.laid.itemsize
        return Rechunk(0, 0, 0, times * totals.sub_blocks, times * copied)

    @property
    def gathered(self) -> int:
        """Bytes of what groups make, all that are gathered in partial products with others'."""
        rows = self.partial_products.totals.gathered
        return rows * sum(self.across) * self.schedule.joined_bytes

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
        """Bytes of what a worker multiplies and others may have, at most, by role."""
        most = max(self.fetched.values(), default=0)
        of_small = int(self.share_of_k * self.sent.nbytes)
        return {self.small: of_small} | ({self.large: most} if most else {})

    def arrives(self, role: str) -> bool:
        """Whether a worker is sent some of an operand."""
        return role in self.in_use

    @cached_property
    def share_of_k(self) -> float:
        """What the worker that multiplies most ranges of k needs of the small operand."""
        of_workers, parts = Counter[int](), self.partial_products
        for length, users in zip(parts.columns, parts.users, strict=True):
            of_workers.update(dict.fromkeys(users, length))
        return max(of_workers.values(), default=0) / max(1, self.schedule.problem.k)

    @cached_property
    def arriving(self) -> tuple[float, float]:
        """Chunks, or coalesced transfers, that a worker is sent, and their bytes.

        Of the small operand the ranges of k that it multiplies, and its share of what others have.
        The latter for all of its tasks at once: 51 chunks of 134 MB took a worker 0.1 s more than
        their bytes would, which its products did not hide.
        """
        small, workers = self.sent, self.workers
        chunks = self.coalesced_transfers or self.share_of_k * small.blocks
        away = 1 - 1 / workers if chunks >= workers else 1
        moved = sum(map(ne, self.laid.owners, self.partial_products.at)) / workers
        most = max(self.fetched.values(), default=0)
        return chunks * away + moved, self.share_of_k * small.nbytes * away + most

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
        of_small = max(self.across) * k * small.itemsize
        if self.partial_products.coalesced:
            of_small = small.fullest or small.nbytes // self.workers
        of_large = max(self.partial_products.lengths) * k * self.laid.itemsize
        return {self.small: of_small, self.large: of_large}

    @property
    def packed_by_products(self) -> dict[str, int]:
        """Elements of each operand that the busiest worker packs, if its products do so."""
        large = max(self.partial_products.multiplied.values()) * len(self.across)
        small = self.partial_products.totals.walked * sum(self.across)
        return {self.large: large, self.small: small}

    @property
    def joined_small(self) -> int:
        """Bytes of the small operand's k-tiles where these are cut from its chunks, at most."""
        length = int(self.share_of_k * self.schedule.problem.k)
        return (self.sent.blocks > 1) * max(self.across) * length * self.sent.itemsize

    def owner_of_small(self, chunk: int) -> int:
        """The worker with a chunk of the small matrix: where it lies, or in turn."""
        owners = self.sent.owners
        return owners[chunk] if owners else chunk % self.workers
