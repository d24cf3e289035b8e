"""The errors multimm raises on purpose, and what every layer asks before it raises one.

Every message says what was given, what is allowed and what to do. Each class also
derives from the built-in that a NumPy user would expect to catch.
"""

from __future__ import annotations

import operator
import re
import shlex
import sys
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class MultimmError(Exception):
    """Base of every error that multimm raises on purpose.

    Messages name addresses, and are copied into logs and reports: `without_secrets`. What they show
    of an argument may have several lines; they have one.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(_LINES.sub(" ", message)))


class ShapeError(MultimmError, ValueError):
    """Operands whose shapes, chunks or leading dimensions do not fit together."""


class DTypeError(MultimmError, TypeError):
    """A dtype that no matrix product is defined for."""


class ArrayTypeError(MultimmError, TypeError):
    """An operand of the wrong kind: sparse blocks, or CPU and GPU blocks mixed."""


class OptionError(MultimmError, ValueError):
    """An argument outside its allowed values."""


class MemoryBudgetError(MultimmError, ValueError):
    """A plan that needs more memory than a worker, or Dask's scheduler, has."""


class ClusterError(MultimmError, RuntimeError):
    """A cluster that cannot be started, reached or used."""


class FileFormatError(MultimmError, ValueError):
    """A matrix file that cannot be read or written as asked.

    Names and attributes come from files of others, so the message is made `printable`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class KernelError(MultimmError, RuntimeError):
    """A CUDA kernel that cannot be built or launched as asked; what a compiler says has lines."""

    def __init__(self, message: str = "") -> None:
        RuntimeError.__init__(self, without_secrets(message))


class IntegerOverflowWarning(RuntimeWarning):
    """A product of narrow integers whose sums can leave the dtype of the result."""


#: What is installed under the import name `multimm`. The `multimm` of the public package index is
#: another project.
DISTRIBUTION = "dask-multimm"


def checkout() -> Path | None:
    """The checkout of the repository that runs; None where multimm is installed from it."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def how_to_install(extra: str = "") -> str:
    """The command that installs this project and an extra from a checkout of it.

    Parameters
    ----------
    extra : str
        A name of ``[project.optional-dependencies]``; none by default.
    """
    extras = f"[{extra}]" if extra else ""
    if root := checkout():
        return f"pip install -e {shlex.quote(f'{root}{extras}')}"
    return f"pip install {shlex.quote(f'.{extras}')} in a checkout of multimm"


def how_to_install_for_gpus() -> str:
    """The command that installs what GPUs need, for who does not know the CUDA of the driver."""
    return f"{how_to_install('cuda13')} (or cuda12)"


def integer(value: Any) -> int | None:
    """An argument as Python's int if it is an integer of any library, and no bool; else None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def kind_of(x: object) -> str:
    """The name of its type, for messages."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def cause(error: BaseException) -> str:
    """An error's type and text, without line breaks."""
    text, kind = one_line(error), type(error).__name__
    return kind if text == kind else f"{kind}: {text}"


def callers_level() -> int:
    """The `stacklevel` of the first frame outside of us, Dask and xarray, for one frame above."""
    frame, level = sys._getframe(1), 1
    ours = "multimm.", "dask.", "xarray."
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(ours):
        frame, level = frame.f_back, level + 1
    return level


#: Who asks, as an address says it: all before the last @ of its host. A secret key may have slashes
#: in it; what is in front of one and looks like a port is one.
_USER = re.compile(r"""(?<=://)(?:[^\s/?#'"]+|[^\s/?#:@\['"]+:(?!\d+[/?#])[^\s@'"]+)@""")
#: Signatures and tokens in the query of an address.
_SIGNED = re.compile(
    r"""([?&][\w.%-]*(?:sig|token|secret|passw|credential|key|auth)[\w.%-]*=)([^&\s'"#]*[^&\s'"#:)])""",
    re.IGNORECASE,
)
#: Where a line ends and another begins.
_LINES = re.compile(r"\s*\n\s*")
#: Characters of a secret that is looked for where it is in no address; arbitrary.
_LONG = 6


def without_secrets(text: str) -> str:
    """Text whose addresses have no user names, passwords, keys or signatures.

    Libraries repeat parts of an address, so these are left out elsewhere in the text, too.

    >>> print(without_secrets("s3://key:secret@bucket/x.npy: no bucket 'key:secret@bucket'"))
    s3://***@bucket/x.npy: no bucket 'key:***@bucket'
    """
    if "://" not in text:
        return text
    secrets = {value for _, value in _SIGNED.findall(text)}
    for user in _USER.findall(text):
        password = user[:-1].partition(":")[2]
        secrets |= {password, unquote(password), *password.split("/")}
    text = _SIGNED.sub(r"\1***", _USER.sub("***@", text))
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***") if len(secret) >= _LONG else text
    return text


#: Characters that turn the direction of text, so that it reads as something else than it is.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: object) -> str:
    r"""Text that a terminal shows and does not obey: control characters are escaped.

    Names in files, on other hosts and in the environment may hold any. Line breaks are escaped,
    too: what is given is one name, or one line.

    >>> print(printable("red \x1b[31m"))
    red \x1b[31m
    """
    given = str(text)
    if given.isascii() and given.isprintable():
        return given
    return "".join(
        one.encode("unicode_escape").decode()
        if one in _TURNING or unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp")
        else one
        for one in given
    )
