"""The suites of the benchmarks at toy size, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from toy_cupy import toy_cupy

import multimm.gpu.elementwise.reduce
import multimm.gpu.product
from multimm_benchmarks import kernels, matvec, python_comparison, records, sums
from multimm_benchmarks.harness import Bench, WrongResultError
from multimm_benchmarks.report.runs import Runs
from multimm_benchmarks.timing import HostTimer

pytestmark = pytest.mark.slow


def test_the_python_comparison_runs_on_the_cpu():
    bench = Bench(HostTimer(), rounds=2, target=0, sustained=0)
    python_comparison.measure(bench, gpu=False, sizes=(4, 8), largest_loop=4)
    systems = {(entry["case"], entry["system"]) for entry in bench.records}
    assert {
        ("python 4", "CPU, Python loop"),
        ("python 4", "NumPy"),
        ("python 8", "NumPy"),
    } <= systems
    assert ("python 8", "CPU, Python loop") not in systems


def test_the_command_runs_what_a_machine_without_gpu_can(
    tmp_path, monkeypatch, known_commit, capsys
):
    monkeypatch.setattr(kernels, "gpu_found", lambda: False)
    assert kernels.main(["all", "--quick", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("python-*.json")
    assert {entry["shape"][0] for entry in records.load(path)} == {32, 64}
    with pytest.raises(SystemExit):
        kernels.main(["ladder"])
    assert "ladder needs CuPy and an NVIDIA GPU" in capsys.readouterr().err


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
