"""Links in the documents lead somewhere, and the plans in them are those of today."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner

import multimm
from multimm.cli import main

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "benchmarks", "multimm_benchmarks", "kernels", "cluster", "docker", "examples")
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md")))
)
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "multimm").rglob("*.py")
    if ">>> " in path.read_text("utf-8")
)
#: Those that say where things are.
EXPLAINING = [
    *(Path("docs") / f"{name}.md" for name in ("architecture", "numerics", "memory-and-faults")),
    *(x for x in DOCUMENTS if x.parts[:2] == ("docs", "decisions")),
    Path("CONTRIBUTING.md"),
    Path("kernels") / "README.md",
]
#: Of all files and folders, as `/multimm/graph`.
PATHS = sorted(
    f"/{path.relative_to(ROOT)}"
    for folder in (*FOLDERS, "multimm", "tests")
    for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
)


def headings(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, place = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if place:
            assert place in map(anchor, headings(linked)), target


@pytest.mark.parametrize("document", EXPLAINING, ids=str)
def test_files_and_folders_that_are_named_exist(document):
    """By their paths, or by as much of the end as tells them from others."""
    text = (ROOT / document).read_text("utf-8")
    for name in re.findall(r"`([\w./]+(?:\.(?:py|cuh?|jsonl)|/))`", text):
        end = f"/{name.rstrip('/')}"
        assert any(path.endswith(end) for path in PATHS), name


def shown(document: str, after: str) -> str:
    """The first block of text behind some words."""
    text = (ROOT / document).read_text("utf-8")
    return re.search(r"^```\n(.*?)^```", text[text.index(after) :], re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("gpus", [1, 2])
def test_plans_for_gpus_are_those_that_are_printed_now(gpus):
    command = f"multimm plan 32768x32768 32768x32768 --chunks 8192 --gpus {gpus}"
    told = CliRunner().invoke(main, command.split()[1:]).stdout
    assert shown("docs/first-run.md", f"`{command}`:") == told


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_say(module):
    found = doctest.testmod(import_module(module))
    assert found.attempted or module == "multimm.io"  # which writes a file
    assert not found.failed


def cells(document: str, head: str) -> list[list[str]]:
    """Of the table with that head."""
    text = (ROOT / document).read_text("utf-8")
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


REPLACED = [
    (call, re.findall("`(.*?)`", new)[0])
    for old, new in cells("docs/from-dask.md", "| Dask | multimm |")
    for call in re.findall("`(.*?)`", old)
    if new.startswith("`multimm.") and "path" not in new and "cluster" not in new
]


@pytest.mark.parametrize(("old", "new"), REPLACED, ids=[new for _, new in REPLACED])
def test_calls_that_take_the_place_of_dasks_give_the_same(old, new):
    a, b, c, x = (
        da.from_array((np.arange(16).reshape(4, 4) * i % 5).astype("int8"), chunks=3)
        for i in (1, 2, 3, 4)
    )
    names = {"a": a, "b": b, "c": c, "x": x, "axes": 1, "da": da, "multimm": multimm}
    np.testing.assert_array_equal(eval(old, names), eval(new, names))
