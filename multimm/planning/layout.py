"""How a problem is cut up and dealt out: blocks, slabs, grid, waves.

A *wave* is a band of block rows that is worked on at once. One wave covers all of C where
its partial sums fit in memory; otherwise the waves follow each other, and each goes through
all slabs. Within a wave the order is slab by slab:

    for wave:  for slab s:  for block (i, j) of the wave:   P(i,j) <- A(i,s) B(s,j) + P(i,j)

so that only a few slabs of A and B are alive at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from multimm.planning.grid import Blocks, Coordinate, Grid, even, largest_share, merges, parts_of
from multimm.planning.problem import PACKED_SIDE, PACKED_SLAB, Problem
from multimm.planning.spec import MatrixSpec

#: Slabs of A and B that may be alive at once: one in use and one on its way.
WINDOW = 2
#: Operations from which on a product that packs its own operands pays: the host waits for it once,
#: and FP32 multiply-adds are done sooner below (H200: 1800 x 1800 x 1800).
LONE_FLOPS = 1.2e10
#: Packed blocks are filled up to multiples of this many rows and this much of k.
PACKED_ROWS, PACKED_K = 128, 64


class Gate(NamedTuple):
    """A worker's block products of one slab in one wave: streamed reads wait for them."""

    wave: int
    slab: int
    row: int  #: of the grid
    col: int  #: of the grid


