"""Matrices on a GPU as kernels meet them, and how their results are compared."""

from __future__ import annotations

from importlib.util import find_spec

import dask.array as da
import numpy as np
import pytest

from multimm.gpu.emulated import pack
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.rechunk import cuts_of, offsets, shape_of

if find_spec("cupy"):  # where there is none, the mark leaves the tests of GPUs out
    import cupy

#: Of products with kernels of their own: few rows, few columns, a short k, and k in slices.
SKINNY = (
    (1, 1000, 1003), (1003, 1, 1000), (1, 5000, 300), (1, 4096, 512), (4100, 1, 2500),
    (2, 1001, 700), (700, 2, 1001), (3, 640, 640), (515, 4, 333), (5, 2052, 129), (2052, 7, 129),
    (8, 900, 901), (901, 8, 900), (2100, 11, 513), (1300, 16, 900), (30_001, 1, 33),
    (20_000, 3, 64), (9_000, 8, 40), (3, 3, 300_001), (1, 1, 400_000), (20, 1, 150_000),
    (1, 20, 150_000), (7, 40, 70_003), (1000, 1000, 1), (801, 803, 5), (1031, 517, 8),
    (641, 1111, 11), (128, 5000, 12),
)  # fmt: skip
#: Of odd sides, most of them cut into slices of k on an H200.
AWKWARD = (
    (257, 257, 257), (509, 521, 523), (1009, 1013, 1019), (33, 33, 65537), (127, 129, 20011),
    (768, 3072, 3072), (1797, 1797, 64), (2039, 2053, 100),
)  # fmt: skip


def placed(x, turned: bool = False):
    """On the GPU; `turned`: in the memory of its transpose."""
    return cupy.asarray(x.T).T if turned else cupy.asarray(x)


def chunked(x, chunks) -> da.Array:
    """A Dask array of blocks on the GPU."""
    return da.from_array(cupy.asarray(x), chunks=chunks, asarray=False)


def padded(values: np.ndarray, extra: int, offset: int = 0, fill: float = np.nan):
    """The values inside a larger GPU buffer: `extra` more columns, `offset` elements in front.

    Returns the view and the whole buffer. What lies around the view is `fill`.
    """
    *batch, rows, cols = values.shape
    whole = cupy.full(offset + int(np.prod(batch)) * rows * (cols + extra), fill, values.dtype)
    view = whole[offset:].reshape(*batch, rows, cols + extra)[..., :cols]
    view[...] = cupy.asarray(values)
    return view, whole


def pieces_of(whole: np.ndarray, chunks, where, arranged) -> SubBlocks:
    """A rectangle of an array as the chunks that it has a part of, each `arranged` on the GPU."""
    found = cuts_of(map(offsets, chunks), where)
    starts = [offsets(sizes) for sizes in chunks]
    blocks = [whole[tuple(of[i] for of, i in zip(starts, at, strict=True))] for at, *_ in found]
    cuts = tuple((part.cut, part.to) for part in found)
    sizes = tuple(part.size for part in found)
    return SubBlocks([*map(arranged, blocks)], cuts, sizes, shape_of(where))


def pack_tiles(x, **options):
    """Pack it also where k is so short that `pack` keeps the source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "SPLIT_K", 0)
        return pack.pack(x, **options)


def same(result, expected) -> None:
    """CuPy's, with the dtype and the numbers of NumPy's."""
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(cupy.asnumpy(result), expected)


def assert_exact(result, expected, context) -> None:
    """Equal everywhere; NaN equals nothing."""
    got = cupy.asnumpy(result)
    wrong = np.argwhere(~(got == expected))
    assert wrong.size == 0, (
        f"{context}: {len(wrong)} wrong, first at {tuple(wrong[0])}: "
        f"{got[tuple(wrong[0])]} for {expected[tuple(wrong[0])]}"
    )
