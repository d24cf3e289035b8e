"""The README is right: its code, its figures, its names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import python

import multimm
from multimm.planning.choice import plan_matmul
from multimm.planning.problem import Problem
from multimm.planning.spec import LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


#: Its Python code, and what that prints.
CODE, PRINTED = re.findall(r"^```(?:python)?\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_its_example_runs_and_prints_what_it_shows(tmp_path):
    """But for figures, which depend on the machine."""
    script = tmp_path / "example.py"
    script.write_text(CODE, "utf-8")
    done = python(script, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    figure = r"\d+(\.\d+)?(e[+-]\d+)?"
    assert re.sub(figure, "#", done.stdout) == re.sub(figure, "#", PRINTED)


def test_the_figures_of_its_plan_are_those_of_now():
    """Of two cores with the rates that the first `start` measured where it was printed."""
    a = MatrixSpec((4000, 6000), chunks=((1000,) * 4, (1000,) * 6))
    b = MatrixSpec((6000, 5000), chunks=((1500,) * 4, (1500,) * 3 + (500,)))
    device = DeviceSpec("AMD EPYC", "cpu", 11 * 10**9, 117.9, 10.0)
    cluster = ClusterSpec.homogeneous(device, 2, replace(LOCAL_TCP, gbps=1.991))
    plan = plan_matmul(Problem(a, b, awaited=True), cluster)
    shown = re.search(r"print\(f\"(.*)\"\)", CODE)[1]
    made = re.sub(r"\{(.+?):\.(\d)f\}", lambda x: value(plan, x[1], int(x[2])), shown)
    assert PRINTED.splitlines()[0] == made


def value(plan, name: str, digits: int) -> str:
    """What `p.name`, or `p.name / 1e6`, is."""
    field, _, scale = name.removeprefix("p.").partition(" / ")
    return f"{getattr(plan, field) / float(scale or 1):.{digits}f}"


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table that begins so."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_its_figures_are_those_of_the_newest_records():
    """A row says what a row of the table of records does, of the case that its words name."""
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    recorded = rows(benchmarks, "| case | accuracy of |")
    shown = rows(README, "| product, with float32's accuracy |")
    assert len(shown) == 4
    cases = {
        "square of 32768": "strong square 32768",
        "square of 65536": "strong square 65536",
        "`a.T @ a`, 1048576 x 8192": "tall AtA 1048576 x 8192",
        "square of 32768, NumPy blocks": "host square 32768 in 8192",
    }
    for product, *figures in shown:
        assert [cases[product], "FP32", *figures] in recorded


@pytest.mark.parametrize("name", sorted(set(re.findall(r"multimm\.([a-z_.]+)\(", README))))
def test_what_it_names_is_there(name):
    found = multimm
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_sums_over_other_axes_that_it_names_are_there():
    (row,) = re.findall(r"^\| sum over other axes \|.*$", README, flags=re.MULTILINE)
    for name in re.findall(r"`([a-z]+)`", row):
        assert callable(getattr(multimm, name)), name
