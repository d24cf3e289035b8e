"""Files and folders that this user alone can change: what they hold is what this user wrote.

Everything is looked at once it is open, and what follows is done below what was opened, never by
a path that somebody may have changed meanwhile.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

#: Of a folder that is passed: its entries need not be readable.
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Of a file: no link, no waiting for the other end of a pipe, no terminal of this process's.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
#: Links on the way to a folder; as many as Linux follows.
_MOST_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(OSError):
    """Somebody else could have written it; the text names it and says what to do."""


def open_folder(path: Path, *, own: int = 1, create: bool = False) -> int:
    """Open a folder that nobody else can write to, or put another one in the place of.

    Folders on the way to it must be this user's or root's, too, and others may write to them only
    if they are sticky, as /tmp is. Links are followed if they are this user's or root's.

    Parameters
    ----------
    path : Path
    own : int
        How many folders at the end of `path` must be this user's, and writable for nobody else.
    create : bool
        Make what is missing, with mode 0700.

    Returns
    -------
    int
        A descriptor, for `open_file` and the `dir_fd` of functions of `os`.

    Raises
    ------
    UntrustedError
        Somebody else could change what the path leads to.
    OSError
        The folder is not there, or cannot be made or opened.
    """
    names = path.absolute().parts[1:]
    left = [(name, i < own) for i, name in enumerate(reversed(names))]
    at, reached, links = os.open("/", _PASSED), PurePosixPath("/"), 0
    try:
        _check_folder(at, reached, own=False)
        while left:
            name, strict = left.pop()
            found = _entry(at, name)
            if found is None and create:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=at)
            elif found is not None and stat.S_ISLNK(found.st_mode):
                _check_link(found, reached / name)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = PurePosixPath(os.readlink(name, dir_fd=at))
                name = "/" if target.is_absolute() else "."
                below_it = target.parts[target.is_absolute() :]
                left += [(part, strict and i == 0) for i, part in enumerate(reversed(below_it))]
                strict = strict and not below_it
            below = os.open(name, _PASSED, dir_fd=at)
            os.close(at)
            at, reached = below, reached / name
            _check_folder(at, reached, own=strict)
    except BaseException:
        os.close(at)
        raise
    return at


def _entry(at: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check_link(found: os.stat_result, shown: PurePosixPath) -> None:
    if found.st_uid not in {os.geteuid(), *_roots()}:
        raise UntrustedError(f"{shown} is a link of another user's (uid {found.st_uid}): delete it")


def _check_folder(folder: int, shown: PurePosixPath, *, own: bool) -> None:
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() and (own or found.st_uid not in _roots()):
        raise UntrustedError(
            f"{shown} belongs to another user (uid {found.st_uid}): use another folder"
        )
    if found.st_mode & _OTHERS_WRITE and (own or not found.st_mode & stat.S_ISVTX):
        raise UntrustedError(
            f"others can write to {shown} (mode {stat.S_IMODE(found.st_mode):o}): "
            f"chmod go-w {shown}, if what it holds is yours, or use another folder"
        )


def open_file(folder: int, path: Path, flags: int) -> int:
    """Open a file of this user's in a folder that `open_folder` has opened.

    Parameters
    ----------
    folder : int
    path : Path
        Its last part is opened; all of it is for messages.
    flags : int
        Of `os.open`; a new file gets mode 0600.

    Raises
    ------
    UntrustedError
        It is a link, a pipe, a device or a folder, or somebody else can write to it.
    OSError
        It cannot be opened.
    """
    try:
        handle = os.open(path.name, flags | _FILE, 0o600, dir_fd=folder)
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
