"""Figures and tables of several GPUs, the roofline, and predictions beyond one box."""

from __future__ import annotations

import pytest
import scaling_records
from scaling_records import entry, save, swept

import multimm
from benchmarks.report import (
    gallery,
    prediction,
    roofline,
    scaling_tables,
    several,
    sweep,
)
from benchmarks.report.runs import Runs

CASE = "strong square 65536"


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("known_commit")]


@pytest.fixture
def sweeps(tmp_path):
    """A folder with one full sweep."""
    save(tmp_path, swept())
    return Runs(tmp_path)


# Figures


def test_what_was_drawn_are_the_rates_of_the_records(sweeps):
    from matplotlib.figure import Figure

    figure = Figure()
    several.weak(figure, sweeps)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    rates = [175 * 0.97 ** (workers - 1) for workers in scaling_records.COUNTS]
    assert list(lines["multimm"].get_xdata()) == list(scaling_records.COUNTS)
    assert list(lines["multimm"].get_ydata()) == pytest.approx(rates, rel=1e-4)
    ideal = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in ideal] == [[175] * 4, [53] * 4]


def test_figures_that_records_lack_are_left_out(tmp_path):
    save(tmp_path, [entry(CASE, "multimm", "float32", 1)])
    runs = Runs(tmp_path)
    said = {one.name: one.missing(runs) for one in gallery.PICTURES}
    assert said["strong-scaling"] == ""
    assert (
        said["weak-scaling"] == "No weak scaling of squares in the newest records of suite scaling."
    )
    assert said["timeline"] == "No timeline in the newest records of suite scaling."
    assert said["bytes"] == "No bytes received in the newest records of suite scaling."
    assert said["sizes"].startswith("Square products of two sizes or more: not in")
    assert said["prediction"] == ""
    assert said["ladder"] == "Not measured yet: `python -m benchmarks.kernels ladder`."


def test_roofs_are_those_of_the_records():
    def made(system, **more):
        return {"system": system, "tflops": None, "gbs": None, **more}

    found = dict.fromkeys((*roofline.PRODUCTS, *roofline.COPIES), ()) | {
        "split": [made("cublas fp16", tflops=600), made("cublas fp16", tflops=700)],
        "add": [made("copy", gbs=4000), made("multimm", gbs=9000)],
    }
    assert roofline.roofs("NVIDIA H200", found) == (67.0, 700, 4000)
    assert roofline.roofs("another", found).fp32 is None
    assert roofline.intensity({"shape": [8, 8, 8]}) == pytest.approx(8 / 6)


# Tables of a sweep


def test_rates_stand_beside_the_ideal_and_the_error(sweeps):
    table = scaling_tables.rates(sweeps.of("scaling"))
    assert "| case | system | 1 GPU | 2 GPUs | 4 GPUs | 8 GPUs | relative error |" in table
    assert f"| {CASE} | multimm | 175 (100 %) | 340 (97 %) | 639 (91 %) | 1,130 (81 %) |" in table
    assert f"| {CASE} | cuBLAS, one GPU | 53 |  |  |  | 1.6e-06 |" in table
    assert f"| {CASE} | cuBLASXt, host memory | absent |  |  |  |  |" in table
    assert "8 workers: the slowest of 3 runs took 1.10 times the median." in table


def test_a_peer_that_wins_is_in_the_table(sweeps):
    table = scaling_tables.verdict(sweeps.of("scaling"))
    assert f"| {CASE} | TF32 | 8 | 3,360 | JAX, default | 3,880 | **0.87** |" in table
    assert f"| {CASE} | FP32 | 8 | 1,130 | JAX, HIGHEST | 336 | 3.37 |" in table
    slow = [entry(CASE, "multimm", "tf32", 1), entry(CASE, "cupy", "float32", 1)]
    assert "cuBLAS" not in scaling_tables.verdict(slow)  # more accurate: no rival
    quick = [*slow, entry(CASE, "jax default", "tf32", 1) | {"tflops": 40.0}]
    assert "| cuBLAS, one GPU | 53 | 9.81 |" in scaling_tables.verdict(quick)  # the faster rival


def test_bytes_peers_and_predictions_are_tabulated(sweeps):
    found = sweeps.of("scaling")
    assert f"| {CASE} | multimm | 8 | 120 | 123 | 1.020 | 6.44 |" in scaling_tables.moved(found)
    assert f"| {CASE} | dask.array | 8 |  | 123 |  | 6.44 |" in scaling_tables.moved(found)
    table = scaling_tables.peers(found)
    assert "| JAX, default | done | jax default as it is |" in table
    assert "| cuBLASXt, host memory | absent | libcublas is / not there |" in table
    table = scaling_tables.starts(found)
    assert f"| {CASE} | dask.array | 8 | 48 | 17.1 |" in table
    assert "JAX" not in table
    assert "did not record" in scaling_tables.starts([entry(CASE, "cupy", "float32", 1)])
    counted = [entry(CASE, "multimm", "ieee", n, config=f"on {n} GPUs") for n in (1, 2)]
    assert "| multimm ieee | done | on 2 GPUs |" in scaling_tables.peers(counted)
    assert f"| {CASE} | float32 | 8 | 0.452 | 0.498 | 1.10 |" in prediction.check(found)
    assert all(sweep.workers(r) == 8 for r in several.timelines(sweeps))


# Beyond one box


def test_predictions_are_the_planners_and_are_called_so():
    from multimm.planning.spec import H200, NVLINK, ClusterSpec, MatrixSpec

    point = prediction.predict(16, "ieee", NVLINK, prediction.LARGE)
    n = 4 * prediction.SHARE
    cluster = ClusterSpec.homogeneous(H200, 16, NVLINK)
    spec = MatrixSpec((n, n))
    plan = multimm.plan(spec, spec, precision="ieee", cluster=cluster, blocks=32768, slabs=32768)
    assert (point.n, point.seconds) == (n, plan.seconds)
    assert point.rate == pytest.approx(2 * n**3 / plan.seconds / 16 / 1e12)
    table = prediction.table()
    assert table.startswith("Predicted, not measured")
    assert {row.split(" | ")[1] for row in table.splitlines()[4:]} == {"16", "64", "256", "1024"}


def test_predictions_are_drawn_apart_from_what_was_measured(tmp_path, sweeps):
    picture = gallery.find("prediction")
    alone = picture.svg(Runs(tmp_path / "empty"))
    assert "PREDICTED" in alone
    assert "predicted: InfiniBand, 50 GB/s" in alone
    assert ">measured<" not in alone
    assert ">measured<" in picture.svg(sweeps)
    assert picture.stamp(sweeps) != picture.stamp(Runs(tmp_path / "empty"))
