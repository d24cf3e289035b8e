"""Products of narrow integers on a GPU: exact, on the tensor cores where FP16 carries them."""

from __future__ import annotations

from importlib.util import find_spec

import dask.array as da
import numpy as np
import pytest
from gpu_arrays import padded
from small import numbers

import multimm
from multimm.gpu import last_choice
from multimm.gpu.emulated.configs import entries_for
from multimm.gpu.integers import in_bytes, tensor_cores
from multimm.gpu.runtime.launch import device_of

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

NARROW = ("bool", "int8", "uint8", "int16", "uint16")


def exact(x, y):
    """In 64 bits, by float64 where no sum can leave its integers."""
    most = float(np.abs(x.astype("f8")).max(initial=0) * np.abs(y.astype("f8")).max(initial=0))
    assert most * x.shape[-1] < 2**53
    return (x.astype("f8") @ y.astype("f8")).astype("i8")


def same(found, expected, dtype):
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(cupy.asnumpy(found), expected.astype(dtype))


def on_tensor_cores():
    return bool(entries_for(device_of(0).limits, 1))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("a", NARROW)
@pytest.mark.parametrize("b", NARROW)
def test_all_that_a_dtype_holds(a, b, dtype):
    x, y = numbers((300, 2500), a), numbers((2500, 170), b, 1)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype=dtype), exact(x, y), dtype)
    if "16" not in a + b and on_tensor_cores():
        assert last_choice().precision == "exact"


@pytest.mark.parametrize(("a", "b"), [("int8", "int8"), ("uint8", "uint8"), ("int8", "uint8")])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 300, 40), (129, 65, 1023), (640, 1500, 2049),
                                   (1300, 1700, 1024), (2000, 3000, 777)])  # fmt: skip
def test_odd_shapes_and_places(a, b, shape):
    m, n, k = shape
    x, y = numbers((m, k), a), numbers((k, n), b, 1)
    for extra, offset in ((0, 0), (3, 1), (4, 2)):
        left, right = padded(x, extra, offset, fill=99)[0], padded(y, extra, offset, fill=99)[0]
        same(multimm.matmul(left, right, dtype="int32"), exact(x, y), "i4")
    same(multimm.gemm(1, cupy.asarray(x.T.copy()), cupy.asarray(y.T.copy()), trans_a=True,
                      trans_b=True, dtype="float32"), exact(x, y), "f4")  # fmt: skip
    fortran = cupy.asarray(np.asfortranarray(x)), cupy.asarray(np.asfortranarray(y))
    same(multimm.matmul(*fortran, dtype="int32"), exact(x, y), "i4")
    same(multimm.matmul(fortran[0][:, ::-1], fortran[1][::-1], dtype="int32"), exact(x, y), "i4")


@pytest.mark.parametrize(("a", "b"), [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("side", [100, 2000])  # in slices of k, and not
def test_the_largest_sums(a, b, side):
    """2^24 in the tensor cores, 2^31 and more in all."""
    k = 140_000 if side == 100 else 5000
    x = cupy.full((side, k), np.iinfo(a).min or np.iinfo(a).max, a)
    y = cupy.full((k, side), np.iinfo(b).min or np.iinfo(b).max, b)
    whole = np.full((side, side), int(x[0, 0]) * int(y[0, 0]) * k)
    assert abs(whole[0, 0]) > (2**31 if side == 100 else 2**24)
    for dtype in ("int32", "int64", "float32", "float64"):
        same(multimm.matmul(x, y, dtype=dtype), whole, dtype)


def test_int16_up_to_what_fp16_carries():
    for most, there in ((512, True), (2048, False), (2049, False)):
        x, y = numbers((200, 3000), "int16", 0, most), numbers((3000, 300), "int16", 1, most)
        x[0, 0] = y[0, 0] = most
        multimm.matmul(cupy.ones((4, 4), "f4"), cupy.ones((4, 4), "f4"), precision="ieee")
        same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="int64"), exact(x, y), "i8")
        assert (last_choice().precision == "exact") == (there and on_tensor_cores())
    x, y = numbers((200, 3000), "int16", 0, 2048), numbers((3000, 300), "int8", 1)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="int32"), exact(x, y), "i4")
    assert not on_tensor_cores() or last_choice().precision == "exact"


