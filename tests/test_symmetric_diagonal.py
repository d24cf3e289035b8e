"""Blocks on the diagonal of a symmetric product: half of one, and half of its halves."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import test_residuals
import test_split
from pack_reference import pack_reference
from small import integers
from stand_in import GPUArray, gpu, standing_in

import multimm
from multimm.gpu.emulated import outliers
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.runtime import launch
from multimm.gpu.simt import split_k
from multimm.graph.lowering import symmetric
from multimm.graph.tasks.multiply import Step
from multimm.planning.tiling import triangle as sub_blocks
from multimm.planning.tiling.triangle import computed, triangle


@pytest.fixture
def small_sub_blocks(monkeypatch):
    """Sub-blocks of 4 and more rows, from even ones on."""
    _sub_blocks_of(monkeypatch, 4, 2)
    yield
    triangle.cache_clear()
    computed.cache_clear()


def _sub_blocks_of(monkeypatch, least, grain):
    monkeypatch.setattr(
        sub_blocks, "LEAST_SUB_BLOCK", dict.fromkeys(sub_blocks.LEAST_SUB_BLOCK, least)
    )
    monkeypatch.setattr(sub_blocks, "LEAST_OTHER", least)
    monkeypatch.setattr(sub_blocks, "GRAIN", grain)
    triangle.cache_clear()
    computed.cache_clear()


# What is computed


@pytest.mark.parametrize(("dtype", "least"), [("float32", 256), ("float64", 1024)])
@pytest.mark.parametrize("size", [1, 300, 1000, 2047, 2048, 2049, 2736, 4001, 5000])
def test_all_below_the_diagonal_is_computed_once(size, dtype, least):
    times = np.zeros((size, size), np.int8)
    for rows, columns in triangle(size, dtype):
        assert rows.start % sub_blocks.GRAIN == columns.start % sub_blocks.GRAIN == 0
        assert min(rows.stop - rows.start, columns.stop - columns.start) >= min(size, least)
        times[rows, columns] += 1
    assert times.max() == 1
    assert np.tril(times).sum() == size * (size + 1) // 2
    assert times.sum() == computed(size, dtype)


# NumPy


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i8"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 20), (9, 7), (40, 30), (2, 33, 5)])
def test_what_is_below_the_diagonal_is_the_product(small_sub_blocks, dtype, turned, shape):
    x, p = integers(shape, dtype=dtype), integers((*shape[:-1], shape[-2]), 1, dtype)
    step = Step(dtype, dtype, trans_a=turned, trans_b=not turned, alpha=3)
    stored = np.ascontiguousarray(x.swapaxes(-1, -2)) if turned else x
    for partial in (None, p):
        found = symmetric.multiply_diagonal(stored, partial, step=step)
        exact = 3 * (x @ x.swapaxes(-1, -2) + (0 if partial is None else p))
        np.testing.assert_array_equal(np.tril(found), np.tril(exact))
        assert found.dtype == dtype
    if shape[-2] > 9:
        assert found[..., 0, -1].ravel()[0] == 0  # not computed


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 20},
        {"blocks": 60, "slabs": 10},
        {"p_k": 2},
        {"blocks": 20, "slabs": 11, "p_k": 2},
        {"blocks": 60, "slabs": 11, "p_k": 4},
    ],
)
def test_products_are_whole_and_symmetric(small_sub_blocks, options):
    x, c0 = integers((50, 44)), integers((50, 50), seed=2)
    a, c = da.from_array(x, chunks=13), da.from_array(c0, chunks=17)
    product = multimm.matmul(a, a.T, **options)
    np.testing.assert_array_equal(product.compute(scheduler="sync"), x @ x.T)
    added = multimm.gemm(2, a, a, 3, c, trans_b=True, **options)
    np.testing.assert_array_equal(added.compute(scheduler="sync"), 2 * (x @ x.T) + 3 * c0)


# Packed blocks, with NumPy for the kernels


def packed(x):
    """`x` on a stand-in for a GPU, with what the parts do not carry of it."""
    made = pack_reference(x, 2)
    at = made.residuals["row"].astype("u8") * 2**32 + made.residuals["k"].astype("u8")
    lists = (gpu(z.reshape(1, -1)).reshape(-1) for z in (at, made.residuals["value"]))
    tiles, exponents = (
        gpu(z.reshape(1, -1)).reshape(z.shape) for z in (made.tiles, made.exponents)
    )
    count = len(at)
    return PackedBlock(*x.shape, "a", "float32", tiles, exponents, 0, count,
                       *(lists if count else ()))  # fmt: skip


@pytest.fixture
def kernels():
    """Kernels that do in NumPy what the GPU's do, given the same arguments."""
    test_residuals.launches.clear()
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_loaded", lambda text, name, *_: test_split.Kernel(text, name))
        patch.setattr(split_k, "workspace", lambda shape, device: (
            gpu(np.full(shape, np.nan, "f4")), lambda: None))  # fmt: skip
        patch.setattr(
            outliers, "kernel_for", lambda ident, file, name, d: test_residuals.Kernel(dict(d))
        )
        launch.device_of.cache_clear()
        yield test_split.stand_in.Kernel.launches
    launch.device_of.cache_clear()


@pytest.mark.parametrize("rows", [100, 256, 600])
def test_a_packed_block_serves_both_sides(kernels, rows):
    x = integers((rows, 150)) * np.float32(2) ** (np.arange(rows) // 64)[:, None].astype("f4")
    x[rows // 2, 7] = np.float32(1.2345678e-9)  # beside hundreds: no part carries it
    block, p = packed(x), integers((rows, rows), seed=3)
    assert block.uncarried == 1
    step = Step("float32", "float32", alpha=2)
    found = symmetric.link_diagonal(block, gpu(p), step=step)
    exact = 2 * (x.astype("f8") @ x.T.astype("f8") + p)
    assert isinstance(found, GPUArray)
    # The tiny element counts where it stands alone, and is lost beside integers.
    np.testing.assert_allclose(np.tril(found), np.tril(exact), rtol=2**-23, atol=1e-12)
    assert ["LOWER" in kernel.defines for kernel, *_ in kernels] == [True]
    assert len(test_residuals.launches) == 1
