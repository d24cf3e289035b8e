"""Products at a promised precision, with NumPy for the kernels: what is launched, and when."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from stand_in import Kernel, captured, gpu, laid_out, standing_in

import multimm
from multimm.errors import ArrayTypeError, KernelError, OptionError, ShapeError
from multimm.gpu import product
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, last_choice, note
from multimm.gpu.product import gemm
from multimm.gpu.runtime import launch_cache

SIDE = 48  # stands for a size at which the tensor cores pay


def choose(sizes, promise, device, alpha_is_0=False):
    large = min(sizes.m, sizes.n, sizes.k) >= SIDE and sizes.batch == 1 and not alpha_is_0
    return Choice(SPLIT if large and promise != "ieee" else FFMA, promise, "for a reason")


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    with standing_in():
        monkeypatch.setattr(product, "choose_kernel", choose)
        note(Choice(FFMA, "ieee", "nothing yet"))
        yield sys.modules["cupy"]


def products():
    """Those that ran, by name; of one that is not done where another is, that other one."""
    return [
        kernel.name + " lower" * ("LOWER" in kernel.defines)
        for name, (kernel, *_) in zip(Kernel.ran, Kernel.launches, strict=True)
        if (name == "sgemm_ffma" and "REFUSED" not in kernel.defines) or name == "sgemm_split !"
    ]


def operands(m=SIDE, n=SIDE, k=SIDE, seed=0):
    rng = np.random.default_rng(seed)
    return [gpu(rng.integers(-8, 9, shape).astype("f4")) for shape in ((m, k), (k, n))]


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("into", [None, "C", "F"])
def test_a_long_k_is_packed_in_stretches(monkeypatch, trans, into):
    prepared, before = [], product._prepared
    monkeypatch.setattr(product, "_prepared", lambda *given: prepared.append(1) or before(*given))
    monkeypatch.setattr(product, "stretch_of", lambda m, n, k: min(k, 52))
    x, y = operands(k=156)
    a, b = (gpu(np.ascontiguousarray(z.T)) if flag else z
            for z, flag in zip((x, y), trans, strict=True))  # fmt: skip
    c, p = (operands(seed=seed)[0] for seed in (7, 8))
    out = None if into is None else laid_out(np.zeros((SIDE, SIDE), "f4"), into)
    exact = 2 * (np.asarray(x) @ np.asarray(y) + p) + 3 * np.asarray(c)
    for _ in range(2):
        result = gemm(a, b, trans_a=trans[0], trans_b=trans[1], alpha=2, beta=3, c=c, partial=p,
                      out=out)  # fmt: skip
        np.testing.assert_array_equal(result, exact)
        assert out is None or result is out
    assert products() == ["sgemm_split"] * 6
    # The last one adds C. Nothing is decided again, but where P' and C' are copied first.
    assert len(prepared) == (5 if into == "F" else 2)


def test_sums_of_stretches_live_in_the_memory_of_a_captured_graph(monkeypatch):
    monkeypatch.setattr(product, "stretch_of", lambda m, n, k: min(k, 52))
    (a, b), (out, _) = operands(k=156), operands()
    with captured():
        gemm(a, b, out=out)
    np.testing.assert_array_equal(out, np.asarray(a) @ np.asarray(b))
    split = "sgemm_split !"
    ran = [name for name in Kernel.ran if name == split or name[5:] in ("1", "4")]
    assert ran == ["take 1", split, "take 4", split, "free 1", split, "free 4"]


def test_what_is_unpacked_is_refused_where_a_graph_is_captured():
    a, b = packed_pair()
    out, _ = operands()
    object.__setattr__(b, "tiles", b.raw)
    object.__setattr__(b, "raw", None)
    with captured(), pytest.raises(KernelError, match="a packed operand is unpacked first"):
        gemm(a, b, out=out)


def test_what_cannot_be_written_to_is_refused_before_the_first_stretch(monkeypatch):
    monkeypatch.setattr(product, "stretch_of", lambda m, n, k: min(k, 52))
    a, b = operands(k=156)
    with pytest.raises(ShapeError, match="out and a may share memory"):
        gemm(a, b, out=a[:, :SIDE])
    assert Kernel.ran == []


def test_flagged_packed_operands_are_multiplied_as_they_were():
    a, b = operands()
    blocks = [PackedBlock(SIDE, SIDE, side, "float32", nonfinite=1, raw=x)
              for side, x in (("a", a), ("b", b))]  # fmt: skip
    np.testing.assert_array_equal(gemm(*blocks), np.asarray(a) @ np.asarray(b))
    assert products() == ["sgemm_ffma"]
    gemm(*blocks, lower=True)
    assert products()[1:] == ["sgemm_ffma lower"]
    assert "operand a has 1 elements that are not finite" in last_choice().reason
    assert launch_cache.product(a, b, "float32") is None, "a promise of what other data may keep"
    for call, reason in (
        (lambda: gemm(a, b), "for a reason"),
        (lambda: gemm(*blocks), "operand a"),
    ):
        call()
        assert last_choice().reason.startswith(reason)


def packed_pair(scheme="float32"):
    """A flagged block of each side: it has its source, which NumPy can multiply."""
    return [PackedBlock(SIDE, SIDE, side, scheme, nonfinite=1, raw=x)
            for side, x in zip("ab", operands(), strict=True)]  # fmt: skip


def test_matmul_and_gemm_take_packed_operands():
    a, b = packed_pair()
    exact = np.asarray(a.raw) @ np.asarray(b.raw)
    np.testing.assert_array_equal(multimm.matmul(a, b), exact)
    c = gpu(np.ones((SIDE, SIDE), "f4"))
    np.testing.assert_array_equal(multimm.gemm(2, a, b, -1, c), 2 * exact - 1)
    np.testing.assert_array_equal(multimm.gemm(2, a, b), 2 * exact)
    assert products() == ["sgemm_ffma"] * 3


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (OptionError, "a was packed for 'tf32': pass precision='tf32'", lambda a, b: (
            multimm.matmul(a, b))),
        (OptionError, "a was packed for 'tf32'", lambda a, b: (
            multimm.gemm(1, a, b, precision="ieee"))),
        (OptionError, r"b was packed as op\(B\): leave out trans_b", lambda a, b: (
            multimm.gemm(1, a, b, trans_b=True, precision="tf32"))),
        (OptionError, "but no c was given", lambda a, b: (
            multimm.gemm(1, a, b, 2, precision="tf32"))),
        (OptionError, "must be real", lambda a, b: (
            multimm.gemm(1j, a, b, precision="tf32"))),
        (OptionError, 'packed as operand "a"', lambda a, b: (
            multimm.matmul(a, a, precision="tf32"))),
        (ArrayTypeError, "CuPy", lambda a, b: (
            multimm.matmul(a, np.ones((SIDE, SIDE), "f4"), precision="tf32"))),
    ],
)  # fmt: skip
def test_a_packed_operand_in_the_wrong_place_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call(*packed_pair("tf32"))
    assert Kernel.ran == []


def test_arguments_that_no_kernel_has():
    a, b = operands()
    packed = PackedBlock(SIDE, SIDE, "b", "float32", nonfinite=1, raw=b)
    for right in (b, packed):
        with pytest.raises(OptionError, match="precision='fp32': allowed are 'float32'"):
            gemm(a, right, precision="fp32")
        with pytest.raises(OptionError, match="beta=1 scales C, but no c was given"):
            gemm(a, right, beta=1)
    assert Kernel.ran == []