@pytest.mark.parametrize(
    ("a", "b"), [("int16", "int16"), ("uint16", "int16"), ("uint16", "uint16"), ("int16", "int8")]
)
def test_large_numbers_of_16_bits_in_bytes(monkeypatch, a, b):
    monkeypatch.setattr(in_bytes, "LARGE", 0)
    x, y = numbers((2100, 2200), a), numbers((2200, 2000), b, 1)
    x[7], y[:, 3] = (np.iinfo(kind).min or np.iinfo(kind).max for kind in (a, b))
    left, right = cupy.asarray(np.asfortranarray(x)), cupy.asarray(y)
    for dtype in ("int32", "int64", "float64", "float32"):
        same(multimm.matmul(left, right, dtype=dtype), exact(x, y), dtype)
        assert last_choice().precision == "exact" or not on_tensor_cores()
    p = numbers((2100, 2000), "int32", 2, 1000)
    found = multimm.gemm(2, left, right, -3, cupy.asarray(p), dtype="int64")
    same(found, 2 * exact(x, y) - 3 * p, "i8")


def test_a_symmetric_product_in_bytes(monkeypatch):
    monkeypatch.setattr(in_bytes, "LARGE", 0)
    x = numbers((2500, 2400), "int16")
    lazy = da.from_array(cupy.asarray(x), chunks=(1250, 2400), asarray=False)
    found = multimm.matmul(lazy.T, lazy, dtype="int64").compute(scheduler="sync")
    same(found, exact(x.T, x), "i8")


def test_every_configuration(monkeypatch):
    limits = device_of(0).limits
    x, y = numbers((700, 3000), "int8"), numbers((3000, 900), "uint8", 1)
    for config in (*tensor_cores.WGMMA_CONFIGS, *tensor_cores.MMA_CONFIGS):
        if config.runs_on(limits):
            monkeypatch.setattr(tensor_cores, "config_for", lambda *_, made=config: made)
            same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="int32"), exact(x, y), "i4")
            same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="f4"), exact(x, y), "f4")


def test_wraps_around_as_numpy_does_without_a_dtype():
    x, y = numbers((200, 900), "int8"), numbers((900, 300), "int8", 1)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y)), exact(x, y), "i1")
    wide = x.astype("i4") * 2**20
    same(
        multimm.matmul(cupy.asarray(wide), cupy.asarray(y.astype("i4"))),
        wide @ y.astype("i4"),
        "i4",
    )


def test_gemm_in_blocks_with_scalars_and_c():
    x, y = numbers((500, 1200), "int8"), numbers((1200, 400), "int8", 1)
    c = numbers((500, 400), "int32", 2, 1000)
    lazy = [da.from_array(cupy.asarray(z), chunks=300, asarray=False) for z in (x, y, c)]
    for dtype, alpha, beta in (("int32", 2, -3), ("float32", 0.5, 1.5), ("float64", -0.25, 1)):
        found = multimm.gemm(alpha, lazy[0], lazy[1], beta, lazy[2], dtype=dtype, blocks=256,
                             slabs=500, p_k=2).compute(scheduler="sync")  # fmt: skip
        same(found, alpha * exact(x, y) + beta * c, dtype)


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64"])
def test_a_symmetric_product(dtype):
    x = numbers((3000, 700), "int8")
    lazy = da.from_array(cupy.asarray(x), chunks=(1000, 350), asarray=False)
    found = multimm.matmul(lazy.T, lazy, dtype=dtype).compute(scheduler="sync")
    same(found, exact(x.T, x), dtype)


def test_stacks():
    x, y = numbers((3, 40, 900), "uint8"), numbers((2, 1, 900, 50), "int8", 1)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="int32"), exact(x, y), "i4")
    x, y = numbers((2, 2100, 2200), "int8"), numbers((2200, 2000), "int8", 1)
    same(multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="float32"), exact(x, y), "f4")
    assert not on_tensor_cores() or last_choice().precision == "exact"


def test_float64_operands_as_float32():
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((700, 900)), rng.standard_normal((900, 800))
    found = multimm.matmul(cupy.asarray(x), cupy.asarray(y), dtype="float32")
    assert last_choice().precision == "float32"
    assert multimm.verify(x, y, cupy.asnumpy(found), dtype="float32")


def test_verify():
    x, y = cupy.asarray(numbers((700, 900), "int8")), cupy.asarray(numbers((900, 800), "int8", 1))
    for dtype in ("int32", "float32"):
        c = multimm.matmul(x, y, dtype=dtype)
        assert multimm.verify(x, y, c, dtype=dtype)
        c[123, 45] += 1
        assert not multimm.verify(x, y, c, dtype=dtype)
