"""A page with all figures and tables in one file, which needs nothing else: no script, no network.

A sentence and a picture come first, where the numbers come from stands last. Figures are SVGs in
data URIs: names inside one do not meet those of another.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import NamedTuple

from multimm_benchmarks.report import blocks, gallery, headline, words
from multimm_benchmarks.report.gallery import Picture
from multimm_benchmarks.report.runs import Runs, sources

TITLE = "multimm: benchmarks"


class Section(NamedTuple):
    """A heading with figures and tables, by name; of GPUs or of CPU workers."""

    title: str
    figures: tuple[str, ...]
    tables: tuple[str, ...]


SECTIONS = (
    Section("Several GPUs", ("beside", "strong-scaling", "oblong-scaling", "weak-scaling", "sizes"),
            ("verdict", "scaling", "starts")),
    Section("Bytes and time", ("bytes", "timeline"), ("bytes",)),
    Section("Predictions", ("prediction",), ("prediction", "prediction-check")),
    Section("One GPU", ("products", "roofline"), ("ffma", "split")),
    Section("Accuracy", ("accuracy",), ("accuracy",)),
    Section("Awkward and thin products", ("awkward",), ("awkward", "matvec")),
    Section("The ladder", ("ladder",), ("ladder",)),
    Section("Other kernels and calls", (), ("transpose", "add", "latency")),
    Section("From Python", (), ("python", "python-grid")),
    Section("Systems", (), ("peers",)),
)  # fmt: skip
#: What may come first: the first of these that can be drawn.
FIRST = ("beside", "strong-scaling", "weak-scaling", "products", "ladder", "awkward")

_STYLE = """
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .3rem 0 1rem; }
h2 { line-height: 1.2; margin-top: 3rem; border-bottom: 1px solid #ccc; }
.title, figcaption { color: #555; }
.title { margin: 0; }
nav a { display: inline-block; margin-right: 1rem; padding: .2rem 0; }
figure { margin: 1.5rem 0; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 52rem; height: auto; }
#first img { max-width: 44rem; }
h1 a, figcaption a, table a, p a { color: inherit; text-decoration: underline dotted; }
.table { overflow-x: auto; margin: 1.5rem 0; overflow-wrap: normal; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: left;
         vertical-align: top; }
dt { font-weight: 600; margin-top: .8rem; }
dd { margin: 0; }
@media (max-width: 40rem) { h1 { font-size: 1.3rem; } h2 { margin-top: 2rem; }
                            th, td { padding: .2rem .4rem; } }
@media print { nav { display: none; } .table { overflow: visible; } table { font-size: 8px; } }
"""


def render(runs: Runs, drawn: Mapping[str, str]) -> str:
    """Return the page.

    Parameters
    ----------
    runs : Runs
        What it shows; what there are no records of is named at the end.
    drawn : mapping of str to str
        The figures that can be drawn, as SVG, by name.
    """
    used: set[words.Word] = set()
    first = next((name for name in FIRST if name in drawn), "")
    sections = {}
    for section in SECTIONS:
        found = [_figure(gallery.find(name), runs, drawn[name], used)
                 for name in section.figures if name in drawn and name != first]  # fmt: skip
        found += [_table(name, runs, used) for name in section.tables if blocks.there(name, runs)]
        if found:
            sections[gallery.worded(section.title, runs)] = "".join(found)
    if missing := _missing(runs):
        sections["Not measured"] = missing
    top = _figure(gallery.find(first), runs, drawn[first], used, "first") if first else ""
    sections["Where the numbers come from"] = f'<div class="table">\n{_html(sources(runs))}</div>\n'
    sentence = words.linked(html.escape(headline.sentence(runs), quote=False), used)
    sections["Words"] = words.explained(used)
    contents = "".join(
        f'<a href="#{_anchor(one)}">{one}</a>\n' for one in map(html.escape, sections)
    )
    body = "".join(
        f'<h2 id="{_anchor(title)}">{html.escape(title)}</h2>\n{inside}'
        for title, inside in sections.items()
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}</title>\n"
        # Without an icon of its own a page asks its server for one.
        f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n</head>\n'
        f'<body>\n<p class="title">{TITLE}</p>\n<h1>{sentence}</h1>\n{top}'
        f"<nav>\n{contents}</nav>\n{body}</body>\n</html>\n"
    )


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())


def _figure(picture: Picture, runs: Runs, svg: str, used: set[words.Word], ident: str = "") -> str:
    data = base64.b64encode(svg.encode()).decode()
    title = words.linked(html.escape(picture.worded(picture.title, runs)), used)
    return (
        f'<figure id="{ident or f"figure-{picture.name}"}">\n'
        f'<img alt="{html.escape(picture.worded(picture.alt, runs))}" '
        f'src="data:image/svg+xml;base64,{data}">\n<figcaption>{title}.</figcaption>\n</figure>\n'
    )


def _table(name: str, runs: Runs, used: set[words.Word]) -> str:
    inside = words.linked(_html(blocks.table(name, runs, origin=False)), used)
    return f'<div class="table" id="table-{name}">\n{inside}</div>\n'


def _missing(runs: Runs) -> str:
    """A list of the figures that cannot be drawn, and why."""
    found: dict[str, list[str]] = {}
    for picture in gallery.PICTURES:
        if why := picture.missing(runs):
            found.setdefault(why, []).append(picture.worded(picture.title, runs))
    items = (
        f"<li>{_text(why)}<br>{html.escape('; '.join(titles))}.</li>\n"
        for why, titles in found.items()
    )
    return f"<ul>\n{''.join(items)}</ul>\n" if found else ""


def _text(markdown: str) -> str:
    """One line of Markdown without a paragraph around it."""
    return _html(markdown).strip().removeprefix("<p>").removesuffix("</p>")


def _html(markdown: str) -> str:
    from markdown_it import MarkdownIt

    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown))
