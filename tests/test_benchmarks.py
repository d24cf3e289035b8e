"""The parts of the benchmarks: clocks, cases, verification, records, tables."""

from __future__ import annotations

import re

import numpy as np
import pytest
from clusters import forked
from toy_cupy import toy_cupy

import multimm
import multimm.gpu.elementwise.reduce
import multimm.gpu.product
from multimm.gpu.kernel_selection import Choice, note
from multimm.gpu.runtime.jit import compile_text
from multimm_benchmarks import (
    accuracy_float64,
    dtypes_on_cpu,
    kernels,
    matvec,
    records,
    rehearsal,
    sums,
)
from multimm_benchmarks.cases import Case, square
from multimm_benchmarks.harness import Bench, Reference, WrongResultError, operands
from multimm_benchmarks.ladder import RUNGS
from multimm_benchmarks.records import load
from multimm_benchmarks.report import blocks, prediction
from multimm_benchmarks.report.runs import Runs
from multimm_benchmarks.timing import HostTimer, interleave

pytestmark = pytest.mark.slow


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def work(self, name, seconds):
        def call():
            self.now += seconds
            self.log.append(name)

        return call


@pytest.fixture
def clock():
    return Clock()


# Timing


def test_calls_take_turns_and_seconds_are_per_call(clock):
    calls = {"ours": clock.work("a", 0.25), "theirs": clock.work("b", 0.5)}
    runs = interleave(HostTimer(clock=clock), calls, rounds=3, target=1.0)
    assert {name: run.seconds for name, run in runs.items()} == {
        "ours": [0.25] * 3, "theirs": [0.5] * 3,
    }  # fmt: skip
    assert (runs["ours"].count, runs["theirs"].count) == (4, 2)
    assert "".join(clock.log).endswith("aaaabb" * 3)
    assert runs["ours"].median == 0.25


# Verification


@pytest.mark.parametrize("case", [square(33, "TN"), Case(3, 5, 40, "NT", batch=4)])
def test_a_right_product_is_let_through_and_wrong_ones_are_not(case):
    a, b, out = operands(np, case)
    reference = Reference(np, case, a, b)
    left = a.swapaxes(-1, -2) if case.trans_a else a
    right = left @ (b.swapaxes(-1, -2) if case.trans_b else b)

    def write(values):
        def call():
            out[...] = values

        return call

    errors = reference.check(out, write(right))
    assert 0 < errors.componentwise <= case.k + 3
    assert 0 < errors.relative < 1e-6
    one_off = right.copy()
    one_off[..., -1, -1] += 1e-3 * abs(right).max()
    for wrong in (one_off, np.full_like(right, np.nan)):
        with pytest.raises(WrongResultError, match=re.escape(case.name)):
            reference.check(out, write(wrong))
    with pytest.raises(WrongResultError):  # what is not written stays NaN
        reference.check(out, lambda: None)


# The ladder


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_fits_the_chip_that_it_is_measured_on(rung):
    usage = compile_text(rung.text, "sm_90").usage[rung.entry]
    assert usage.spilled == 0
    assert usage.registers * rung.threads <= 65536


# Records


def test_a_record_carries_every_key_and_survives_the_file(tmp_path, known_commit):
    header = records.run_header({"gpu": "toy", "count": 1})
    entry = records.record("c", "multimm", (2, 3, 4), [1.0, 3.0, 2.0], flops=4e12, plan="p")
    assert (entry["median"], entry["tflops"]) == (2.0, 2.0)
    path = records.save([entry], header, "toy", tmp_path)
    (loaded,) = records.load(path)
    assert set(loaded) == set(records.KEYS)
    assert loaded["commit"] == "0123456789abcdef"
    assert loaded["machine"]["gpu"] == "toy"
    assert loaded["seconds"] == [1.0, 3.0, 2.0]
    assert loaded["bytes_received"] is None
    with pytest.raises(FileExistsError):  # a record is never written over
        records.save([entry], header, "toy", tmp_path)
    with pytest.raises(ValueError, match="records have no key"):
        records.record("c", "s", (1,), [1.0], speed=3)


