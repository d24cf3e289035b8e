"""Parts of pages for notebooks: without scripts or files, of bounded size, for light and dark.

Text has the notebook's own colour, and nothing has a background but what is coloured for a meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from multimm.errors import printable

#: Degrees between the hues of neighbours: the golden angle, so that any number of them differ.
_ANGLE = 137.5
_BOX = "margin:4px 0;line-height:1.5"
_BAR = "display:flex;height:14px;border:1px solid;border-radius:2px;max-width:640px"

Parts = Sequence[tuple[str, float, str]]  #: a name, its size, and what is said of it


def escaped(text: object) -> str:
    """Text that a page shows and does not obey."""
    return escape(printable(text))


def colour(number: int) -> str:
    """One that is seen on white and on black, and under black text."""
    return f"hsl({_ANGLE * number % 360:.0f} 60% 62%)"


def page(title: str, *parts: str) -> str:
    """A headline and what stands below it."""
    return f'<div style="{_BOX}"><b>{escaped(title)}</b>{"".join(parts)}</div>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of text, the first column left and all others right."""
    lines = [_row(head, "th")] if head else []
    return f"<table>{''.join([*lines, *(_row(row, 'td') for row in rows)])}</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    sides = ["left", *["right"] * (len(cells) - 1)]
    made = (
        f'<{tag} style="text-align:{side}">{escaped(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"


def bar(title: str, parts: Parts, whole: float) -> str:
    """Parts of a whole side by side, and a legend; what is left of the whole stays empty."""
    whole = max(whole, sum(size for _, size, _ in parts)) or 1.0
    pieces = "".join(
        f'<span title="{escaped(name)}" style="width:{100 * size / whole:.2f}%;'
        f'background:{colour(at)}"></span>'
        for at, (name, size, _) in enumerate(parts)
    )
    legend = " &nbsp; ".join(
        f'<span style="white-space:nowrap"><span style="color:{colour(at)}">&#9632;</span> '
        f"{escaped(name)} {escaped(said)}</span>"
        for at, (name, _, said) in enumerate(parts)
    )
    return (
        f'<div style="{_BOX}">{escaped(title)}<div style="{_BAR}">{pieces}</div>'
        f"<small>{legend}</small></div>"
    )


def folded(title: str, text: str) -> str:
    """Lines of text that are shown on a click."""
    lines = "\n".join(map(escaped, text.splitlines()))
    return f"<details><summary>{escaped(title)}</summary><pre>{lines}</pre></details>"
