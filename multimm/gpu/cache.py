"""Files that can be made again: where they lie, and how several processes write them at once.

`$MULTIMM_CACHE_DIR` names the directory, else it is `multimm` in the user's cache directory.
Everything in it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


def directory() -> Path | None:
    """Where the files lie; None for a user without a home directory."""
    if given := os.environ.get("MULTIMM_CACHE_DIR"):
        return Path(given)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "multimm")
    try:
        return Path.home() / ".cache" / "multimm"
    except RuntimeError:
        return None


def writable() -> bool:
    """Whether files may be kept, as far as can be told without writing one."""
    home = directory()
    if home is None:
        return False
    there = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def read(path: Path) -> bytes | None:
    """The content of a file, or None if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for whoever else is in here for the same file: to read it, change it, and write it.

    Where no file can be locked nobody waits: what is lost can be made again.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = held.enter_context(open(f"{path}.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


def write(path: Path, content: bytes) -> bool:
    """Write a whole file or none of it, and say whether that went well.

    Whoever reads `path` meanwhile sees the old file or the new one: the content is written
    under a name of its own in the same directory and then renamed. Of several writers the last
    one wins.
    """
    temporary = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _unwritable(path.parent, str(error))
        return False
    return True


@functools.cache
def _unwritable(parent: Path, reason: str) -> None:
    """Said once per process and reason: everything works without the files, slower."""
    logger.warning(
        "nothing is kept in %s (%s): what is compiled or measured is for this process alone; set "
        "MULTIMM_CACHE_DIR to a directory that can be written to",
        parent,
        reason,
    )
