"""Sums of partial results on a GPU: bitwise those of NumPy, and nothing else is touched."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import padded

from multimm.gpu import library_gemm
from multimm.gpu.elementwise.reduce import add_partials

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

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


def test_other_orders():
    values = np.random.default_rng(1).standard_normal((5, 40, 70)).astype(np.float32)
    expected = library_gemm.add_partials(list(values))
    assert_bits(add_partials([cupy.asfortranarray(cupy.asarray(x)) for x in values]), expected, "")


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
