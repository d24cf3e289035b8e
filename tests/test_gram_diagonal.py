"""Blocks on the diagonal of a Gram product: half of one, and half of its halves."""

from __future__ import annotations

import sys

import dask.array as da
import numpy as np
import pytest
import test_residuals
import test_split
from stand_in import GPUArray, gpu, standing_in

import multimm
from multimm.errors import ArrayTypeError
from multimm.gpu import compiled, residuals, slices, split
from multimm.gpu.packed import PackedBlock, Residuals
from multimm.gpu.registry import Device
from multimm.gpu.split_reference import pack_reference
from multimm.gpu.tiles import limits_for
from multimm.graph import gram_tasks
from multimm.graph.tasks import BlockTask, Step
from multimm.planning import triangle as pieces
from multimm.planning.triangle import computed, triangle


def integers(shape, dtype="f4", seed=0):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 4 and more rows, from even ones on."""
    _pieces_of(monkeypatch, 4, 2)
    yield
    triangle.cache_clear()


def _pieces_of(monkeypatch, least, grain):
    monkeypatch.setattr(pieces, "LEAST_PIECE", dict.fromkeys(pieces.LEAST_PIECE, least))
    monkeypatch.setattr(pieces, "GRAIN", grain)
    triangle.cache_clear()


# What is computed


@pytest.mark.parametrize("size", [1, 1000, 2047, 2048, 2049, 2736, 4001, 5000])
def test_all_below_the_diagonal_is_computed_once(size):
    times = np.zeros((size, size), np.int8)
    for rows, columns in triangle(size):
        assert rows.start % pieces.GRAIN == columns.start % pieces.GRAIN == 0
        assert min(rows.stop - rows.start, columns.stop - columns.start) >= min(size, 1024)
        times[rows, columns] += 1
    assert times.max() == 1
    assert np.tril(times).sum() == size * (size + 1) // 2
    assert times.sum() == computed(size)


def test_a_large_block_is_nearly_halved():
    assert computed(16384) == computed(16384, "float32") == 16384**2 * (1 + 1 / 16) / 2
    assert computed(16384, "tf32") == 16384**2 * (1 + 1 / 8) / 2
    assert computed(1024) == 1024**2


# NumPy


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i8"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 20), (9, 7), (40, 30), (2, 33, 5)])
def test_what_is_below_the_diagonal_is_the_product(small_pieces, dtype, turned, shape):
    x, p = integers(shape, dtype), integers((*shape[:-1], shape[-2]), dtype, seed=1)
    step = Step(dtype, dtype, trans_a=turned, trans_b=not turned, alpha=3)
    stored = np.ascontiguousarray(x.swapaxes(-1, -2)) if turned else x
    for partial in (None, p):
        found = gram_tasks.multiply_diagonal(stored, partial, step=step)
        exact = 3 * (x @ x.swapaxes(-1, -2) + (0 if partial is None else p))
        np.testing.assert_array_equal(np.tril(found), np.tril(exact))
        assert found.dtype == dtype
    if shape[-2] > 9:
        assert found[..., 0, -1].ravel()[0] == 0  # not computed


@pytest.mark.parametrize("options", [{"blocks": 20}, {"blocks": 60, "slabs": 10}, {"p_k": 2}])
def test_products_are_whole_and_symmetric(small_pieces, options):
    x, c0 = integers((50, 44)), integers((50, 50), seed=2)
    a, c = da.from_array(x, chunks=13), da.from_array(c0, chunks=17)
    product = multimm.matmul(a, a.T, **options)
    np.testing.assert_array_equal(product.compute(scheduler="sync"), x @ x.T)
    added = multimm.gemm(2, a, a, 3, c, trans_b=True, **options)
    np.testing.assert_array_equal(added.compute(scheduler="sync"), 2 * (x @ x.T) + 3 * c0)


def test_one_operand_block_is_all_that_a_task_on_the_diagonal_asks_for():
    a = da.from_array(integers((40, 20)), chunks=10)
    made = dict(multimm.matmul(a, a.T, blocks=20, slabs=20).dask)
    halves = [t for t in made.values()
              if isinstance(t, BlockTask) and t.func is gram_tasks.multiply_diagonal]  # fmt: skip
    assert len(halves) == 2
    assert all(len(task.dependencies) == 1 for task in halves)


# Packed blocks, with NumPy for the kernels


def packed(x):
    """`x` on a stand-in for a GPU, with what the parts do not carry of it."""
    made = pack_reference(x, 2)
    at = made.residuals["row"].astype("u8") * 2**32 + made.residuals["k"].astype("u8")
    rests = Residuals(*(gpu(z.reshape(1, -1)).reshape(-1) for z in (at, made.residuals["value"])))
    tiles, exponents = (
        gpu(z.reshape(1, -1)).reshape(z.shape) for z in (made.tiles, made.exponents)
    )
    count = len(at)
    return PackedBlock(*x.shape, "a", "float32", tiles, exponents, 0, count,
                       rests if count else None)  # fmt: skip


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that do in NumPy what the GPU's do, given the same arguments."""
    _pieces_of(monkeypatch, 128, 128)
    test_residuals.launches.clear()
    with standing_in():
        monkeypatch.setattr(sys.modules["cupy"], "zeros", lambda shape, dtype: gpu(
            np.zeros(shape, dtype)), raising=False)  # fmt: skip
        monkeypatch.setattr(
            compiled, "_loaded", lambda text, name, *_: test_split.Kernel(text, name)
        )
        monkeypatch.setattr(slices, "workspace", lambda shape, device: (
            gpu(np.full(shape, np.nan, "f4")), lambda: None))  # fmt: skip
        monkeypatch.setattr(
            residuals, "kernel_for", lambda ident, file, name, d: test_residuals.Kernel(dict(d))
        )
        monkeypatch.setattr(residuals, "device_of", lambda ident: Device(limits_for(90), 132))
        compiled.device_of.cache_clear()
        split._plan.cache_clear()
        yield test_split.stand_in.Kernel.launches
    compiled.device_of.cache_clear()
    split._plan.cache_clear()
    triangle.cache_clear()