def test_an_installed_package_records_its_version(monkeypatch):
    """Not the commit of a repository that it happens to lie in."""
    monkeypatch.delenv("MULTIMM_COMMIT", raising=False)
    monkeypatch.setattr(records, "ROOT", None)
    assert records.commit() == f"v{multimm.__version__}"


def test_all_kept_records_can_be_read():
    for path in records.RESULTS.glob("*.json"):
        for entry in records.load(path):
            assert entry["commit"], path
            assert entry["seconds"] == [] or entry["median"] > 0, path


# The suites at toy size, without a GPU --------------------------------------------------


def test_the_command_runs_what_a_machine_without_gpu_can(
    tmp_path, monkeypatch, known_commit, capsys
):
    monkeypatch.setattr(kernels, "gpu_found", lambda: False)
    assert kernels.main(["all", "--quick", "--output", str(tmp_path)]) == 0
    found = {path.name.partition("-")[0]: records.load(path) for path in tmp_path.iterdir()}
    assert {*found} == {"python", "dtypes", "accuracy"}
    assert {entry["shape"][0] for entry in found["python"]} == {32, 64}
    systems = {entry["system"] for entry in found["dtypes"] if "int8" in entry["case"]}
    assert systems == {*(f"multimm {dtype}" for dtype in ("int32", "int64", "float32")),
                       "numpy.matmul int64"}  # fmt: skip
    table = blocks.table("dtypes-on-cpus", Runs(tmp_path))
    assert table.count("| int8 200 | multimm") == 3
    for entry in found["accuracy"]:
        assert entry["precision"] == "float64"
        exact = entry["case"] == "accuracy float64 integers"
        assert (entry["componentwise_u"] == 0) == exact
    assert "Of float64, u = 2^-53" in blocks.table("accuracy", Runs(tmp_path))
    with pytest.raises(SystemExit):
        kernels.main(["ladder"])
    assert "ladder needs CuPy and an NVIDIA GPU" in capsys.readouterr().err


def errors_of_float64(**options):
    bench = Bench(HostTimer(), rounds=1, target=0)
    accuracy_float64.measure(bench, side=20, depths=(64, 300), depth=100, **options)
    return bench.records


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c + 1e-9, "normal, k = 64: multimm, numpy.matmul, is beyond the error bound"),
        (lambda c: c * np.nan, "uniform, k = 300: multimm, numpy.matmul, is beyond"),
        (lambda c: c + 1e-14 * (c == np.rint(c)), "integers, k = 100: .* is not exact"),
    ],
)
def test_a_promise_of_float64_that_is_broken_fails_the_suite(monkeypatch, spoil, message):
    systems = {entry["system"] for entry in errors_of_float64(gpu=False)}
    assert systems == {"multimm", "numpy.matmul"}
    truth = multimm.matmul
    monkeypatch.setattr(multimm, "matmul", lambda a, b, **asked: spoil(truth(a, b, **asked)))
    with pytest.raises(WrongResultError, match=message):
        errors_of_float64(gpu=False)


def test_on_gpus_what_carries_data_of_float64_is_looked_at(cupy, monkeypatch):
    """With NumPy in the place of CuPy, and of the kernels."""
    ran = ["residues"]

    def matmul(a, b, precision):
        if precision == "float64" and ran:
            note(Choice(ran[0], "float64", "toy"))
        return np.matmul(a, b)

    monkeypatch.setattr(multimm, "matmul", matmul)
    found = {entry["system"]: entry["detail"] for entry in errors_of_float64(gpu=True)}
    assert found == {"multimm": "residues", "multimm ieee": "cupy.matmul",
                     "cupy.matmul": "cupy.matmul"}  # fmt: skip
    ran.clear()
    with pytest.raises(WrongResultError, match="normal, k = 64: multimm did not run residues"):
        errors_of_float64(gpu=True)


