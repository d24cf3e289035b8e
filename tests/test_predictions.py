"""Predicted seconds beside measured ones, of products that were run on GPUs and on CPU workers.

`golden/measured.jsonl` has one product a line: workers, shape, chunks that operands came in (0: the
plan's own), and the seconds of its runs (on GPUs at 92fc6c7, on CPUs at c1196a2). Rates are those
that the first start measured then; of CPUs, copies to new memory were measured later.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from scaling_records import entry as record_of

import multimm
from multimm.planning.cost import time
from multimm.planning.spec import H200, LOCAL_TCP, NVLINK, ClusterSpec, DeviceSpec, MatrixSpec
from multimm_benchmarks import verdict
from multimm_benchmarks.peers.ours import as_the_plan_keeps_them
from multimm_benchmarks.sweep_cases import Product, operand_specs

FILE = Path(__file__).parent / "golden" / "measured.jsonl"
H100 = replace(
    H200, name="NVIDIA H100 80GB HBM3", memory_bytes=85_017_493_504, gflops=53_680.0,
    copy_gbps=2912.0, packed_gflops=(("float32", 205_000.0), ("tf32", 650_000.0)),
)  # fmt: skip
MEASURED = {
    "1 H100": ClusterSpec.homogeneous(H100, 1),
    "2 H200": ClusterSpec.homogeneous(
        replace(
            H200, gflops=53_770.0, copy_gbps=3821.0,
            packed_gflops=(("float32", 189_400.0), ("tf32", 623_600.0)),
        ), 2, replace(NVLINK, gbps=250.6),
    ),
} | {
    f"{workers} EPYC": ClusterSpec.homogeneous(
        DeviceSpec("AMD EPYC", "cpu", 13_000_000_000 // workers, 238.0 / workers, 23.7),
        workers, replace(LOCAL_TCP, gbps=1.77),
    )
    for workers in (1, 2)
}  # fmt: skip


def planned(entry):
    """The plan for operands as they lay when the product was measured."""
    m, k, n = entry["product"]
    product = Product("", "", m, n, k, symmetric=entry["symmetric"], chunk=entry["chunk"])
    cluster, symmetric = MEASURED[entry["on"]], product.symmetric

    def plan(a, b):
        return multimm.plan(a, b, trans_a=symmetric, precision=entry["precision"], cluster=cluster)

    given = operand_specs(product, cluster.workers)
    return as_the_plan_keeps_them(plan, given, product)


@pytest.mark.parametrize(
    ("kind", "counts", "cases"),
    [("gpu", median, 36), ("cpu", min, 16)],  # who else uses the cores makes it slower
    ids=["gpu", "cpu"],
)
def test_nine_of_ten_predictions_are_within_15_percent_and_all_within_30(kind, counts, cases):
    entries = [json.loads(line) for line in FILE.read_text().splitlines()]
    ratios = {}
    for entry in entries:
        case = "{on}, {product} in {chunk}, {precision}".format_map(entry)
        if MEASURED[entry["on"]].slowest.kind == kind:
            ratios[case] = planned(entry).seconds / counts(entry["seconds"])
    assert len(ratios) >= cases
    far = {case: f"{ratio:.2f}" for case, ratio in ratios.items() if abs(ratio - 1) > 0.15}
    assert len(far) <= len(ratios) / 10, far
    assert all(abs(ratio - 1) <= 0.3 for ratio in ratios.values()), far


def x_w(rows, chunks):
    """The plan of a tall X on one GPU, in chunks of so many rows, times W."""
    x = MatrixSpec((rows * chunks, 2048), chunks=((rows,) * chunks, (2048,)), owners=(0,) * chunks)
    w = MatrixSpec((2048, 128), owners=(0,))
    plan = multimm.plan(x, w, precision="tf32", cluster=MEASURED["1 H100"])
    assert plan.tasks == 1
    return plan.time_terms


def test_what_a_task_makes_of_many_chunks_takes_time_to_gather():
    gathered = 8 * 131_072 * 128 * 4  # bytes, read and written
    assert x_w(131_072, 8)["cutting"] == 2 * gathered / (H100.copy_gbps * 1e9)
    assert x_w(131_072, 1)["cutting"] == 0


def test_a_gpu_waits_for_launches_where_these_take_longer_than_its_kernels():
    terms = x_w(16_384, 8)
    kernels = terms["block products"] + terms["packing"]
    assert 0 < terms["launching"] == 8 * time.LAUNCH_S - kernels
    assert x_w(131_072, 8)["launching"] == 0, "kernels take longer"


def test_a_sweep_says_how_near_its_predictions_were():
    case = "strong square 32768"
    seconds = record_of(case, "multimm", "tf32", 1)["median"]
    found = [
        record_of(case, "multimm", "tf32", 1, predicted_seconds=seconds * times, reason="")
        for times in (0.9, 1.25, 2.0)
    ]
    found.append(record_of(case, "dask.array", "float32", 1, reason=""))
    said = [line for line in verdict.verdict(found) if line.startswith("predicted")]
    assert said == [
        "predicted seconds, of 3 cases: 1 within 15 % of the median, 2 within 30 %; "
        "0.90 to 2.00 times"
    ]
    cells = {str(column.header): [*column.cells] for column in verdict.table(found).columns}
    assert cells["predicted"] == [f"{seconds * x:.4g}" for x in (0.9, 1.25, 2.0)] + [""]
