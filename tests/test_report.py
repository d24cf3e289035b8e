"""The report: which records it shows, blocks in READMEs, figures, and the command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from scaling_records import entry, save, swept, without_result

import multimm.cli
from benchmarks import records
from benchmarks.records import INTERRUPTED
from benchmarks.report import (
    __main__,
    blocks,
    files,
)
from benchmarks.report.runs import Runs, origin

NO_SWEEP = "No records of suite scaling from a GPU machine yet: `multimm bench`."


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("known_commit")]


def _ladder(folder, second, rate, gpu="toy"):
    header = records.run_header({"gpu": gpu, "count": 1})
    header["date"] = f"2026-01-01T00:00:0{second}Z"
    made = [
        records.record("ladder 8", system, (8, 8, 8), [1.0], flops=rate, detail=detail,
                       ratio_vs={"cublas": 0.5})
        for system, detail in (("1_naive", "first"), ("cublas lt", None))
    ]  # fmt: skip
    return records.save(made, header, "ladder", folder)


# Which records


def test_the_newest_run_counts_and_of_each_gpu_its_newest(tmp_path):
    _ladder(tmp_path, 1, 1e12, "old")
    _ladder(tmp_path, 2, 2e12, "new")
    _ladder(tmp_path, 3, 3e12, "old")
    runs = Runs(tmp_path)
    assert runs.of("ladder")[0]["tflops"] == 3
    by_gpu = runs.per_gpu("ladder")
    assert {gpu: found[0]["tflops"] for gpu, found in by_gpu.items()} == {"old": 3, "new": 2}
    assert runs.of("ffma") == []


def test_a_sweep_over_cpu_workers_is_no_figure_of_speed(tmp_path):
    save(tmp_path, swept("cpu"), "2026-01-02T00:00:00Z")
    assert Runs(tmp_path).of("scaling") == []
    save(tmp_path, swept())
    assert Runs(tmp_path).of("scaling")[0]["date"] == "2026-01-01T00:00:00Z"


def test_sweeps_are_one(tmp_path, monkeypatch):
    """Each with counts or peers that the other lacks; a figure is not replaced by its absence."""
    first = [entry("strong square 65536", "multimm", "float32", workers) for workers in (1, 2)]
    again = [
        entry("strong square 65536", "multimm", "float32", 2) | {"tflops": 7.0},
        entry("strong square 65536", "multimm", "float32", 4),
        without_result("strong square 65536", "multimm", 1, "failed", "interrupted"),
        without_result("strong square 65536", "numpy", 1, "absent", "too slow"),
    ]
    monkeypatch.setenv("MULTIMM_COMMIT", "c1")
    save(tmp_path, first, "2026-01-01T00:00:00Z")
    save(tmp_path, again, "2026-01-02T00:00:00Z")
    found = Runs(tmp_path).of("scaling")
    where = {(r["system"], r["detail"]["workers"]): r["detail"]["status"] for r in found}
    assert where == {("multimm", 1): "done", ("multimm", 2): "done", ("multimm", 4): "done",
                     ("numpy", 1): "absent"}  # fmt: skip
    assert [r["tflops"] for r in found if r["detail"]["workers"] == 2] == [7.0]
    monkeypatch.setenv("MULTIMM_COMMIT", "c2")
    lost = without_result("strong square 65536", "multimm", 2, "failed", "out of memory")
    save(tmp_path, [first[0] | {"tflops": 8.0}, lost], "2026-01-03T00:00:00Z")
    found = Runs(tmp_path).of("scaling")
    ours = {r["detail"]["workers"]: (r["detail"]["status"], r["commit"]) for r in found}
    assert ours == {1: ("done", "c2"), 2: ("failed", "c2"), 4: ("done", "c1")}
    assert origin(found) == "8 x toy, 2026-01-03, commit c2 (multimm in part at c1)."


@pytest.mark.parametrize(("reason", "shown"), [(INTERRUPTED, "done"), ("wrong", "failed")])
def test_what_a_closed_sweep_did_not_come_to_has_not_failed(tmp_path, monkeypatch, reason, shown):
    case = "strong square 65536"
    monkeypatch.setenv("MULTIMM_COMMIT", "c1")
    save(tmp_path, [entry(case, "multimm", "float32", 2)], "2026-01-01T00:00:00Z")
    monkeypatch.setenv("MULTIMM_COMMIT", "c2")
    newer = [
        entry(case, "multimm", "float32", 1),
        without_result(case, "multimm", 2, "failed", reason),
    ]
    save(tmp_path, newer, "2026-01-02T00:00:00Z")
    found = {r["detail"]["workers"]: r["detail"]["status"] for r in Runs(tmp_path).of("scaling")}
    assert found == {1: "done", 2: shown}


def test_what_a_sweep_lacks_of_peers_is_taken_from_an_older_one(tmp_path, monkeypatch):
    """No commit of ours makes another product of dask.array; another driver may."""
    case = "strong square 65536"
    older = [entry(case, system, "float32", 2) for system in ("multimm", "dask.array")]
    newer = [
        entry(case, "multimm", "float32", 1),
        without_result(case, "dask.array", 2, "failed", "interrupted"),
    ]
    monkeypatch.setenv("MULTIMM_COMMIT", "c1")
    save(tmp_path, older, "2026-01-01T00:00:00Z")
    monkeypatch.setenv("MULTIMM_COMMIT", "c2")
    path = save(tmp_path, newer, "2026-01-02T00:00:00Z")
    found = Runs(tmp_path).of("scaling")
    where = {(r["system"], r["detail"]["workers"]): r["detail"]["status"] for r in found}
    assert where == {("multimm", 1): "done", ("multimm", 2): "done", ("dask.array", 2): "done"}
    assert origin(found) == "8 x toy, 2026-01-02, commit c2 (dask.array and multimm in part at c1)."
    text = path.read_text().replace('"count": 8', '"count": 8, "driver": "another"')
    path.write_text(text)
    assert [r["detail"]["status"] for r in Runs(tmp_path).of("scaling")] == ["done", "failed"]


def test_a_file_that_is_no_run_is_named(tmp_path):
    (tmp_path / "ladder-1.json").write_text("{")
    with pytest.raises(ValueError, match=r"ladder-1\.json: no JSON"):
        Runs(tmp_path).of("ladder")
    (tmp_path / "ladder-1.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ladder-1\.json: no run of the benchmarks"):
        Runs(tmp_path).of("ladder")


# Blocks


def test_markers_are_filled_from_the_newest_run(tmp_path):
    text = "a\n<!-- table: ladder -->\nold\n<!-- end of table -->\nb\n"
    assert "Not measured yet" in blocks.render(text, Runs(tmp_path))
    _ladder(tmp_path, 1, 1e12)
    _ladder(tmp_path, 2, 2e12)
    filled = blocks.render(text, Runs(tmp_path))
    assert "| 1_naive | first | 2000 | 50.0 |" in filled
    assert "toy, 2026-01-01, commit 01234567." in filled
    assert blocks.render(filled, Runs(tmp_path)) == filled
    for kind in ("table", "figure"):
        with pytest.raises(ValueError, match=f"no {kind} is called 'nothing'; known are"):
            blocks.render(f"<!-- {kind}: nothing -->\n<!-- end of {kind} -->", Runs(tmp_path))


def test_readmes_and_figures_agree_with_the_records():
    outdated = files.outdated(Runs())
    assert outdated == [], "stale: run python -m benchmarks.report"
    for path in blocks.README:
        assert "<!-- figure: " in path.read_text("utf-8")


@pytest.fixture
def readme(tmp_path, monkeypatch):
    """One README with two figures and a table, in a tree of its own."""
    path = tmp_path / "tree" / "README.md"
    path.parent.mkdir()
    names = ("figure: ladder", "figure: strong-scaling", "table: ladder")
    path.write_text("".join(f"<!-- {x} -->\n<!-- end of {x.split(':')[0]} -->\n" for x in names))
    monkeypatch.setattr(blocks, "README", (path,))
    monkeypatch.setattr(blocks, "FIGURES", path.parent / "figures")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(__main__, "Runs", lambda: Runs(tmp_path))
    return path


def test_what_is_outdated_is_said_and_written(readme, tmp_path, capsys):
    _ladder(tmp_path, 1, 1e12)
    drawing = readme.parent / "figures" / "ladder.svg"
    assert __main__.main(["--check"]) == 2
    assert capsys.readouterr().out == f"{readme}: stale\n{drawing}: stale\n"
    assert not drawing.exists()
    assert __main__.main([]) == 0
    assert "| 1_naive | first | 1000 |" in readme.read_text("utf-8")
    assert "ladder 2026-01-01T00:00:01Z 0123456789abcdef; drawn by" in drawing.read_text("utf-8")
    assert __main__.main(["--check"]) == 0
    _ladder(tmp_path, 2, 2e12)
    assert __main__.main(["--check"]) == 2
    __main__.main([])
    (drawing.parent / "strong-scaling.svg").write_text("of records that are gone")
    (drawing.parent / "nothing.svg").write_text("of no figure")
    assert __main__.main(["--check"]) == 2
    __main__.main([])
    assert [path.name for path in drawing.parent.iterdir()] == ["ladder.svg"]


# The command


def _run(*words):
    return CliRunner().invoke(multimm.cli.main, ["report", *map(str, words)])


def test_the_command_writes_a_page_tables_and_figures(tmp_path):
    (tmp_path / "results").mkdir()
    _ladder(tmp_path / "results", 1, 1e12)
    out = tmp_path / "out"
    out.mkdir()
    (out / "sizes.svg").write_text("of an earlier report")
    done = _run("-o", out, "--results", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert f"strong-scaling: left out. {NO_SWEEP}" in done.output
    assert {path.name for path in out.iterdir()} == {
        "ladder.svg", "ladder.png", "prediction.svg", "prediction.png", "tables.md", "report.html",
    }  # fmt: skip
    assert (out / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "| 1_naive | first |" in (out / "tables.md").read_text("utf-8")
    assert "NaN" not in (out / "report.html").read_text("utf-8")


def test_an_installed_package_says_that_the_report_runs_from_a_checkout(tmp_path):
    package = tmp_path / "multimm"
    package.symlink_to(blocks.ROOT / "multimm")
    code = (
        "import sys, pathlib, multimm\n"
        f"multimm.__file__ = {str(tmp_path / 'elsewhere' / 'multimm' / '__init__.py')!r}\n"
        "from multimm.cli import main; main(['report'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert "multimm report runs from a checkout of the repository" in run.stderr
    assert run.stderr.count("\n") == 1