def test_wrong_products_on_cpus_are_not_recorded(monkeypatch):
    bench, truth = Bench(HostTimer(), rounds=1, target=0), multimm.matmul

    def spoilt(a, b, **asked):
        c = truth(a, b, **asked)
        c[3, 4] += 1 if c.dtype.kind in "iu" else 1e-3
        return c

    monkeypatch.setattr(multimm, "matmul", spoilt)
    for sizes, message in (
        (((70,), (), ()), "int8 70 by multimm int32: WRONG"),
        (((), (50,), ()), "float64 50: WRONG"),
        (((), (), (60,)), "int32 60: WRONG"),
    ):
        with pytest.raises(WrongResultError, match=message):
            dtypes_on_cpu.measure(bench, *sizes)
    assert bench.records == []


@pytest.fixture
def cupy(monkeypatch):
    for suite in (sums, matvec):
        monkeypatch.setattr(suite, "copy", np.copyto)
    with toy_cupy() as module:
        yield module


def test_sums_are_verified_and_counted(cupy, monkeypatch):
    bench = Bench(HostTimer(), rounds=2, target=0)
    sums.measure(bench, shapes=((5, 8), (3, 7)), counts=(2, 3))
    assert [(e["case"], e["system"]) for e in bench.records[:4]] == [
        ("add 2 of 5 x 8", "copy"), ("add 2 of 5 x 8", "multimm"), ("add 2 of 5 x 8", "cupy"),
        ("add 3 of 5 x 8", "copy"),
    ]  # fmt: skip
    assert len(bench.records) == 2 * 2 * 3
    entry = bench.records[-2]
    assert entry["shape"] == [3, 3, 7]
    assert entry["gbs"] == pytest.approx(4 * 3 * 7 * 4 / entry["median"] / 1e9, rel=1e-4)
    monkeypatch.setattr(
        multimm.gpu.elementwise.reduce, "add_partials", lambda parts: np.ones_like(parts[0])
    )
    with pytest.raises(WrongResultError, match="sum of 2 by multimm"):
        sums.measure(bench, shapes=((5, 8),), counts=(2,))


def test_a_failed_suite_is_kept_apart_and_only_where_the_caller_says(
    tmp_path, monkeypatch, known_commit
):
    def measure(bench):
        bench.records.append(records.record("c", "s", (1,), [1.0]))
        raise WrongResultError("toy")

    monkeypatch.setattr(kernels, "gpu_found", lambda: False)
    monkeypatch.setattr(kernels, "suites", lambda quick, gpu: {"python": measure})
    monkeypatch.setattr(records, "RESULTS", tmp_path / "kept")
    assert kernels.main(["python", "--output", str(tmp_path / "looked at")]) == 1
    (path,) = (tmp_path / "looked at").iterdir()
    assert path.name.startswith("failed-python-")
    assert Runs(tmp_path / "looked at").of("python") == []
    assert kernels.main(["python"]) == 1
    assert not (tmp_path / "kept").exists()


# Rehearsals: block products that wait, and several workers on a GPU ---------------------


def test_a_rehearsal_on_cpu_workers_is_recorded(tmp_path, capsys):
    words = ["--workers", "2", "--quick", "--repeats", "2", "--cases", "strong,tall"]
    with forked():
        assert rehearsal.main([*words, "--output", str(tmp_path)]) == 0
    assert "x predicted" in capsys.readouterr().err
    [path] = tmp_path.glob("rehearsal-*.json")
    square, tall = load(path)
    for record in (square, tall):
        assert record["system"] == "multimm, kernels wait"
        assert record["detail"]["workers"] == 2
        assert record["detail"]["gpus"] == 0
        assert len(record["seconds"]) == 2
        workers, begin, end, kinds = zip(*record["detail"]["timeline"], strict=True)
        # So little of a tall one is one worker's.
        assert set(workers) == ({0, 1} if record is square else {0})
        assert 0 < min(begin) < max(end) <= record["seconds"][-1]
        assert "multiply" in kinds
        assert record["tflops"] is None
        assert record["componentwise_u"] is None
    # Nothing is faster than the block products that it waits for: half of a Gram product's.
    assert min(square["seconds"]) > 1024**3 * 2 / 2 / 30e9 / 2
    table = prediction.rehearsed([square, tall])
    assert table.count("\n") == 4
    assert f"| {square['case']} | float32 | 2 | {square['detail']['tasks']} |" in table
