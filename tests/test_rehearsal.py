"""Rehearsals: block products that wait, and several workers on a GPU."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import multimm
from benchmarks import rehearsal, shared_gpus
from benchmarks.records import load
from benchmarks.report import prediction
from benchmarks.sweep_cases import Product
from multimm.cluster.inspect.devices import Gpu
from multimm.graph.lowering import symmetric
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step
from multimm.planning.spec import H200, NVLINK, ClusterSpec, MatrixSpec
from multimm.planning.tiling.triangle import computed

GB = 10**9


@pytest.fixture
def waiting(monkeypatch):
    """Block products wait as in a rehearsal, at 1 GFLOP/s; slept seconds are collected."""
    slept = []
    for module in (multiply, symmetric):
        monkeypatch.setattr(module, "gemm", module.gemm)  # put back afterwards
    monkeypatch.setattr(time, "sleep", slept.append)
    rehearsal.wait_instead(1e9, 1e9)
    return slept


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_a_block_product_waits_as_long_as_it_would_take(waiting, trans_a, trans_b):
    a, b = np.ones((20, 30), "f4"), np.ones((30, 40), "f4")
    step = Step("float32", "float32", trans_a, trans_b)
    result = multiply.multiply(a.T if trans_a else a, b.T if trans_b else b, step=step)
    assert (result.shape, result.dtype) == ((20, 40), np.float32)
    assert waiting == [2 * 20 * 30 * 40 / 1e9]


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


def test_what_is_rehearsed_is_kept_when_a_later_case_fails(tmp_path, monkeypatch):
    whole = rehearsal.rehearsals

    def broken(*given):
        yield next(whole(*given))
        raise MemoryError

    monkeypatch.setattr(rehearsal, "rehearsals", broken)
    with pytest.raises(MemoryError):
        rehearsal.main(["--workers", "1", "--quick", "--repeats", "1", "--output", str(tmp_path)])
    [path] = tmp_path.glob("rehearsal-*.json")
    assert len(load(path)) == 1


@pytest.mark.parametrize(
    "words", [["--cases", "round"], ["--precisions", "exact"], ["--workers", "0"]]
)
def test_unknown_names_and_numbers_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        rehearsal.main(words)
    assert words[1] in capsys.readouterr().err


@pytest.mark.parametrize(("edge", "refused"), [(32768, False), (65536, False), (131072, True)])
def test_what_the_gpus_cannot_hold_is_said(monkeypatch, edge, refused):
    gpus = (Gpu("0", "H200", 150 * GB), Gpu("1", "H200", 150 * GB))
    monkeypatch.setattr(rehearsal, "visible_gpus", lambda: gpus)
    spec = MatrixSpec((edge, edge))
    cluster = ClusterSpec.homogeneous(H200, 8, NVLINK)
    plan = multimm.plan(spec, MatrixSpec((edge, edge)), cluster=cluster)
    product = Product("strong", "square", edge, edge, edge)
    assert bool(rehearsal.too_large(plan, product, 2)) == refused
    assert rehearsal.too_large(plan, product, 0) == ""


class ToyCluster:
    """As dask-cuda's: a worker is named by its GPU, which comes first among those it sees."""

    def __init__(self, *, CUDA_VISIBLE_DEVICES, n_workers, **options):
        self.cuda_visible_devices, self.options = CUDA_VISIBLE_DEVICES, options
        self.worker_spec = {}
        while len(self.worker_spec) < n_workers:
            self.worker_spec.update(self.new_worker_spec())

    def new_worker_spec(self):
        name = min(set(self.cuda_visible_devices) - set(self.worker_spec))
        first = self.cuda_visible_devices.index(name)
        turned = self.cuda_visible_devices[first:] + self.cuda_visible_devices[:first]
        return {name: {"sees": turned}}


made: list[ToyCluster] = []


def test_workers_share_gpus_and_their_memory(monkeypatch):
    toy = ModuleType("dask_cuda")
    toy.LocalCUDACluster = ToyCluster
    monkeypatch.setitem(sys.modules, "dask_cuda", toy)
    gpus = tuple(Gpu(ident, "H200", 100 * GB) for ident in "012")
    monkeypatch.setattr(shared_gpus, "visible_gpus", lambda: gpus)
    prepared, closed = [], []
    client = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(
        "multimm.cluster.client.ClusterClient", lambda cluster, **_: made.append(cluster) or client
    )
    monkeypatch.setattr(
        "multimm.cluster.client.set_up_cluster", lambda c, *, overlap: prepared.append((c, overlap))
    )
    with shared_gpus.shared_gpus(8) as found:
        assert found is client
        assert not closed
    cluster = made.pop()
    sees = [spec["sees"] for spec in cluster.worker_spec.values()]
    assert sees == [["012"[(i + j) % 3] for j in range(3)] for i in range(8)]
    assert list(cluster.worker_spec) == list(range(8))
    # Three workers on the fullest GPU.
    assert 0.8 * 100 * GB < 3 * cluster.options["rmm_pool_size"] < 0.9 * 100 * GB
    assert prepared == [(client, True)]
    assert closed
