"""A finished file or folder gets its name: whole, durable, and without loss of another's.

Only what is on the disk is renamed, and the rename is on the disk before anybody is told. Linux
exchanges two names in one step, and renames only where a name is free (``renameat2``); where a file
system does neither (NFS), the next best is done, as the functions say.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from multimm.files.raw import sync_one

#: Of Linux's linux/fs.h.
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
AT_FDCWD = -100
#: What `renameat2` says where it, or what is asked of it, is not known.
UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
#: Files of a store that are synced at a time: a disk's journal takes what waits in one commit.
SYNCS = 16
#: Seconds to wait for another's commit, which takes a few renames; arbitrary.
LONGEST = 10.0


def sync(path: Path) -> None:
    """Have a file, or all files and folders in a folder, on the disk."""
    if not path.is_dir():
        sync_one(path)
        return
    walked = list(os.walk(path))
    files = [os.path.join(folder, name) for folder, _, names in walked for name in names]
    with ThreadPoolExecutor(SYNCS) as pool:
        for _ in pool.map(sync_one, files):
            pass
    for folder, *_ in reversed(walked):
        sync_one(folder)


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """One commit in a folder at a time: what was found there stays until the names are changed.

    Without it where the file system has no locks, or somebody keeps it locked for `LONGEST`.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            _wait_for(descriptor)
        yield


def _wait_for(descriptor: int) -> None:
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return


def put_new(unfinished: Path, path: Path) -> None:
    """Rename, or raise FileExistsError: of two at the same moment, one has the name."""
    try:
        _renameat2(unfinished, path, RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
    else:
        return
    if unfinished.is_dir():
        _rename_folder(unfinished, path)
        return
    try:
        os.link(unfinished, path)
    except OSError as error:
        if error.errno not in {*UNKNOWN, errno.EPERM, errno.EMLINK}:
            raise
        # No links either: the name is taken by an empty file first.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
        os.rename(unfinished, path)
    else:
        os.unlink(unfinished)


def _rename_folder(unfinished: Path, path: Path) -> None:
    """A folder never takes the place of one that holds anything, and a store is never empty."""
    try:
        os.rename(unfinished, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "File exists", str(path)) from error
        raise


def exchange(one: Path, other: Path) -> bool:
    """Have each get the other's name, in one step; False where the file system can't."""
    try:
        _renameat2(one, other, RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        return False
    return True


def replace(unfinished: Path, path: Path, older: Path) -> None:
    """Put a file, or a folder, in the place of one that goes to `older`, or is gone.

    For file systems that exchange no names. A folder's name is without one for a moment: what is
    at `older` gets it back when the next run begins, if this one is killed then. Raises
    FileExistsError where another one has the name by now, and what it replaced is at `older`.
    """
    if not path.is_dir():
        os.replace(unfinished, path)
        return
    os.rename(path, older)
    try:
        _rename_folder(unfinished, path)
    except FileExistsError:
        raise
    except OSError:
        os.rename(older, path)
        raise


def _renameat2(old: Path, new: Path, flags: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(new))
