"""Many pieces copied on a GPU: every element at its place, and nothing else is touched."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import assert_exact, padded, pieces_of

from multimm.gpu.elementwise.batched_copy import CAPACITY, Move, copy_all
from multimm.graph.lowering.sub_blocks import SubBlocks
from multimm.planning.tiling.grid import regular

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu


ARRANGED = {
    "C": lambda x: cupy.asarray(np.ascontiguousarray(x)),
    "padded": lambda x: padded(x, 3, 1)[0],
    "F": lambda x: cupy.asfortranarray(cupy.asarray(x)),
}


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("edge", [7, 64, 100, 301])
def test_blocks_and_coalesced_transfers(arranged, dtype, edge):
    values = np.random.default_rng(1).integers(0, 100, (700, 530)).astype(dtype)
    if arranged == "padded" and dtype == "u1":
        pytest.skip("no byte is NaN")
    chunks = regular(700, edge), regular(530, edge)
    for where in ((slice(0, 700), slice(0, 530)), (slice(33, 650), slice(101, 102))):
        given = pieces_of(values, chunks, where, ARRANGED[arranged])
        assert_exact(given.copied(), values[where], (arranged, dtype, edge, where))
        row = given.in_a_row()
        expected = np.concatenate([values[where][to].reshape(-1) for _, to in given.cuts])
        assert_exact(row, expected, (arranged, dtype, edge, where, "row"))
        ends = np.cumsum([0, *(values[where][to].size for _, to in given.cuts)])
        spans = tuple(
            ((slice(int(start), int(end)),), to)
            for (start, end), (_, to) in zip(itertools.pairwise(ends), given.cuts, strict=True)
        )
        joined = SubBlocks([row] * len(spans), spans, (row.shape,) * len(spans), given.shape)
        assert_exact(joined.copied(), values[where], (arranged, dtype, edge, where, "joined"))


def test_stacks_and_nothing_beside_the_targets():
    values = np.random.default_rng(2).standard_normal((4, 30, 40)).astype("f4")
    target, whole = padded(np.zeros((4, 30, 40), "f4"), 5, 3)
    source = cupy.asarray(values)
    columns = [slice(i, i + 10) for i in range(0, 40, 10)]
    where = [(slice(b, b + 1), slice(0, 30), at) for b in range(4) for at in columns]
    copy_all([Move(source, at, target, at) for at in where])
    assert_exact(target, values, "stack")
    target[...] = np.nan
    assert bool(cupy.isnan(whole).all())


def test_more_pieces_than_a_launch_takes_and_more_than_32_bits():
    if cupy.cuda.Device().mem_info[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of free GPU memory")
    size = 2**32 + 13
    long = cupy.zeros(size, "u1")
    long[-7:] = cupy.arange(7)
    out = cupy.full(size + CAPACITY, 9, "u1")
    one = cupy.full(1, 5, "u1")
    first = (slice(0, 1),)
    moves = [Move(long, (slice(0, size),), out, (slice(0, size),))]
    moves += [Move(one, first, out, (slice(size + i, size + i + 1),)) for i in range(CAPACITY)]
    copy_all(moves)
    assert cupy.asnumpy(out[size - 8 : size + 2]).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 5, 5]
    assert bool((out[size:] == 5).all())
    assert not bool(out[: size - 6].any())
    wide = cupy.zeros((3, 2**31 + 5), "u1")
    wide[:, -2:] = cupy.asarray([[1, 2], [3, 4], [5, 6]], "u1")
    room = cupy.zeros((3, 2**31 + 6), "u1")
    columns = slice(0, 2**31 + 5)
    copy_all([Move(wide, (slice(0, 3), columns), room, (slice(0, 3), columns))])
    assert cupy.asnumpy(room[:, -3:]).tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 0]]
