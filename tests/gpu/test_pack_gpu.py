"""Packing on a GPU, to the last bit of the NumPy model; what flagged blocks keep; the way back."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from cuda_on_cpu.packing import numbers, places
from gpu_arrays import pack_tiles
from pack_reference import pack_reference, split

from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated import pack, packed
from multimm.gpu.emulated.pack import cut_for, prepared, source_of

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

SIZES = (1, 2, 7, 31, 63, 64, 65, 127, 128, 129, 200, 257, 511, 1000)
KINDS = ("normal", "sparse", "integers", "odd")


def stored(x: np.ndarray, order: str, extra: int, offset: int):
    """A matrix on the GPU: its lines `extra` elements longer, `offset` from an aligned address."""
    lines = x if order == "C" else x.T
    whole = cupy.full(offset + lines.shape[0] * (lines.shape[1] + extra), np.nan, np.float32)
    view = whole[offset:].reshape(lines.shape[0], -1)[:, : lines.shape[1]]
    view[...] = cupy.asarray(np.ascontiguousarray(lines))
    return view if order == "C" else view.T


def assert_packed(block, x: np.ndarray, scheme: str):
    """Bit by bit; `x` is rows x k."""
    parts = {"float32": 2, "tf32": 1}[scheme]
    expected = pack_reference(x, parts)
    assert (block.nonfinite, block.uncarried) == (expected.nonfinite, expected.uncarried)
    if block.raw is not None:
        assert expected.nonfinite or expected.uncarried > RESIDUAL_CAP
        raw = cupy.asnumpy(block.raw)
        raw = raw if block.side == "a" else raw.T
        np.testing.assert_array_equal(raw.view(np.uint32), x.view(np.uint32))
        return
    np.testing.assert_array_equal(cupy.asnumpy(block.exponents), expected.exponents)
    tiles = cupy.asnumpy(block.tiles).view(np.uint16)
    np.testing.assert_array_equal(tiles, expected.tiles.view(np.uint16))
    if block.uncarried:
        at, values = cupy.asnumpy(block.places), cupy.asnumpy(block.values)
        order = at.argsort()  # they come in any
        np.testing.assert_array_equal(at[order], places(expected.residuals))
        np.testing.assert_array_equal(values[order], expected.residuals["value"])
    else:
        assert block.places is block.values is None


@pytest.mark.parametrize("scheme", ["float32", "tf32"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_ragged_matrices(kind, scheme):
    rng = np.random.default_rng(KINDS.index(kind))
    for rows, k in zip(*(rng.permutation(SIZES * 2) for _ in "ab"), strict=True):
        side, order = rng.choice(["a", "b"]), rng.choice(["C", "F"])
        trans, extra, offset = bool(rng.integers(2)), int(rng.integers(6)), int(rng.integers(5))
        x = numbers(kind, int(rows), int(k), rng)
        if rng.integers(2):  # packed, not kept: what is not finite leaves holes
            x[~np.isfinite(x)] = 1
        given = x if (side == "a") != trans else x.T
        block = pack_tiles(
            stored(given, order, extra, offset), side=side, trans=trans, scheme=scheme
        )
        assert block.shape == (x.shape if side == "a" else x.shape[::-1])
        assert_packed(block, x, scheme)


def test_what_is_not_finite_is_packed_as_zero():
    x = numbers("odd", 130, 200, np.random.default_rng(5))
    (tiles,), counts = packed_together([(cupy.asarray(x), "a", False)])
    expected = pack_reference(x)
    assert counts.tolist() == [[(~np.isfinite(x)).sum(), expected.uncarried]]
    assert counts[0, 0] > 0
    np.testing.assert_array_equal(tiles.view(np.uint16), expected.tiles.view(np.uint16))


def packed_together(operands):
    """Pack in one launch, in memory that holds noise; the tiles, and what was counted."""
    found = [source_of(*operand) for operand in operands]
    packing = prepared([source for _, source in found], "float32", 0)
    head = cupy.full(packing.head_bytes, 0xEE, np.uint8)
    parts = [
        (cupy.full(source.tile_shape("float32"), np.nan, np.float16),
         cupy.full(source.height, -1, np.int32))
        for _, source in found
    ]  # fmt: skip
    packing(head.data.ptr, [
        (x.data.ptr, tiles.data.ptr, exponents.data.ptr)
        for (x, _), (tiles, exponents) in zip(found, parts, strict=True)
    ])  # fmt: skip
    counts = cupy.asnumpy(head[: 16 * len(found)]).view(np.uint64).reshape(-1, 2)
    return [cupy.asnumpy(tiles) for tiles, _ in parts], counts


WAYS = ("at once", "every block alone", "in two launches")


@pytest.mark.parametrize("way", WAYS)
def test_two_operands_together_however_blocks_learn_of_each_other(monkeypatch, way):
    if way == WAYS[1]:
        monkeypatch.setattr(pack, "PATIENCE", 0)
    elif way == WAYS[2]:
        monkeypatch.setattr(pack, "cut_for", lambda *x: cut_for(*x)._replace(at_once=False))
    rng = np.random.default_rng(7)
    for m, n, k in ((1, 1, 1), (1000, 700, 1500), (65, 3000, 129), (4097, 5, 3), (70, 3, 40_000)):
        a, b = numbers("normal", m, k, rng), numbers("sparse", n, k, rng)
        both = [(cupy.asarray(a), "a", False), (cupy.asarray(b.T.copy()), "b", False)]
        for _ in range(3):  # memory of earlier rounds is used again
            found, counts = packed_together(both)
            for tiles, count, x in zip(found, counts, (a, b), strict=True):
                expected = pack_reference(x)
                np.testing.assert_array_equal(tiles.view("u2"), expected.tiles.view("u2"))
                assert count.tolist() == [0, expected.uncarried]


def test_k_of_any_length():
    rng = np.random.default_rng(17)
    for rows, k in ((130, 50_000), (66, 51_000), (3, 300_001)):
        x = rng.standard_normal((rows, k), np.float32)
        x[1] *= np.float32(2.0**-20)
        x[1, k // 2] = 2.0**10
        for view in (cupy.asarray(x), cupy.asfortranarray(cupy.asarray(x))):
            assert_packed(pack_tiles(view, side="a"), x, "float32")


def test_streams_that_pack_at_one_time_wait_for_none_of_each_others_blocks():
    """More blocks wait than have room: together the streams' panels do not fit."""
    rng = np.random.default_rng(19)
    given = [rng.standard_normal((70, 50_000), np.float32) for _ in range(6)]
    arrays = [cupy.asarray(x) for x in given]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in given]
    prepared_ = []
    for x in arrays:
        _, source = source_of(x, "a", False)
        packing_ = prepared([source], "float32", 0)
        prepared_.append((
            packing_, cupy.empty(packing_.head_bytes, np.uint8),
            cupy.zeros(source.tile_shape("float32"), np.float16), cupy.zeros(source.height, "i4"),
        ))  # fmt: skip
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for stream, x, (packing_, head, tiles, exponents) in zip(
            streams, arrays, prepared_, strict=True
        ):
            with stream:
                packing_(head.data.ptr, [(x.data.ptr, tiles.data.ptr, exponents.data.ptr)])
    cupy.cuda.Device().synchronize()
    for x, (_, _, tiles, _) in zip(given, prepared_, strict=True):
        expected = pack_reference(x).tiles.view("u2")
        np.testing.assert_array_equal(cupy.asnumpy(tiles).view("u2"), expected)


