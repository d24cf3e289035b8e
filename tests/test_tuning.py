"""Choosing the fastest configuration, and the file that remembers it. No GPU."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner
from kept import slowly

from multimm.cli import main
from multimm.cli import tune as command
from multimm.gpu.arch import limits_for
from multimm.gpu.runtime import launch, launch_cache
from multimm.gpu.simt.configs import REGISTRY, Device, entry_named
from multimm.gpu.tuning import autotune
from multimm.gpu.tuning import bench as tuning_bench
from multimm.gpu.tuning.autotune import Case, Model, Outcome, Timing

H200 = Device(limits_for(90), 132)
MODEL = Model("NVIDIA H200", 90)
CASE = Case(512, 256, 128)
FIRST, SECOND, THIRD = (entry.name for entry in REGISTRY[:3])


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path))
    autotune.winners_on.cache_clear()
    yield tmp_path
    autotune.winners_on.cache_clear()


class FakeBench:
    """Configurations with known times; the clock drifts, so that taking turns matters."""

    def __init__(self, seconds, wrong=()):
        self._seconds, self._wrong = seconds, dict(wrong)
        self.order = []
        self.drift = 1.0

    def wrong(self, name):
        return self._wrong.get(name, "")

    def seconds(self, name, launches):
        assert not self._wrong.get(name), "what is wrong is not timed"
        self.order.append((name, launches))
        self.drift *= 1.002
        return self._seconds[name] * self.drift


@pytest.mark.parametrize(
    ("times", "winner"),
    [((1.0, 0.9, 2.0), SECOND), ((1.0, 0.99, 2.0), FIRST), ((1.0, 1.1, 0.5), THIRD)],
)
def test_the_fastest_wins_if_it_is_faster_than_noise(times, winner):
    names = [FIRST, SECOND, THIRD]
    bench = FakeBench(dict(zip(names, times, strict=True)))
    outcome = autotune.tune(CASE, names, bench, 0.001)
    assert [one.name for one in outcome.timings] == names
    assert outcome.winner.name == winner


def test_configurations_take_turns():
    bench = FakeBench({FIRST: 1e-4, SECOND: 1e-9, THIRD: 1.0})
    autotune.tune(CASE, [FIRST, SECOND, THIRD], bench, 0.0)
    warm, rounds = bench.order[:3], bench.order[3:]
    assert warm == [(FIRST, 3), (SECOND, 3), (THIRD, 3)]
    assert len(rounds) == 3 * autotune.MIN_ROUNDS
    assert [name for name, _ in rounds[:9]] == [FIRST, SECOND, THIRD, SECOND, THIRD, FIRST,
                                                THIRD, FIRST, SECOND]  # fmt: skip
    assert dict(rounds) == {FIRST: 20, SECOND: autotune.MAX_LAUNCHES, THIRD: 1}


def test_what_is_wrong_is_out_of_the_race():
    bench = FakeBench({FIRST: 1.0, THIRD: 0.5}, {SECOND: "other bits"})
    outcome = autotune.tune(CASE, [FIRST, SECOND, THIRD], bench, 0.0)
    assert outcome.winner.name == THIRD
    assert outcome.timings[1].reason == "other bits"
    wrong = autotune.tune(CASE, [FIRST, SECOND], FakeBench({}, {FIRST: "wrong"}), 0.0)
    assert wrong.winner is wrong.default
    assert wrong.default.reason == "wrong"


def outcome(case, winner, default=FIRST):
    timings = (Timing(default, 1.0), *([Timing(winner, 0.5)] if winner != default else []))
    return Outcome(case, timings)


def test_winners_come_back_from_the_file(directory):
    turned = CASE._replace(trans_b=True)
    path = autotune.save(MODEL, [outcome(CASE, SECOND), outcome(turned, THIRD)])
    assert path == directory / "tuned" / "nvidia-h200-sm_90.json"
    assert autotune.read(MODEL) == {CASE: SECOND, turned: THIRD}
    # Later runs add to it; where the default has become the best there is nothing to remember.
    more = Case(7, 8, 9, True, True)
    autotune.save(MODEL, [outcome(more, SECOND), outcome(turned, FIRST)])
    assert autotune.read(MODEL) == {CASE: SECOND, more: SECOND}
    assert autotune.read(Model("NVIDIA H100", 90)) == {}


def test_products_that_ran_without_a_winner_decide_anew(monkeypatch):
    monkeypatch.setitem(launch_cache._known, ("float32", 0), None)
    autotune.save(MODEL, [outcome(CASE, SECOND)])
    assert not launch_cache._known


def test_who_tunes_at_the_same_time_loses_no_winner(monkeypatch):
    read, cases = autotune.read, [Case(512, 256, k) for k in range(1, 9)]

    monkeypatch.setattr(autotune, "read", slowly(read))
    with ThreadPoolExecutor(len(cases)) as pool:
        done = pool.map(lambda case: autotune.save(MODEL, [outcome(case, SECOND)]), cases)
        assert all(done)
    assert read(MODEL) == dict.fromkeys(cases, SECOND)


def test_a_file_for_other_kernels_is_ignored_and_said(monkeypatch, caplog):
    autotune.save(MODEL, [outcome(CASE, SECOND)])
    monkeypatch.setattr(autotune, "kernels_hash", lambda: "another")
    assert autotune.read(MODEL) == {}
    assert "was tuned for other kernels and is ignored" in caplog.text
    autotune.save(MODEL, [outcome(CASE, THIRD)])
    assert autotune.read(MODEL) == {CASE: THIRD}


def test_the_hash_follows_kernels_and_registry(monkeypatch):
    before = autotune.kernels_hash()
    autotune.kernels_hash.cache_clear()
    assert autotune.kernels_hash() == before
    autotune.kernels_hash.cache_clear()
    monkeypatch.setattr(autotune, "REGISTRY", REGISTRY[1:])
    assert autotune.kernels_hash() != before
    autotune.kernels_hash.cache_clear()


@pytest.fixture
def cupy(monkeypatch):
    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceProperties=lambda device: {"name": b"NVIDIA H200"}),
        Device=lambda device: SimpleNamespace(
            compute_capability="90", attributes={"MultiProcessorCount": 132}
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    launch.device_of.cache_clear()
    yield module
    launch.device_of.cache_clear()


def test_lookup_finds_exactly_what_was_tuned(cupy):
    autotune.save(MODEL, [outcome(CASE, SECOND), outcome(Case(9, 9, 9, True, False), THIRD)])
    turned = Case(9, 9, 9, True, False).sizes
    assert autotune.lookup(0, CASE.sizes, False, False) is entry_named(REGISTRY, SECOND).config
    assert autotune.lookup(0, turned, True, False) is entry_named(REGISTRY, THIRD).config
    for sizes, sides in (
        (dataclasses.replace(CASE.sizes, k=129), (False, False)),
        (dataclasses.replace(CASE.sizes, batch=2), (False, False)),
        (dataclasses.replace(CASE.sizes, scattered_b=True), (False, False)),
        (CASE.sizes, (True, False)),
    ):
        assert autotune.lookup(0, sizes, *sides) is None


@pytest.fixture
def gpu(cupy, monkeypatch):
    """One GPU on which the second configuration is twice as fast as all others."""
    times = dict.fromkeys((entry.name for entry in REGISTRY), 1e-3) | {SECOND: 5e-4}
    state = SimpleNamespace(bench=FakeBench(times), made=[])

    def make(case, device, configs):
        state.made.append((case, device, list(configs)))
        return state.bench

    monkeypatch.setattr("multimm.cluster.inspect.devices.visible_gpus", lambda: ("GPU-0",))
    monkeypatch.setattr(tuning_bench, "GpuBench", make)
    return state


def run(*args):
    return CliRunner().invoke(main, ["tune", "--seconds", "0.001", *args], prog_name="multimm")


def test_command_tunes_prints_and_keeps(gpu):
    done = run("--shapes", "4096x4096x64,8192x8192x512", "--transposes", "nn,nt")
    assert done.exit_code == 0, done.output
    assert [case for case, *_ in gpu.made] == command.parse("4096x4096x64,8192x8192x512", "nn,nt")
    assert "8192x8192x512 nt" in done.output
    assert f"kept in {MODEL.path}" in done.output.replace("\n", "")
    assert set(autotune.read(MODEL).values()) == {SECOND}
    found = autotune.lookup(0, Case(4096, 4096, 64, False, True).sizes, False, True)
    assert found is entry_named(REGISTRY, SECOND).config


def test_command_keeps_no_winner_where_the_default_is_wrong(gpu):
    gpu.bench = FakeBench({}, dict.fromkeys((entry.name for entry in REGISTRY), "wrong"))
    done = run("--shapes", "64x64x64", "--transposes", "nn")
    assert done.exit_code == 1
    assert "wrong results for 64x64x64 nn" in done.output
    assert autotune.read(MODEL) == {}


@pytest.mark.parametrize(
    ("args", "gpus", "code", "sentence"),
    [
        (("--shapes", "5"), 1, 2, "--shapes '5'"),
        (("--device", "1"), 1, 2, "sees devices 0 to 0"),
        (("--seconds", "0"), 1, 2, "more than 0"),
        ((), 0, 1, "no GPU to tune for"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(monkeypatch, args, gpus, code, sentence):
    monkeypatch.setattr("multimm.cluster.inspect.devices.visible_gpus", lambda: ("GPU",) * gpus)
    done = run(*args)
    assert done.exit_code == code
    assert sentence in done.output
    assert done.output.count("\n") == 1
