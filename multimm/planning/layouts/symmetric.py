"""Gram products C = op(A) op(A)^T: one triangle of C's blocks is computed, the other mirrored.

Block (i, j) with i >= j is computed from the blocks i and j of one operand, whose blocks serve
both sides; block (j, i) is its transpose, made where it lies. So C is symmetric bit by bit:

        j=0   j=1   j=2                 c: computed
    i=0 | d |  m  |  m  |               d: computed below the diagonal, and mirrored
    i=1 | c |  d  |  m  |               m: mirrored
    i=2 | c |  c  |  d  |

Of a block on the diagonal a little more than half is computed: see
`multimm.planning.tiling.triangle`. All of C's operations come to (1 + 1 / d) / 2 of the plain
product's, for d pieces along its diagonal, of 256 rows and more.

Who computes which block: see `multimm.planning.layouts.assignment`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from multimm.planning.layouts.assignment import Deal, Spot, Waves, in_waves
from multimm.planning.layouts.cyclic import Gate, Layout
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.partition import WINDOW


@dataclass(frozen=True)
class GramLayout(Layout):
    """A layout whose problem is a Gram product; `m_blocks` and `n_blocks` are the same."""

    @property
    def deal(self) -> Deal:
        """Who computes what."""
        return self.in_waves.deal

    @cached_property
    def in_waves(self) -> Waves:
        """Who computes what when."""
        p_m, p_n, _ = self.grid
        sums = self.problem.accumulate
        return in_waves(p_m, p_n, self.m_blocks, self.batch_sizes, sums, self.band * p_m)

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
        if self.problem.c is not None:
            return matrices * rows * rows
        return matrices * rows * (rows - 1) // 2

    def owner(self, row: int, j: int, part: int) -> Coordinate:
        """Who computes a block of C, for one part of k."""
        return Coordinate(*self.deal.owners[row, j], part)

    def users(self, flat: int, block: int, wave: int | None = None) -> set[Spot]:
        """Places of the grid that use a block row of op(A), in one wave or in any."""
        if wave is None:
            return set(self.deal.users[flat, block])
        return self.in_waves.users[flat, block].get(wave, set())

    def _in_turn(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By slab: the number of one of its users, another one for each slab of a part of k."""
        users = [self.grid.rank(Coordinate(*x, 0)) for x in self.deal.homes[flat, block]]
        first = self.first_slab
        return tuple(
            users[(slab - first[part]) % len(users)] + part
            for slab, part in enumerate(self.part_of)
        )

    def _kept(self, role: str) -> int:
        if role in self.elsewhere or self.batch_blocks:
            return super()._kept(role)
        # Slabs of the longest part; parts are dealt out alike.
        return max(self._kept_rows.values()) * max(self.slabs) * self.spec(role).itemsize

    @cached_property
    def _kept_rows(self) -> Counter[Spot]:
        """Rows of op(A) that each place keeps, over the slabs of the longest part of k."""
        held: Counter[Spot] = Counter()
        for panel, users in self.deal.homes.items():
            rounds, rest = divmod(self.steps, len(users))
            size = self.deal.rows_of(panel)
            held.update(dict.fromkeys(users[:rest], size))
            if rounds:
                held.update(dict.fromkeys(users, rounds * size))
        return held

    @property
    def most_received(self) -> int:
        """Elements of op(A) that the busiest worker needs and does not keep."""
        longest = max(self.slabs)  # what is kept is counted in whole slabs
        return max(
            0,
            *(
                size * self.share_k - self._kept_rows[place] * longest
                for place, size in self.in_waves.needed.items()
            ),
        )

    def gate(self, home: Coordinate, wave: int, slab: int, window: int = WINDOW) -> Gate | None:
        """What a streamed read waits for: the slab `window` steps back; None in the first steps."""
        gate = super().gate(home, wave, slab, window)
        if gate is None:
            return None
        p_m, p_n, _ = self.grid
        at, busy = (home.row % p_m, home.col % p_n), self.in_waves.computed[gate.wave]
        row, col = at if at in busy else min(busy)
        return gate._replace(row=row, col=col)

    @property
    def openings(self) -> int:
        """Gates that hold back the waves after the first."""
        if self.stream:
            return 0
        waves = sorted(self.in_waves.computed.items())
        return self.parts * sum(
            len({at if at in before else min(before) for at in places})
            for (_, before), (_, places) in pairwise(waves)
        )

    def behind(self, gate: Gate) -> Iterator[tuple[int, int]]:
        """The block rows and columns whose sums a gate waits for."""
        yield from self.in_waves.computed[gate.wave][gate.row, gate.col]

    def operand_panels(self) -> set[tuple[str, int, int, int]]:
        """Role, wave (0 unless streamed), matrix and block of all that is read or packed."""
        return {
            ("a", wave, flat, block)
            for (flat, block), waves in self.in_waves.users.items()
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
        return self.in_waves.most_summed

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
        return self.in_waves.panel, 0
