"""Where operand blocks are kept: where they lie, or in turn with those that use them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from multimm.planning.layouts import rechunk
from multimm.planning.tiling.cutting import Cutting
from multimm.planning.tiling.grid import Coordinate


@dataclass(frozen=True)
class Homes(Cutting):
    """A partition whose operand blocks have homes."""

    @cached_property
    def lying(self) -> dict[str, tuple[int, ...]]:
        """Workers of the blocks of those operands that are used where they lie."""
        return {
            role: self.spec(role).owners
            for role in self.roles
            if self.spec(role).owners and self.spec(role).chunks == self.operand_chunks(role)
        }

    @cached_property
    def elsewhere(self) -> tuple[str, ...]:
        """Those of `lying` of which a block lies where it would not be kept otherwise."""
        edges = {"a": self.m_blocks, "b": self.n_blocks}
        return tuple(
            role
            for role in self.lying
            if any(
                self.keepers(role, *at) != self._in_turn(role, *at)
                for at in product(
                    (share.users[0] for share in self.shares(role)), range(len(edges[role]))
                )
            )
        )

    def home(self, role: str, flat: int, block: int, slab: int) -> Coordinate:
        """Where an operand block is kept: where it lies, if it lies in a place of the grid.

        Else A's by block row, B's by block column, and slab. Of a stack, `flat` is the first batch
        block of C that uses it.
        """
        rank = self.keepers(role, flat, block)[slab]
        if rank >= self.grid.workers:
            rank = self._in_turn(role, flat, block)[slab]
        return self.grid.place(rank)

    def keepers(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By slab: the number of the worker that keeps an operand block, in the grid or beyond it.

        Of a block of A's rows, or of B's columns.
        """
        at = role, flat, block
        if at not in self._keepers:
            self._keepers[at] = self._lie(*at) or self._in_turn(*at)
        return self._keepers[at]

    @cached_property
    def _keepers(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        """What `keepers` has found so far: a search asks for the same ones again and again."""
        return {}

    def _lie(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By slab: the number of the worker on which a block lies; empty if some lie nowhere."""
        slabs, matrix = len(self.slabs), self._number_of[role][flat] if self.batch_blocks else 0
        if role in self.lying:
            owners = self.lying[role]
            if role == "a":
                first = (matrix * len(self.m_blocks) + block) * slabs
                return owners[first : first + slabs]
            columns = len(self.n_blocks)
            first = matrix * slabs * columns + block
            return owners[first : first + slabs * columns : columns]
        if role not in self._fitting:
            return ()
        found, usual = self._fitting[role], self._in_turn(role, flat, block)
        at = ((block, slab) if role == "a" else (slab, block) for slab in range(slabs))
        return tuple(found.get((matrix, *pair), rank) for pair, rank in zip(at, usual, strict=True))

    def away(self, role: str) -> float | None:
        """The share of an operand that does not lie where it is kept: of one that is cut along k.

        It comes in whole columns of A, or rows of B; None of others, and of stacks, which are taken
        to lie anywhere.
        """
        spec, blocks = self.spec(role), self.operand_chunks(role)
        across, along = (0, 1) if role == "a" else (1, 0)
        if not spec.owners or self.batch_blocks:
            return None
        if len(spec.chunks[across]) > 1 or len(blocks[across]) > 1:
            return None
        return rechunk.away(spec.chunks[along], spec.owners, self.slabs, self.keepers(role, 0, 0))

    @cached_property
    def _fitting(self) -> dict[str, dict[tuple[int, int, int], int]]:
        """By role of what is cut: workers of those blocks that stay as they come, in the grid."""
        found = {}
        for role in self.cut_apart if self.grid.workers > 1 else ():
            spec = self.spec(role)
            given = product(*map(rechunk.spans, spec.chunks))
            owners = dict(zip(given, spec.owners, strict=False))
            *batch, rows, cols = map(rechunk.spans, self.operand_chunks(role))
            places = product(enumerate(product(*batch)), enumerate(rows), enumerate(cols))
            found[role] = {
                (matrix, row, col): owners[*at, r, c]
                for (matrix, at), (row, r), (col, c) in places
                if owners.get((*at, r, c), self.grid.workers) < self.grid.workers
            }
        return {role: own for role, own in found.items() if own}

    @cached_property
    def _number_of(self) -> dict[str, dict[int, int]]:
        """By role and batch block of C: the number of the operand's batch block that it uses."""
        return {
            role: {flat: at for at, share in enumerate(self.shares(role)) for flat in share.users}
            for role in self.roles
        }

    def arrives(self, role: str) -> bool:
        """Whether blocks of an operand come from other workers, or are read, during the product."""
        cut = role in self.cut_again and (self.cut_once or self.lies_beyond(role))
        return self.stream or self.work.travels(role) or cut or role in self.elsewhere

    @cached_property
    def at_home(self) -> dict[str, int]:
        """Bytes of each operand on the worker that keeps the most of it, by role, at most."""
        return {role: self._kept(role) for role in self.roles}

    def _kept(self, role: str) -> int:
        spec = self.spec(role)
        blocks = self.m_blocks if role == "a" else self.n_blocks
        if role in self.elsewhere:
            held: Counter[int] = Counter()
            for (at, size), share in product(enumerate(blocks), self.shares(role)):
                keepers, width = self.keepers(role, share.users[0], at), size * spec.itemsize
                for rank, slab in zip(keepers, self.slabs, strict=True):
                    held[rank] += share.matrices * width * slab
            return max(held.values())
        kept = self.work.kept(role, self.steps) * max(self.slabs) * spec.itemsize
        return min(spec.nbytes, kept)

    def _in_turn(self, role: str, flat: int, block: int) -> tuple[int, ...]:
        """By slab: the number of the worker that keeps a block unless it lies somewhere."""
        (_, p_n, p_k), first = self.grid, self.first_slab
        steps = [slab - first[part] for slab, part in enumerate(self.part_of)]
        places = zip(self.work.in_turn(role, flat, block, steps), self.part_of, strict=True)
        return tuple((row * p_n + col) * p_k + part for (row, col), part in places)
