"""The report: which records it shows, its tables and figures, blocks in documents, the command."""

from __future__ import annotations

import base64
import re

import pytest
from click.testing import CliRunner
from scaling_records import CPUS, entry, save, swept, without_result

import multimm
import multimm.cli
from multimm_benchmarks import records
from multimm_benchmarks.report import (
    __main__,
    blocks,
    files,
    gallery,
    page,
    words,
)
from multimm_benchmarks.report.runs import Runs, origin

NO_SWEEP = "Not measured yet: `multimm bench`."


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
    long = without_result("strong square 65536", "multimm", 4, "absent", "more than --longest 6")
    save(tmp_path, [first[0] | {"tflops": 8.0}, lost, long], "2026-01-03T00:00:00Z")
    found = Runs(tmp_path).of("scaling")
    ours = {r["detail"]["workers"]: (r["detail"]["status"], r["commit"]) for r in found}
    assert ours == {1: ("done", "c2"), 2: ("failed", "c2"), 4: ("done", "c1")}
    assert origin(found) == "8 x toy, 2026-01-03, commit c2 (multimm in part at c1)."
    # A run of some cases: what the others had no room for stays, what failed does not.
    absent = without_result("strong square 131072", "multimm", 1, "absent", "needs 250 GB")
    failed = without_result("strong square 131072", "multimm", 2, "failed", "out of memory")
    save(tmp_path, [absent, failed], "2026-01-04T00:00:00Z")
    monkeypatch.setenv("MULTIMM_COMMIT", "c3")
    save(tmp_path, [first[0]], "2026-01-05T00:00:00Z")
    found = [r for r in Runs(tmp_path).of("scaling") if r["case"] == "strong square 131072"]
    assert [r["detail"]["workers"] for r in found] == [1]


def test_dtypes_may_be_measured_in_parts_on_one_day(tmp_path):
    """Of each case what was measured last."""
    runs = [("gone",), ("int8", "float64"), ("int8",)]
    for rate, cases in enumerate(runs):
        one = entry("strong square 65536", "multimm", "float32", 1)
        made = [one | {"case": case, "tflops": float(rate)} for case in cases]
        path = save(tmp_path, made, f"2026-01-0{min(2, rate + 1)}T0{rate}:00:00Z")
        path.rename(path.with_name(path.name.replace("scaling", "dtypes")))
    found = {r["case"]: r["tflops"] for r in Runs(tmp_path).of("dtypes")}
    assert found == {"float64": 1.0, "int8": 2.0}


def test_runs_on_gpus_come_first(tmp_path):
    save(tmp_path, swept("cpu"), "2026-01-02T00:00:00Z", CPUS)
    runs = Runs(tmp_path)
    assert origin(runs.of("scaling")) == "2 cores, no GPU, 2026-01-02, commit 01234567."
    assert runs.per_gpu("scaling") == {}
    save(tmp_path, swept())
    # CPU workers of a machine that has GPUs
    save(tmp_path, swept("cpu"), "2026-01-03T00:00:00Z")
    assert origin(Runs(tmp_path).of("scaling")) == "8 x toy, 2026-01-01, commit 01234567."


def test_a_file_that_is_no_run_is_named(tmp_path):
    (tmp_path / "ladder-1.json").write_text("{")
    with pytest.raises(ValueError, match=r"ladder-1\.json: no JSON"):
        Runs(tmp_path).of("ladder")
    (tmp_path / "ladder-1.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ladder-1\.json: no run of the benchmarks"):
        Runs(tmp_path).of("ladder")


# Blocks


def test_documents_and_figures_agree_with_the_records():
    outdated = files.outdated(Runs())
    assert outdated == [], "stale: run python -m multimm_benchmarks.report"


