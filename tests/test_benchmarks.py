"""The parts of the benchmarks: clocks, cases, verification, records, tables."""

from __future__ import annotations

import re

import numpy as np
import pytest

import multimm
from multimm.gpu.runtime.jit import compile_text
from multimm_benchmarks import records
from multimm_benchmarks.cases import Case, square
from multimm_benchmarks.harness import Reference, WrongResultError, operands
from multimm_benchmarks.ladder import RUNGS
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


@pytest.mark.parametrize(
    ("source", "commit"),
    [
        ("dask-multimm @ git+https://a.b/c@12ab", "12ab"),
        ("dask-multimm @ file:///a+b@c/x.whl", f"v{multimm.__version__}"),
        ("", f"v{multimm.__version__}"),
    ],
)
def test_an_installed_package_records_what_was_installed(monkeypatch, source, commit):
    """Not the commit of a repository that it happens to lie in."""
    monkeypatch.delenv("MULTIMM_COMMIT", raising=False)
    monkeypatch.setattr(records, "ROOT", None)
    monkeypatch.setattr(records, "came_from", lambda: source)
    assert records.commit() == commit


def test_all_kept_records_can_be_read():
    for path in records.RESULTS.glob("*.json"):
        for entry in records.load(path):
            assert entry["commit"], path
            assert entry["seconds"] == [] or entry["median"] > 0, path
