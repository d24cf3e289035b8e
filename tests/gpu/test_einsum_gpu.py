"""einsum and its like on CuPy arrays and on Dask arrays of CuPy blocks, no cluster."""

from __future__ import annotations

from importlib.util import find_spec

import dask.array as da
import numpy as np
import pytest
from gpu_arrays import chunked, same
from small import integers

import multimm
from multimm.graph.block_dots import dot

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("in_this_thread")]


SUBSCRIPTS = {
    "txy,tuv->xyuv": ((30, 7, 11), (30, 5, 6)),
    "tzxy,xyp->tzp": ((9, 4, 12, 10), (12, 10, 17)),
    "mbej,aeim->abij": ((6, 9, 8, 5), (7, 8, 4, 6)),
    "ztx,ztu->zxu": ((5, 40, 9), (5, 40, 8)),
    "ij,jk,kl->il": ((20, 30), (30, 10), (10, 25)),
    "iij,jq->i": ((9, 9, 12), (12, 4)),
    "ij,ij->ij": ((9, 12), (9, 12)),
    "i,j->ij": ((9,), (12,)),
    "ij->j": ((9, 12),),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int32"])
@pytest.mark.parametrize("subscripts", SUBSCRIPTS)
def test_einsum_is_numpys(subscripts, dtype):
    arrays = [integers(shape, n, dtype) for n, shape in enumerate(SUBSCRIPTS[subscripts])]
    expected = np.einsum(subscripts, *arrays)
    same(multimm.einsum(subscripts, *map(cupy.asarray, arrays)), expected)
    found = multimm.einsum(subscripts, *(chunked(x, 4) for x in arrays))
    assert isinstance(found._meta, cupy.ndarray)
    same(found.compute(), expected)


@pytest.mark.parametrize("asked", ["float32", "int32", "complex64"])
@pytest.mark.parametrize("subscripts", ["ij->ji", "ij->j", "ii->i", "ij,ij->ij", "ij,kl->ijkl"])
def test_what_is_no_product_has_the_dtype_asked_for_in_its_blocks(subscripts, asked):
    x = np.random.default_rng(4).integers(-128, 128, (7, 7)).astype("int8")
    arrays = [x] * (subscripts.count(",") + 1)
    expected = np.einsum(subscripts, *(x.astype("int64") for x in arrays)).astype(asked)
    same(multimm.einsum(subscripts, *map(cupy.asarray, arrays), dtype=asked), expected)
    found = multimm.einsum(subscripts, *(chunked(x, 4) for x in arrays), dtype=asked)
    assert found.dtype == asked
    same(found.compute(), expected)


def test_empty_chunks_beside_others_are_no_elements():
    x = integers((1, 12), 0, "float32")
    for first in ((0, 1), (1, 0)):
        given = chunked(x, (first, (5, 0, 7)))
        same(multimm.outer(given, given).compute(), np.outer(x, x))
        same(multimm.einsum("ij,kj->ikj", given, given).compute(), x[:, None] * x[None])
        stack = multimm.matmul(given[:, :, None], chunked(x.T, (6, 1))[:, None])
        same(stack.compute(), x[:, :, None] @ x.T[:, None])


def test_tensordot_inner_vecdot_and_outer_are_numpys():
    x, y = integers((6, 20, 30), 0, "float32"), integers((30, 20, 8), 1, "float32")
    axes = ((1, 2), (1, 0))
    same(multimm.tensordot(chunked(x, 7), chunked(y, 9), axes).compute(), np.tensordot(x, y, axes))
    same(multimm.inner(chunked(x, 7), chunked(x[0], 9)).compute(), np.inner(x, x[0]))
    same(multimm.vecdot(chunked(x, 7), chunked(x, 9)).compute(), np.vecdot(x, x))
    same(multimm.outer(chunked(x[0], 200), chunked(x[1], 300)).compute(), np.outer(x[0], x[1]))
    same(multimm.tensordot(cupy.asarray(x), cupy.asarray(y), axes), np.tensordot(x, y, axes))


def test_large_blocks_keep_the_bound_of_fp32():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((32, 64, 1024)).astype("float32") for _ in "ab")
    found = multimm.einsum("atk,btk->ab", chunked(x, (16, 32, 1024)), chunked(y, (16, 32, 1024)))
    flat = [v.reshape(32, -1).astype(float) for v in (x, y)]
    bound = (flat[0].shape[1] + 3) * 2.0**-24 * (abs(flat[0]) @ abs(flat[1]).T)
    assert (abs(cupy.asnumpy(found.compute()) - flat[0] @ flat[1].T) <= bound).all()


def test_accelerate_takes_them_and_reports_it():
    x = chunked(integers((40, 30), 0, "float32"), 16)
    with multimm.accelerate() as report:
        found = da.einsum("ij,kj->ik", x, x), da.tensordot(x, x, ((0,), (0,))), np.inner(x, x)
    assert [call.function for call in report.taken] == ["einsum", "tensordot", "inner"]
    y = integers((40, 30), 0, "float32")
    for result, expected in zip(found, (y @ y.T, y.T @ y, y @ y.T), strict=True):
        same(result.compute(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex64"])
def test_products_of_blocks_inside_of_tasks_are_ours(dtype):
    x, y = integers((700, 900), 0, dtype), integers((900, 800), 1, dtype)
    same(dot(cupy.asarray(x), cupy.asarray(y)), np.dot(x, y))
    same(dot(cupy.asarray(x), cupy.asarray(y[:, 0])), np.dot(x, y[:, 0]))


def test_tsqr_on_gpu_blocks():
    x = np.random.default_rng(0).standard_normal((4000, 64))
    with multimm.accelerate() as report:
        q, r = da.linalg.tsqr(chunked(x, (1000, 64)))
    assert "product of blocks" in report.taken[0].note
    back = cupy.asnumpy((q @ r).compute())
    np.testing.assert_allclose(back, x, rtol=1e-10, atol=1e-10)
