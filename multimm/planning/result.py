"""C: in the blocks in which a schedule makes it, and in the chunks that its caller gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from multimm.planning.tiling.grid import Blocks, made_regular
from multimm.planning.tiling.result_chunks import Chunk, chunks_of, counted, within

if TYPE_CHECKING:
    from multimm.planning.schedule import Schedule

#: Of results whose chunks and blocks meet in more places than so many, what is joined is not
#: counted chunk by chunk, which takes 10 us each: arbitrary.
COUNTED = 20_000


@dataclass(frozen=True)
class Result:
    """Blocks and chunks of C, who makes them, and what it takes to make the one of the other.

    Parameters
    ----------
    schedule : Schedule
    """

    schedule: Schedule

    @cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        """Sizes of the blocks in which it is made."""
        return (*self.schedule.batch_blocks, *self.schedule.work.sides)

    @cached_property
    def chunks(self) -> tuple[Blocks, ...]:
        """Its chunks: what is wanted, else regular ones, if possible its blocks."""
        return self.schedule.problem.chunks or tuple(map(made_regular, self.blocks))

    @cached_property
    def hands_out(self) -> bool:
        """Whether its chunks are others than its blocks: `tiling.result_chunks`."""
        return self.chunks != self.blocks

    @property
    def cut_out(self) -> bool:
        """Whether each chunk is a block, or part of one: then nothing travels."""
        return all(map(within, self.chunks, self.blocks))

    @cached_property
    def block_owners(self) -> tuple[int, ...]:
        """The number of the worker that makes each block, in C order."""
        sides = len(self.schedule.batch_sizes), *map(len, self.schedule.work.sides)
        at = product(*map(range, sides))
        return tuple(self.schedule.completes(i, j, flat) for flat, i, j in at)

    @cached_property
    def handed_out(self) -> tuple[Chunk, ...]:
        """What each chunk is made of; none where the blocks are the chunks."""
        if not self.hands_out:
            return ()
        return tuple(chunks_of(self.chunks, self.blocks, self.block_owners))

    def handing_out(self, workers: int) -> tuple[int, int]:
        """Tasks that make the chunks of the blocks, and bytes that travel for it.

        Counted, but for many chunks of which some are joined: at most.
        """
        if not self.hands_out:
            return 0, 0
        chunks, blocks = self.chunks, self.blocks
        count, parts = prod(map(len, chunks)), prod(map(len, blocks))
        if self.cut_out:
            return count, 0
        problem = self.schedule.problem
        if prod(len(x) + len(y) for x, y in zip(chunks, blocks, strict=True)) > COUNTED:
            return count + parts, problem.result_bytes if workers > 1 else 0
        tasks, moved = counted(chunks, blocks, self.block_owners, workers)
        return tasks, moved * problem.out_bytes

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each chunk, in C order; empty where Dask decides."""
        if self.schedule.queued or not self.schedule.work.spread(workers):
            return ()
        ranks = [x.owner for x in self.handed_out] if self.hands_out else self.block_owners
        return tuple(rank % workers for rank in ranks)
