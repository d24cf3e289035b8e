"""Files that can be made again: where they lie, and how several processes write them at once.

`$MULTIMM_CACHE_DIR` names the directory, else it is `multimm` in the user's cache directory.
Everything in it may be deleted at any time. What somebody else could have written there is not
used, and what is damaged is ignored: everything works without these files, slower.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from pathlib import Path

from multimm.gpu.runtime.trusted_files import UntrustedError, open_file, own_folder

logger = logging.getLogger(__name__)

#: Bytes of a file; a kernel has some 100 kB, and other files less. Arbitrary.
MOST_BYTES = 2**26


def directory() -> Path | None:
    """Where the files lie, absolute; None for a user without a home directory."""
    if given := os.environ.get("MULTIMM_CACHE_DIR"):
        return Path(given).absolute()
    # A relative one is to be ignored: specifications.freedesktop.org/basedir-spec.
    if not os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        base = os.path.expanduser("~/.cache") if os.environ.get("HOME", "~") else ""
    return Path(base, "multimm") if os.path.isabs(base) else None


def _folder(path: Path, *, create: bool = False) -> Path:
    """A folder in `directory()`: from there on down all are this user's alone."""
    home = directory()
    inside = home is not None and path.is_relative_to(home)
    own = len(path.parts) - len(home.parts) + 1 if inside and home else 1
    return own_folder(path, own=own, create=create)


def obstacle() -> str:
    """Why no files may be kept, as far as can be told without writing one; empty if they may."""
    home = directory()
    if home is None:
        return "there is no home directory: set MULTIMM_CACHE_DIR"
    try:
        allowed = os.access(_folder(home, create=True), os.W_OK, effective_ids=True)
    except OSError as error:
        return str(error)
    return "" if allowed else f"{home} cannot be written to: set MULTIMM_CACHE_DIR"


def names(path: Path) -> list[str]:
    """What lies in a folder, in order; nothing if it is not there or not to be trusted."""
    try:
        return sorted(os.listdir(_folder(path)))
    except UntrustedError as error:
        _refused(str(error))
    except OSError:
        pass
    return []


def read(path: Path) -> bytes | None:
    """The content of a file, or None if it cannot be read or is not to be trusted."""
    try:
        with os.fdopen(open_file(_folder(path.parent) / path.name, os.O_RDONLY), "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) <= MOST_BYTES:
            return content
        logger.warning("%s has more than %d bytes and is ignored: delete it", path, MOST_BYTES)
    except UntrustedError as error:
        _refused(str(error))
    except OSError:
        pass
    return None


def write(path: Path, content: bytes) -> bool:
    """Write a whole file or none of it, and say whether that went well.

    Whoever reads `path` meanwhile sees the old file or the new one: the content is written
    under a name of its own in the same directory and then renamed. Of several writers the last
    one wins. New folders have mode 0700, files 0600.
    """
    try:
        _write(_folder(path.parent, create=True) / path.name, content)
    except UntrustedError as error:
        _refused(str(error))
        return False
    except OSError as error:
        _unwritable(path.parent, str(error))
        return False
    return True


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".new-{secrets.token_hex(8)}")
    handle = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        with contextlib.suppress(OSError):  # an empty folder in the file's place
            path.rmdir()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@functools.cache
def _unwritable(parent: Path, reason: str) -> None:
    """Said once per process and reason: everything works without the files, slower."""
    logger.warning(
        "nothing is kept in %s (%s): what is compiled or measured is for this process alone; set "
        "MULTIMM_CACHE_DIR to a directory that can be written to",
        parent,
        reason,
    )


@functools.cache
def _refused(reason: str) -> None:
    """Said once per process and reason."""
    logger.warning(
        "the cache is not used where others could have written to it: %s; all else goes on without "
        "(MULTIMM_CACHE_DIR names another folder)",
        reason,
    )
