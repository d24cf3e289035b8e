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
less to do computes the block. Which blocks are computed never depends on the grid, so that the
bits do not either.
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

#: Row and column of the grid.
Place = tuple[int, int]
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
        By cell: its own place (i, j), or the mirrored one (j, i); not wrapped around the grid.
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
        self.users: dict[tuple[int, int], dict[int, set[Place]]] = {}
        work: Counter[Place] = Counter()
        summed: Counter[Place] = Counter()
        kept: Counter[Place] = Counter()
        in_wave: Counter[tuple[int, Place]] = Counter()
        for flat, i, j in self._cells():
            first = flat * len(blocks)
            here, there = (first + i, j), (first + j, i)
            place, other = self.wrap(here), self.wrap(there)
            at, wave = here, here[0] // rows_per_wave
            # Equal places share: which one is asked first changes from block to block.
            if work[other] < work[place] + (i + j) % 2:
                at, place = there, other
            size = batch_sizes[flat] * blocks[i] * blocks[j]
            work[place] += size if i != j else batch_sizes[flat] * computed(blocks[i], dtype)
            summed[place] += size
            kept[place] += size if i == j else 2 * size
            in_wave[wave, place] += size
            self.owners[here] = at
            self.computed.setdefault(wave, {}).setdefault(place, []).append(here)
            for block in {i, j}:
                self.users.setdefault((flat, block), {}).setdefault(wave, set()).add(place)
        self.computed_in_all, self.most_computed = sum(work.values()), max(work.values())
        self.wave_sums = max(in_wave.values())
        self.most_summed, self.most_kept = max(summed.values()), max(kept.values())

    def _cells(self) -> Iterator[tuple[int, int, int]]:
        """Batch block, block row, block column: the diagonals first, for they have no choice."""
        rows = range(len(self.blocks))
        for flat in range(len(self.batch_sizes)):
            yield from ((flat, i, i) for i in rows)
        for flat in range(len(self.batch_sizes)):
            yield from ((flat, i, j) for i in rows for j in range(i))

    def wrap(self, at: Place) -> Place:
        """A place inside the grid."""
        return at[0] % self.plane[0], at[1] % self.plane[1]

    @cached_property
    def panel(self) -> int:
        """Elements of op(A), per unit of k, that the busiest place needs in one wave."""
        needed: Counter[tuple[int, Place]] = Counter()
        for (flat, block), waves in self.users.items():
            size = self.batch_sizes[flat] * self.blocks[block]
            for wave, places in waves.items():
                for place in places:
                    needed[wave, place] += size
        return max(needed.values())


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
    def _homes(self) -> dict[tuple[int, int], list[Place]]:
        return {key: sorted(self.users(*key)) for key in self.deal.users}

    def _home(self, role: str, flat: int, block: int, slab: int) -> Coordinate:
        """With one of its users, another one for each slab."""
        users = self._homes[flat, block]
        return Coordinate(*users[(slab + block) % len(users)], self.part_of[slab])

    def _kept(self, role: str) -> int:
        if role in self.lying or len(self.spec(role).shape) > 2:
            return super()._kept(role)
        # Slab by slab a block goes round its users, each block from the next one on: see `_home`.
        # Parts of k that begin alike hold alike.
        lengths = {len(users) for users in self._homes.values()}
        alike = {(end - first, *(first % length for length in lengths)): (first, end)
                 for first, end in pairwise(self.first_slab)}  # fmt: skip
        most = 0
        for first, end in alike.values():
            held: Counter[Place] = Counter()
            for block, size in enumerate(self.m_blocks):
                users = self._homes[0, block]
                rounds, rest = divmod(end - first, len(users))
                start = (first + block) % len(users)
                for place in (users[start:] + users[:start])[:rest]:
                    held[place] += size
                if rounds:
                    held.update(dict.fromkeys(users, rounds * size))
            most = max(most, max(held.values()) * max(self.slabs))
        return most * self.spec(role).itemsize

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
