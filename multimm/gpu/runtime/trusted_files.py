"""Files and folders that this user alone can change: what they hold is what this user wrote."""

from __future__ import annotations

import errno
import functools
import os
import stat
from pathlib import Path

#: No link, no waiting for the other end of a pipe, no terminal of this process's.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(OSError):
    """Somebody else could have written it; the text names it and says what to do."""


def own_folder(path: Path, *, own: int = 1, create: bool = False) -> Path:
    """Return where a folder is, in whose place nobody else can put another one.

    Folders on the way to it must be this user's or root's, too, and others may write to them only
    if they are sticky, as /tmp is. So nobody else can change what was found here.

    Parameters
    ----------
    path : Path
        Links in it are followed.
    own : int
        How many folders at the end of the way must be this user's, and writable for nobody else.
    create : bool
        Make what is missing, with mode 0700.

    Raises
    ------
    UntrustedError
        Somebody else could change what the path leads to.
    OSError
        The folder is not there, or cannot be made.
    """
    found = Path(os.path.realpath(path))
    way = [*reversed(found.parents), found]
    for left, folder in zip(range(len(way), 0, -1), way, strict=True):
        if create and not os.path.lexists(folder):
            folder.mkdir(0o700, exist_ok=True)
        _check_folder(folder, own=left <= own)
    return found


def _check_folder(folder: Path, *, own: bool) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if found.st_uid != os.geteuid() and (own or found.st_uid not in _roots()):
        raise UntrustedError(
            f"{folder} belongs to another user (uid {found.st_uid}): use another folder"
        )
    if found.st_mode & _OTHERS_WRITE and (own or not found.st_mode & stat.S_ISVTX):
        raise UntrustedError(
            f"others can write to {folder} (mode {stat.S_IMODE(found.st_mode):o}): "
            f"chmod go-w {folder}, if what it holds is yours, or use another folder"
        )


def open_file(path: Path, flags: int) -> int:
    """Open a file of this user's in an `own_folder`; a new one gets mode 0600.

    Raises
    ------
    UntrustedError
        It is a link, a pipe, a device or a folder, or somebody else can write to it.
    OSError
        It cannot be opened.
    """
    try:
        handle = os.open(path, flags | _FLAGS, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise UntrustedError(f"{path} is no ordinary file: delete it") from error
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError(f"{path} is no ordinary file: delete it")
        if found.st_uid != os.geteuid():
            raise UntrustedError(f"{path} belongs to another user (uid {found.st_uid}): delete it")
        if found.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(found.st_mode)
            raise UntrustedError(f"others can write to {path} (mode {mode:o}): delete it")
    except BaseException:
        os.close(handle)
        raise
    return handle


@functools.cache
def _roots() -> frozenset[int]:
    """Who may own folders on the way: root, under whatever number a container shows it.

    Where a container maps few users, all others appear as one that is none of them.
    """
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    except (OSError, ValueError):
        return frozenset({0})
    mapped = any(first <= unknown < first + count for first, count in ranges)
    return frozenset({0}) if mapped else frozenset({0, unknown})
