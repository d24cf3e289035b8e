"""Tables of the suites of one GPU, in Markdown."""

from __future__ import annotations

import pytest

from benchmarks import records
from benchmarks.cases import TRANSPOSES
from benchmarks.report import tables

pytestmark = pytest.mark.slow


def _entry(case, system, ratio, **more):
    return dict.fromkeys(records.KEYS) | {
        "case": case, "system": system, "shape": [4096, 4096, 4096], "seconds": [0.1],
        "median": 0.1, "tflops": 40.0, "gbs": 3000.0, "ratio_vs": {"cublas": ratio, "copy": ratio},
        **more,
    }  # fmt: skip


STEADY = {"tflops": 50.0, "sm_mhz": 1950.0, "watts": 697.0, "gflop_per_joule": 72.0}


def test_tables_show_what_the_records_say():
    text = tables.ladder([_entry("ladder", "7_warp_tile", 0.89, detail="x", sustained=STEADY)])
    assert "| 7_warp_tile | x | 40000 | 89.0 |" in text
    assert "50.0 TFLOP/s at 1950 MHz and 697 W" in text
    assert "| 4096 x 4096 | naive | 3000 | 12.0 |" in tables.transpose([_entry("t", "naive", 0.12)])
    square_records = [
        _entry(f"ffma 4096 {letters}", system, ratio, sustained=STEADY)
        for letters in TRANSPOSES for system, ratio in (("multimm", 1.05), ("cublas lt", 1.0))
    ]  # fmt: skip
    text = tables.ffma(square_records)
    assert "| 4096 | 40.0 (1.050) |" in text
    assert "| 4096 NN | 50.0 | 1.000 | 1950 | 697 | 72.0 | 72.0 |" in text
    assert "geometric mean 1.050, least 1.050" in text
    pair = [_entry("awkward 1 x 2 x 3, NN", "multimm", 2.0), _entry("awkward x", "multimm", 0.5)]
    assert "| 1 x 2 x 3, NN | 40 | 20 | 2.000 |" in tables.awkward(pair)
    assert "geometric mean 1.000, least 0.500" in tables.awkward(pair)


def test_tables_of_what_memory_limits():
    added = [_entry("add", system, ratio, shape=[3, 8, 9])
             for system, ratio in (("copy", 1), ("multimm", 1.05), ("cupy", 0.3))]  # fmt: skip
    text = tables.add(added)
    assert "| 8 x 9 | 3 | multimm | 3000 | 105.0 |\n| 8 x 9 | 3 | CuPy | 3000 | 30.0 |" in text
    assert "copy |" not in text.partition("---")[2]
    thin = [
        _entry("matvec 8 x 1 x 9, TN", system, ratio, median=seconds, gbs=1.0 / seconds)
        for system, ratio, seconds in (
            ("copy", 1, 0.001), ("multimm", 0.5, 0.2), ("cublas lt", 1, 0.4),
            ("cublas sgemv", 1, 0.1),
        )
    ]  # fmt: skip
    assert "| 8 x 1 x 9, TN | 5 | 50.0 | 10 | cublasSgemv | 0.500 |" in tables.matvec(thin)


def test_the_table_of_calls_has_a_row_for_each_library():
    entries = [
        _entry(f"latency {n}", system, 1, shape=[n] * 3, median=seconds * n)
        for n in (64, 32) for system, seconds in (("multimm", 1e-6), ("cupy", 2e-6))
    ]  # fmt: skip
    assert tables.latency(entries).splitlines()[0] == "| n | 32 | 64 |"
    assert tables.latency(entries).splitlines()[2:] == [
        "| `multimm.matmul` | 32.0 | 64.0 |", "| `cupy.matmul` | 64.0 | 128.0 |",
    ]  # fmt: skip