def test_large_matrices_are_packed_like_small_ones():
    rng = np.random.default_rng(9)
    x = rng.standard_normal((5000, 6001), np.float32)
    for view in (cupy.asarray(x), cupy.asfortranarray(cupy.asarray(x))):
        assert_packed(pack_tiles(view, side="a"), x, "float32")
        assert_packed(pack_tiles(view, side="b"), np.ascontiguousarray(x.T), "float32")


def test_rows_2_to_31_elements_apart():
    if cupy.cuda.Device().mem_info[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    x = np.random.default_rng(1).standard_normal((3, 70), np.float32)
    far = cupy.zeros((3, 2**31 + 5), np.float32)[:, -70:]
    far[...] = cupy.asarray(x)
    assert_packed(pack_tiles(far, side="a"), x, "float32")
    assert_packed(pack_tiles(far, side="b"), np.ascontiguousarray(x.T), "float32")


@pytest.mark.parametrize("scheme", ["float32", "tf32"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_unpacked_is_what_the_parts_carry(side, scheme):
    rng = np.random.default_rng(11)
    for rows, k in ((1, 1), (65, 63), (130, 200), (64, 8), (3, 1000)):
        x = numbers("odd", rows, k, rng)
        x[~np.isfinite(x)] = 2.0**-140
        block = pack_tiles(cupy.asarray(x if side == "a" else x.T), side=side, scheme=scheme)
        result = cupy.asnumpy(block.unpack())
        result = result if side == "a" else result.T
        parts = split(x, 2 if scheme == "float32" else 1)
        error = np.abs(result.astype(float) - x)
        assert not (
            error > np.abs(x.astype(float)) * 2.0 ** (-22 if scheme == "float32" else -11)
        ).any()
        np.testing.assert_array_equal(result[parts.rest != 0], x[parts.rest != 0])
        assert result.shape == x.shape


def test_too_many_rests_keep_the_source():
    x = numbers("wide", 600, 700, np.random.default_rng(13))
    assert split(x).rest.astype(bool).sum() > RESIDUAL_CAP
    given = cupy.asarray(x)
    block = pack_tiles(given, side="a")
    assert block.uncarried == split(x).rest.astype(bool).sum()
    given[...] = 0  # the block is a value
    np.testing.assert_array_equal(cupy.asnumpy(block.unpack()), x)


def test_the_callers_stream_is_used():
    x = np.random.default_rng(15).standard_normal((513, 700), np.float32)
    given = cupy.zeros((513, 700), np.float32)
    with cupy.cuda.Stream(non_blocking=True):
        big = cupy.ones(1 << 26)
        for _ in range(20):
            big += 1  # the stream is busy when packing is launched
        given[...] = cupy.asarray(x)
        assert_packed(pack_tiles(given, side="a"), x, "float32")


@pytest.mark.parametrize("family", ["cuda", "dask", "pickle"])
@pytest.mark.parametrize("kind", ["normal", "rests", "not finite"])
def test_blocks_travel_as_dask_sends_them(kind, family):
    from distributed.protocol import deserialize, serialize

    packed.register_with_dask()
    x = numbers("normal", 70, 90, np.random.default_rng(16))
    if kind == "not finite":
        x[3, 4] = np.inf
    elif kind == "rests":  # few enough to be kept beside the parts
        x[:, ::9] *= 2.0**-40
    block = pack_tiles(cupy.asfortranarray(cupy.asarray(x)), side="a")
    assert (block.raw is not None) == (kind == "not finite")
    assert (block.places is not None) == (kind == "rests")
    header, frames = serialize(block, serializers=(family,), on_error="raise")
    assert header["serializer"] == family
    if family == "cuda":
        assert all(isinstance(frame, cupy.ndarray) for frame in frames)
    found = deserialize(header, frames)
    cupy.testing.assert_array_equal(found.unpack(), block.unpack())
    assert found.arrays().keys() == block.arrays().keys()
    if family != "pickle":  # which gives C order
        for name, array in block.arrays().items():
            assert found.arrays()[name].strides == array.strides
