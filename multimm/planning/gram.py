"""Gram products C = op(A) op(A)^T: one triangle of C's blocks is computed, the other mirrored.

Block (i, j) with i >= j is computed from the blocks i and j of one operand, whose blocks serve
both sides; block (j, i) is its transpose, made where it lies. So C is symmetric bit by bit:

        j=0   j=1   j=2                 c: computed
    i=0 | d |  m  |  m  |               d: computed below the diagonal, and mirrored
    i=1 | c |  d  |  m  |               m: mirrored
    i=2 | c |  c  |  d  |

Of a block on the diagonal a little more than half is computed: see `multimm.planning.triangle`.
All of C's operations come to (1 + 1 / d) / 2 of the plain product's, for d pieces along its
diagonal, of 256 rows and more.

A plain cyclic deal of a triangle leaves some workers with half of the others' work. Whoever
stands at place (i, j) of the grid, or at (j, i), has both operand blocks anyway; the one with
less to do computes the block. In a grid of few rows and one column anybody may: blocks are dealt
diagonal by diagonal, each to a place with the least to do, of these to one that needs the fewest
further operand blocks, and the halves on the diagonal at last. Any number of workers then has even
shares of as many block rows, or of twice as many: with 8 of each, 3 blocks and 2 halves, or 4.
Which blocks are computed never depends on the grid, so that the bits do not either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from multimm.planning.grid import Blocks, Coordinate
from multimm.planning.layout import Gate, Layout
from multimm.planning.partition import WINDOW
from multimm.planning.triangle import computed

#: Blocks are dealt out freely among at most so many places, of so many block rows for each: every
#: place is tried for every block, and of finer blocks a cyclic deal is even enough.
FREE_PLACES, FREE_ROWS = 16, 2

#: Row and column of the grid.
Place = tuple[int, int]
#: Batch block and block row of op(A).
Panel = tuple[int, int]
#: Block row, over all matrices, and block column of C.
Cell = tuple[int, int]


class Deal:
    """The computed blocks of C, dealt out to the places of a plane of workers.

    Parameters
    ----------
    p_m, p_n : int
    blocks : Blocks
        Of C's rows, and of its columns.
    batch_sizes : Blocks
        Matrices in each batch block.
    rows_per_wave : int
        Block rows that make up a wave.
    dtype : str
        In which sums are made.

    Attributes
    ----------
    owners : dict
        By cell: its own place (i, j), or the mirrored one (j, i), not wrapped around the grid; or,
        dealt out freely, any place.
    computed : dict
        By wave and place: the cells.
    users : dict
        By batch block and block row of op(A), then by wave: the places that use it.
    computed_in_all, most_computed : int
        Elements of C that are computed, by all places and by the busiest one.
    wave_sums : int
        Elements of the blocks that the busiest place computes in one wave.
    most_summed, most_kept : int
        Elements of the blocks that the busiest place computes, whole ones on the diagonal; and
        with the mirror images of the others.
    """

    def __init__(
        self,
        p_m: int,
        p_n: int,
        blocks: Blocks,
        batch_sizes: Blocks,
        rows_per_wave: int,
        dtype: str = "float32",
    ) -> None:
        self.plane = p_m, p_n
        self.blocks = blocks
        self.batch_sizes = batch_sizes
        self.owners: dict[Cell, Place] = {}
        self.computed: dict[int, dict[Place, list[Cell]]] = {}
        self.users: dict[Panel, dict[int, set[Place]]] = {}
        self._panels: dict[Place, set[Panel]] = {(row, 0): set() for row in range(p_m)}
        self._work: Counter[Place] = Counter()
        summed: Counter[Place] = Counter()
        kept: Counter[Place] = Counter()
        in_wave: Counter[tuple[int, Place]] = Counter()
        for flat, i, j in self._cells():
            row = flat * len(blocks) + i
            at = self._freely(flat, i, j) if self.free else self._cyclic(flat, i, j)
            place, wave = self.wrap(at), row // rows_per_wave
            size = batch_sizes[flat] * blocks[i] * blocks[j]
            self._work[place] += size if i != j else batch_sizes[flat] * computed(blocks[i], dtype)
            summed[place] += size
            kept[place] += size if i == j else 2 * size
            in_wave[wave, place] += size
            self.owners[row, j] = at
            self.computed.setdefault(wave, {}).setdefault(place, []).append((row, j))
            for panel in {(flat, i), (flat, j)}:
                self.users.setdefault(panel, {}).setdefault(wave, set()).add(place)
        self.computed_in_all = sum(self._work.values())
        self.most_computed = max(self._work.values())
        self.wave_sums = max(in_wave.values())
        self.most_summed, self.most_kept = max(summed.values()), max(kept.values())

    @property
    def free(self) -> bool:
        """Any place may compute any block."""
        p_m, p_n = self.plane
        return p_n == 1 and p_m <= FREE_PLACES and len(self.blocks) <= FREE_ROWS * p_m

    def _cells(self) -> Iterator[tuple[int, int, int]]:
        """Batch block, block row, block column: first what has no choice; last what is small."""
        rows, flats = range(len(self.blocks)), range(len(self.batch_sizes))
        diagonal = [(flat, i, i) for flat in flats for i in rows]
        if self.free:
            yield from ((flat, j + d, j) for flat in flats for d in rows[1:] for j in rows[:-d])
            yield from diagonal
        else:
            yield from diagonal
            yield from ((flat, i, j) for flat in flats for i in rows for j in range(i))

    def _cyclic(self, flat: int, i: int, j: int) -> Place:
        """Of a block's own place and the mirrored one, not wrapped, the one with less to do."""
        first = flat * len(self.blocks)
        here, there = (first + i, j), (first + j, i)
        # Equal places share: which one is asked first changes from block to block.
        least = self._work[self.wrap(here)] + (i + j) % 2
        return there if self._work[self.wrap(there)] < least else here

    def _freely(self, flat: int, i: int, j: int) -> Place:
        """Of all places with the least to do, the one that needs the fewest further blocks."""
        panels, have, work = {(flat, i), (flat, j)}, self._panels, self._work
        place = min(have, key=lambda at: (work[at], len(panels - have[at]), len(have[at])))
        have[place] |= panels
        return place

    def wrap(self, at: Place) -> Place:
        """A place inside the grid."""
        return at[0] % self.plane[0], at[1] % self.plane[1]

    @cached_property
    def sent(self) -> int:
        """Elements of op(A), per unit of k, that places receive from where they are kept."""
        return sum(
            self.batch_sizes[flat] * self.blocks[block] * (sum(map(len, waves.values())) - 1)
            for (flat, block), waves in self.users.items()
        )

    @cached_property
    def panel(self) -> int:
        """Elements of op(A), per unit of k, that the busiest place needs in one wave."""
        return max(self._needed.values())

    @cached_property
    def needed(self) -> Counter[Place]:
        """Elements of op(A), per unit of k, that each place needs in all waves together."""
        found: Counter[Place] = Counter()
        for (_, place), size in self._needed.items():
            found[place] += size
        return found

    @cached_property
    def _needed(self) -> Counter[tuple[int, Place]]:
        needed: Counter[tuple[int, Place]] = Counter()
        for (flat, block), waves in self.users.items():
            size = self.batch_sizes[flat] * self.blocks[block]
            for wave, places in waves.items():
                for place in places:
                    needed[wave, place] += size
        return needed


