"""The blocks that operands come in, and those that they are cut, joined or packed to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from multimm.planning.layouts import rechunk
from multimm.planning.layouts.rechunk import Recut
from multimm.planning.problem import PACKED_SIDE, PACKED_SLAB
from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.partition import Partition

#: Operations from which on a product that packs its own operands pays: an H200 needs 35 us for
#: 1024 x 1024 x 1024, and 51 with FP32 multiply-adds.
LONE_FLOPS = 1.2e9
#: Packed blocks are filled up to multiples of this many rows and this much of k.
PACKED_ROWS, PACKED_K = 128, 64
#: Bytes of a piece from which on it is multiplied by itself, rather than joined to others. X W of
#: 1048576 x 8192 and 1024 columns took an H200 180 ms in place of 241 in pieces of 5792 x 5792,
#: Dask's own, and 179 in place of 182 in 4096 x 4096.
LEAST_BAND = 128_000_000
#: ... if the other operand's block, of which a part is packed for each piece, has so many times
#: fewer columns, or rows, than the piece has rows, or columns: arbitrary.
NARROWER = 2


@dataclass(frozen=True)
class Cutting(Partition):
    """A partition of a product, and what becomes of its operands."""

    def operand_chunks(self, role: str) -> tuple[Blocks, ...]:
        """The chunks of an operand once it fits, as it is multiplied or added."""
        if role == "c":
            return (*self.batch_blocks, self.m_blocks, self.n_blocks)
        shape = self.spec(role).shape
        own = self.batch_blocks[len(self.batch_blocks) - (len(shape) - 2) :]
        batch = ((1,) if size == 1 else b for size, b in zip(shape, own, strict=False))
        if role == "a":
            return (*batch, self.m_blocks, self.slabs)
        return (*batch, self.slabs, self.n_blocks)

    @cached_property
    def cut_again(self) -> tuple[str, ...]:
        """The operands that come in other blocks than these; those from files are read in these.

        Of one that comes in one block, and lies nowhere, nobody knows how it comes.
        """
        readable = dict(zip("ab", self.problem.rereadable, strict=True))
        return tuple(
            role
            for role in ("a" if self.mirrors else "ab")
            if not readable[role] and self._comes_otherwise(role)
        )

    @property
    def cut_apart(self) -> tuple[str, ...]:
        """Those of `cut_again` that tasks of their own cut and join."""
        return self.cut_again if self.cut_once else ()

    @property
    def cut_within(self) -> tuple[str, ...]:
        """Those of `cut_again` that each product joins for itself."""
        return () if self.cut_once else self.cut_again

    @cached_property
    def bandable(self) -> str:
        """An operand in long pieces: a slab of rows of A, or columns of B, or parts; "" if none is.

        Blocks from host memory are joined on their way.
        """
        joined = self.batch_blocks or self.mirrors or self.problem.from_host or self.problem.in_one
        for role in () if joined else self.cut_within:
            longest, along_k = max(self.across_k(role)), max(self._along_k(role))
            other = max(self.n_blocks if role == "a" else self.m_blocks)
            long = longest * along_k * self.spec(role).itemsize >= LEAST_BAND
            if long and longest >= NARROWER * other and along_k >= min(PACKED_SLAB, *self.slabs):
                return role
        return ""

    def _along_k(self, role: str) -> Blocks:
        return self.spec(role).chunks[-1 if role == "a" else -2]

    def across_k(self, role: str) -> Blocks:
        """The chunks of rows that A comes in, or of columns that B does."""
        return self.spec(role).chunks[-2 if role == "a" else -1]

    @property
    def banded(self) -> str:
        """The operand that products multiply piece by piece, if there is one."""
        return self.bandable if self.in_bands else ""

    @property
    def bands(self) -> int:
        """Pieces that are multiplied by themselves, over all blocks of C and slabs."""
        return self._within(self.banded).pieces if self.banded else 0

    @property
    def sums_in_bands(self) -> int:
        """Pieces along k beyond one in each slab: so often sums are handed on within tasks."""
        if not self.banded:
            return 0
        ends = {*accumulate(self._along_k(self.banded)), *accumulate(self.slabs)}
        return len(ends) - len(self.slabs)

    @property
    def handed_on(self) -> int:
        """Elements of sums that the busiest worker's products hand to the next ones."""
        return super().handed_on + self.sums_in_bands * self.work.most_summed

    @cached_property
    def cuts_c(self) -> bool:
        """Whether the C that is added comes in other blocks than the result's."""
        return self._comes_otherwise("c")

    def _comes_otherwise(self, role: str) -> bool:
        spec = self.spec(role)
        known = spec.owners or any(len(x) > 1 for x in spec.chunks)
        return bool(known) and spec.chunks != self.operand_chunks(role)

    def lies_beyond(self, role: str) -> bool:
        """Whether a block of an operand lies with a worker that has no place in the grid."""
        return max(self.spec(role).owners, default=0) >= self.grid.workers

    def away(self, role: str) -> float | None:
        """The share of an operand that lies elsewhere than it is kept; None where any may."""
        return None

    @cached_property
    def recut(self) -> Recut:
        """What it takes to bring operands and C into these blocks, by what is expected of any."""
        found = []
        for role in self.cut_apart:
            spec, blocks = self.spec(role), self.operand_chunks(role)
            beyond, away = self.lies_beyond(role), self.away(role)
            found.append(rechunk.once(spec, blocks, self.grid.workers, beyond=beyond, away=away))
        for role in self.cut_within:
            pieces = self._within(role)
            found.append(pieces._replace(pieces=0, copied=0) if role == self.banded else pieces)
        if self.cuts_c:
            spec, blocks = self.spec("c"), self.operand_chunks("c")
            beyond = self.lies_beyond("c")
            found.append(rechunk.added(spec, blocks, self.grid.workers, beyond=beyond))
        return Recut.of_all(found)

    def _within(self, role: str) -> Recut:
        """The same of an operand that products cut."""
        uses = {"a": len(self.n_blocks), "b": len(self.row_sizes)}[role]
        beyond = self.lies_beyond(role)
        return rechunk.within(self.spec(role), self.operand_chunks(role), uses, beyond=beyond)

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """The operands whose blocks are packed for tensor cores, once, where they are at home.

        A block that is used once is packed by the product that uses it.
        """
        long_enough = self.problem.packable and min(self.slabs) >= PACKED_SLAB
        if not (self.pack_once and long_enough):
            return ()
        if min(*self.m_blocks, *self.n_blocks) < PACKED_SIDE:
            return ()
        if self.mirrors:
            return ("a",)
        uses = {"a": len(self.n_blocks), "b": len(self.m_blocks)}
        return tuple(role for role, count in uses.items() if count > 1)

    def width(self, role: str) -> int:
        """Bytes of an operand's element on its way between workers."""
        spec = self.spec(role)
        return self.problem.packed_itemsize if role in self.packed else spec.itemsize

    @property
    def on_tensor_cores(self) -> bool:
        """Whether block products are expected to run there."""
        flops = 2 * max(self.m_blocks) * max(self.n_blocks) * max(self.slabs)
        by_itself = self.problem.packable and flops >= LONE_FLOPS
        return bool(self.packed) or self.problem.alone or by_itself

    @cached_property
    def padding(self) -> float:
        """By how much packed blocks are larger than their sources, at most."""
        rows = max(
            (1 + -size % PACKED_ROWS / size for size in {*self.m_blocks, *self.n_blocks} if size),
            default=1.0,
        )
        return rows * max(1 + -size % PACKED_K / max(1, size) for size in set(self.slabs))

    @property
    def in_use(self) -> dict[str, int]:
        """Bytes of a slab of each operand that the busiest worker needs in one wave, by role."""
        longest = max(self.slabs)
        panels = zip(self.roles, self.work.panels, strict=False)
        return {role: panel * longest * self.width(role) for role, panel in panels}