@dataclass(frozen=True)
class Layout:
    """Blocks, slabs, grid and waves of one product.

    Parameters
    ----------
    problem : Problem
    grid : Grid
    batch_blocks : tuple of Blocks
        Per batch dimension.
    m_blocks, n_blocks, slabs : Blocks
        Of C's rows, of C's columns, of k.
    band : int
        Block rows that each grid row works on in one wave.
    stream : bool
        Operand blocks are read when their slab comes, again in every wave, and no earlier
        than `WINDOW` slabs ahead; only for operands that can be made again.
    pack_once : bool
        Blocks that are used more than once may be packed where they are at home; else each
        product packs its own, which takes less memory.
    """

    problem: Problem
    grid: Grid
    batch_blocks: tuple[Blocks, ...]
    m_blocks: Blocks
    n_blocks: Blocks
    slabs: Blocks
    band: int
    stream: bool = False
    pack_once: bool = True

    @cached_property
    def batch_sizes(self) -> Blocks:
        """Matrices in each batch block, the batch dimensions flattened in C order."""
        return tuple(prod(sizes) for sizes in product(*self.batch_blocks))

    @cached_property
    def row_sizes(self) -> Blocks:
        """Rows of C, over all matrices, in each block row; block rows run over the batch first."""
        return tuple(count * size for count in self.batch_sizes for size in self.m_blocks)

    @cached_property
    def part_of(self) -> Blocks:
        """The part of k that each slab belongs to."""
        return parts_of(len(self.slabs), self.grid.p_k)

    @cached_property
    def first_slab(self) -> Blocks:
        """The slab that each part of k begins with, and behind the last the slab count."""
        starts = [self.part_of.index(part) for part in range(self.parts)]
        return (*starts, len(self.slabs))

    @property
    def parts(self) -> int:
        """Parts of k in use: p_k, or fewer where there are fewer slabs."""
        return self.part_of[-1] + 1

    @property
    def steps(self) -> int:
        """Slabs in the longest part of k."""
        return max(even(len(self.slabs), self.grid.p_k))

    @property
    def waves(self) -> int:
        """Bands of block rows that follow each other."""
        return ceil(len(self.row_sizes) / (self.band * self.grid.p_m))

    def wave(self, row: int) -> int:
        """The wave in which a block row is worked on."""
        return row // (self.band * self.grid.p_m)

    def flat(self, batch_index: tuple[int, ...]) -> int:
        """The number of a batch block, counted in C order."""
        flat = 0
        for index, blocks in zip(batch_index, self.batch_blocks, strict=True):
            flat = flat * len(blocks) + index
        return flat

    def batch_index(self, flat: int) -> tuple[int, ...]:
        """The indices of a batch block from its number."""
        index: list[int] = []
        for blocks in reversed(self.batch_blocks):
            flat, at = divmod(flat, len(blocks))
            index.append(at)
        return tuple(reversed(index))

    def row(self, flat: int, i: int) -> int:
        """The flattened block row of block row `i` of a batch block."""
        return flat * len(self.m_blocks) + i

    def home_b(self, flat: int, slab: int, j: int) -> Coordinate:
        """Where a B block is kept: in a grid row that works on its own batch block."""
        at = self.grid.home_b(slab, j, self.part_of[slab])
        inside = at.row % max(1, min(len(self.m_blocks), self.grid.p_m))
        return at._replace(row=self.row(flat, inside))

    @property
    def mirrors(self) -> bool:
        """Whether one triangle of C's blocks is computed and mirrored: see `GramLayout`."""
        return False

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Block row and block column of what is computed, of each batch block."""
        return tuple(product(range(len(self.m_blocks)), range(len(self.n_blocks))))

    @property
    def blocks(self) -> int:
        """Blocks of C that are computed."""
        return len(self.batch_sizes) * len(self.pairs)

    @property
    def finishing(self) -> int:
        """Tasks on blocks of C after their last sum."""
        return 0

    def owner(self, row: int, j: int, part: int) -> Coordinate:
        """Who computes a block of C, for one part of k."""
        return Coordinate(row, j, part)

    def keeper(self, row: int, j: int) -> Coordinate:
        """Who has the complete sum of a computed block of C."""
        tree = merges(self.parts, row + j)
        return self.owner(row, j, tree[-1].keeper if tree else 0)

    def result_owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each block of C, row by row; empty for stacks and where Dask decides."""
        if self.batch_blocks or self.blocks == 1:
            return ()
        blocks = product(range(len(self.m_blocks)), range(len(self.n_blocks)))
        cells = ((max(at), min(at)) if self.mirrors else at for at in blocks)
        return tuple(self.grid.rank(self.keeper(*cell)) % workers for cell in cells)

    def spec(self, role: str) -> MatrixSpec:
        """The operand "a" or "b", as it is multiplied."""
        return self.problem.a if role == "a" else self.problem.b

    def operand_chunks(self, role: str) -> tuple[Blocks, ...]:
        """The chunks of an operand once it fits, as it is multiplied."""
        shape = self.spec(role).shape
        own = self.batch_blocks[len(self.batch_blocks) - (len(shape) - 2) :]
        batch = ((1,) if size == 1 else b for size, b in zip(shape, own, strict=False))
        if role == "a":
            return (*batch, self.m_blocks, self.slabs)
        return (*batch, self.slabs, self.n_blocks)

    @cached_property
    def lying(self) -> dict[str, tuple[int, ...]]:
        """Workers of the blocks of those operands that are used where they lie."""
        roles = ("a",) if self.mirrors else ("a", "b")
        return {
            role: self.spec(role).owners
            for role in roles
            if self.spec(role).owners
            and max(self.spec(role).owners) < self.grid.workers
            and self.spec(role).chunks == self.operand_chunks(role)
        }

    def home(self, role: str, flat: int, block: int, slab: int) -> Coordinate:
        """Where an operand block is kept: where it lies, if it lies somewhere.

        Else A's by block row, B's by block column, and slab.
        """
        if role in self.lying:
            at = (block, slab) if role == "a" else (slab, block)
            cols = len(self.operand_chunks(role)[-1])
            return self.grid.place(self.lying[role][at[0] * cols + at[1]])
        return self._home(role, flat, block, slab)

    @cached_property
    def at_home(self) -> dict[str, int]:
        """Bytes of each operand on the worker that keeps the most of it, by role."""
        kept: dict[str, Counter[int]] = {}
        for role in ("a",) if self.mirrors else ("a", "b"):
            spec, batched = self.spec(role), len(self.spec(role).shape) > 2
            held = kept.setdefault(role, Counter())
            blocks = self.m_blocks if role == "a" else self.n_blocks
            flats = {self._own(flat, role): size for flat, size in enumerate(self.batch_sizes)}
            for (flat, count), (at, size), (s, slab) in product(
                flats.items(), enumerate(blocks), enumerate(self.slabs)
            ):
                matrices = count if batched and self._own(1, role) else 1
                rank = self.grid.rank(self.home(role, flat, at, s))
                held[rank] += matrices * size * slab * spec.itemsize
        return {role: max(held.values()) for role, held in kept.items()}

    def _home(self, role: str, flat: int, block: int, slab: int) -> Coordinate:
        if role == "b":
            return self.home_b(flat, slab, block)
        return self.grid.home_a(self.row(flat, block), slab, self.part_of[slab])

    def gate(self, home: Coordinate, wave: int, slab: int, window: int = WINDOW) -> Gate | None:
        """What a streamed read waits for: the slab `window` steps back; None in the first steps.

        A step back from the first slab of a wave leads to the last ones of the wave before.
        A worker without blocks of its own in that wave goes by another one.
        """
        part = self.part_of[slab]
        first, end = self.first_slab[part], self.first_slab[part + 1]
        back = slab - window
        while back < first and wave > 0:
            wave, back = wave - 1, back + (end - first)
        if back < first:
            return None
        start = wave * self.band * self.grid.p_m
        row = home.row % self.grid.p_m
        row = row if start + row < len(self.row_sizes) else 0
        return Gate(wave, back, row, home.col % min(self.grid.p_n, len(self.n_blocks)))

    def opening(self, row: int, j: int, part: int) -> Gate | None:
        """What the first product of a block of C waits for; None in the first wave.

        Otherwise the operands of all waves would be fetched at once. Streamed reads wait
        themselves.
        """
        wave = self.wave(row)
        if self.stream or wave == 0:
            return None
        return self.gate(self.owner(row, j, part), wave, self.first_slab[part], window=1)

    def behind(self, gate: Gate) -> Iterator[tuple[int, int]]:
        """The block rows and columns whose sums a gate waits for."""
        start = gate.wave * self.band * self.grid.p_m
        end = min(start + self.band * self.grid.p_m, len(self.row_sizes))
        yield from product(
            range(start + gate.row, end, self.grid.p_m),
            range(gate.col, len(self.n_blocks), self.grid.p_n),
        )

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

    @property
    def on_tensor_cores(self) -> bool:
        """Whether block products are expected to run there."""
        flops = 2 * max(self.m_blocks) * max(self.n_blocks) * max(self.slabs)
        return bool(self.packed) or (self.problem.packable and flops >= LONE_FLOPS)

    @property
    def padding(self) -> float:
        """By how much packed blocks are larger than their sources, at most."""
        rows = max(1 + -size % PACKED_ROWS / size for size in (*self.m_blocks, *self.n_blocks))
        return rows * max(1 + -size % PACKED_K / size for size in self.slabs)

    @cached_property
    def tasks(self) -> int:
        """Tasks of the product: block products, partial sums, reads, their gates, packs."""
        products = self.blocks * (len(self.slabs) + self.parts - 1) + self.finishing
        blocks = self.operand_blocks() if self.stream or self.packed else set()
        packs = sum(role in self.packed for role, *_ in blocks)
        if not self.stream:
            return products + packs + len(self._openings())
        gates = {
            self.gate(self.home(role, flat, block, slab), wave, slab)
            for role, wave, flat, block, slab in blocks
        }
        return products + packs + len(blocks) + len(gates - {None})

    def _openings(self) -> set[Gate]:
        if self.waves == 1:
            return set()
        flats = range(len(self.batch_sizes))
        found = {
            self.opening(self.row(flat, i), j, part)
            for flat, (i, j), part in product(flats, self.pairs, range(self.parts))
        }
        return {gate for gate in found if gate is not None}

    def operand_blocks(self) -> set[tuple[str, int, int, int, int]]:
        """Role, wave (0 unless streamed), matrix, block and slab of all that is read or packed."""
        rows = {
            (self.wave(row) if self.stream else 0, *divmod(row, len(self.m_blocks)))
            for row in range(len(self.row_sizes))
        }
        used = {("a", wave, self._own(flat, "a"), i) for wave, flat, i in rows}
        users_of_b = {(wave, self._own(flat, "b")) for wave, flat, _ in rows}
        used |= {("b", *user, j) for user in users_of_b for j in range(len(self.n_blocks))}
        return {(*block, slab) for block, slab in product(used, range(len(self.slabs)))}

    def _own(self, flat: int, role: str) -> int:
        """The batch block of an operand for a batch block of C; 0 of an operand without any."""
        return flat if any(size != 1 for size in self.spec(role).shape[:-2]) else 0

    @property
    def flops(self) -> int:
        """Floating-point operations that are executed, over all matrices."""
        return self.problem.flops

    @property
    def wave_sums(self) -> int:
        """Elements of C that the busiest worker sums up in one wave, at most."""
        return self.wave_rows * self.share_cols

    @property
    def share_sums(self) -> int:
        """Elements of C that the busiest worker sums up in all."""
        return self.share_rows * self.share_cols

    @property
    def share_result(self) -> int:
        """Elements of C that the busiest worker keeps."""
        return self.share_sums

    @property
    def panels(self) -> tuple[int, int]:
        """Elements of A and of B, per unit of k, that the busiest worker needs in one wave."""
        return self.wave_rows, self._wave_matrices * self.share_cols

    @property
    def _wave_matrices(self) -> int:
        """Matrices of B that the busiest grid row works with in one wave."""
        if len(self.problem.b.shape) == 2 or all(n == 1 for n in self.problem.b.shape[:-2]):
            return 1
        count = len(self.m_blocks)
        return max(
            sum(self.batch_sizes[flat] for flat in {row // count for row in rows})
            for rows in self._bands(range(len(self.row_sizes)))
        )

    def _bands(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """What each grid row works on in each wave, of something by block row."""
        for rank in range(self.grid.p_m):
            share = rows[rank :: self.grid.p_m]
            for start in range(0, max(1, len(share)), self.band):
                yield share[start : start + self.band]

    @property
    def wave_rows(self) -> int:
        """Rows of C that the busiest grid row works on in one wave."""
        return max(map(sum, self._bands(self.row_sizes)))

    @property
    def share_rows(self) -> int:
        """Rows of C, over all matrices, of the busiest grid row."""
        return largest_share(self.row_sizes, self.grid.p_m)

    @property
    def share_cols(self) -> int:
        """Columns of C of the busiest grid column."""
        return largest_share(self.n_blocks, self.grid.p_n)

    @property
    def share_k(self) -> int:
        """Length of the longest part of k."""
        return max(
            sum(self.slabs[start:end])
            for start, end in zip(self.first_slab, self.first_slab[1:], strict=False)
        )