@pytest.mark.parametrize("rows", [100, 256, 600])
def test_parts_of_packed_blocks_are_multiplied_where_they_lie(kernels, rows):
    x = integers((rows, 150)) * np.float32(2) ** (np.arange(rows) // 64)[:, None].astype("f4")
    x[rows // 2, 7] = np.float32(1.2345678e-9)  # beside hundreds: no part carries it
    block, p = packed(x), integers((rows, rows), seed=3)
    assert block.uncarried == 1
    step = Step("float32", "float32", alpha=2)
    found = gram_tasks._lower(block, gpu(p), step)
    exact = 2 * (x.astype("f8") @ x.T.astype("f8") + p)
    assert isinstance(found, GPUArray)
    # The tiny element counts where it stands alone, and is lost beside integers.
    np.testing.assert_allclose(np.tril(found), np.tril(exact), rtol=2**-23, atol=1e-12)
    assert len(kernels) == len(triangle(rows)) == {100: 1, 256: 3, 600: 7}[rows]
    assert len(test_residuals.launches) == 1  # for all pieces


@pytest.mark.parametrize(
    ("rows", "k", "precision", "times"),
    [(256, 256, "float32", 1), (256, 256, "ieee", 0), (256, 255, "float32", 0),
     (100, 256, "float32", 0)],
)  # fmt: skip
def test_what_is_not_packed_yet_is_packed_once_for_all_pieces(
    kernels, monkeypatch, rows, k, precision, times
):
    seen = []

    def pack(block, *, role, step):
        seen.append((role, step.trans_a))
        return packed(np.asarray(block.T))

    def gemm(a, b, p=None, *, step, tuned, out):
        out[...] = 1

    monkeypatch.setattr(gram_tasks, "pack", pack)
    if not times:
        monkeypatch.setattr(gram_tasks, "gemm", gemm)
    x = integers((rows, k))
    step = Step("float32", "float32", trans_a=True, precision=precision)
    found = gram_tasks._lower(gpu(np.ascontiguousarray(x.T)), None, step)
    assert seen == [("a", True)] * times
    if times:
        np.testing.assert_array_equal(np.tril(found), np.tril(x @ x.T))


def test_a_block_that_keeps_its_source_is_multiplied_whole(monkeypatch):
    x = np.full((9, 5), np.inf, "f4")
    block = PackedBlock(9, 5, "a", "float32", nonfinite=45, raw=gpu(x))
    seen = []
    monkeypatch.setattr(gram_tasks, "gemm", lambda *given, **more: seen.append((given, more)))
    gram_tasks._lower(block, None, Step("float32", "float32"))
    (((left, right, _), more),) = seen
    assert (left.side, right.side, "out" in more) == ("a", "b", False)


def test_packed_blocks_are_divided_between_tiles_alone():
    block = packed(integers((300, 70)))
    part = block.carried(slice(128, 300))
    assert (part.shape, part.tiles.shape[0], part.exponents.shape) == ((172, 70), 4, (256,))
    assert part.tiles.data.ptr == block.tiles[2:].data.ptr
    for rows in (slice(64, 300), slice(0, 200)):
        with pytest.raises(ArrayTypeError, match="cannot be divided off"):
            block.carried(rows)