#: Layouts that differ in their slabs only are dealt out alike.
_deal = lru_cache(maxsize=256)(Deal)


@dataclass(frozen=True)
class GramLayout(Layout):
    """A layout whose problem is a Gram product; `m_blocks` and `n_blocks` are the same."""

    @cached_property
    def deal(self) -> Deal:
        """Who computes what."""
        plane = self.grid.p_m, self.grid.p_n
        rows_per_wave = self.band * self.grid.p_m
        return _deal(*plane, self.m_blocks, self.batch_sizes, rows_per_wave,
                     self.problem.accumulate)  # fmt: skip

    @property
    def mirrors(self) -> bool:
        """One triangle of C's blocks is computed and mirrored."""
        return True

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed, of each batch block."""
        return tuple((i, j) for i in range(len(self.m_blocks)) for j in range(i + 1))

    @property
    def blocks(self) -> int:
        """Blocks of C that are computed."""
        return len(self.batch_sizes) * len(self.m_blocks) * (len(self.m_blocks) + 1) // 2

    @property
    def finishing(self) -> int:
        """Tasks that mirror blocks off the diagonal, and that add C where there is one."""
        rows, matrices = len(self.m_blocks), len(self.batch_sizes)
        if self.problem.reads_c:
            return matrices * rows * rows
        return matrices * rows * (rows - 1) // 2

    def owner(self, row: int, j: int, part: int) -> Coordinate:
        """Who computes a block of C, for one part of k."""
        return Coordinate(*self.deal.owners[row, j], part)

    def users(self, flat: int, block: int, wave: int | None = None) -> set[Place]:
        """Places of the grid that use a block row of op(A), in one wave or in any."""
        waves = self.deal.users[flat, block]
        return set().union(*waves.values()) if wave is None else waves.get(wave, set())

    @cached_property
    def _homes(self) -> dict[Panel, list[Place]]:
        """The users of each block, the one first that keeps its first slab, and few others."""
        begin: Counter[Place] = Counter()
        homes = {}
        for flat, block in sorted(self.deal.users):
            users = sorted(self.users(flat, block))
            at = min(range(len(users)), key=lambda i: (begin[users[i]], (i - block) % len(users)))
            begin[users[at]] += 1
            homes[flat, block] = users[at:] + users[:at]
        return homes

    def _home(self, role: str, flat: int, block: int, slab: int) -> Coordinate:
        """With one of its users, another one for each slab."""
        users, part = self._homes[flat, block], self.part_of[slab]
        return Coordinate(*users[(slab - self.first_slab[part]) % len(users)], part)

    def _kept(self, role: str) -> int:
        if role in self.lying or len(self.spec(role).shape) > 2:
            return super()._kept(role)
        # Slabs of the longest part; parts are dealt out alike.
        return max(self._kept_rows.values()) * max(self.slabs) * self.spec(role).itemsize

    @cached_property
    def _kept_rows(self) -> Counter[Place]:
        """Rows of op(A) that each place keeps, over the slabs of the longest part of k."""
        held: Counter[Place] = Counter()
        for (flat, block), users in self._homes.items():
            rounds, rest = divmod(self.steps, len(users))
            size = self.batch_sizes[flat] * self.m_blocks[block]
            held.update(dict.fromkeys(users[:rest], size))
            if rounds:
                held.update(dict.fromkeys(users, rounds * size))
        return held

    @property
    def most_received(self) -> int:
        """Elements of op(A) that the busiest worker needs and does not keep."""
        return max(
            size * self.share_k - self._kept_rows[place] * max(self.slabs)
            for place, size in self.deal.needed.items()
        )

    def gate(self, home: Coordinate, wave: int, slab: int, window: int = WINDOW) -> Gate | None:
        """What a streamed read waits for: the slab `window` steps back; None in the first steps."""
        gate = super().gate(home, wave, slab, window)
        if gate is None:
            return None
        at, busy = self.deal.wrap((home.row, home.col)), self.deal.computed[gate.wave]
        row, col = at if at in busy else min(busy)
        return gate._replace(row=row, col=col)

    @property
    def openings(self) -> int:
        """Gates that hold back the waves after the first."""
        if self.stream:
            return 0
        waves = sorted(self.deal.computed.items())
        return self.parts * sum(
            len({at if at in before else min(before) for at in places})
            for (_, before), (_, places) in pairwise(waves)
        )

    def behind(self, gate: Gate) -> Iterator[tuple[int, int]]:
        """The block rows and columns whose sums a gate waits for."""
        yield from self.deal.computed[gate.wave][gate.row, gate.col]

    def operand_panels(self) -> set[tuple[str, int, int, int]]:
        """Role, wave (0 unless streamed), matrix and block of all that is read or packed."""
        return {
            ("a", wave, flat, block)
            for (flat, block), waves in self.deal.users.items()
            for wave in (waves if self.stream else (0,))
        }

    @property
    def flops(self) -> int:
        """Floating-point operations that are executed, over all matrices."""
        return 2 * self.problem.k * self.deal.computed_in_all

    @property
    def share_computed(self) -> int:
        """Elements of C that the busiest worker computes, for each slab."""
        return self.deal.most_computed

    @property
    def wave_sums(self) -> int:
        """Elements of C that the busiest worker sums up in one wave."""
        return self.deal.wave_sums

    @cached_property
    def share_sums(self) -> int:
        """Elements of C that the busiest worker sums up in all."""
        return self.deal.most_summed

    @cached_property
    def share_result(self) -> int:
        """Elements of C that the busiest worker keeps: what it computes, and mirrors of it."""
        return self.deal.most_kept

    @property
    def panels(self) -> tuple[int, int]:
        """Elements of A, per unit of k, that the busiest worker needs in one wave; B is A."""
        return self.deal.panel, 0
