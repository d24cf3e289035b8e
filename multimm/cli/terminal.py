"""What commands print: names from files, hosts and the environment are shown, never obeyed.

All text goes through here. A terminal would take some characters for orders, and rich some words
in brackets for colours.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from multimm.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def plain(text: object) -> str:
    """Text of several lines with all other control characters escaped."""
    return "\n".join(map(printable, str(text).split("\n")))


def say(text: object, *, err: bool = False, **style: Any) -> None:
    """Print text in a line of its own, or in several."""
    click.secho(plain(text), err=err, **style)


def console(width: int | None = None) -> Console:
    """For tables and progress; the strings that it is given are text, not markup.

    Parameters
    ----------
    width : int, optional
        Characters of a line where output goes to a file, which has no width.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(plain(text), **options)

    made = Plain(markup=False, emoji=False)
    if width is not None and not made.is_terminal:
        made = Plain(markup=False, emoji=False, width=width)
    return made


class PlainStream:
    """A text stream that escapes what it is given; all else is the stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, and return how many characters were given."""
        if not isinstance(text, str):
            raise TypeError(f"{type(text).__name__} is no text")
        self._stream.write(plain(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def plain_stderr() -> Iterator[None]:
    """What libraries log inside is text, too: nothing on stderr has a style."""
    before = sys.stderr
    sys.stderr = PlainStream(before)
    try:
        yield
    finally:
        sys.stderr = before


def plain_streams_for_good() -> None:
    """Runs on workers of our own, which share our terminal."""
    if isinstance(sys.stderr, PlainStream):
        return
    old = {id(stream): PlainStream(stream) for stream in (sys.stdout, sys.stderr)}
    sys.stdout, sys.stderr = old[id(sys.stdout)], old[id(sys.stderr)]
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        stream = old.get(id(getattr(handler, "stream", None)))
        if stream is not None and isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)
