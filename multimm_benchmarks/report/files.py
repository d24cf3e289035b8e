"""What is written: a folder with the page and all figures, or the documents and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from multimm.errors import how_to_install
from multimm_benchmarks.report import blocks, gallery, headline, page
from multimm_benchmarks.report.runs import Runs, sources

PAGE, TABLES = "report.html", "tables.md"


def drawable() -> bool:
    """Whether matplotlib is there to draw."""
    return find_spec("matplotlib") is not None


def write(folder: Path, runs: Runs, say: Callable[[str], None] = print) -> None:
    """Write the page, the tables as Markdown, and each figure as SVG and PNG.

    Parameters
    ----------
    folder : Path
        Made where need be; files of an earlier report are written over.
    runs : Runs
    say : callable
        Given a line per file, and per figure that there are no records of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    for picture in gallery.PICTURES:
        files = [folder / f"{picture.name}.{ending}" for ending in ("svg", "png")]
        if why := picture.missing(runs):
            for path in files:
                path.unlink(missing_ok=True)
            say(f"{picture.name}: left out. {why}")
            continue
        drawn[picture.name] = picture.svg(runs)
        files[0].write_text(drawn[picture.name], "utf-8")
        files[1].write_bytes(picture.png(runs))
        say(f"{files[0]}, {files[1].name}")
    named = [name for name in (*blocks.TABLES, blocks.PREDICTION) if blocks.there(name, runs)]
    tables = [f"## {name}\n\n{blocks.table(name, runs, origin=False)}" for name in named]
    tables.append(f"## Where the numbers come from\n\n{sources(runs)}")
    first = f"# {page.TITLE}\n\n{headline.sentence(runs)}\n\n"
    (folder / TABLES).write_text(first + "\n".join(tables), "utf-8")
    (folder / PAGE).write_text(page.render(runs, drawn), "utf-8")
    say(f"{folder / TABLES}\n{folder / PAGE}")


def outdated(runs: Runs) -> list[Path]:
    """Return the documents and figures that differ from the records, needed or left over."""
    found = [path for path, text in _pages(runs) if text != path.read_text("utf-8")]
    wanted = {blocks.FIGURES / f"{picture.name}.svg": picture for picture in _shown()}
    found += [path for path, picture in wanted.items() if gallery.stale(picture, path, runs)]
    return found + sorted(set(blocks.FIGURES.glob("*")) - set(wanted))


def update(runs: Runs, say: Callable[[str], None] = print) -> None:
    """Write anew what is outdated; figures only where matplotlib is installed."""
    pages = dict(_pages(runs))
    for path in outdated(runs):
        if path in pages:
            path.write_text(pages[path], "utf-8")
            say(f"{path}: written")
            continue
        picture = next((one for one in _shown() if path.name == f"{one.name}.svg"), None)
        if picture is None or picture.missing(runs):
            path.unlink()
            say(f"{path}: removed")
        elif drawable():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(picture.svg(runs), "utf-8")
            say(f"{path}: written")
        else:
            say(f"{path}: left alone, matplotlib is missing: {how_to_install('bench')}")


def _pages(runs: Runs) -> Iterator[tuple[Path, str]]:
    """Each document with the text that belongs there."""
    for path in blocks.PAGES:
        yield path, blocks.render(path.read_text("utf-8"), runs, path.parent)


def _shown() -> list[gallery.Picture]:
    """The figures that documents show."""
    names = [name for path in blocks.PAGES for name in blocks.figures(path.read_text("utf-8"))]
    return [gallery.find(name) for name in dict.fromkeys(names)]
