"""The page of the report in a real browser: it loads, says nothing, and shows every figure."""

from __future__ import annotations

import html.parser
import os
import shutil

import pytest
import scaling_records
from browser import PROGRAMS, Browser, program

from benchmarks.records import RESULTS
from benchmarks.report import files, gallery, page
from benchmarks.report.runs import Runs

#: Of the page: its figures with the sizes at which they are drawn, and whether it is too wide.
LOOK = """Promise.all([...document.images].map(image => image.decode())).then(() => ({
    title: document.title,
    figures: [...document.querySelectorAll("figure")].map(figure => {
        const image = figure.querySelector("img"), box = image.getBoundingClientRect();
        return {name: figure.id, alt: image.alt, width: box.width, height: box.height,
                drawn: image.complete && image.naturalWidth > 0,
                caption: figure.querySelector("figcaption").textContent};
    }),
    missing: [...document.querySelectorAll(".missing")].map(line => line.dataset.figure),
    tables: document.querySelectorAll("table").length,
    links: [...document.querySelectorAll("nav a")].map(
        link => document.querySelector(link.getAttribute("href")) !== null),
    tooWide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
}))"""


@pytest.fixture(scope="module", params=[1280, 390])
def browser(request, tmp_path_factory):
    path = program()
    if path is None:
        reason = f"none of {', '.join(PROGRAMS)} is installed"
        if os.environ.get("MULTIMM_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    opened = Browser(path, tmp_path_factory.mktemp("profile"), request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The report of the records that are kept."""
    folder = tmp_path_factory.mktemp("kept")
    files.write(folder, Runs(), lambda line: None)
    return folder / files.PAGE


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The report of the same and of a sweep over GPUs: every figure there is."""
    folder = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTIMM_COMMIT", "0123456789abcdef")
        shutil.copytree(RESULTS, folder / "results")
        for path in (folder / "results").glob("scaling-*"):
            path.unlink()
        scaling_records.save(folder / "results", scaling_records.swept())
    files.write(folder, Runs(folder / "results"), lambda line: None)
    return folder / files.PAGE


def _check(loaded, path, expected):
    assert loaded.complaints == []
    assert loaded.requests == [path.as_uri()]
    found = loaded.found
    assert found["title"] == page.TITLE
    assert sorted(figure["name"] for figure in found["figures"]) == sorted(expected)
    for figure in found["figures"]:
        assert figure["drawn"], figure
        assert figure["width"] > 300, figure
        assert figure["height"] > 100, figure
        assert figure["alt"]
        assert figure["caption"]
    assert all(found["links"])
    assert not found["tooWide"]


def test_the_page_of_the_kept_records_loads(browser, kept):
    runs = Runs()
    drawn = [f"figure-{one.name}" for one in gallery.PICTURES if not one.missing(runs)]
    loaded = browser.load(kept.as_uri(), LOOK)
    _check(loaded, kept, drawn)
    assert len(drawn) >= 6
    left_out = [one.name for one in gallery.PICTURES if one.missing(runs)]
    assert sorted(loaded.found["missing"]) == sorted(left_out)


def test_the_page_of_a_full_set_of_records_shows_every_figure(browser, full):
    loaded = browser.load(full.as_uri(), LOOK)
    _check(loaded, full, [f"figure-{one.name}" for one in gallery.PICTURES])
    assert loaded.found["missing"] == []
    assert loaded.found["tables"] >= 16


def test_what_is_wrong_with_a_page_is_noticed(browser, tmp_path):
    path = tmp_path / "wrong.html"
    path.write_text(
        "<!doctype html><title>x</title><script>console.log('said'); throw Error('thrown')</script>"
        "<img src='nowhere.png'><img src='data:image/svg+xml;base64,PHN2Zz4='>"
    )
    script = "[...document.images].map(image => image.naturalWidth)"
    loaded = browser.load(path.as_uri(), script)
    told = str(loaded.complaints)
    assert "said" in told
    assert "thrown" in told
    assert "ERR_FILE_NOT_FOUND" in told
    assert loaded.found == [0, 0]
    assert len(loaded.requests) == 2


def test_the_page_needs_nothing_from_elsewhere(kept, full):
    class Addresses(html.parser.HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "iframe", "object", "embed"), tag
            self.found += [value for name, value in attrs if name in ("src", "href", "srcset")]

    for path in (kept, full):
        text = path.read_text("utf-8")
        parser = Addresses()
        parser.feed(text)
        outside = [one for one in parser.found if not one.startswith(("#", "data:"))]
        assert outside == []
        assert "url(" not in text
        assert "@import" not in text
