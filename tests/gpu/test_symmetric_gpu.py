"""Blocks on the diagonal of symmetric products, on a GPU: tiles of a triangle, packed and not."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import dask.array as da
import numpy as np
import pytest

import multimm
from multimm.gpu.emulated.configs import stretch_of
from multimm.gpu.emulated.pack import pack
from multimm.gpu.product import gemm
from multimm.graph.lowering import symmetric
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step
from multimm.planning.tiling.triangle import triangle

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

U = 2.0**-24
#: In units of |A| |A|^T: of FP16 parts, of a float32 dot product, of TF32.
PROMISES = {"float32": 24 * U, "ieee": 3000 * U, "tf32": 2.0**-9}
ROWS, K = 5000, 2900  # neither 128 nor 64 divides them


def normal(seed=0):
    """Rows of sizes of their own: each has another exponent when it is packed."""
    sizes = 2.0 ** (np.arange(ROWS, dtype="f4") % 9 - 4)
    return np.random.default_rng(seed).standard_normal((ROWS, K), dtype="f4") * sizes[:, None]


def assert_lower(found, x, added, promise):
    """Right below the diagonal; NaN is wrong."""
    wide = cupy.asarray(x).astype("f8")
    scale = cupy.abs(wide) @ cupy.abs(wide.T) + abs(added)
    off = cupy.abs(cupy.asarray(found).astype("f8") - (wide @ wide.T + added))
    assert bool((cupy.tril(off) <= (promise + 2 * U) * scale).all())


@pytest.mark.parametrize("precision", PROMISES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_below_the_diagonal_is_right(precision, turned, packed):
    x = normal()
    x[7, 11] = 1e-12  # no part carries it
    step = Step("float32", "float32", trans_a=turned, trans_b=not turned, precision=precision)
    block = cupy.asarray(np.ascontiguousarray(x.T) if turned else x)
    if packed and precision != "ieee":
        block = multiply.pack(block, role="a", step=step)
    partial = cupy.full((ROWS, ROWS), 3, "f4")
    assert_lower(symmetric.link_diagonal(block, step=step), x, 0, PROMISES[precision])
    found = symmetric.link_diagonal(block, partial, step=step)
    assert_lower(found, x, 3, PROMISES[precision])
    again = symmetric.link_diagonal(block, partial, step=step)
    assert bool((cupy.tril(found) == cupy.tril(again)).all())


@pytest.mark.parametrize("precision", PROMISES)
@pytest.mark.parametrize("size", [257, 1900, 4224])
def test_tiles_above_the_diagonal_are_not_computed(precision, size):
    """Of a few tiles, by slices of k; of many, by all of it."""
    x = normal(2)[:size]
    packed = precision != "ieee"
    a = pack(cupy.asarray(x), side="a", scheme=precision) if packed else cupy.asarray(x)
    b = replace(a, side="b") if packed else a.T
    out = cupy.full((size, size), 77, "f4")
    gemm(a, b, precision=precision, lower=True, out=out)
    assert_lower(out, x, 0, PROMISES[precision])
    if size == 4224:  # no slices
        assert int((out == 77).sum()) > size * (size - 512) // 2 - size * 128
    plain = gemm(a, b, precision=precision)
    if size == 4224:
        assert bool((cupy.tril(out) == cupy.tril(plain)).all())


def test_a_stack_of_triangles():
    x = np.random.default_rng(3).standard_normal((3, 700, 90), dtype="f4")
    found = gemm(cupy.asarray(x), cupy.asarray(x), trans_b=True, precision="ieee", lower=True)
    for one, wide in zip(found, x, strict=True):
        assert_lower(one, wide, 0, PROMISES["ieee"])


def test_float64_is_multiplied_in_pieces():
    x = normal()[:3000].astype("f8")
    found = symmetric.link_diagonal(cupy.asarray(x), step=Step("float64", "float64",
                                                                trans_b=True))  # fmt: skip
    np.testing.assert_allclose(np.tril(found.get()), np.tril(x @ x.T), rtol=1e-12, atol=1e-9)
    assert len(triangle(3000, "float64")) > 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_source_that_cannot_be_packed_is_multiplied_whole(packed):
    x = normal()
    x[5, 5] = np.inf
    step = Step("float32", "float32", trans_b=True)
    block = cupy.asarray(x)
    if packed:
        block = multiply.pack(block, role="a", step=step)
        assert block.raw is not None
    found = symmetric.link_diagonal(block, step=step)
    assert bool(cupy.isinf(found[5, 5]))
    finite = cupy.arange(ROWS) != 5
    assert bool(cupy.isfinite(cupy.tril(found)[finite][:, finite]).all())


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("turned", [False, True])
def test_packed_once_or_for_one_product_the_bits_are_the_same(precision, turned):
    x = normal(4)
    x[3, 5] = 1e-12
    step = Step("float32", "float32", trans_a=turned, trans_b=not turned, precision=precision)
    block = cupy.asarray(np.ascontiguousarray(x.T) if turned else x)
    found = symmetric.link_diagonal(block, step=step)
    first = symmetric.link_diagonal(multiply.pack(block, role="a", step=step), step=step)
    assert bool((cupy.tril(found) == cupy.tril(first)).all())


def test_slabs_in_turn_are_those_of_tasks_one_after_the_other():
    x = normal(5)
    step = Step("float32", "float32", trans_b=True)
    slabs = [cupy.asarray(x[:, s : s + 500]) for s in range(0, K, 500)]
    sums = None
    for slab in slabs:
        sums = symmetric.link_diagonal(slab, sums, step=step)
    *before, last = slabs
    found = multiply.multiply(
        last, None, verb=symmetric.link_diagonal, before=[[slab] for slab in before], step=step,
        inner=step, complete=True,
    )  # fmt: skip
    assert bool((cupy.tril(found) == cupy.tril(sums)).all())
    assert bool((found == found.T).all())


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("odd", [None, 1e-12, np.inf])
def test_stretches_of_a_long_k(precision, odd):
    """Three; of one an element is carried by no part, or has all of it multiplied in plain FP32."""
    side, k = 4096, 3 * 2**17 + 1000
    assert -(-k // stretch_of(side, side, k)) == 3
    x = cupy.random.default_rng(6).standard_normal((k, side), dtype="f4")
    if odd is not None:
        x[k // 2, 5] = odd
    step = Step("float32", "float32", trans_a=True, precision=precision)
    found = symmetric.link_diagonal(x, step=step)
    plain = multiply.multiply(x, x.copy(), step=step)
    rows = [0, 5, 6, side - 1]
    few = x[:, rows].astype("f8")
    finite = [row for row in rows if odd != np.inf or row != 5]
    for result in (found[rows][:, rows], plain[rows][:, rows]):
        at = cupy.asarray([rows.index(row) for row in finite])
        wide = few[:, at]
        off = abs(cupy.tril(result[at][:, at].astype("f8") - wide.T @ wide))
        promise = max(PROMISES[precision], PROMISES["ieee"] if odd == np.inf else 0)
        assert bool((off <= promise * (abs(wide).T @ abs(wide))).all())
        assert bool(cupy.isfinite(result[1, 1])) == (odd != np.inf)


def test_a_whole_product_is_symmetric():
    x = normal(1)
    a = da.from_array(x, chunks=(ROWS // 2, K)).map_blocks(cupy.asarray)
    c = multimm.matmul(a, a.T, blocks=ROWS).compute(scheduler="sync")
    assert bool((c == c.T).all())
    assert_lower(c, x, 0, PROMISES["ieee"])
