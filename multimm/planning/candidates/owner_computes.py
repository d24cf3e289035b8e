"""Layouts that multiply a tall or a wide matrix where it lies.

See `multimm.planning.work.partial_products`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

from multimm.planning.blocking import lay_out
from multimm.planning.candidates.read_ahead import takes_little
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.counts import EDGE, MOST_ELEMENTS, Cut
from multimm.planning.tiling.grid import Blocks, Grid, ceil_div, group, group_regular
from multimm.planning.work.partial_products import PartialProducts

#: Times as many output tiles of C as are needed: with more of them a worker sends the partial
#: products of one while it multiplies for the next.
FINER = (1, 2, 4, 8)
#: Blocks of C have as many elements as usual times this, at most: arbitrary, 2 GB on GPUs.
LARGEST = 2
#: K-tiles as long as can be: what is large does not travel.
LONG = Cut(k_tiles=0.0625)
#: Elements of a chunk from which on CPUs multiply it by itself: to join 100 MB of chunks of 25 MB
#: takes 20 ms, and their product with a vector 10.
ALONE = 2**18
#: Bytes of such a chunk on a GPU that is the only worker. X W of 1048576 x 8192 and 1024 columns
#: took an H200 180 ms in place of 241 in chunks of 5792 x 5792, Dask's own, and 179 in place of 182
#: in 4096 x 4096. Of several workers partial products travel meanwhile: no chunk is.
LONE_GPU = 128_000_000

#: Ranges of k beyond which none of two large operands is summed by one task of each worker, which
#: holds all of its ranges at once: arbitrary.
MOST_RANGES = 16


def in_partial_products(problem: Problem, cluster: ClusterSpec) -> Iterator[Schedule]:
    """Layouts that multiply a matrix where it lies, in few tasks.

    None where it is not known where chunks lie.
    """
    known = problem.c is None and not any(problem.rereadable)
    nothing = not problem.m * problem.n * problem.k
    beyond = max(problem.a.owners + problem.b.owners, default=0) >= cluster.workers
    if problem.batch_shape or problem.symmetric or not known or nothing or beyond:
        return
    if cluster.workers == 1:
        # On CPUs tasks of their own join chunks meanwhile, which need less memory at once.
        if cluster.slowest.kind == "cpu" or problem.awaited:
            return
        problem = _on_one(problem)
    largest = max(problem.a.nbytes, problem.b.nbytes)
    for by_columns, spec in enumerate((problem.a, problem.b.T)):
        if spec.owners and spec.nbytes == largest:
            other = problem.a if by_columns else problem.b.T
            for at in dict.fromkeys((spec.owners, _by_rows(spec), *_by_k(spec, other, cluster))):
                for layout in _layouts(problem, cluster, bool(by_columns), spec, at):
                    if not problem.made_in_place[by_columns] or takes_little(layout):
                        yield layout


def _on_one(problem: Problem) -> Problem:
    """The product of operands that lie on the one worker that there is."""
    a, b = (replace(x, owners=(0,) * x.blocks) for x in (problem.a, problem.b))
    return replace(problem, a=a, b=b)


def _by_rows(spec: MatrixSpec) -> tuple[int, ...]:
    """For each chunk the worker that has most of its row: then no rows are added.

    Of several with as much of it, the one that has been given least.
    """
    (rows, columns), found = spec.chunks, list[int]()
    if len(columns) == 1:
        return spec.owners
    given = Counter[int]()
    for row, start in zip(rows, range(0, len(spec.owners), len(columns)), strict=True):
        held = Counter[int]()
        for owner, size in zip(spec.owners[start:], columns, strict=False):
            held[owner] += size
        most = max(held, key=lambda worker: (held[worker], -given[worker]))
        given[most] += row
        found += [most] * len(columns)
    return tuple(found)


def _by_k(spec: MatrixSpec, other: MatrixSpec, cluster: ClusterSpec) -> Iterator[tuple[int, ...]]:
    """For each chunk of CPU workers the one that has most of its range of k, of both operands.

    None of them multiplies more ranges than others. Nothing but sums leaves a worker then, and what
    others have of its ranges comes: of two large operands in chunks along k the least.
    """
    (rows, columns), workers = spec.chunks, cluster.workers
    alike = other.owners and columns == other.chunks[1]
    if cluster.slowest.kind != "cpu" or workers == 1 or not alike:
        return
    if not 1 < len(columns) <= MOST_RANGES:
        return
    held = held_of_ranges((spec, other))
    yield with_most(held, range(workers), ceil_div(len(columns), workers)) * len(rows)


def _layouts(
    problem: Problem,
    cluster: ClusterSpec,
    by_columns: bool,
    spec: MatrixSpec,
    at: tuple[int, ...],
) -> Iterator[Schedule]:
    """Those in which workers multiply the chunks of `spec`, A or B transposed, as `at` says."""
    (rows, columns), workers = spec.chunks, cluster.workers
    grid = Grid(1, workers, 1) if by_columns else Grid(workers, 1, 1)
    usual = lay_out(problem, cluster, grid, Options(), LONG)
    alone = ALONE
    if cluster.slowest.kind == "gpu":
        alone = 0 if workers > 1 else LONE_GPU // spec.itemsize
    across = problem.m if by_columns else problem.n
    turn = -1 if by_columns else 1
    along, beside = problem.chunks[-2:][::turn] if problem.chunks else ((), ())
    wanted = _tiles_of(rows, along)
    some = _output_tiles(rows, spec.cols, across, cluster, regular=not problem.chunks)
    for output_tiles in dict.fromkeys(filter(None, (wanted, *some))):
        partial_products = PartialProducts(
            rows, columns, at, output_tiles, workers, by_columns, alone=alone
        )
        lengths = partial_products.lengths
        k_tiles = tuple(columns[s] for s in partial_products.k_tiles)
        usually = usual.m_blocks if by_columns else usual.n_blocks
        others = beside if output_tiles == wanted else usually
        m_blocks, n_blocks = (lengths, others)[::turn]
        band = ceil_div(len(m_blocks), grid.p_m)
        layout = Schedule(
            problem, grid, (), m_blocks, n_blocks, k_tiles, band,
            pack_once=False, partial_products=partial_products,
        )  # fmt: skip
        yield layout
        if layout.spec("a" if by_columns else "b").blocks > workers > 1:
            yield replace(layout, partial_products=replace(partial_products, coalesced=True))


def _tiles_of(rows: Blocks, wanted: Blocks) -> Blocks:
    """How many rows of chunks each wanted chunk of C is made of; empty if one is cut for it.

    >>> _tiles_of((2, 2, 3), (4, 3)), _tiles_of((2, 2, 3), (3, 4))
    ((2, 1), ())
    """
    ends = [*accumulate(rows)]
    if not {*accumulate(wanted)} <= {*ends} or 0 in wanted:
        return ()
    cuts = [0, *(bisect_right(ends, end) for end in accumulate(wanted))]
    return tuple(end - start for start, end in pairwise(cuts))


def _output_tiles(
    rows: Blocks, k: int, across: int, cluster: ClusterSpec, *, regular: bool
) -> Iterator[Blocks]:
    """How many rows of chunks each output tile may have, of a matrix of so many columns.

    As many output tiles as there are workers, or a multiple of that: then each joins some. A half
    or a quarter of the output tiles are as much fewer tasks. They may be wanted of regular heights,
    where chunks allow it.
    """
    m, workers = sum(rows), cluster.workers
    usual = EDGE[cluster.slowest.kind] ** 2
    least = max(ceil_div(m * across, LARGEST * usual), ceil_div(m * k, workers * MOST_ELEMENTS))
    counts = [count for count in (workers // 4, workers // 2) if count >= least]
    counts += [finer * ceil_div(least, workers) * workers for finer in FINER]
    for height in (ceil_div(m, count) for count in counts):
        lengths = group_regular(rows, height, workers) if regular else group(rows, height)
        yield _tiles_of(rows, lengths)


def held_of_ranges(known: Sequence[MatrixSpec]) -> list[Counter[int]]:
    """For each range of k the bytes that each worker has of A and B there.

    Parameters
    ----------
    known : sequence of MatrixSpec
        A, and B transposed, if it is known where they lie: in equal chunks along k.
    """
    held = [Counter[int]() for spec in known[:1] for _ in spec.chunks[1]]
    for spec in known:
        sizes = product(spec.chunks[0], enumerate(spec.chunks[1]))
        for owner, (rows, (place, columns)) in zip(spec.owners, sizes, strict=True):
            held[place][owner] += rows * columns * spec.itemsize
    return held


def with_most(held: list[Counter[int]], workers: Sequence[int], most: int) -> tuple[int, ...]:
    """For each of some things the worker that has most of it, none of them for more than `most`."""
    room = Counter(dict.fromkeys(workers, most))
    found = [0] * len(held)
    for place in sorted(range(len(held)), key=lambda x: -max(held[x].values())):
        own = max((w for w in workers if room[w]), key=held[place].__getitem__)
        found[place], room[own] = own, room[own] - 1
    return tuple(found)
