"""How a problem is cut up: blocks, slabs, grid, waves, and what the busiest worker gets of them.

A *wave* is a band of block rows that is worked on at once. One wave covers all of C where
its partial sums fit in memory; otherwise the waves follow each other, and each goes through
all slabs. Within a wave the order is slab by slab:

    for wave:  for slab s:  for block (i, j) of the wave:   P(i,j) <- A(i,s) B(s,j) + P(i,j)

so that only a few slabs of A and B are alive at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from multimm.planning.matrix import MatrixSpec
from multimm.planning.problem import Problem
from multimm.planning.tiling.grid import Blocks, Grid, ceil_div, even, parts_of
from multimm.planning.tiling.stacks import Share, shares
from multimm.planning.work.cyclic import Cyclic, cyclic
from multimm.planning.work.symmetric import Symmetric, symmetric

#: Slabs of A and B that may be alive at once: one in use and one on its way.
WINDOW = 2
#: Slabs in a part of k, at most, where threads make operands ahead: arbitrary. 80 slabs of 2 MB on
#: two threads held 31, 18, 25, 42 and 82 MB in parts of 2, 4, 10, 20 and 40, and 156 in one part;
#: `dask.array.matmul` held 29. With parts of 4 another product held 1.7 times as much as it.
SHORT = 2


@dataclass(frozen=True)
class Partition:
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
    cut_once : bool
        Operands that come in other blocks are cut and joined to these by tasks of their own; else
        each product does so with what it needs.
    in_bands : bool
        Of what each product would join, rows of A or columns of B are multiplied as they come, one
        piece after the other: see `Cutting.bandable`.
    fan_in : int
        Sums of parts of k that one task adds, at most: a power of two.
    slabs_per_task : int
        Slabs that one task multiplies in turn, at most, where it has them at home.
    part_slabs : Blocks
        Slabs of each part of k. Empty: as even as can be.
    mirrors : bool
        One triangle of C's blocks is computed and mirrored: see `work.symmetric`.
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
    cut_once: bool = True
    in_bands: bool = False
    fan_in: int = 2
    slabs_per_task: int = 1
    part_slabs: Blocks = ()
    mirrors: bool = False

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
        if self.part_slabs:
            return tuple(part for part, n in enumerate(self.part_slabs) for _ in range(n))
        return parts_of(len(self.slabs), self.grid.p_k)

    @cached_property
    def first_slab(self) -> Blocks:
        """The slab that each part of k begins with, and behind the last the slab count."""
        starts = dict(zip(reversed(self.part_of), reversed(range(len(self.part_of))), strict=True))
        return (*sorted(starts.values()), len(self.slabs))

    @property
    def parts(self) -> int:
        """Parts of k in use: p_k, or fewer where there are fewer slabs."""
        return self.part_of[-1] + 1

    @property
    def ranks(self) -> int:
        """Places of the grid that have a part of k."""
        return self.grid.p_m * self.grid.p_n * self.parts

    @property
    def steps(self) -> int:
        """Slabs in the longest part of k."""
        return max(self.part_slabs or even(len(self.slabs), self.grid.p_k))

    def in_turn(self, workers: int) -> bool:
        """Whether a worker with several parts of k takes one after another.

        What is read when it is needed has gates within a part alone, and all parts together.
        """
        return self.ranks > workers and not self.stream

    def begins(self, part: int, workers: int) -> int:
        """The step at which a worker begins a part of k."""
        return part // workers * (self.steps + 1) if self.in_turn(workers) else 0

    def step(self, slab: int, workers: int) -> int:
        """When a worker multiplies a slab: so many of its steps come before."""
        part = self.part_of[slab]
        return self.begins(part, workers) + slab - self.first_slab[part]

    @property
    def links(self) -> int:
        """Tasks that follow each other in the longest part of k, for each block of C."""
        return ceil_div(self.steps, self.slabs_per_task)

    @property
    def waves(self) -> int:
        """Bands of block rows that follow each other."""
        return ceil_div(len(self.row_sizes), self.band * self.grid.p_m)

    def wave(self, row: int) -> int:
        """The wave in which a block row is worked on."""
        return row // (self.band * self.grid.p_m)

    def flat(self, batch_index: Sequence[int]) -> int:
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

    @property
    def roles(self) -> tuple[str, ...]:
        """The operands that blocks are read, kept or sent of: where C is mirrored, B is A."""
        return ("a",) if self.mirrors else ("a", "b")

    @property
    def uploaded(self) -> tuple[str, ...]:
        """Those of A, B and C whose blocks come from host memory."""
        return tuple(x for x in self.problem.uploaded if x == "c" or x in self.roles)

    def spec(self, role: str) -> MatrixSpec:
        """The operand "a" or "b", as it is multiplied, or the "c" that is added."""
        problem = self.problem
        if role == "c":
            return problem.c or MatrixSpec((*problem.batch_shape, problem.m, problem.n))
        return problem.a if role == "a" else problem.b

    @cached_property
    def work(self) -> Cyclic | Symmetric:
        """Who computes what, and when."""
        (p_m, p_n, _), p, per_wave = self.grid, self.problem, self.band * self.grid.p_m
        if self.mirrors:
            return symmetric(p_m, p_n, self.m_blocks, self.batch_sizes, p.accumulate, per_wave)
        shapes = p.a.shape, p.b.shape
        return cyclic(p_m, p_n, self.batch_blocks, self.m_blocks, self.n_blocks, shapes, per_wave)

    def shares(self, role: str) -> tuple[Share, ...]:
        """The batch blocks of an operand; one where there are no stacks."""
        return shares(self.batch_blocks, self.spec(role).shape)

    @property
    def flops(self) -> int:
        """Floating-point operations that are executed, over all matrices."""
        return 2 * self.problem.k * self.work.computed if self.mirrors else self.problem.flops

    @property
    def share_flops(self) -> int:
        """Floating-point operations of the busiest worker."""
        return 2 * self.work.most_computed * self.share_k

    @property
    def handed_on(self) -> int:
        """Elements of sums that the busiest worker's products hand to the next ones."""
        return (self.steps - 1) * self.work.most_summed

    @cached_property
    def share_k(self) -> int:
        """Length of the longest part of k."""
        return max(
            sum(self.slabs[start:end])
            for start, end in zip(self.first_slab, self.first_slab[1:], strict=False)
        )
