"""The scaling sweep: what it is asked, how it goes, and what it does when something goes wrong."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from clusters import soon
from commands import python, runs
from rich.console import Console

from multimm.cli import main
from multimm_benchmarks import agenda, group, records, scaling, unfinished, verdict
from multimm_benchmarks.agenda import Item, ask
from multimm_benchmarks.group import Group, GroupError, OutOfTimeError
from multimm_benchmarks.harness import WrongResultError
from multimm_benchmarks.limit import Limit
from multimm_benchmarks.peers import SYSTEMS
from multimm_benchmarks.peers.base import Machine, System
from multimm_benchmarks.report import sweep
from multimm_benchmarks.sweep_cases import Product
from multimm_benchmarks.sweep_records import record_of

GB = 10**9
CPU = Machine("cpu", 2, 8 * GB, 8 * GB, 60.0)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("known_commit")]


# The whole path


@pytest.mark.alone  # which may repeat less often where time is short
def test_a_quick_sweep_on_cpu_workers(tmp_path):
    """From the command line to the records, beside two peers."""
    arguments = ["bench", "--quick", "--workers", "2", "--cases", "strong", "--peers",
                 "dask.array,cupy,numpy", "--output", str(tmp_path)]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "multimm: right in all 1 cases" in result.output
    assert "beside dask.array: " in result.output
    assert "beside numpy: " in result.output
    (path,) = tmp_path.iterdir()
    assert f"recorded in {path}" in result.output
    found = {(r["system"], r["case"]): r for r in records.load(path)}
    assert len(found) == 4
    for (system, case), record in found.items():
        detail = record["detail"]
        if system == "cupy":
            assert (detail["status"], record["seconds"], record["median"]) == ("absent", [], None)
            assert detail["reason"] in ("needs an NVIDIA GPU", "cupy not installed")
            continue
        assert detail["status"] == "done"
        assert len(record["seconds"]) == agenda.QUICK_REPEATS
        assert 0 < record["componentwise_u"] < 30
        assert record["tflops"] == pytest.approx(
            2 * np.prod(record["shape"]) / record["median"] / 1e12, rel=1e-3
        )
        assert system in detail["config"].replace("numpy.matmul", "numpy"), case
    ours = found["multimm", "strong square 1024"]
    assert ours["detail"]["one_worker_tflops"] > 0
    assert ours["detail"]["predicted_seconds"] > 0
    assert ours["bytes_received"] == ours["bytes_predicted"] > 0
    assert {row[0] for row in ours["detail"]["timeline"]} == {0, 1}
    assert {"multiply", "transfer"} <= {row[3] for row in ours["detail"]["timeline"]}
    assert found["dask.array", "strong square 1024"]["bytes_received"] > 0


# Process groups


@pytest.fixture
def command(monkeypatch):
    def of(text):
        monkeypatch.setattr(group, "COMMAND", (sys.executable, "-c", text))

    return of


SAY = "import json, os, sys, time\ndef say(**m): print(json.dumps(m), flush=True)\n"


@pytest.mark.alone
def test_a_silent_group_is_given_up_with_all_its_processes(command, tmp_path, monkeypatch):
    monkeypatch.setattr(group, "SETTLE", 0.2)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    command(
        SAY + "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "say(child=child.pid)\ntime.sleep(60)"
    )
    with Group(tmp_path / "log", silence=1.0) as one:
        messages = one.messages("")
        pid = next(messages)["child"]
        with pytest.raises(GroupError, match="no answer for 1 s"):
            next(messages)
    soon(lambda: not runs(pid))


def test_a_group_imports_before_it_has_a_job_and_ends_without_one(command, tmp_path):
    command(SAY + "say(ahead=sys.argv[1:], pid=os.getpid())\n"
            "line = sys.stdin.readline()\nsay(job=line.strip())")  # fmt: skip
    with Group(tmp_path / "log", None, ("cupy", "multimm")) as one:
        first = one._messages.get(timeout=60)
        assert first["ahead"] == ["cupy", "multimm"]
        with one:  # its turn
            assert list(one.messages("this")) == [{"job": "this"}]
    with Group(tmp_path / "log") as idle:
        pid = idle._messages.get(timeout=60)["pid"]
        assert runs(pid)
    assert not runs(pid)


def test_a_group_of_systems_that_nothing_is_wanted_of():
    run = python("-m", "multimm_benchmarks.peers", "numpy", "multimm", input="")
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


# The sweep


class Script:
    """Stands in for groups: each says what it is told to, and may die then."""

    def __init__(self, *groups):
        self.groups, self.jobs, self.ahead = list(groups), [], []

    def __call__(self, log, devices, ahead):
        self.devices = devices
        self.ahead.append(ahead)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def messages(self, job, limit):
        self.jobs.append((json.loads(job), self.devices))
        self.limit = limit
        for message in self.groups.pop(0):
            if isinstance(message, BaseException):
                raise message
            if callable(message):
                message()
                continue
            yield message


def done(number, seconds=(2.0, 1.0, 4.0), **more):
    errors = {"rel_error": 1e-7, "componentwise_u": 1.5, "rms_u": 0.5}
    return {"done": number, "config": "c", "seconds": list(seconds), "errors": errors, **more}


OPENED = {"opened": 0}


def item(name, system="multimm", absent="", kind="strong", machine=CPU):
    return Item(system, machine, Product(kind, name, 8, 8, 8, "strong"), "float32", 3, absent)


def swept(monkeypatch, folder, items, *groups, **options):
    script = Script(*groups)
    monkeypatch.setattr(scaling, "Group", script)
    console = Console(file=io.StringIO(), width=200)
    asked = ask(workers="2", quick=True)
    try:
        found, path = scaling.sweep(asked, folder, console, items=items, **options)
    except BaseException as error:
        error.add_note(console.file.getvalue())
        raise
    return found, path, script, console.file.getvalue()


def test_a_failed_case_and_a_dead_group_are_recorded_and_the_rest_goes_on(monkeypatch, tmp_path):
    items = [item("one"), item("two"), item("three"), item("four", absent="no room")]
    found, path, script, text = swept(
        monkeypatch, tmp_path, items,
        [OPENED, {"failed": 0, "reason": "E: x"}],
        [OPENED, {"step": 0}, GroupError("it died")],
        [OPENED, {"step": 0}, done(0, bytes_received=7, detail={"predicted_seconds": 0.5})],
    )  # fmt: skip
    status = {r["case"]: (r["detail"]["status"], r["detail"]["reason"]) for r in found}
    assert status == {"four": ("absent", "no room"), "one": ("failed", "E: x"),
                      "two": ("failed", "it died"), "three": ("done", "")}  # fmt: skip
    names = [[work["product"]["name"] for work in job] for job, _ in script.jobs]
    assert names == [["one", "two", "three"], ["two", "three"], ["three"]]
    assert script.jobs[0][1] == ""  # CPU workers see no GPU
    loaded = {r["case"]: r for r in records.load(path)}
    assert loaded["three"]["median"] == 2.0
    assert loaded["three"]["bytes_received"] == 7
    assert loaded["three"]["detail"]["predicted_seconds"] == 0.5
    assert loaded["two"]["median"] is None
    assert loaded["two"]["tflops"] is None
    assert loaded["two"]["seconds"] == []
    assert "left out: multimm, four: no room" in text
    assert not (tmp_path / unfinished.NAME).exists()
    assert len(verdict.failed(found)) == 2


def test_a_wrong_product_ends_the_sweep_without_a_figure(monkeypatch, tmp_path):
    items = [item("one"), item("two"), item("three")]
    said = [OPENED, done(0), {"wrong": 1, "reason": "an element is off by 9 u"}]
    with pytest.raises(WrongResultError, match="two, float32, 2 workers: an element is off"):
        swept(monkeypatch, tmp_path, items, said)
    assert list(tmp_path.glob("scaling-*")) == []


def test_an_interrupted_sweep_goes_on_where_it_was(monkeypatch, tmp_path):
    items = [item("one"), item("two"), item("three", absent="why")]
    with pytest.raises(KeyboardInterrupt) as caught:
        swept(monkeypatch, tmp_path, items, [OPENED, done(0), {"step": 1}, KeyboardInterrupt()])
    assert "2 of 3 cases are kept" in caught.value.__notes__[0]
    with (tmp_path / unfinished.NAME).open("a") as file:
        file.write('{"case": "tw')  # the line that was being written
    found, path, script, text = swept(monkeypatch, tmp_path, items, [OPENED, done(0, [5.0])])
    assert len(script.jobs) == 1
    assert [work["product"]["name"] for work in script.jobs[0][0]] == ["two"]
    assert sorted(r["case"] for r in found) == ["one", "three", "two"]
    assert "to measure: 1 of 3, on 2 workers; 2 are there from before" in text
    assert len(records.load(path)) == 3


# Its time


LATE = "a quick sweep ends after two minutes"


class Clock:
    """Stands until it is set; seconds."""

    now = 0.0

    def __call__(self):
        return self.now

    def at(self, seconds):
        """What a script calls for the clock to be there."""
        return lambda: setattr(self, "now", seconds)


def test_a_quick_sweep_ends_when_its_time_is_up(monkeypatch, tmp_path):
    clock = Clock()
    items = [item("one"), item("two"), item("three"), item("one", "numpy"), item("x", absent="no")]
    said = [OPENED, done(0), {"step": 1}, clock.at(10.0), OutOfTimeError()]
    limit = Limit(10.0, clock)
    found, path, script, _ = swept(monkeypatch, tmp_path, items, said, limit=limit)
    assert len(script.jobs) == 1  # and no second group
    assert script.limit.left == 0
    absent = {(r["case"], r["system"]): r["detail"]["reason"] for r in records.load(path)
              if r["detail"]["status"] == "absent"}  # fmt: skip
    assert absent == {("two", "multimm"): f"broken off: {LATE}", ("x", "multimm"): "no",
                      ("three", "multimm"): f"not begun: {LATE}",
                      ("one", "numpy"): f"not begun: {LATE}"}  # fmt: skip
    assert verdict.failed(found) == []
    assert list(verdict.verdict(found)) == [
        "multimm: right in all 1 cases, FP32 errors of at most 1.5 u |A||B|",
        f"{LATE}; cases not measured: 2 of 3 of multimm, 1 of 1 of numpy",
    ]
    assert not (tmp_path / unfinished.NAME).exists()


QUICK = replace(CPU, quick=True)


def test_in_a_quick_sweep_each_system_has_its_turn_and_then_another(monkeypatch, tmp_path):
    clock = Clock()
    peers = ("numpy", "cupy", "jax highest")
    items = [item("one"), item("two"), item("three"), *(item("one", peer) for peer in peers)]
    kept = sum(agenda.kept_seconds([item("one", peer)]) for peer in peers)
    first = [OPENED, done(0), clock.at(60.0 - kept), OutOfTimeError()]
    quick = [[OPENED, clock.at(60.0 - kept + at), done(0)] for at in (1, 2, 3)]
    again = [OPENED, done(0), clock.at(60.0), OutOfTimeError()]
    limit = Limit(60.0, clock)
    found, _, script, _ = swept(monkeypatch, tmp_path, items, first, *quick, again, limit=limit)
    ran = [(job[0]["system"], [work["product"]["name"] for work in job]) for job, _ in script.jobs]
    assert ran == [("multimm", ["one", "two", "three"]), *((peer, ["one"]) for peer in peers),
                   ("multimm", ["two", "three"])]  # fmt: skip
    status = {(r["case"], r["system"]): r["detail"]["reason"] for r in found}
    assert {case: reason for case, reason in status.items() if reason} == {
        ("three", "multimm"): f"broken off: {LATE}"
    }
    assert len(status) == 6


def test_nothing_is_started_anew_for_the_last_seconds(monkeypatch, tmp_path):
    clock = Clock()
    items = [item("one"), item("two")]
    first = [OPENED, done(0), clock.at(31.0), GroupError("it died")]
    limit = Limit(40.0, clock)
    monkeypatch.setattr(limit, "before", lambda others, own: Limit(30.0, clock))
    items.append(item("three"))
    found, _, script, _ = swept(monkeypatch, tmp_path, items, first, limit=limit)
    assert len(script.jobs) == 1  # 9 s are left, and its workers take as long to start
    assert [r["detail"]["reason"] for r in found] == ["", "it died", f"not begun: {LATE}"]


def test_what_several_systems_share_is_started_once(monkeypatch, tmp_path):
    items = [item(case, system, machine=QUICK) for case in ("one", "two")
             for system in ("multimm", "dask.array", "numpy")]  # fmt: skip
    dask = [OPENED, done(0), {"opened": 1}, done(1), done(2), done(3)]
    found, _, script, text = swept(monkeypatch, tmp_path, items, dask, [OPENED, done(0), done(1)])
    ran = [[(work["system"], work["product"]["name"]) for work in job] for job, _ in script.jobs]
    assert ran == [
        [("multimm", "one"), ("dask.array", "one"), ("multimm", "two"), ("dask.array", "two")],
        [("numpy", "one"), ("numpy", "two")],
    ]
    assert {r["detail"]["status"] for r in found} == {"done"}
    assert "dask.array, 2 x cpu: ready" in text


@pytest.mark.parametrize(("cores", "device", "quick", "ahead"), [
    (4, "gpu", True, [("multimm", "dask.array"), ("numpy",)]),
    (3, "gpu", True, [(), ()]), (4, "cpu", True, [(), ()]), (4, "gpu", False, [(), (), ()]),
])  # fmt: skip
def test_processes_of_a_quick_sweep_on_gpus_import_before_their_turn(
    monkeypatch, tmp_path, cores, device, quick, ahead
):
    monkeypatch.setattr(scaling, "cores", lambda: cores)
    monkeypatch.setattr(scaling, "visible_gpus", lambda: ())
    machine = replace(QUICK, device=device, quick=quick)
    items = [item("one", system, machine=machine) for system in ("multimm", "dask.array")]
    items.append(item("one", "numpy", machine=replace(QUICK, quick=quick)))
    said = [[OPENED, done(0)]] * 3
    if quick:
        said[0] = [OPENED, done(0), {"opened": 1}, done(1)]
    found, _, script, _ = swept(monkeypatch, tmp_path, items, *said)
    assert script.ahead == ahead
    assert {r["detail"]["status"] for r in found} == {"done"}


def test_a_system_that_cannot_be_opened_takes_its_own_cases_along(monkeypatch, tmp_path):
    items = [item(case, system, machine=QUICK) for case in ("one", "two")
             for system in ("multimm", "dask.array")]  # fmt: skip
    found, *_ = swept(
        monkeypatch, tmp_path, items,
        [OPENED, done(0), GroupError("no workers")], [OPENED, done(0)],
    )  # fmt: skip
    assert [(r["system"], r["case"], r["detail"]["reason"]) for r in found] == [
        ("multimm", "one", ""), ("dask.array", "one", "no workers"),
        ("multimm", "two", ""), ("dask.array", "two", "no workers"),
    ]  # fmt: skip


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine on paper, with all peers."""
    missing = classmethod(lambda cls, device: "" if device in cls.needs else "no")
    monkeypatch.setattr(System, "missing", missing)
    gpu = SimpleNamespace(memory_bytes=80 * GB, ident="0")
    monkeypatch.setattr(agenda, "visible_gpus", lambda: (gpu, gpu))
    monkeypatch.setattr(agenda, "cores", lambda: 32)
    memory = SimpleNamespace(available=200 * GB, total=256 * GB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("gpus", ["1", "2", "1,2"])
def test_a_quick_sweep_has_the_same_two_cases_of_every_peer_and_of_multimm_first(gpus):
    asked = ask(gpus=gpus, quick=True)
    found = [item for item in agenda.agenda(asked) if not item.absent]
    series, kept = {}, Counter()
    for one in found:
        key = one.system, one.machine.workers, one.precision
        series.setdefault(key, []).append(one.product.name)
        kept[key] += one.first
    kept["multimm", max(asked.counts), "float32"] -= 1  # the steady one
    assert set(kept.values()) == {agenda.FIRST_CASES}
    assert {system for system, *_ in series} == set(SYSTEMS)
    for (system, workers, precision), cases in series.items():
        ours = series["multimm", workers if workers in asked.counts else max(asked.counts),
                      precision]  # fmt: skip
        # NumPy and CuPy have no weak square where one worker is not asked for.
        assert set(cases[: agenda.FIRST_CASES]) <= set(ours[: agenda.FIRST_CASES + 3]), system
    groups = [list({one.group: None for one in group}) for group in agenda.groups(found)]
    assert groups == [[("dask", count)] for count in sorted(asked.counts, reverse=True)] + [
        [("cupy", 0)], [("cublasxt", 0)], [("jax", 0)], [("numpy", 0)]
    ]  # fmt: skip
    in_full = agenda.agenda(replace(asked, quick=False))
    assert all(one.group == (one.system, one.machine.workers) for one in in_full)


@pytest.mark.usefixtures("two_gpus")
def test_of_a_quick_sweep_cases_without_a_peer_come_last():
    for together in agenda.groups(agenda.agenda(ask(gpus="2", quick=True, peers="dask.array"))):
        precisions = [item.precision for item in together if not item.first and not item.absent]
        assert precisions == sorted(precisions)
    assert precisions.count("tf32") == 4


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("quick", [False, True])
def test_float64_is_measured_of_who_multiplies_it(quick):
    def measured(precisions):
        items = agenda.agenda(ask(gpus="1", cases="strong", quick=quick, precisions=precisions))
        for one in items:
            assert (one.product.dtype == "float64") == (one.precision == "float64")
        return {(one.system, one.precision): one.absent for one in items}

    alone = measured("float64")
    assert {precision for _, precision in alone} == {"float64"}
    absent = {name for (name, _), why in alone.items() if "no float64" in why}
    assert absent == {"cublasxt", "jax highest", "jax default"}
    both = measured("ieee,float64")
    double = {name for name, precision in both if precision == "float64"}
    assert double == {*SYSTEMS} - absent
    single = {name for name, precision in both if precision == "float32"}
    assert single == {*SYSTEMS} - {"multimm", "jax default"}
    assert "float64" not in {precision for _, precision in measured(None)}


def test_what_is_said_of_float64_is_said_apart():
    one = Product("strong", "s", 8, 8, 8)
    found = []
    for precision, ours, peer, u in (("float32", 1.0, 2.0, 1.5), ("float64", 2.0, 1.0, 2.5)):
        for name, seconds in (("multimm", ours), ("numpy", peer)):
            errors = {"componentwise_u": u}
            message = {"seconds": [seconds], "errors": errors, "config": ""}
            item = Item(name, CPU, one.at(precision), precision, 1)
            found.append(record_of(item, "done", "", message))
    said = list(verdict.verdict(found))
    for kind, u in (("FP32", 1.5), ("FP64", 2.5)):
        assert f", {kind} errors of at most {u} u |A||B|" in said[0]
    assert said[1].endswith("(geometric mean of 2); numpy wins s of float64 (0.50 x)")
    # In a report, too, each stands beside its own kind; TF32 beside float32's.
    pairs = [(pair.promise, pair.times) for pair in sweep.beside(found)]
    assert pairs == [("FP32", pytest.approx(2.0)), ("FP64", pytest.approx(0.5))]
    found[0]["precision"] = "tf32"
    assert [pair.promise for pair in sweep.beside(found)] == ["FP64"]


# The command


def test_a_failed_case_of_ours_is_exit_code_1_and_a_wrong_product_too(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "agenda", lambda asked: [item("one")])
    arguments = ["bench", "--workers", "2", "--output", str(tmp_path)]
    for said, texts in (
        ([OPENED, {"failed": 0, "reason": "E: x"}], ("recorded in", "1 of multimm's cases failed")),
        ([OPENED, {"wrong": 0, "reason": "off"}], ("a product is wrong, and nothing is recorded",)),
    ):
        monkeypatch.setattr(scaling, "Group", Script(said))
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        for text in texts:
            assert text in result.output
