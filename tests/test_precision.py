"""Products at a promised precision, with NumPy for the kernels: what is launched, and when."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from stand_in import fake_cupy, gpu, laid_out, memory

import multimm
from multimm.errors import ArrayTypeError, KernelError, OptionError, ShapeError
from multimm.gpu import product
from multimm.gpu.arch import Device, limits_for
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, last_choice, note
from multimm.gpu.product import gemm
from multimm.gpu.runtime import launch_cache

HOPPER, AMPERE = Device(limits_for(90), 132), Device(limits_for(80), 108)
SIDE = 48  # stands for a size at which the tensor cores pay


class Kernels:
    """What was launched, by name."""

    def __init__(self):
        self.ran, self.prepared = [], 0
        self.device = HOPPER

    def gemm(self, problem, config):
        return self.prepare("ffma" + " lower" * problem.lower, problem)

    def on_tensor_cores(self, problem, choice):
        left, right, *_ = problem.arrays
        assert not problem.symmetric or left is right, "copied twice"
        kind = " gram" * problem.symmetric + " lower" * problem.lower
        run = self.prepare(f"split {choice.precision}{kind}", problem)
        return lambda pointers: note(choice) or run(pointers)

    def prepare(self, name, problem):
        self.prepared += 1
        layouts = [None if x is None else (x.shape, x.strides) for x in problem.arrays]
        trans, scalars = problem.trans, (problem.alpha, problem.beta)

        def run(pointers):
            self.ran.append(name)
            a, b, c, partial, out = (
                None if layout is None else at(pointer, *layout)
                for pointer, layout in zip(pointers, layouts, strict=True)
            )
            left, right = (
                x.swapaxes(-1, -2) if flag else x for x, flag in zip((a, b), trans, strict=True)
            )
            _compute(left, right, out, *scalars, c, partial)

        return run

    def multiply(self, problem, parts, config):
        (_, m, n, _), name = problem.shape, "split lower" if problem.lower else "split"

        def run(pointers):
            self.ran.append(name)
            _compute(*self.tiles, at(pointers[6], (m, n), (4 * n, 4)), 1.0, 0.0, None, None)

        return run

    def choose(self, sizes, promise, device, alpha_is_0=False):
        large = min(sizes.m, sizes.n, sizes.k) >= SIDE and sizes.batch == 1 and not alpha_is_0
        kernel = SPLIT if large and promise != "ieee" and device is HOPPER else FFMA
        return Choice(kernel, promise, "for a reason")


def _compute(a, b, out, alpha, beta, c, partial):
    sums = np.asarray(a) @ np.asarray(b) + (0 if partial is None else np.asarray(partial))
    out[...] = np.float32(alpha) * sums + (np.float32(beta) * np.asarray(c) if beta else 0)


def at(pointer, shape, strides):
    return memory(pointer, shape, tuple(step // 4 for step in strides), "f4")


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setattr(product.simt_gemm, "prepared", found.gemm)
    monkeypatch.setattr(product.multiply, "prepared", found.multiply)
    monkeypatch.setattr(product.emulated_gemm, "prepared", found.on_tensor_cores)
    monkeypatch.setattr(product, "choose_kernel", found.choose)
    monkeypatch.setattr(product, "device_of", lambda ident: found.device)
    note(Choice(FFMA, "ieee", "nothing yet"))
    launch_cache.forget()
    yield found
    launch_cache.forget()


def operands(m=SIDE, n=SIDE, k=SIDE, seed=0):
    rng = np.random.default_rng(seed)
    return [gpu(rng.integers(-8, 9, shape).astype("f4")) for shape in ((m, k), (k, n))]


@pytest.mark.parametrize("turned", [False, True])
def test_all_terms_and_an_output(kernels, turned):
    a, b = operands()
    c, p = operands(seed=5)
    out = gpu(np.full((SIDE, SIDE), np.nan, "f4"))
    out = out.T if turned else out
    given = {"alpha": 2.0, "beta": -3.0, "c": c, "partial": p}
    for _ in range(2):
        out[...] = np.nan
        assert gemm(a, b, trans_a=True, trans_b=True, out=out, precision="tf32", **given) is out
        exact = 2 * (np.asarray(a).T @ np.asarray(b).T + np.asarray(p)) - 3 * np.asarray(c)
        np.testing.assert_array_equal(out, exact)
    assert kernels.ran == ["split tf32"] * 2
    assert kernels.prepared == 1 + turned  # with a copy of C' nothing is kept


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("into", [None, "C", "F"])
def test_a_long_k_is_packed_in_stretches(kernels, monkeypatch, trans, into):
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
    assert kernels.ran == ["split float32"] * 6
    # The last one adds C. Nothing is decided again, but where P' and C' are copied first.
    assert kernels.prepared == (5 if into == "F" else 2)


def test_sums_of_stretches_live_in_the_memory_of_a_captured_graph(kernels, monkeypatch):
    monkeypatch.setattr(product, "stretch_of", lambda m, n, k: min(k, 52))
    taken = []

    def workspace(shape, device):
        room = gpu(np.full(shape, np.nan, "f4"))
        taken.append(room)
        number = len(taken)
        kernels.ran.append(f"take {number}")
        return room, lambda: kernels.ran.append(f"free {number}")

    monkeypatch.setattr(product, "workspace", workspace)
    a, b = operands(k=156)
    np.testing.assert_array_equal(gemm(a, b), np.asarray(a) @ np.asarray(b))
    split = "split float32"
    assert kernels.ran == ["take 1", split, "take 2", split, "free 1", split, "free 2"]


def test_what_is_unpacked_is_refused_where_a_graph_is_captured(kernels, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", lambda stream: True)
    a, b = packed_pair()
    gemm(a, b)
    object.__setattr__(b, "tiles", b.raw)
    object.__setattr__(b, "raw", None)
    with pytest.raises(KernelError, match="a packed operand is unpacked first"):
        gemm(a, b)


def test_what_cannot_be_written_to_is_refused_before_the_first_stretch(kernels, monkeypatch):
    monkeypatch.setattr(product, "stretch_of", lambda m, n, k: min(k, 52))
    a, b = operands(k=156)
    with pytest.raises(ShapeError, match="out and a may share memory"):
        gemm(a, b, out=a[:, :SIDE])
    assert kernels.ran == []


def test_flagged_packed_operands_are_multiplied_as_they_were(kernels):
    a, b = operands()
    blocks = [PackedBlock(SIDE, SIDE, side, "float32", nonfinite=1, raw=x)
              for side, x in (("a", a), ("b", b))]  # fmt: skip
    np.testing.assert_array_equal(gemm(*blocks), np.asarray(a) @ np.asarray(b))
    assert kernels.ran == ["ffma"]
    gemm(*blocks, lower=True)
    assert kernels.ran[1:] == ["ffma lower"]
    assert "operand a has 1 elements that are not finite" in last_choice().reason
    assert launch_cache.product(a, b, "float32") is None, "a promise of what other data may keep"


def packed_pair(scheme="float32"):
    """A flagged block of each side: it has its source, which NumPy can multiply."""
    return [PackedBlock(SIDE, SIDE, side, scheme, nonfinite=1, raw=x)
            for side, x in zip("ab", operands(), strict=True)]  # fmt: skip


def test_matmul_and_gemm_take_packed_operands(kernels):
    a, b = packed_pair()
    exact = np.asarray(a.raw) @ np.asarray(b.raw)
    np.testing.assert_array_equal(multimm.matmul(a, b), exact)
    c = gpu(np.ones((SIDE, SIDE), "f4"))
    np.testing.assert_array_equal(multimm.gemm(2, a, b, -1, c), 2 * exact - 1)
    np.testing.assert_array_equal(multimm.gemm(2, a, b), 2 * exact)
    assert kernels.ran == ["ffma"] * 3


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
def test_a_packed_operand_in_the_wrong_place_is_refused(kernels, error, message, call):
    with pytest.raises(error, match=message):
        call(*packed_pair("tf32"))
    assert kernels.ran == []


def test_arguments_that_no_kernel_has(kernels):
    a, b = operands()
    packed = PackedBlock(SIDE, SIDE, "b", "float32", nonfinite=1, raw=b)
    for right in (b, packed):
        with pytest.raises(OptionError, match="precision='fp32': allowed are 'float32'"):
            gemm(a, right, precision="fp32")
        with pytest.raises(OptionError, match="beta=1 scales C, but no c was given"):
            gemm(a, right, beta=1)
    assert kernels.ran == []
