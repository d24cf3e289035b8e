"""Links in the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "benchmarks", "kernels", "cluster", "examples")
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md")))
)
PAIR = ("measurements.md", "design.md")


def headings(path: Path, marks: str = "#+") -> list[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(rf"^{marks} (.+)$", text, flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_anchors_are_those_of_github():
    assert anchor("Packed once, or by every product") == "packed-once-or-by-every-product"
    assert anchor("sgemm_split") == "sgemm_split"


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


def test_measurements_have_the_sections_of_the_design():
    measured, explained = (headings(ROOT / "docs" / name, "##") for name in PAIR)
    assert measured == [heading for heading in explained if heading in measured]


@pytest.mark.parametrize("name", PAIR)
def test_files_that_are_named_exist(name):
    text = (ROOT / "docs" / name).read_text("utf-8")
    names = re.findall(r"`([\w/]+\.(?:py|cuh?))`", text)
    assert names
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "multimm" / name).exists(), name
