"""Copies of many sub-blocks without a GPU: what the kernel is given, and what is left to CuPy."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import LAYOUTS, GPUArray, Kernel, gpu, laid_out, standing_in

from multimm.gpu.elementwise import batched_copy
from multimm.gpu.elementwise.batched_copy import Move, copy_all, rows_of
from multimm.graph.tasks import sub_blocks
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.rechunk import cuts_of, offsets, shape_of


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    with standing_in():
        # The arrays that stand in for CuPy's are NumPy's as well.
        monkeypatch.setattr(sub_blocks, "module_of", lambda *_: sys.modules["cupy"])
        yield


def numbered(shape: tuple[int, ...], dtype: str = "f4") -> np.ndarray:
    return np.arange(1, math.prod(shape) + 1).reshape(shape).astype(dtype)


def everything(x: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in x.shape)


def sub_blocks_of(whole: np.ndarray, chunks, where, layouts) -> SubBlocks:
    """A rectangle of an array as the chunks that it has a part of."""
    found = cuts_of(map(offsets, chunks), where)
    starts = [np.cumsum([0, *sizes]) for sizes in chunks]
    blocks = []
    for number, (at, *_) in enumerate(found):
        part = tuple(
            slice(axis[i], axis[i] + sizes[i])
            for axis, i, sizes in zip(starts, at, chunks, strict=True)
        )
        blocks.append(laid_out(np.array(whole[part]), layouts[number % len(layouts)]))
    cuts = tuple((part.cut, part.to) for part in found)
    sizes = tuple(part.size for part in found)
    return SubBlocks(blocks, cuts, sizes, shape_of(where))


@st.composite
def rectangles(draw):
    """A matrix or a stack in uneven chunks, and a part of it that is not empty."""
    sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
    chunks = tuple(draw(sizes) for _ in range(draw(st.integers(2, 3))))
    where = []
    for blocks in chunks:
        start = draw(st.integers(0, sum(blocks) - 1))
        where.append(slice(start, draw(st.integers(start + 1, sum(blocks)))))
    return chunks, tuple(where)


@given(
    rectangles(),
    st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    st.sampled_from(["i1", "f2", "f4", "f8", "c16"]),
)
def test_blocks_and_coalesced_transfers_are_what_numpy_makes_of_them(rectangle, layouts, dtype):
    chunks, where = rectangle
    whole = numbered(tuple(map(sum, chunks)), dtype)
    given = sub_blocks_of(whole, chunks, where, layouts)
    result = given.copied()
    assert type(result) is GPUArray
    np.testing.assert_array_equal(np.asarray(result), whole[where])
    row = given.in_a_row()
    expected = np.concatenate([whole[where][to].reshape(-1) for _, to in given.cuts])
    np.testing.assert_array_equal(np.asarray(row), expected)
    ends = np.cumsum([0, *(math.prod(shape_of(to)) for _, to in given.cuts)])
    spans = tuple(
        ((slice(start, stop),), to)
        for start, stop, (_, to) in zip(ends[:-1], ends[1:], given.cuts, strict=True)
    )
    joined = SubBlocks([row] * len(spans), spans, (row.shape,) * len(spans), given.shape).copied()
    np.testing.assert_array_equal(np.asarray(joined), whole[where])


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_sub_block_of_whole_blocks_has_no_empty_one(blocks):
    source, target = (gpu(np.ones((1, 4 * batched_copy.SPAN * blocks), "f4")) for _ in "ab")
    copy_all([Move(source, everything(source), target, everything(target))])
    ((_, grid, _, _),) = Kernel.launches
    assert grid == (blocks, 1, 1)


def test_a_repeated_row_is_read_again():
    row = np.broadcast_to(numbered((1, 8)), (4, 8)).view(GPUArray)
    target = gpu(np.zeros((4, 8), "f4"))
    copy_all([Move(row, everything(row), target, everything(target))])
    assert len(Kernel.launches) == 1
    np.testing.assert_array_equal(np.asarray(target), np.asarray(row))


def test_what_is_no_rows_of_neighbours_is_left_to_cupy():
    values = numbered((4, 5, 6))
    for source, target in (
        (laid_out(values[0], "F"), np.zeros((5, 6), "f4")),
        (gpu(values, extra=2)[:, :4], np.zeros((4, 4, 6), "f4")),
        (gpu(values[0].astype("f8")), np.zeros((5, 6), "f4")),
        (gpu(values[0].astype("i4")), np.zeros((5, 6), "f4")),
    ):
        into = gpu(target)
        move = Move(source, everything(source), into, everything(into))
        assert rows_of(move) is None
        copy_all([move])
        np.testing.assert_array_equal(np.asarray(into), np.asarray(source))
    assert Kernel.launches == []


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_nothing_is_launched_for_what_has_no_elements(shape):
    empty, target = np.zeros(shape, "f4").view(GPUArray), np.zeros(shape, "f4").view(GPUArray)
    copy_all([Move(empty, everything(empty), target, everything(target))])
    assert Kernel.launches == []
