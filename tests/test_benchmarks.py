"""The parts of the benchmarks: clocks, cases, verification, records, tables."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import machine, records
from benchmarks.cases import Case, square
from benchmarks.cublas import OVERRIDES, check_environment
from benchmarks.harness import Reference, WrongResultError, operands
from benchmarks.ladder import RUNGS
from benchmarks.report.runs import Runs
from benchmarks.timing import HostTimer, interleave, sustain
from multimm.cluster.inspect.devices import Gpu
from multimm.gpu.runtime.jit import compile_text

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


@pytest.fixture
def timer(clock):
    return HostTimer(clock=clock)


# Timing


def test_calls_take_turns_and_seconds_are_per_call(clock, timer):
    calls = {"ours": clock.work("a", 0.25), "theirs": clock.work("b", 0.5)}
    runs = interleave(timer, calls, rounds=3, target=1.0)
    assert {name: run.seconds for name, run in runs.items()} == {
        "ours": [0.25] * 3, "theirs": [0.5] * 3,
    }  # fmt: skip
    assert (runs["ours"].count, runs["theirs"].count) == (4, 2)
    assert "".join(clock.log).endswith("aaaabb" * 3)
    assert runs["ours"].median == 0.25


def test_sustained_figures_last_and_count_energy(clock, timer):
    gauge = SimpleNamespace(sample=lambda: (1950.0, 697.0), joules=lambda: 700.0 * clock.now)
    figures = sustain(timer, clock.work("x", 0.125), 3.0, gauge, clock)
    assert figures.duration >= 3.0
    assert figures.seconds == 0.125
    assert figures.joules == pytest.approx(700 * 0.125)


# Cases and operands


# Verification


def _product(case, a, b):
    return (a.swapaxes(-1, -2) if case.trans_a else a) @ (b.swapaxes(-1, -2) if case.trans_b else b)


@pytest.mark.parametrize("case", [square(33, "TN"), Case(3, 5, 40, "NT", batch=4)])
def test_a_right_product_is_let_through_and_wrong_ones_are_not(case):
    a, b, out = operands(np, case)
    reference = Reference(np, case, a, b)
    right = _product(case, a, b)

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


def test_overrides_of_float32_are_refused(monkeypatch):
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    check_environment()
    monkeypatch.setenv("CUPY_TF32", "0")
    check_environment()
    monkeypatch.setenv("CUBLAS_EMULATE_SINGLE_PRECISION", "1")
    with pytest.raises(RuntimeError, match="CUBLAS_EMULATE_SINGLE_PRECISION set"):
        check_environment()


# The ladder


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_fits_the_chip_that_it_is_measured_on(rung):
    usage = compile_text(rung.text, "sm_90").usage[rung.entry]
    assert usage.spilled == 0
    assert usage.registers * rung.threads <= 65536


def test_the_recorded_ladder_climbs_to_cublas():
    climb = [entry for entry in Runs().of("ladder") if entry["system"][0].isdigit()]
    for lower, higher in itertools.pairwise(climb):
        assert higher["median"] < lower["median"], higher["system"]
    for entry in climb[-1:]:
        assert entry["ratio_vs"]["cublas"] >= 0.85


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


def test_records_name_the_gpus_that_were_used(monkeypatch):
    gpus = tuple(Gpu(str(i), "H200", 10**9) for i in range(2))
    facts = SimpleNamespace(gpus=gpus, driver="580", cuda=(13, 0), nvlinks={(0, 1): 18})
    monkeypatch.setattr(machine, "gather", lambda: facts)
    both, one, none = (machine.described(count) for count in (None, 1, 0))
    assert [(m["gpu"], m["count"]) for m in (both, one, none)] == [
        ("H200", 2),
        ("H200", 1),
        (None, 0),
    ]
    assert [m["links"] for m in (both, one, none)] == ["18 NVLinks per pair", None, None]
    assert {(m["driver"], m["cuda"]) for m in (both, one, none)} == {("580", "13.0")}
    assert set(both) <= set(Runs().of("scaling")[0]["machine"])  # as those written before


def test_unknown_keys_and_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="records have no key"):
        records.record("c", "s", (1,), [1.0], speed=3)
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"case": 1}))
    with pytest.raises(ValueError, match="no run of the benchmarks"):
        records.load(path)


def test_a_commit_is_asked_for_where_none_is_known(monkeypatch, tmp_path):
    monkeypatch.delenv("MULTIMM_COMMIT", raising=False)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="set MULTIMM_COMMIT"):
        records.commit()


def test_all_kept_records_can_be_read():
    for path in records.RESULTS.glob("*.json"):
        for entry in records.load(path):
            assert entry["commit"], path
            assert entry["seconds"] == [] or entry["median"] > 0, path
