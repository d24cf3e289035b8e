"""The demonstration: real digits through Zarr files, then a random product, both checked."""

from __future__ import annotations

import os

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from clusters import forked
from distributed import Client

from multimm.cli import demo as module
from multimm.cli import main


def demo(*args):
    with forked():
        return CliRunner().invoke(main, ["demo", *map(str, args)])


def test_the_demo_on_cpu_workers(tmp_path):
    result = demo("--gpus", 0, "--size", 300, "--keep", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("verified") == 2
    assert "nearest   98.9%" in result.stdout
    assert "300 x 300 @ 300 x 300" in result.stdout
    assert sorted(os.listdir(tmp_path)) == ["digits.zarr", "similarity.zarr"]
    digits = zarr.open_array(tmp_path / "digits.zarr", mode="r")[:]
    similarity = zarr.open_array(tmp_path / "similarity.zarr", mode="r")[:]
    assert digits.shape == (1797, 64)
    np.testing.assert_allclose(similarity, digits @ digits.T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(similarity.diagonal(), 1, rtol=1e-5)


def test_shuffled_labels_fail(monkeypatch):
    images, labels = module.load_digits()
    shuffled = np.random.default_rng(0).permutation(labels)
    monkeypatch.setattr(module, "load_digits", lambda: (images, shuffled))
    result = demo("--workers", 1, "--size", 50)
    assert result.exit_code == 1
    assert "above 0.95 is expected" in result.stderr
    assert "All results are right" not in result.stdout


def test_a_bad_size_is_refused():
    result = demo("--size", 0)
    assert result.exit_code == 2
    assert result.stderr == "multimm: error: --size 0: at least 1 is needed\n"


def test_random_matrices_are_reproducible_and_differ_by_block():
    first, again, other = (module.random_matrix(40, seed, gpu=False) for seed in (1, 1, 2))
    assert first.numblocks == (4, 4)
    assert first.dtype == np.float32
    values = first.compute(scheduler="sync")
    np.testing.assert_array_equal(values, again.compute(scheduler="sync"))
    assert len(np.unique(values)) > 1500
    assert not np.array_equal(values, other.compute(scheduler="sync"))


@pytest.mark.parametrize(("memory", "edge"), [("64GB", 4096), ("60MB", 512)])
def test_the_edge_follows_the_memory(memory, edge):
    with Client(
        n_workers=1, processes=False, memory_limit=memory, dashboard_address="127.0.0.1:0"
    ) as client:
        assert module.edge_that_fits(client) == edge
