"""Where blocks and k-tiles begin and end: at the chunks' own boundaries, or evenly.

The inputs' own chunks are kept where they serve (neighbours joined when they are tiny) and
replaced by even blocks where they do not; the boundaries of two operands are never merged
into their union.
"""

from __future__ import annotations

from multimm.planning.problem import Problem
from multimm.planning.tiling.counts import LONGEST
from multimm.planning.tiling.grid import (
    Blocks,
    Grid,
    ceil_div,
    even,
    group,
    group_regular,
    is_regular,
    largest_share,
    regular,
    remembered,
)

#: In place of a length below which chunks are joined: none are.
AS_GIVEN = 1
#: Operands in more chunks than so many along a side are never multiplied chunk by chunk.
MOST_CHUNKS = 256
#: Kernels compute tiles of 128 x 256 and pack k-tiles of 64; rows that begin on 16 bytes are copied
#: fastest. With columns in blocks of 15446 two H200s multiplied 46336 squares at 93 % of their own
#: FP32 rate, 32768 and 65536 at 98 and 99 %.
GRAINS = (256, 128, 64, 32, 16, 8, 4)
#: Blocks are rounded to a grain if they are at least so many long, and no worker's share grows by
#: more than this: arbitrary.
LEAST_GRAINS, ROUNDING = 16, 1.002
#: Given chunks are kept if the busiest worker's share grows by no more than this: arbitrary.
IMBALANCE = 1.2


def batch_blocks(problem: Problem, edge: int, wanted: int) -> tuple[Blocks, ...]:
    """Chunks of the batch dimensions, small matrices joined up to about edge^2 elements.

    Where there are enough matrices, `wanted` batch blocks or more: then none is shared.
    """
    matrix = max(problem.m * problem.n, problem.m * problem.k, problem.k * problem.n, 1)
    room = max(1, min(edge * edge // (4 * matrix), problem.batch // wanted))
    grouped: list[Blocks] = []
    for chunks in reversed(problem.batch_chunks):
        blocks = group_regular(chunks, room, 1)
        if max(blocks) > 2 * room:
            blocks = regular(sum(chunks), room)
        grouped.append(blocks)
        room = max(1, room // max(1, max(blocks)))
    return tuple(reversed(grouped))


def choose_k_tiles(
    problem: Problem, grid: Grid, count: int, fixed: int | None, keep: int, most: int
) -> Blocks:
    """The operand that lies somewhere, or else the larger one, keeps its chunks along k."""
    given = (problem.a, -1), (problem.b, -2)
    spec, axis = max(given, key=lambda x: (bool(x[0].owners), x[0].nbytes))
    return choose(problem.k, count, grid.p_k, spec.chunks[axis], fixed, keep, most)


def choose_parts(problem: Problem, parts: Blocks, count: int, keep: int) -> Blocks:
    """The chunks of each part of k, joined: into k-tiles of `keep`, or of many chunks into few."""
    chunks = problem.a.chunks[-1]
    length = keep if len(chunks) <= MOST_CHUNKS else ceil_div(problem.k, count)
    own = (
        tuple(x for x, at in zip(chunks, parts, strict=True) if at == part)
        for part in range(max(parts) + 1)
    )
    return tuple(k_tile for part in own for k_tile in group(part, length))


@remembered
def _evenly(size: int, count: int, workers: int) -> Blocks:
    """`count` blocks, all of one size but the last where that gives as many: files are chunked so.

    Of a round size, if no worker gets more for it.
    """
    usual = regular(size, ceil_div(size, count))
    if len(usual) != count:
        usual = even(size, count)
    most = ROUNDING * largest_share(usual, workers)
    for grain in GRAINS:
        blocks = regular(size, ceil_div(size, count * grain) * grain)
        fits = len(blocks) == count and size >= LEAST_GRAINS * count * grain
        if fits and largest_share(blocks, workers) <= most:
            return blocks
    return usual


def choose_side(
    problem: Problem,
    axis: int,
    count: int,
    workers: int,
    fixed: int | None,
    keep: int,
    most: int,
    only_regular: bool,
    evenly: bool,
) -> Blocks:
    """Block rows of C (axis -2), or its block columns (-1).

    If they are to be cut `evenly`, they are about as long as each other. Else they are the chunks
    that are wanted, or A's rows and B's columns, joined, where these serve: of chunks that are
    parts of blocks nothing travels when C is handed out. Where none are wanted, regular blocks are
    the better, for they are handed out as they are.
    """
    spec, result = problem.a if axis == -2 else problem.b, not problem.chunks
    chunks = spec.chunks if keep or result else problem.chunks
    size = spec.shape[axis]
    own = (size,) if evenly else chunks[axis]
    return choose(
        size, count, workers, own, fixed, keep, most, result=result, only_regular=only_regular
    )


def choose(
    size: int,
    count: int,
    workers: int,
    chunks: Blocks,
    fixed: int | None,
    keep: int,
    most: int,
    *,
    result: bool = False,
    only_regular: bool = False,
) -> Blocks:
    """The given chunks, joined, if they serve as well as `count` even blocks; else those.

    With `keep`, they are taken as they are, those below that length joined. Of a `result`, what is
    joined is regular where it can be, and what is not is, always; with `only_regular`, all is.
    Blocks are about `most` long at most, and then of any number of chunks.
    """
    if fixed is not None:
        return regular(size, fixed)

    keep, count = min(keep, most), max(count, ceil_div(size, most))
    most_chunks = LONGEST if most < size else MOST_CHUNKS
    if keep and min(2, workers) <= len(chunks) <= most_chunks:  # one block serves one worker
        kept = group_regular(chunks, keep, workers, most) if result else group(chunks, keep)
        if not only_regular or is_regular(kept):
            return kept
    blocks = _evenly(size, count, workers)
    if result and not is_regular(blocks):
        blocks = regular(size, max(blocks))  # fewer, but the busiest worker has no more

    def serves(joined: Blocks) -> bool:
        small_enough = max(joined) <= 1.5 * max(blocks) and (not only_regular or is_regular(joined))
        share = largest_share(blocks, workers)
        return small_enough and largest_share(joined, workers) <= IMBALANCE * share

    joined = group(chunks, max(blocks))
    if not (only_regular or serves(joined)):
        return blocks
    other = group_regular(chunks, max(blocks), workers, most) if result else joined
    return other if serves(other) else blocks if only_regular else joined
