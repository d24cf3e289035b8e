"""Integers on the tensor cores: what is launched, on kernels that do the same in NumPy."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from small import numbers
from stand_in import LAYOUTS, Kernel, gpu, laid_out

from multimm.gpu import last_choice
from multimm.gpu.arch import ARCHITECTURES, limits_for
from multimm.gpu.integers import in_bytes, int8_cores, tensor_cores
from multimm.gpu.integers.tensor_cores import config_for, plan_for
from multimm.gpu.kernel_selection import SPLIT, Choice
from multimm.graph.lowering.symmetric import link_diagonal
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step
from multimm.planning import problem

SLAB = 64
BYTES = "tensor cores multiply the bytes of integers of 16 bits"


pytestmark = pytest.mark.usefixtures("gpu_in_numpy")


@pytest.fixture(params=[True, False], ids=["INT8", "FP16"], autouse=True)
def int8(request, monkeypatch):
    """Whether the GPU multiplies bytes."""
    if not request.param:
        monkeypatch.setattr(int8_cores, "takes", lambda a, b: False)
    return request.param


def of(*entries):
    return [args for kernel, _, _, args in Kernel.launches if kernel.name in entries]


def packed():
    return of("integer_pack", "byte_pack")


def products_run():
    return of("sgemm_split", "byte_mma")


def product(x, y, *, sums="int32", dtype=None, trans=(False, False), layout="C", **more):
    stored = [z.swapaxes(-1, -2) if flag else z for z, flag in zip((x, y), trans, strict=True)]
    step = Step(sums, dtype or sums, *trans)
    return multiply.gemm(*(laid_out(z, layout) for z in stored), step=step, **more)


def same(found, expected, dtype):
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(found), expected.astype(dtype))


@pytest.mark.parametrize("a", ["bool", "int8", "uint8"])
@pytest.mark.parametrize("b", ["bool", "int8", "uint8"])
@pytest.mark.parametrize("sums", ["int8", "int32", "uint32", "int64", "uint64", "float64"])
def test_products_are_exact(a, b, sums):
    x, y = numbers((150, 700), a), numbers((700, 70), b, 1)
    same(product(x, y, sums=sums), x.astype("i8") @ y.astype("i8"), sums)
    assert last_choice().precision == "exact"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trans", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_operands_as_they_lie(layout, trans, dtype):
    x, y = numbers((40, 130), dtype, most=500), numbers((130, 33), dtype, 1, most=500)
    found = product(x, y, trans=trans, layout=layout)
    same(found, x.astype("i8") @ y.astype("i8"), "i4")
    assert len(packed()) == 2


@pytest.mark.parametrize(
    ("sums", "dtype", "rounded"),
    [("int32", "float32", True), ("int32", "int32", False), ("float64", "float32", False)],
)
def test_the_kernel_rounds_what_is_to_be_float32(sums, dtype, rounded):
    x, y = numbers((1000, 1200), "uint8"), numbers((1200, 700), "uint8", 1)
    whole = (x.astype(float) @ y).astype("i8")  # by BLAS: exact below 2**53
    assert whole.max() > 2**24
    same(product(x, y, sums=sums, dtype=dtype), whole, dtype)
    assert [bool(args[-1]) for args in products_run()] == [rounded]


def test_partial_sums_scalars_and_c():
    x, y = numbers((30, 200), "int8"), numbers((200, 20), "int8", 1)
    whole = x.astype("i8") @ y.astype("i8")
    p, c = numbers((30, 20), "int32", 2), numbers((30, 20), "int32", 3, most=99)
    for kind in ("int32", "int64", "float64"):
        same(product(x, y, sums=kind, partial=gpu(p.astype(kind))), (whole + p).astype(kind), kind)
    step = Step("int32", "float32", alpha=0.5, beta=2.0)
    found = multiply.gemm(gpu(x), gpu(y), c=gpu(c), step=step)
    same(found, 0.5 * whole + 2 * c, "f4")
    assert not any(args[-1] for args in products_run())


def test_long_sums_are_cut_where_int32_ends(monkeypatch, int8):
    """Also into stretches, so that packed operands are not all there at a time: not of bytes."""
    k = 140_000
    x, y = np.full((3, k), -128, "i1"), np.full((k, 2), -128, "i1")
    for sums in ("int64", "float64"):
        Kernel.forget()
        same(product(x, y, sums=sums), np.full((3, 2), k * 2**14), sums)
        assert len(packed()) == 2 * ceil(k / 131_008)
    Kernel.forget()
    monkeypatch.setattr(tensor_cores, "stretch_of", lambda m, n, k: 128 * 400)
    same(product(x, y), np.full((3, 2), k * 2**14).astype("i4"), "i4")
    same(product(x, y, partial=gpu(np.full((3, 2), 5, "i4"))),
         np.full((3, 2), k * 2**14 + 5).astype("i4"), "i4")  # fmt: skip
    assert len(packed()) == 2 * 2 * (1 if int8 else 3)


def test_few_tiles_are_summed_in_slices():
    x, y = numbers((60, 9000), "int8"), numbers((9000, 50), "int8", 1)
    p = gpu(numbers((60, 50), "int32", 2))
    whole = x.astype("i8") @ y.astype("i8")
    same(product(x, y, partial=p), (whole + p).astype("i4"), "i4")
    assert all(args[3] > 0 and args[-1] == 0 for args in products_run())
    same(product(x, y, dtype="float32"), whole, "f4")


def test_stacks_of_large_matrices_one_by_one_and_of_small_ones_by_a_library(monkeypatch):
    x, y = numbers((2, 1, 20, 90), "int8"), numbers((3, 90, 30), "uint8", 1)
    whole = x.astype("i8") @ y.astype("i8")
    same(product(x, y), whole, "i4")
    assert not Kernel.launches
    monkeypatch.setattr(tensor_cores, "ALONE", 0)
    same(product(x, y), whole, "i4")
    same(product(x, y, dtype="float32"), whole, "f4")
    p = numbers((2, 3, 20, 30), "int32", 2, most=9)
    same(product(x, y, sums="float64", partial=gpu(p.astype("f8"))), whole + p, "f8")
    assert len(products_run()) == 3 * 6


def test_numbers_that_fp16_does_not_carry_go_elsewhere():
    for most, there in ((512, True), (2048, False), (2049, False)):
        Kernel.forget()
        x, y = numbers((60, 300), "int16", most=most), numbers((300, 50), "int16", 1, most=most)
        x[0, 0] = y[0, 0] = most
        same(product(x, y), x.astype("i8") @ y.astype("i8"), "i4")
        assert bool(Kernel.launches) == there
    x, y = numbers((60, 300), "int16", most=2048), numbers((300, 50), "int8")
    same(product(x, y), x.astype("i8") @ y, "i4")
    assert products_run()[-1][-2] == 1  # every slab
    Kernel.forget()
    wide = numbers((60, 300), "int32", most=3)
    same(
        product(wide, numbers((300, 50), "int8")),
        wide.astype("i8") @ numbers((300, 50), "int8"),
        "i4",
    )
    assert not Kernel.launches


@pytest.mark.parametrize("sums", ["int16", "int32", "uint32", "int64", "uint64", "float64"])
@pytest.mark.parametrize(
    ("a", "b", "products"),
    [("int16", "int16", 4), ("uint16", "uint16", 4), ("int16", "uint16", 4), ("int16", "int8", 2),
     ("uint8", "uint16", 2), ("bool", "int16", 2)],
)  # fmt: skip
def test_large_numbers_of_16_bits_are_multiplied_as_bytes(monkeypatch, int8, a, b, products, sums):
    monkeypatch.setattr(in_bytes, "LARGE", 0)
    x, y = numbers((60, 300), a), numbers((300, 50), b, 1)
    x[0], y[:, 0] = (z.min() if z.dtype.kind == "i" else z.max() for z in (x, y))  # the largest
    whole = x.astype("i8") @ y.astype("i8")
    same(product(x, y, sums=sums), whole, sums)
    assert len(products_run()) == products
    assert last_choice() == Choice("byte_mma" if int8 else SPLIT, "exact", BYTES)
    p = gpu(numbers((60, 50), "int16", 2).astype(sums))
    same(product(x, y, sums=sums, partial=p), whole + p.astype("i8"), sums)


@pytest.mark.parametrize("trans", [(False, False), (False, True), (True, False), (True, True)])
def test_bytes_of_operands_as_they_lie(monkeypatch, trans):
    monkeypatch.setattr(in_bytes, "LARGE", 0)
    x, y = numbers((40, 130), "int16"), numbers((130, 33), "int16", 1)
    for layout in LAYOUTS:
        same(product(x, y, sums="int64", trans=trans, layout=layout), x.astype("i8") @ y, "i8")


def test_what_fp16_carries_beside_bytes_stays_whole(monkeypatch):
    monkeypatch.setattr(in_bytes, "LARGE", 0)
    for most, products in ((1028, 2), (1029, 4)):
        Kernel.forget()
        x, y = numbers((40, 130), "int16", most=most), numbers((130, 33), "int16", 1)
        x[0, 0] = most
        same(product(x, y, sums="int64"), x.astype("i8") @ y, "i8")
        assert len(products_run()) == products


def test_half_of_a_symmetric_product_of_bytes(monkeypatch):
    monkeypatch.setattr(in_bytes, "LARGE", 0)
    x = numbers((300, 140), "int16")
    step = Step("int64", "int64", False, True)
    same(link_diagonal(gpu(x), step=step, complete=True), x.astype("i8") @ x.T, "i8")
    assert len(packed()) == 1 + 2 + 2 + 1  # of both bytes: once where both sides are one


def test_plans_know_from_where_on_16_bits_are_cut_into_bytes():
    assert problem.CUT_INTO_BYTES == in_bytes.LARGE


def test_small_products_of_large_numbers_are_float64s():
    x, y = numbers((60, 300), "int16"), numbers((300, 50), "int16", 1)
    same(product(x, y, sums="int64"), x.astype("i8") @ y, "i8")
    assert not Kernel.launches


@pytest.mark.parametrize("trans", [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_half_of_a_symmetric_product_and_one_packing(trans, dtype):
    x = numbers((300, 140), "int8")
    a = gpu(x if trans[1] else x.T.copy())
    step = Step("int32", dtype, *trans)
    found = link_diagonal(a, step=step, complete=True)
    same(found, x.astype("i8") @ x.astype("i8").T, dtype)
    assert len(packed()) == 1
    p = gpu(np.full((300, 300), 7, "i4"))
    same(
        link_diagonal(a, p, step=step, complete=True), x.astype("i8") @ x.astype("i8").T + 7, dtype
    )


def test_plans_keep_sums_in_what_holds_them():
    for a in (1, 2, 127, 128, 255, 512, 2047, 2048):
        for b in (0, 1, 3, 128, 255, 512, 2048):
            plan = plan_for(a, b)
            if plan is None:
                assert SLAB * a * b > 2**24
                continue
            assert plan.promote * SLAB * a * b <= 2**24
            assert plan.length * a * b < 2**31
            assert plan.promote >= 1
            assert plan.length >= SLAB
    assert plan_for(0, 0).promote < 2**31


def test_configurations_fit_every_gpu_that_has_one():
    for limits in ARCHITECTURES:
        if limits.capability >= 80:
            for side in (64, 8192):
                config = config_for(side, side, limits, 100)
                assert config.runs_on(limits)
                assert config.products == 1
    assert config_for(8192, 8192, limits_for(90), 132).tile_n == 192
    assert config_for(100, 100, limits_for(90), 132).tile_n == 64
