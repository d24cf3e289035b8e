"""Products at a promised precision, with NumPy for the kernels: what is launched, and when."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from stand_in import GPUArray, fake_cupy, gpu

from multimm.errors import ShapeError
from multimm.gpu import precision
from multimm.gpu.choice import FFMA, SPLIT, Choice, last_choice, note
from multimm.gpu.packed import PackedBlock
from multimm.gpu.precision import gemm, packed
from multimm.gpu.registry import Device
from multimm.gpu.tiles import limits_for

HOPPER, AMPERE = Device(limits_for(90), 132), Device(limits_for(80), 108)
SIDE = 48  # stands for a size at which the tensor cores pay


class OutOfMemoryError(Exception):
    """CuPy's."""


class Kernels:
    """What was launched, by name, and what packing will have found."""

    def __init__(self):
        self.ran, self.kept, self.residuals = [], [], []
        self.flags = (0, 0)  # elements of A that are not finite, or not carried
        self.memory, self.device = True, HOPPER

    def gemm(self, a, b, *, trans_a=False, trans_b=False, out=None, tuned, kept_as="ieee",
             alpha=1.0, beta=0.0, c=None, partial=None):  # fmt: skip
        self.ran.append("ffma")
        self.kept.append(kept_as)
        return self._product(a.T if trans_a else a, b.T if trans_b else b, out, alpha, beta, c,
                             partial)  # fmt: skip

    def _product(self, a, b, out, alpha, beta, c, partial):
        sums = np.asarray(a) @ np.asarray(b) + (0 if partial is None else np.asarray(partial))
        result = np.float32(alpha) * sums + (np.float32(beta) * np.asarray(c) if beta else 0)
        out = gpu(np.zeros(result.shape, "f4")) if out is None else out
        out[...] = result
        return out

    def start_pack(self, operands, *, scheme, keep_raw):
        assert not keep_raw
        if not self.memory:
            raise OutOfMemoryError
        self.ran.append(f"pack {scheme}")
        sources = [x.T if trans else x for x, _, trans in operands]
        nonfinite, uncarried = self.flags
        raw = sources[0] if nonfinite or uncarried > 1024 else None
        blocks = [
            SimpleNamespace(side="a", raw=raw, nonfinite=nonfinite, uncarried=uncarried),
            SimpleNamespace(side="b", raw=None, nonfinite=0, uncarried=0),
        ]
        return SimpleNamespace(
            operands=sources, clean=lambda: self.flags == (0, 0), finish=lambda: tuple(blocks)
        )

    def multiply(self, a, b, *, out, alpha, beta, c, partial):
        self.ran.append("split")
        if isinstance(a, PackedBlock):
            a, b = a.raw, b.raw
        return self._product(a, b, out, alpha, beta, c, partial)

    def add_residuals(self, d, a, b, *, alpha):
        self.residuals.append((a.uncarried, b.uncarried, alpha))

    def choose(self, problem, promise, device):
        large = min(problem.m, problem.n, problem.k) >= SIDE and problem.batch == 1
        kernel = SPLIT if large and promise != "ieee" and device is HOPPER else FFMA
        return Choice(kernel, promise, "for a reason")


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    module = fake_cupy()
    module.cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    module.cuda.runtime.streamIsCapturing = lambda stream: stream == 7
    module.cuda.get_current_stream = lambda: SimpleNamespace(ptr=found.stream)
    found.stream = 0
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(precision.launch, "gemm", found.gemm)
    monkeypatch.setattr(precision.split, "multiply", found.multiply)
    for name in ("start_pack", "add_residuals"):
        monkeypatch.setattr(precision, name, getattr(found, name))
    monkeypatch.setattr(precision, "choose_kernel", found.choose)
    monkeypatch.setattr(precision, "device_of", lambda ident: found.device)
    note(Choice(FFMA, "ieee", "nothing yet"))
    return found


def operands(m=SIDE, n=SIDE, k=SIDE, seed=0):
    rng = np.random.default_rng(seed)
    return [gpu(rng.integers(-8, 9, shape).astype("f4")) for shape in ((m, k), (k, n))]


def test_usual_data_is_packed_and_multiplied_and_looked_at_once(kernels):
    a, b = operands()
    result = gemm(a, b)
    np.testing.assert_array_equal(result, np.asarray(a) @ np.asarray(b))
    assert kernels.ran == ["pack float32", "split"]
    assert not kernels.residuals
    assert last_choice().kernel == SPLIT


def test_all_terms_and_an_output(kernels):
    a, b = operands()
    c, p = operands(seed=5)
    out = gpu(np.full((SIDE, SIDE), np.nan, "f4"))
    given = {"alpha": 2.0, "beta": -3.0, "c": c, "partial": p}
    assert gemm(a, b, trans_a=True, trans_b=True, out=out, precision="tf32", **given) is out
    exact = 2 * (np.asarray(a).T @ np.asarray(b).T + np.asarray(p)) - 3 * np.asarray(c)
    np.testing.assert_array_equal(out, exact)
    assert kernels.ran == ["pack tf32", "split"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((3, 0), "a has 3 elements that are not finite"),
        ((0, 5000), "a has 5000 elements that FP16"),
    ],
)
def test_what_is_not_carried_is_computed_again(kernels, flags, reason):
    kernels.flags = flags
    a, b = operands()
    out = gpu(np.full((SIDE, SIDE), np.nan, "f4"))
    assert gemm(a, b, out=out) is out
    np.testing.assert_array_equal(out, np.asarray(a) @ np.asarray(b))
    assert kernels.ran == ["pack float32", "split", "ffma"]
    assert kernels.kept == ["ieee"]  # the next product of the kind tries again
    assert last_choice().kernel == FFMA
    assert reason in last_choice().reason


