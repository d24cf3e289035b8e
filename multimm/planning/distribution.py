"""How A and B are spread over workers: in which blocks they come, who keeps the plan's, and where.

An operand that comes in the plan's blocks is used where it lies. Of another one, blocks are cut and
joined, by tasks of their own or by the products; who keeps what lies nowhere is for the work map to
say, one of its users in turn.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from multimm.planning.problem import PACKED_K_TILE, PACKED_SIDE
from multimm.planning.tiling import rechunk
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.rechunk import Rechunk
from multimm.planning.tiling.stacks import share_of

if TYPE_CHECKING:
    from multimm.planning.schedule import Schedule


class Distribution:
    """The operands of a schedule, in its blocks.

    Parameters
    ----------
    schedule : Schedule
    """

    coalesced_transfers = 0  #: tasks that coalesce what travels
    joined_small = 0  #: bytes of k-tiles that a task joins from several chunks, all at once

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.spec, self.grid, self.problem = schedule.spec, schedule.grid, schedule.problem
        self.work = schedule.blockwise
        #: What `owners` has found so far: a search asks for the same ones again and again.
        self._owners: dict[tuple[str, int, int], tuple[int, ...]] = {}

    # ---------------------------------------------------------------- in which blocks they come

    @cached_property
    def cut_again(self) -> tuple[str, ...]:
        """The operands that come in other blocks than these; those from files are read in these.

        Of one that comes in one block, and lies nowhere, nobody knows how it comes.
        """
        readable = dict(zip("ab", self.problem.rereadable, strict=True))
        return tuple(
            role
            for role in self.schedule.roles
            if not readable[role] and self.schedule.comes_otherwise(role)
        )

    @cached_property
    def cut_apart(self) -> tuple[str, ...]:
        """Those of `cut_again` that tasks of their own bring into these blocks.

        On one worker each product does so for itself, which takes no tasks, and none that all
        products wait for. Among several, what is cut has to travel first; and of several chunks
        that tasks make each is let go of as soon as it is cut. Of what lies in this process that
        would be a copy of all of it.
        """
        if self.grid.workers > 1 or self.packed:
            return self.cut_again
        if not self.problem.awaited or self.problem.in_one:
            return ()
        made = dict(zip("ab", self.problem.made_anywhere, strict=True))
        return tuple(x for x in self.cut_again if made[x] and self.spec(x).blocks > 1)

    @cached_property
    def cut_within(self) -> tuple[str, ...]:
        """Those of `cut_again` that each product joins for itself."""
        return tuple(role for role in self.cut_again if role not in self.cut_apart)

    @cached_property
    def rechunk(self) -> Rechunk:
        """What it takes to bring operands and C into these blocks, by what is expected of any."""
        found, workers = [], self.grid.workers
        uses = {"a": len(self.schedule.n_blocks), "b": len(self.schedule.row_sizes)}
        for role in (*self.cut_again, *"c" * self.schedule.cuts_c):
            cut = self.spec(role), self.schedule.operand_chunks(role)
            beyond = self.schedule.lies_beyond(role)
            if role == "c":
                found.append(rechunk.added(*cut, workers, beyond=beyond))
            elif role in self.cut_apart:
                found.append(rechunk.once(*cut, workers, beyond=beyond, away=self.away(role)))
            else:
                found.append(rechunk.within(*cut, uses[role], beyond=beyond))
        return Rechunk.of_all(found)

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """The operands whose blocks are packed for tensor cores, once, where they are kept.

        A block that is used once is packed by the product that uses it.
        """
        long_enough = self.problem.packable and min(self.schedule.k_tiles) >= PACKED_K_TILE
        if not (self.schedule.pack_once and long_enough):
            return ()
        if min(*self.schedule.m_blocks, *self.schedule.n_blocks) < PACKED_SIDE:
            return ()
        if self.schedule.mirrors:
            return ("a",)
        uses = {"a": len(self.schedule.n_blocks), "b": len(self.schedule.m_blocks)}
        return tuple(role for role, count in uses.items() if count > 1)

    def width(self, role: str) -> int:
        """Bytes of an operand's element on its way between workers."""
        spec = self.spec(role)
        return self.problem.packed_itemsize if role in self.packed else spec.itemsize

    @cached_property
    def in_use(self) -> dict[str, int]:
        """By role, bytes of a k-tile that the busiest worker needs in one row panel."""
        longest = max(self.schedule.k_tiles)
        panels = zip(self.schedule.roles, self.work.panels, strict=False)
        return {role: panel * longest * self.width(role) for role, panel in panels}

    @property
    def first_use(self) -> dict[str, int]:
        """Bytes of each operand that a worker's first product multiplies, by role, at most."""
        length = max(self.schedule.k_tiles) * min(
            self.schedule.k_tiles_per_task, self.schedule.steps
        )
        edges = {"a": max(self.schedule.row_sizes), "b": max(self.schedule.n_blocks)}
        return {
            role: edges[role] * length * self.spec(role).itemsize for role in self.schedule.roles
        }

    # ---------------------------------------------------------------- who keeps them

    @cached_property
    def in_place(self) -> dict[str, tuple[int, ...]]:
        """Workers of the blocks of those operands that are used where they lie."""
        return {
            role: self.spec(role).owners
            for role in self.schedule.roles
            if self.spec(role).owners
            and self.spec(role).chunks == self.schedule.operand_chunks(role)
        }

    @cached_property
    def elsewhere(self) -> tuple[str, ...]:
        """Those of `in_place` of which a block lies where it would not be kept otherwise."""
        edges = {"a": self.schedule.m_blocks, "b": self.schedule.n_blocks}
        return tuple(
            role
            for role in self.in_place
            if any(
                self.owners(role, *at) != self._in_turn(role, *at)
                for at in product(
                    (share.users[0] for share in self.schedule.shares(role)),
                    range(len(edges[role])),
                )
            )
        )

    def owner(self, role: str, flat: int, block: int, k_tile: int) -> Coordinate:
        """Where an operand block is kept: where it lies, if it lies in a place of the grid.

        Else A's by block row, B's by block column, and k-tile. Of a stack, `flat` is the first
        batch block of C that uses it.
        """
        rank = self.owners(role, flat, block)[k_tile]
        if rank >= self.grid.workers:
            rank = self._in_turn(role, flat, block)[k_tile]
        return self.grid.place(rank)

    def owners(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By k-tile, the number of the worker that keeps an operand block, also beyond the grid.

        Of a block of A's rows, or of B's columns.
        """
        at = role, flat, block
        if at not in self._owners:
            self._owners[at] = self._lie(*at) or self._in_turn(*at)
        return self._owners[at]

    def _lie(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By k-tile: the number of the worker on which a block lies; empty if it lies nowhere."""
        if role not in self.in_place:
            return ()
        owners, k_tiles = self.in_place[role], len(self.schedule.k_tiles)
        batch = self.schedule.batch_blocks
        matrix = share_of(batch, self.spec(role).shape)[flat].number if batch else 0
        if role == "a":
            first = (matrix * len(self.schedule.m_blocks) + block) * k_tiles
            return owners[first : first + k_tiles]
        columns = len(self.schedule.n_blocks)
        first = matrix * k_tiles * columns + block
        return owners[first : first + k_tiles * columns : columns]

    def away(self, role: str) -> float | None:
        """The share of an operand that does not lie where it is kept: of one that is cut along k.

        It comes in whole columns of A, or rows of B; None of others, and of stacks, which are taken
        to lie anywhere.
        """
        spec, blocks = self.spec(role), self.schedule.operand_chunks(role)
        across, along = (0, 1) if role == "a" else (1, 0)
        if not spec.owners or self.schedule.batch_blocks:
            return None
        if len(spec.chunks[across]) > 1 or len(blocks[across]) > 1:
            return None
        return rechunk.away(
            spec.chunks[along], spec.owners, self.schedule.k_tiles, self.owners(role, 0, 0)
        )

    def arrives(self, role: str) -> bool:
        """Whether blocks of an operand come from other workers, or are read, during the product."""
        cut = role in self.cut_apart or (
            role in self.cut_within and self.schedule.lies_beyond(role)
        )
        return self.schedule.stream or self.work.travels(role) or cut or role in self.elsewhere

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes of each operand on the worker that keeps the most of it, by role, at most."""
        return {role: self._kept(role) for role in self.schedule.roles}

    def _kept(self, role: str) -> int:
        spec = self.spec(role)
        blocks = self.schedule.m_blocks if role == "a" else self.schedule.n_blocks
        stacked = bool(self.schedule.batch_blocks) and not self.schedule.mirrors
        if role in self.elsewhere or stacked:  # no closed form of the map knows them
            held: Counter[int] = Counter()
            for (at, size), share in product(enumerate(blocks), self.schedule.shares(role)):
                owners, width = self.owners(role, share.users[0], at), size * spec.itemsize
                for rank, k_tile in zip(owners, self.schedule.k_tiles, strict=True):
                    held[rank] += share.matrices * width * k_tile
            return max(held.values())
        kept = (
            self.work.kept(role, self.schedule.steps) * max(self.schedule.k_tiles) * spec.itemsize
        )
        return min(spec.nbytes, kept)

    def _in_turn(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By k-tile: the number of the worker that keeps a block unless it lies somewhere."""
        (_, p_n, p_k), first = self.grid, self.schedule.first_k_tile
        steps = [k_tile - first[part] for k_tile, part in enumerate(self.schedule.part_of)]
        places = zip(
            self.work.in_turn(role, flat, block, steps), self.schedule.part_of, strict=True
        )
        return tuple((row * p_n + col) * p_k + part for (row, col), part in places)