@pytest.fixture
def readme(tmp_path, monkeypatch):
    """One README with two figures and a table, in a tree of its own."""
    path = tmp_path / "tree" / "README.md"
    path.parent.mkdir()
    names = ("figure: ladder", "figure: strong-scaling", "table: ladder")
    path.write_text("".join(f"<!-- {x} -->\n<!-- end of {x.split(':')[0]} -->\n" for x in names))
    monkeypatch.setattr(blocks, "PAGES", (path,))
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
    text = (out / "tables.md").read_text("utf-8")
    assert "| 1_naive | first |" in text
    assert "## scaling" not in text
    assert "NaN" not in (out / "report.html").read_text("utf-8")


CASE = "strong square 65536"


# The page


@pytest.fixture
def rendered(tmp_path):
    """The page of one full sweep, whose figures are their names."""
    save(tmp_path, swept())
    sweeps = Runs(tmp_path)
    there = [one.name for one in gallery.PICTURES if not one.missing(sweeps)]
    return page.render(sweeps, {name: f"<svg>{name}</svg>" for name in there})


def test_a_sentence_and_a_picture_come_first_and_commits_last(rendered):
    (sentence,) = re.findall("<h1>(.*?)</h1>", rendered)
    assert re.sub("<.*?>", "", sentence) == (
        "On 8 toy GPUs multimm is 3.4 times as fast as the fastest other system, in 4 "
        "products of float32's accuracy."
    )
    first = rendered.index("<figure")
    assert rendered.index("<h1>") < first < rendered.index("<nav>")
    drawn = re.findall('base64,([^"]*)', rendered)
    assert base64.b64decode(drawn[0]) == b"<svg>beside</svg>"
    assert len(set(drawn)) == len(drawn)
    last = rendered.index("Where the numbers come from</h2>")
    assert "01234567" not in rendered[:last]
    assert "<td>8 x toy</td>\n<td>2026-01-01</td>\n<td>01234567</td>" in rendered[last:]


def test_links_of_the_page_lead_somewhere_in_it(rendered):
    idents = re.findall(' id="(.*?)"', rendered)
    targets = re.findall('href="#(.*?)"', rendered)
    assert len(set(idents)) == len(idents)
    assert {x for x in idents if x.startswith("word-")} <= set(targets) <= set(idents)
    assert "http" not in re.sub("<(dd|td|li|code)>.*?</", "", rendered)


def test_a_word_is_linked_where_it_first_stands():
    used = set()
    text = '<p title="tasks">A task, tasks; <code>peer</code>, <a href="x">peer</a>, peer/x</p>'
    linked = words.linked(text, used)
    assert linked == text.replace("A task", 'A <a href="#word-task">task</a>')
    assert [word.name for word in used] == ["task"]
    assert words.explained(used).count("<dt") == 1


# CPU workers


def test_a_report_of_cpu_records_is_a_report(tmp_path):
    shown = [r for r in swept("cpu") if r["system"] in ("multimm", "dask.array")]
    slow = [r | {"tflops": r["tflops"] / 1e5} for r in shown]
    numpy = entry(CASE, "numpy", "float32", 1, device="cpu")
    save(tmp_path / "results", [*slow, numpy | {"tflops": 0.02}], machine=CPUS)
    done = _run("-o", tmp_path / "out", "--results", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert "prediction: left out. These are predictions for GPUs" in done.output
    made = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert {"beside.svg", "strong-scaling.svg", "weak-scaling.svg", "timeline.svg"} <= made
    drawn = (tmp_path / "out" / "strong-scaling.svg").read_text("utf-8")
    assert "workers" in drawn
    assert "GFLOP/s" in drawn
    assert "GPU" not in re.sub("<!--.*?-->", "", drawn)
    text = (tmp_path / "out" / "tables.md").read_text("utf-8")
    assert text.splitlines()[2].startswith("On 8 CPU workers of a machine with 2 cores multimm is")
    assert "| case | system | 1 worker | 2 workers |" in text
    # NumPy has all cores, and stands beside any number of workers.
    assert f"| {CASE} | FP32 | 8 | 11.3 | NumPy, CPU | 20 | **0.57** |" in text
