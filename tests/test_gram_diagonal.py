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
from multimm.gpu.arch import tiles_of
from multimm.gpu.emulated import outliers
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.runtime import launch
from multimm.gpu.simt import split_k
from multimm.graph.block_task import BlockTask
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


def test_a_large_block_is_nearly_halved():
    assert computed(16384) == computed(16384, "float32") == 16384**2 * (1 + 1 / 64) / 2
    assert computed(16384, "complex64") == 16384**2 * (1 + 1 / 16) / 2
    assert computed(256) == 256**2


@pytest.mark.parametrize("size", [2048, 2900, 8192, 16384])
@pytest.mark.parametrize(
    "edges", [(128, 64), (128, 128), (128, 256), (256, 128), (64, 128)], ids=str
)
def test_kernels_compute_about_as_much(size, edges):
    tiles = tiles_of(size, size, *edges, lower=True) * edges[0] * edges[1]
    assert abs(tiles / computed(size) - 1) < 0.09


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


def test_one_operand_block_is_all_that_a_task_on_the_diagonal_asks_for():
    a = da.from_array(integers((40, 20)), chunks=20)
    made = dict(multimm.matmul(a, a.T, blocks=20, slabs=20).dask)
    halves = [t for t in made.values()
              if isinstance(t, BlockTask) and t.func is symmetric.multiply_diagonal]  # fmt: skip
    assert len(halves) == 2
    assert all(len(task.dependencies) == 1 for task in halves)


@pytest.mark.parametrize("p_k", [1, 2])
def test_a_block_on_the_diagonal_is_mirrored_once_by_the_task_that_completes_it(p_k):
    a = da.from_array(integers((40, 20)), chunks=(20, 5))
    made = dict(multimm.matmul(a, a.T, blocks=20, slabs=5, p_k=p_k).dask)
    tasks = {key: task for key, task in made.items() if isinstance(task, BlockTask)}
    completing = {
        key[1:]
        for key, task in tasks.items()
        if task.func is symmetric.add_diagonal or task.kwargs.get("complete")
    }
    assert completing == {(0, 0), (1, 1)}
    products = [t for t in tasks.values() if t.func is symmetric.multiply_diagonal]
    assert len(products) == 2 * 4
    assert sum("complete" in task.kwargs for task in products) == (2 if p_k == 1 else 0)


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


def test_what_is_not_packed_yet_is_given_for_both_sides(kernels, monkeypatch):
    """So that whoever packs it can do so once."""
    multiplied = []
    monkeypatch.setattr(symmetric, "gemm", lambda a, b, *_, **more: multiplied.append((a, b, more)))
    stored = gpu(integers((20, 30)))
    symmetric.link_diagonal(stored, step=Step("float32", "float32", trans_a=True))
    ((left, right, more),) = multiplied
    assert left is right is stored
    assert more["lower"]


def test_a_block_that_keeps_its_source_is_turned_for_the_other_side(monkeypatch):
    x = np.full((9, 5), np.inf, "f4")
    block = PackedBlock(9, 5, "a", "float32", nonfinite=45, raw=gpu(x))
    seen = []
    monkeypatch.setattr(symmetric, "gemm", lambda *given, **more: seen.append((given, more)))
    symmetric.link_diagonal(block, step=Step("float32", "float32"))
    (((left, right, _), more),) = seen
    assert (left.side, right.side, more["lower"]) == ("a", "b", True)
    assert right.raw.shape == (5, 9)


def test_what_has_no_kernel_of_ours_is_multiplied_in_sub_blocks(small_sub_blocks, monkeypatch):
    """On a GPU too: blocks of float64."""
    x = integers((20, 6), dtype="f8")
    seen = []

    def gemm(a, b, partial, *, step, tuned):
        seen.append((a.shape, b.shape))
        return a @ b.T

    monkeypatch.setattr(symmetric, "gemm", gemm)
    monkeypatch.setattr(symmetric, "module_of", lambda a: np)
    found = symmetric.link_diagonal(gpu(x), step=Step("float64", "float64", trans_b=True))
    np.testing.assert_array_equal(np.tril(found), np.tril(x @ x.T))
    assert len(seen) == len(triangle(20, "float64")) > 1


def test_sub_blocks_of_other_dtypes_are_large():
    """A library is to fill a GPU with them."""
    x, seen = np.zeros((2048, 1)), []
    step = Step("float64", "float64", trans_b=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "gemm", lambda a, b, *_, **__: seen.append(len(a)) or a @ b.T)
        symmetric.multiply_diagonal(x, step=step)
    assert seen == [1024] * 3
