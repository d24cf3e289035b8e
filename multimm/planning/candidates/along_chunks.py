"""Other boundaries of blocks for operands in storage chunks: a chunk that two cut is decoded twice.

Blocks that are shorter than a chunk are tried longer, up to all of it, and narrower so that they
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product, takewhile

from multimm.planning.blocking import in_memory
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Blocks, ceil_div, regular

#: So many storage chunks in a block, or blocks in a storage chunk, are tried: arbitrary, each is a
#: third or a half more than the one before.
SEVERAL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def along_chunks(layout: Schedule, cluster: ClusterSpec, options: Options) -> Iterator[Schedule]:
    """The layout with block rows, columns and k-tiles that begin where storage chunks do.

    Those of A's rows and of k together, for a block that is longer has to be narrower; and B's.
    """
    a, b = layout.problem.a, layout.problem.b
    if not (a.storage or b.storage):
        return
    cluster = cluster.first(layout.grid.workers)
    k_tiles = [layout.k_tiles]
    if options.slabs is None:
        k_tiles += [*_others(layout.k_tiles, a, -1), *_others(layout.k_tiles, b, -2)]
    if options.edges != (None, None):
        sides = [(layout.m_blocks, layout.n_blocks)]
    elif layout.mirrors:
        rows = dict.fromkeys((*_others(layout.m_blocks, a, -2), layout.m_blocks))
        sides = [(blocks, blocks) for blocks in rows]
    else:
        m_blocks, n_blocks = layout.m_blocks, layout.n_blocks
        sides = [(m_blocks, n_blocks)]
        sides += [(blocks, n_blocks) for blocks in _others(m_blocks, a, -2)]
        sides += [(m_blocks, blocks) for blocks in _others(n_blocks, b, -1)]
    for (m_blocks, n_blocks), k_blocks in product(dict.fromkeys(sides), dict.fromkeys(k_tiles)):
        band = ceil_div(len(layout.batch_sizes) * len(m_blocks), layout.grid.p_m)
        blocks = {"m_blocks": m_blocks, "n_blocks": n_blocks, "k_tiles": k_blocks}
        anew = replace(layout, **blocks, band=band, stream=False, by_block=False)
        yield in_memory(anew, cluster)[0]


def _others(blocks: Blocks, spec: MatrixSpec, axis: int) -> Iterator[Blocks]:
    """Blocks of one storage chunk, or of several, or of an even part of one."""
    if spec.storage is None:
        return
    size, usual, chunk = sum(blocks), max(blocks), spec.storage.chunk[axis]
    if size == 0:
        return
    if not isinstance(chunk, int):
        starts = (range(0, len(chunk), several) for several in SEVERAL)
        joined = (tuple(sum(chunk[i : i + at.step]) for i in at) for at in starts)
        yield from takewhile(lambda found: max(found) <= max(usual, *chunk), joined)
        return
    lengths = [usual // chunk * chunk, ceil_div(usual, chunk) * chunk]
    lengths += [chunk * several for several in SEVERAL if chunk * several < usual]
    lengths += [ceil_div(chunk, parts) for parts in SEVERAL if chunk > usual * parts]
    yield from dict.fromkeys(regular(size, min(size, length)) for length in lengths if length)
