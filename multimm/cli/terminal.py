"""What commands print: names from files, hosts and the environment are shown, never obeyed.

All text goes through here. A terminal would take some characters for orders, and rich some words
in brackets for colours.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import click

from multimm.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


#: Where the command's own lines go while stderr is held back.
_own: int | None = None


def plain(text: object) -> str:
    """Text of several lines with all other control characters escaped."""
    return "\n".join(map(printable, str(text).split("\n")))


def say(text: object, *, err: bool = False, **style: Any) -> None:
    """Print text in a line of its own, or in several."""
    if err and _own is not None:
        os.write(_own, f"{plain(text)}\n".encode(errors="backslashreplace"))
    else:
        click.secho(plain(text), err=err, **style)


def console(width: int | None = None) -> Console:
    """For tables and progress; the strings that it is given are text, not markup.

    `width` counts where output goes to a file, which has none.
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


def occupy_closed() -> None:
    """Have standard streams that were closed (``2>&-``) go nowhere.

    The next file that is opened would get the number of one, and what libraries and workers write
    to stderr with it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


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
    if before is None:  # it was closed
        yield
        return
    sys.stderr = PlainStream(before)
    try:
        yield
    finally:
        sys.stderr = before


@contextmanager
def stderr_held_back() -> Iterator[None]:
    """Inside, stderr shows what `say` says; all else comes when that ends well, else never.

    When a run fails, its workers and libraries complain, too, from Python and from C, in this
    process and in others. The one line that says what happened would be lost among theirs. So
    they write to a file, also until the process ends if this ends with an exception.
    """
    global _own
    if sys.stderr is None:
        yield
        return
    with _file() as file:
        _own = os.dup(2)
        os.dup2(file.fileno(), 2)
        yield
        sys.stderr.flush()
        os.dup2(_own, 2)
        os.close(_own)
        _own = None
        file.seek(0)
        held = file.read().decode(errors="backslashreplace")
    with suppress(OSError):  # a terminal that was closed takes no text
        sys.stderr.write(held)
        sys.stderr.flush()


def _file() -> IO[bytes]:
    with suppress(OSError):  # a full disk, or no folder for temporary files
        return tempfile.TemporaryFile()
    return open(os.devnull, "w+b")


class OutputError(click.ClickException):
    """Nobody takes what the command prints: the reader has gone, or the disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"stdout takes no more ({error.strerror}): free space where it goes, or send it "
            "elsewhere"
        )
        self.gone = error.errno == errno.EPIPE


class Stdout:
    """stdout, whose errors are not taken for those of files and connections."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, and return how many characters were given."""
        with self._checked():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what was buffered."""
        with self._checked():
            self._stream.flush()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Raise `OutputError` inside where stdout takes no more, and be silent about it afterwards."""
    before = sys.stdout
    if before is None:
        yield
        return
    sys.stdout = Stdout(before)
    try:
        yield
        sys.stdout.flush()
    except OutputError:
        with suppress(OSError, ValueError):  # what is buffered is written as Python ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, before.fileno())
            os.close(nowhere)
        raise
    finally:
        sys.stdout = before
