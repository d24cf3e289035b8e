"""A page with all figures and tables in one file, which needs nothing else: no script, no network.

Figures are SVGs in data URIs: names inside one do not meet those of another.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import NamedTuple

from multimm_benchmarks.report import blocks, gallery
from multimm_benchmarks.report.gallery import Picture
from multimm_benchmarks.report.runs import Runs, origin

TITLE = "multimm: benchmarks"


class Section(NamedTuple):
    """A heading with figures and tables, by name."""

    title: str
    figures: tuple[str, ...]
    tables: tuple[str, ...]


SECTIONS = (
    Section("Several GPUs", ("strong-scaling", "oblong-scaling", "weak-scaling", "sizes"),
            ("verdict", "scaling", "starts", "peers")),
    Section("Bytes and time", ("bytes", "timeline"), ("bytes",)),
    Section("Beyond one box: predicted", ("prediction",), ("prediction", "prediction-check")),
    Section("One GPU", ("products", "roofline"), ("ffma", "split")),
    Section("Accuracy", ("accuracy",), ("accuracy",)),
    Section("Awkward and thin products", ("awkward",), ("awkward", "matvec")),
    Section("The ladder", ("ladder",), ("ladder",)),
    Section("Other kernels and calls", (), ("transpose", "add", "latency")),
    Section("From Python", (), ("python", "python-grid")),
)  # fmt: skip

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 3rem; border-bottom: 1px solid #ccc; }
nav a { margin-right: 1rem; }
figure { margin: 1.5rem 0; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 52rem; height: auto; }
figcaption, .missing { color: #555; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: left;
         vertical-align: top; }
@media print { nav { display: none; } .table { overflow: visible; } table { font-size: 8px; } }
"""


def render(runs: Runs, drawn: Mapping[str, str]) -> str:
    """Return the page.

    Parameters
    ----------
    runs : Runs
        What it shows; a line says what there is no record of.
    drawn : mapping of str to str
        The figures that can be drawn, as SVG, by name.
    """
    contents = "".join(
        f'<a href="#{_anchor(section)}">{html.escape(section.title)}</a>\n' for section in SECTIONS
    )
    body = "".join(_section(section, runs, drawn) for section in SECTIONS)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{TITLE}</title>\n'
        # Without an icon of its own a page asks its server for one.
        f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{TITLE}</h1>\n<nav>\n{contents}</nav>\n{body}</body>\n</html>\n"
    )


def _section(section: Section, runs: Runs, drawn: Mapping[str, str]) -> str:
    parts = [f'<h2 id="{_anchor(section)}">{html.escape(section.title)}</h2>\n']
    parts += [_figure(gallery.find(name), runs, drawn) for name in section.figures]
    parts += [_table(name, runs) for name in section.tables]
    return "".join(parts)


def _anchor(section: Section) -> str:
    return "".join(c if c.isalnum() else "-" for c in section.title.lower())


def _figure(picture: Picture, runs: Runs, drawn: Mapping[str, str]) -> str:
    title = html.escape(picture.title)
    if why := picture.missing(runs):
        return f'<p class="missing" data-figure="{picture.name}">{title}: {_text(why)}</p>\n'
    data = base64.b64encode(drawn[picture.name].encode()).decode()
    shown = [origin(runs.of(suite)) for suite in picture.suites]
    notes = html.escape(" ".join(dict.fromkeys(shown)))
    return (
        f'<figure id="figure-{picture.name}">\n<img alt="{html.escape(picture.alt)}" '
        f'src="data:image/svg+xml;base64,{data}">\n'
        f"<figcaption>{title}. {notes}</figcaption>\n</figure>\n"
    )


def _table(name: str, runs: Runs) -> str:
    return f'<div class="table" id="table-{name}">\n{_html(blocks.table(name, runs))}</div>\n'


def _text(markdown: str) -> str:
    """One line of Markdown without a paragraph around it."""
    return _html(markdown).strip().removeprefix("<p>").removesuffix("</p>")


def _html(markdown: str) -> str:
    from markdown_it import MarkdownIt

    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown))
