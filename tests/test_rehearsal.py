"""Rehearsals: block products that wait, and several workers on a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
from clusters import forked

from multimm.graph.lowering import symmetric
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step
from multimm.planning.tiling.triangle import computed
from multimm_benchmarks import rehearsal
from multimm_benchmarks.records import load
from multimm_benchmarks.report import prediction

pytestmark = pytest.mark.slow


@pytest.fixture
def waiting(monkeypatch):
    """Block products wait as in a rehearsal, at 1 GFLOP/s; slept seconds are collected."""
    slept = []
    for module in (multiply, symmetric):
        monkeypatch.setattr(module, "gemm", module.gemm)  # put back afterwards
    monkeypatch.setattr(time, "sleep", slept.append)
    rehearsal.wait_instead(1e9, 1e9)
    return slept


def test_of_a_block_on_the_diagonal_only_what_is_computed_is_waited_for(waiting):
    a = np.ones((2048, 64), "f4")
    step = Step("float32", "float32", trans_b=True)
    assert symmetric.multiply_diagonal(a, step=step).shape == (2048, 2048)
    assert sum(waiting) == pytest.approx(2 * 64 * computed(2048) / 1e9)
    waiting.clear()
    multiply.gemm(a, a, step=step, lower=True)
    assert sum(waiting) == pytest.approx(2 * 64 * computed(2048) / 1e9)


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
        assert set(workers) == {0, 1}
        assert 0 < min(begin) < max(end) <= record["seconds"][-1]
        assert "multiply" in kinds
        assert record["tflops"] is None
        assert record["componentwise_u"] is None
    # Nothing is faster than the block products that it waits for: half of a Gram product's.
    assert min(square["seconds"]) > 1024**3 * 2 / 2 / 30e9 / 2
    table = prediction.rehearsed([square, tall])
    assert table.count("\n") == 4
    assert f"| {square['case']} | float32 | 2 | {square['detail']['tasks']} |" in table