def test_a_few_elements_are_added(kernels):
    kernels.flags = (0, 4)
    gemm(*operands(), alpha=-2.0)
    assert kernels.ran == ["pack float32", "split"]
    assert kernels.residuals == [(4, 0, -2.0)]
    assert last_choice().kernel == SPLIT


def test_without_memory_to_pack_in(kernels):
    kernels.memory = False
    a, b = operands()
    np.testing.assert_array_equal(gemm(a, b), np.asarray(a) @ np.asarray(b))
    assert kernels.ran == ["ffma"]
    assert "no memory" in last_choice().reason


@pytest.mark.parametrize("how", ["alpha", "captured"])
def test_where_nothing_can_be_looked_at_or_multiplied(kernels, how):
    kernels.stream = 7 if how == "captured" else 0
    gemm(*operands(), alpha=0.0 if how == "alpha" else 1.0)
    assert kernels.ran == ["ffma"]
    assert kernels.kept == ["ieee"]
    assert last_choice().kernel == FFMA


@pytest.mark.parametrize(
    ("sizes", "promise", "device", "kept"),
    [
        ((8, 8, 8), "float32", HOPPER, "gemm"),
        ((8, 8, 8), "ieee", HOPPER, "gemm"),
        ((SIDE, SIDE, SIDE), "ieee", HOPPER, "ieee"),  # matmul of these is not "ieee" by default
        ((SIDE, SIDE, SIDE), "float32", AMPERE, "gemm"),
    ],
)
def test_only_what_every_precision_runs_is_repeated_without_asking(
    kernels, sizes, promise, device, kept
):
    kernels.device = device
    gemm(*operands(*sizes), precision=promise)
    assert kernels.ran == ["ffma"]
    assert kernels.kept == [kept]


def test_stacks_are_never_packed(kernels):
    a, b = operands()
    gemm(a[None], b)
    assert kernels.ran == ["ffma"]


def test_repeated_rows_are_laid_out_first(kernels):
    a, b = operands()
    row = np.lib.stride_tricks.as_strided(b[:1], b.shape, (0, b.strides[1])).view(GPUArray)
    np.testing.assert_array_equal(gemm(a, row), np.asarray(a) @ np.asarray(row))
    assert kernels.ran == ["pack float32", "split"]


def test_an_output_over_an_operand_is_refused_before_anything_runs(kernels):
    a, b = operands()
    with pytest.raises(ShapeError, match="out and a may share memory"):
        gemm(a, b, out=a)
    assert kernels.ran == []


def test_so_is_an_addend_of_another_shape(kernels):
    a, b = operands()
    with pytest.raises(ShapeError, match="c has shape"):
        gemm(a, b, beta=1.0, c=gpu(np.zeros((SIDE, 1), "f4")))
    assert kernels.ran == []


def test_flagged_packed_operands_are_multiplied_as_they_were(kernels):
    a, b = operands()
    blocks = [PackedBlock(SIDE, SIDE, side, "float32", nonfinite=1, raw=x)
              for side, x in (("a", a), ("b", b))]  # fmt: skip
    np.testing.assert_array_equal(gemm(*blocks), np.asarray(a) @ np.asarray(b))
    assert kernels.ran == ["ffma"]
    assert "operand a has 1 elements that are not finite" in last_choice().reason


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
def test_packed_operands_meet_the_kernel_that_the_gpu_has(kernels, device, monkeypatch):
    kernels.device = device
    a, b = operands()
    blocks = []
    for side, x in (("a", a), ("b", b)):
        block = object.__new__(PackedBlock)  # its tiles are not looked at
        known = {"rows": SIDE, "k": SIDE, "side": side, "scheme": "tf32", "tiles": x, "raw": None}
        for name, value in known.items():
            object.__setattr__(block, name, value)
        blocks.append(block)
    monkeypatch.setattr(PackedBlock, "unpack", lambda block: block.tiles)
    plain = kernels.multiply
    monkeypatch.setattr(
        precision.split, "multiply", lambda a, b, **rest: plain(a.tiles, b.tiles, **rest)
    )
    monkeypatch.setattr(precision, "add_residuals", lambda *_, **__: None)
    np.testing.assert_array_equal(gemm(*blocks), np.asarray(a) @ np.asarray(b))
    assert kernels.ran == ["split" if device is HOPPER else "ffma"]


def test_blocks_stay_as_they_are_where_no_kernel_takes_them_packed(kernels):
    kernels.device = AMPERE
    (a, _) = operands()
    assert packed(a, side="a", trans=False, scheme="float32") is a
