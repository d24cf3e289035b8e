"""Transposes, sums and copies on a GPU, to the byte: edges, gaps, large offsets."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import assert_exact, padded, pieces_of

from multimm.gpu import library_gemm
from multimm.gpu.elementwise import transpose as launcher
from multimm.gpu.elementwise.batched_copy import CAPACITY, Move, copy_all
from multimm.gpu.elementwise.reduce import add_partials
from multimm.gpu.elementwise.transpose import TransposeConfig, config_for, transpose
from multimm.gpu.runtime import launch_cache
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.grid import regular

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


# Sums of partial results: bitwise those of NumPy ----------------------------------------


SHAPES = ((1, 1), (3, 5), (7, 255), (5, 256), (2, 1024), (3, 1025), (33, 4099), (2, 3, 70))


def assert_bits(actual, expected: np.ndarray, what: str) -> None:
    actual = cupy.asnumpy(actual)
    assert actual.dtype == expected.dtype, what
    bits = f"u{actual.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(bits), np.ascontiguousarray(expected).view(bits), what
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11, 64, 67])
def test_bits_of_numpy(count):
    rng = np.random.default_rng(count)
    scalars = [(1, 0), (0.3, -0.7), (0, 0.1), (-1, 1), (0, 0)]
    places = [(0, 0), (4, 4), (3, 1)]
    for number, (shape, (extra, offset)) in enumerate(itertools.product(SHAPES, places)):
        alpha, beta = scalars[number % len(scalars)]
        values = [rng.standard_normal(shape).astype("f4") for _ in range(count + 1)]
        expected = library_gemm.add_partials(values[:-1], alpha=alpha, beta=beta, c=values[-1])
        for i, used in enumerate([alpha] * count + [beta]):
            if used == 0:
                values[i][...] = np.nan
        *parts, c = (padded(x, extra, offset)[0] for x in values)
        what = f"{shape=} {extra=} {offset=} {alpha=} {beta=}"
        assert_bits(add_partials(parts, alpha=alpha, beta=beta, c=c), expected, what)


def test_subnormals_and_signed_zeros_are_kept():
    tiny = cupy.asarray(np.array([[2.0**-130, -0.0, 2.0**-126, np.inf]], np.float32))
    zero = cupy.asarray(np.array([[2.0**-131, -0.0, -(2.0**-127), -np.inf]], np.float32))
    for alpha, beta in ((1.0, 0.0), (0.5, 0.5), (0.0, 0.5)):
        with np.errstate(invalid="ignore"):
            expected = library_gemm.add_partials(
                [cupy.asnumpy(tiny), cupy.asnumpy(zero)], alpha=alpha, beta=beta,
                c=cupy.asnumpy(zero),
            )  # fmt: skip
        result = cupy.asnumpy(add_partials([tiny, zero], alpha=alpha, beta=beta, c=zero))
        finite = ~np.isnan(expected)
        assert_bits(cupy.asarray(result[finite]), expected[finite], f"{alpha} {beta}")
        assert (np.isnan(result) == ~finite).all()


def test_many_matrices_and_large_offsets():
    a = cupy.arange(70_001 * 2, dtype=np.float32).reshape(-1, 2, 1)
    wide = cupy.zeros((70_001, 2, 3), np.float32)[..., :1]
    wide[...] = a
    assert bool((add_partials([wide, wide]) == 2 * a).all())
    if cupy.cuda.Device().mem_info[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    size = 2**31 + 13
    long = cupy.zeros(size, np.float32)
    long[-5:] = cupy.arange(5)
    made = add_partials([long, long])
    assert cupy.asnumpy(made[-6:]).tolist() == [0, 0, 2, 4, 6, 8]
    assert float(made[:1000].sum()) == 0


# Many pieces copied: every element at its place, and nothing else is touched ------------


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
