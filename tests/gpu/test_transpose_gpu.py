"""Transposes on a GPU, to the byte: every kernel and configuration, edges, gaps, large offsets."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import pytest

from multimm.gpu.elementwise import transpose as launcher
from multimm.gpu.elementwise.transpose import TransposeConfig, config_for, transpose
from multimm.gpu.runtime import launch_cache

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

EDGES = (1, 2, 3, 7, 31, 32, 33, 56, 57, 63, 64, 65, 127, 128, 129, 255, 257, 1000)
CONFIGS = sorted(
    {config_for(size, alignment, rows, rows)
     for size, alignment, rows in itertools.product(
         (1, 2, 4, 8, 16, 3, 12, 40), (1, 2, 4, 8, 16), (20, 200, 5000))},
    key=str,
)  # fmt: skip


def inside(shape: tuple[int, ...], itemsize: int, extra: int, offset: int):
    """A random array inside a larger buffer, as bytes: the view, and the whole buffer."""
    *batch, rows, cols = shape
    size = offset + int(np.prod(batch, dtype=int)) * rows * (cols + extra) + 1
    whole = cupy.random.randint(0, 256, (size, itemsize), dtype=np.uint8)
    view = whole[offset : size - 1].reshape(*batch, rows, cols + extra, itemsize)[..., :cols, :]
    return view, whole


def typed(raw, itemsize: int):
    """Bytes as elements: of the dtypes that CuPy has, the one of that size."""
    kinds = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
    return raw.view(kinds[itemsize])[..., 0]


@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if c.word_bytes * c.words in (1, 2, 4, 8, 16)], ids=str
)
def test_every_configuration(config, monkeypatch):
    launch_cache.forget()
    monkeypatch.setattr(launcher, "config_for", lambda *_: config)
    itemsize, step = config.word_bytes * config.words, 1 if config.skew else config.vector
    rng = np.random.default_rng(3)
    for rows, cols in zip(*(rng.permutation(EDGES * 2) for _ in "ab"), strict=True):
        batch = int(rng.integers(1, 4))
        rows = -(-int(rows) // step) * step  # the rows of the result
        extra = -int(cols) % step + step * int(rng.integers(0, 3))
        offset = step * int(rng.integers(0, 9))
        a, _ = inside((batch, rows, int(cols)), itemsize, extra, offset)
        found = transpose(typed(a, itemsize))
        expected = cupy.ascontiguousarray(a.swapaxes(1, 2)).reshape(batch, int(cols), -1)
        assert bool((found.view(np.uint8) == expected).all()), f"{rows=} {cols=} {extra=} {offset=}"
    launch_cache.forget()


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", "i4", "f4", "f8", "c8", "c16"])
def test_every_dtype_by_default(dtype):
    rng = np.random.default_rng(37)
    for rows, cols in zip(*(rng.permutation(EDGES) for _ in "ab"), strict=True):
        values = rng.integers(0, 2 if dtype == "?" else 100, (rows, cols + 3)).astype(dtype)
        for view in (cupy.asarray(values)[:, 3:], cupy.ascontiguousarray(cupy.asarray(values))):
            assert bool((transpose(view) == view.T).all()), f"{dtype} {rows}x{cols}"


def test_stacks_orders_and_slices():
    x = cupy.arange(3 * 4 * 50 * 70, dtype=np.float64).reshape(3, 4, 50, 70)
    for view in (x, x.swapaxes(-1, -2), x[::2, :, 3:40, 5:], x[..., ::-2], x.transpose(1, 2, 0, 3)):
        result = transpose(view)
        assert result.flags.c_contiguous
        assert bool((result == view.swapaxes(-1, -2)).all())


@pytest.mark.parametrize(("rows", "cols"), [(46_341, 46_349), (46_336, 46_400)])
def test_more_than_2_to_31_elements(rows, cols):
    if cupy.cuda.Device().mem_info[0] < 3 * rows * cols * 4:
        pytest.skip("needs 26 GB of free GPU memory")
    a = cupy.arange(rows * cols, dtype=np.uint32).reshape(rows, cols)
    turned = transpose(a)
    for i in (0, 1, rows // 2, rows - 1):
        assert bool((turned[:, i] == a[i]).all())
    assert bool((turned[cols - 1] == a[:, cols - 1]).all())


def test_rows_and_columns():
    for shape in ((1, 70_001), (70_001, 1), (3, 1, 700), (5, 700, 1)):
        x = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
        for given in (cupy.asarray(x), cupy.asfortranarray(cupy.asarray(x))):
            result = transpose(given)
            assert result.flags.c_contiguous
            np.testing.assert_array_equal(cupy.asnumpy(result), x.swapaxes(-1, -2))


def test_the_callers_stream_is_used():
    a = cupy.random.standard_normal((513, 700), dtype=np.float32)
    expected = a.T.copy()
    cupy.cuda.Stream.null.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out = transpose(a)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert bool((out == expected).all())


def test_subnormal_and_special_values_keep_their_bits():
    bits = cupy.asarray(np.array([[1, 0x7FA00001, 0xFF800000], [0x80000000, 0x7FFFFFFF, 3]], "u4"))
    assert bool((transpose(bits.view(np.float32)).view(np.uint32) == bits.T).all())
    assert TransposeConfig(4).words == 1
