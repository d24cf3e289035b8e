"""The suites `split`, `accuracy` and `wide-range` at toy size, with NumPy models of the kernels."""

from __future__ import annotations

import logging
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from pack_reference import joined
from pack_reference import split as split_parts
from stand_in import gpu
from toy_cupy import ToyTimer, toy_cupy
from wgmma_model import wgmma_model

import multimm.gpu.emulated.pack
import multimm.gpu.product
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, note
from multimm_benchmarks import accuracy, records, split, wide_range, xla
from multimm_benchmarks.cases import Case
from multimm_benchmarks.cublas import COMPUTE_TF32
from multimm_benchmarks.distributions import DISTRIBUTIONS, OVER_K
from multimm_benchmarks.harness import Bench, Reference, U, WrongResultError, widened
from multimm_benchmarks.report import reach_tables, split_tables

pytestmark = pytest.mark.slow

TOY_CAP = 40  #: elements that a toy product leaves to single updates


def in_turn(a, b):
    """a @ b in float32, one element of k after the other."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def tf32_product(a, b):
    """A product of what is left of float32 numbers in 11 bits, cut off."""
    cut = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b)]
    return in_turn(*cut)


def oriented(x, trans):
    return np.ascontiguousarray(x.T if trans else x).view(np.ndarray)


class ToyKernels:
    """What multimm and cuBLAS compute, by the models; `spoil` makes one system wrong."""

    def __init__(self):
        self.spoil, self.reasons = {}, {}

    def gemm(self, a, b, *, precision=None, trans_a=False, trans_b=False, config=None, out):
        if config is not None:
            self.multiply(a, b, out=out, config=config)
            return
        if precision is None:  # both are packed, and have their rows along m or n
            a, b, precision = a.x, b.x.T, a.scheme
        a, b = oriented(a, trans_a), oriented(b, trans_b)
        left, right = split_parts(a), split_parts(b.T)
        rests = max(np.count_nonzero(x.rest) for x in (left, right))
        kernel = FFMA if precision == "ieee" or rests > TOY_CAP else SPLIT
        parts = 1 if precision == "tf32" else 2
        result = in_turn(a, b) if kernel == FFMA else wgmma_model(a, b.T, parts=parts)
        factor, kernel = self.spoil.get(precision, (1, kernel))
        out[...] = result * np.float32(factor)
        note(Choice(kernel, precision, self.reasons.get(precision, "toy")))

    def multiply(self, a, b, *, out, config):
        assert config == {"float32": "mma_wide", "tf32": "tf32_mma_wide"}[a.scheme]
        parts = 1 if a.scheme == "tf32" else 2
        out[...] = wgmma_model(a.x, b.x, parts=parts) * np.float32(self.spoil.get("mma", (1,))[0])

    def pack(self, a, *, side, trans, scheme):
        turned = (side == "b") != trans
        x = oriented(a, turned)
        parts = split_parts(x, 2 if scheme == "float32" else 1)
        unpacked = joined(parts) * np.float32(self.spoil.get("pack", (1,))[0])
        return SimpleNamespace(x=x, scheme=scheme, unpack=lambda: gpu(unpacked))

    def sgemm(self, case, a, b, out):
        return lambda: np.copyto(out, in_turn(oriented(a, case.trans_a), oriented(b, case.trans_b)))

    def gemm_ex(self, case, a, b, out, compute=None):
        operands = oriented(a, case.trans_a), oriented(b, case.trans_b)
        if compute == COMPUTE_TF32:
            return lambda: np.copyto(out, tf32_product(*operands))
        assert operands[0].dtype == np.float16
        return lambda: np.copyto(out, in_turn(*(x.astype(np.float32) for x in operands)))

    def lt(self, *_):
        return None


@pytest.fixture
def toys(monkeypatch):
    kernels = ToyKernels()
    for module, name in (
        (multimm.gpu.product, "gemm"), (multimm.gpu.emulated.pack, "pack"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(kernels, name))
    for suite in (split, accuracy, wide_range):
        monkeypatch.setattr(suite, "Cublas", lambda stream: kernels)
    monkeypatch.setattr(split, "copy", np.copyto)
    monkeypatch.setattr(split, "_launch_of", lambda a, trans, scheme: lambda: None)
    monkeypatch.setattr(xla, "available", lambda: False)
    with toy_cupy():
        yield kernels


def loaded(bench):
    machine = {"gpu": "toy", "count": 1}
    shared = {"machine": machine, "date": "2026-01-02T03:04:05Z", "commit": "0123456789abcdef"}
    return [dict.fromkeys(records.KEYS) | shared | entry for entry in bench.records]


# The suite split


def measured_split(bench_class=Bench, **more):
    bench = bench_class(ToyTimer(), rounds=1, target=0, sustained=0)
    given = {"squares": (Case(8, 8, 256), Case(8, 8, 256, "TT")),
             "cases": (Case(5, 7, 300, "NT", extra=1),), "sustained": (Case(8, 8, 256),),
             "packs": (16,)} | more  # fmt: skip
    split.measure(bench, **given)
    return bench


def test_every_system_is_verified_and_says_which_kernel_ran(toys):
    bench = measured_split()
    square_systems = [e["system"] for e in bench.records if e["case"] == "split 8 NN"]
    assert square_systems == [
        "multimm", "multimm packed before", "multimm by mma",
        "multimm tf32", "multimm tf32 packed before", "multimm tf32 by mma",
        "multimm ieee", "cublas sgemm", "cublas tf32", "cublas fp16",
    ]  # fmt: skip
    by = {(e["case"], e["system"]): e for e in bench.records}
    ours = by["split 8 TT", "multimm"]
    assert (ours["precision"], ours["detail"]) == ("float32", SPLIT)
    assert set(ours["ratio_vs"]) == {"cublas", "multimm ieee", "a third of cublas fp16"}
    assert by["split 8 NN", "multimm ieee"]["detail"] == FFMA
    assert set(by["split 8 NN", "multimm tf32"]["ratio_vs"]) == {"cublas", "cublas tf32"}
    assert by["split 8 NN", "multimm"]["rms_u"] < 3 < 30 < by["split 8 NN", "multimm tf32"]["rms_u"]
    awkward = [e["system"] for e in bench.records if e["case"].startswith("split 5 x 7 x 300")]
    assert awkward == ["multimm", "multimm packed before", "multimm ieee", "cublas sgemm"]
    packs = {e["system"]: e for e in bench.records if e["case"] == "split pack 16"}
    assert len(packs) == 5
    whole = packs["multimm tf32, across k"]
    assert whole["gbs"] == pytest.approx(6 * 16 * 16 / whole["median"] / 1e9, rel=1e-4)
    assert whole["ratio_vs"]["copy"] == pytest.approx(whole["gbs"] / packs["copy"]["gbs"], rel=0.01)


# Errors


def test_subnormal_numbers_are_widened_by_their_bits():
    x = np.array([[1e-45, -1e-40, 1.1754942e-38], [0.0, -1.5, np.inf]], np.float32)
    np.testing.assert_array_equal(widened(np, x), x.astype(np.float64))

    class Flushed(np.ndarray):
        """As CuPy converts."""

        def astype(self, dtype):
            y = np.asarray(self)
            y = np.where(abs(y) < 2.0**-126, 0, y) if y.dtype == np.float32 else y
            return y.astype(dtype)

    np.testing.assert_array_equal(widened(np, x.view(Flushed)), x.astype(np.float64))


def test_errors_are_counted_where_something_is_multiplied():
    a, b = np.ones((2, 4), np.float32), np.ones((4, 2), np.float32)
    a[1] = 0
    reference = Reference(np, Case(2, 2, 4), a, b)
    off = np.array([[4 * U, 0.0], [0.0, 0.0]])
    errors = reference.errors(off)
    assert errors.componentwise == 1
    assert errors.rms == pytest.approx(math.sqrt(1 / 2))
    assert errors.relative == pytest.approx(4 * U / math.sqrt(32))
    assert errors.recorded().keys() <= set(records.KEYS)
    off[1, 1] = 1e-30  # a product of zeros is zero
    with np.errstate(over="ignore"):
        assert reference.errors(off).componentwise > 1e200
    out = np.empty((2, 2), np.float32)
    almost = [[4 + 2**-9, 4], [0, 0]]
    reference.check(out, lambda: np.copyto(out, almost), bound=2.0**-10)
    with pytest.raises(WrongResultError):
        reference.check(out, lambda: np.copyto(out, almost))


# The suite accuracy


def measured_accuracy(**more):
    bench = Bench(ToyTimer(), rounds=1, target=0)
    given = {"side": 16, "depths": (256, 512), "depth": 256} | more
    accuracy.measure(bench, **given)
    return bench


def test_ours_keeps_its_promises_on_all_data(toys):
    bench = measured_accuracy()
    cases = list(dict.fromkeys((e["case"], e["shape"][2]) for e in bench.records))
    assert len(cases) == len(DISTRIBUTIONS) + len(OVER_K)
    assert len(bench.records) == 5 * len(cases)
    by = {(e["case"], e["system"]): e for e in bench.records}
    assert by["accuracy integers", "multimm"]["componentwise_u"] == 0
    assert by["accuracy lognormal 4", "multimm"]["detail"] == FFMA
    assert by["accuracy subnormal rows", "multimm"]["detail"] == SPLIT
    assert by["accuracy normal", "multimm tf32"]["precision"] == "tf32"
    table = split_tables.accuracy(loaded(bench))
    assert "| data | k | multimm ran | multimm | multimm ieee | multimm tf32 | cuBLAS |" in table
    assert "| integers | 256 | `sgemm_split` | 0 / 0 |" in table
    assert table.count("\n| normal |") == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"float32": (1.001, SPLIT)}, "multimm, sgemm_split, is beyond the error bound of float32"),
        ({"ieee": (1.001, FFMA)}, "multimm ieee, sgemm_ffma, is beyond the error bound of ieee"),
        ({"ieee": (math.nan, FFMA)}, "k = 512: multimm ieee, sgemm_ffma, is beyond"),
        ({"tf32": (1.05, SPLIT)}, "multimm tf32, sgemm_split, is beyond the error bound of tf32"),
        ({"float32": (1 + 2**-15, SPLIT)}, "multimm, sgemm_split, is beyond 24 u"),
        ({"float32": (1 + 2**-18, SPLIT)}, "normal, k = 512: rms error"),
        ({"float32": (1 + 2**-20, SPLIT)}, "multimm, sgemm_split, is not exact for integers"),
        ({"float32": (1, FFMA)}, "multimm, sgemm_ffma, did not run sgemm_split"),
    ],
)
def test_a_broken_promise_fails_the_suite_after_all_was_measured(
    toys, monkeypatch, spoil, message, caplog
):
    for name in set(DISTRIBUTIONS) - {"normal", "integers"}:
        monkeypatch.delitem(DISTRIBUTIONS, name)
    toys.spoil = spoil
    with caplog.at_level(logging.INFO), pytest.raises(WrongResultError, match=re.escape(message)):
        measured_accuracy()
    assert caplog.text.count("accuracy integers") >= 5
    assert message in caplog.text


# The suite wide-range


def measured_wide(toys, monkeypatch, *, stays):
    monkeypatch.setattr(wide_range, "_stays", lambda *_: stays)
    # A toy's own rates are rounded to 0.
    monkeypatch.setattr(Bench, "steady", lambda *_: {"tflops": 2.0, "sm_mhz": 1500.0, "watts": 7.0})
    bench = Bench(ToyTimer(), rounds=1, target=0)
    wide_range.measure(bench, cases=(("exponents 2^40", 24), ("graded columns 10^6", 24)))
    return bench


def test_products_of_a_wide_range_stand_beside_their_peers_and_say_what_ran(toys, monkeypatch):
    found = measured_wide(toys, monkeypatch, stays=False).records
    by = {(e["case"], e["system"]): e for e in found}
    assert len(by) == 2 * 5
    ours = by["wide-range exponents 2^40, 24", "multimm"]
    assert (ours["detail"], ours["precision"], [*ours["ratio_vs"]]) == (
        FFMA, "float32", ["multimm ieee"],
    )  # fmt: skip
    what = {"float32": "six products of bfloat16 parts", "tf32": "one product of TF32"}
    toys.spoil = dict.fromkeys(what, (1, SPLIT))
    toys.reasons = {precision: f"a wide range: {text}" for precision, text in what.items()}
    bench = measured_wide(toys, monkeypatch, stays=True)
    lines = reach_tables.wide_range(loaded(bench)).splitlines()
    assert lines[0].startswith("| data | n | system | multimm ran | TFLOP/s | x peer | held |")
    ran = {system: next(line for line in lines if f"40 | 24 | {system} |" in line).split(" | ")[3]
           for system in ("multimm", "multimm tf32", "multimm ieee", "cublas tf32")}  # fmt: skip
    assert ran == {
        "multimm": "sgemm_split: six products of bfloat16 parts",
        "multimm tf32": "sgemm_split: one product of TF32",
        "multimm ieee": "sgemm_ffma", "cublas tf32": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({}, "multimm ran .*sgemm_ffma.*, not sgemm_split: six products of bfloat16 parts"),
        ({"float32": (1, SPLIT)}, "multimm ran .*, not sgemm_split: six products"),
        ({"float32": (1.001, SPLIT)}, r"an element is off by .* u \|A\|\|B\|"),
    ],
)
def test_data_of_a_wide_range_that_leaves_the_tensor_cores_fails(toys, monkeypatch, spoil, message):
    toys.spoil = spoil
    with pytest.raises(WrongResultError, match=message):
        measured_wide(toys, monkeypatch, stays=True)
