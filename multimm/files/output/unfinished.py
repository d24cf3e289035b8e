"""Outputs in the making: their names, who is writing them, and what killed runs have left.

Beside a target lie, while it is written, an unfinished file or folder, and a lock file that the
writing process holds with ``flock``. The system lets go of the lock when that process ends, however
it ends: so the next run to the same output knows a leftover from an output in the making.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from multimm.errors import FileFormatError
from multimm.files.stored import reason

logger = logging.getLogger(__name__)

#: In front of what a lock file says: what begins otherwise is not ours to write into.
WRITER = "multimm "
#: flock's errors where a file system has none.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

#: Times that a lock file may be removed, by who let go of it, just when it is taken; arbitrary.
TRIES = 100


class Claim:
    """The right to write one output, which one run has at a time.

    `target` is what the output will be, of an array in a store its folder; in `folder`, on the
    target's file system, it lies unfinished.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        self._held: int | None = None
        self._process = os.getpid()
        self.target, self.folder = target, folder
        name = os.fsencode(os.path.relpath(target, folder))
        # Short, whatever the name's length: file systems take 255 bytes, some fewer.
        self._stem = f".multimm-{hashlib.sha256(name).hexdigest()[:16]}"
        self.lock = folder / f"{self._stem}.lock"

    def new_path(self, kind: str = "partial") -> Path:
        """A name for what is unfinished, or was replaced, that nothing else has."""
        return self.folder / f"{self._stem}-{uuid.uuid4().hex[:8]}.{kind}"

    def take(self) -> None:
        """Become the one who writes, and remove what a run that was killed has left.

        Raises
        ------
        FileFormatError
            Another run is writing, or there can be no lock.
        """
        if self._held is not None:
            return
        try:
            for _ in range(TRIES):
                self._held = self._take_once()
                if self._held is not None:
                    break
            else:
                raise OSError(errno.EAGAIN, "it comes and goes")
        except OSError as error:
            raise FileFormatError(
                f"{self.target}: cannot be locked ({reason(error)}): if no run writes it, "
                f"remove {self.lock}"
            ) from error
        self._clean()

    def _take_once(self) -> int | None:
        """The lock's descriptor, or None where its file was removed meanwhile."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        held = os.open(self.lock, flags, 0o666)
        try:
            found = os.fstat(held)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise OSError(errno.EEXIST, "it is no file of multimm")
            free, locks = self._lock(held)
            said = os.pread(held, 200, 0).decode("utf-8", "replace")
            if said and not said.startswith(WRITER):
                raise OSError(errno.EEXIST, "it is no file of multimm")
            if not free or (said and not locks):
                who = said.removeprefix(WRITER).strip() or "it began just now"
                over = "" if locks else f"; if it has ended, remove {self.lock}"
                raise FileFormatError(
                    f"{self.target}: another run is writing it ({who}): wait for its end, or "
                    f"choose another name{over}"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(found, os.stat(self.lock, follow_symlinks=False)):
                    os.ftruncate(held, 0)
                    me = f"process {os.getpid()} on {socket.gethostname()}"
                    os.pwrite(held, f"{WRITER}{me}\n".encode(), 0)
                    held, mine = -1, held
                    return mine
            return None
        finally:
            if held >= 0:
                os.close(held)

    @staticmethod
    def _lock(held: int) -> tuple[bool, bool]:
        """Whether nobody else has it locked, and whether that can be known here."""
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False, True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return True, False
        return True, True

    def release(self) -> None:
        """Let others write; again does nothing."""
        if self._held is None or self._process != os.getpid():  # a fork's copy of it
            return
        held, self._held = self._held, None
        try:
            with suppress(OSError):
                if os.path.samestat(os.fstat(held), os.stat(self.lock, follow_symlinks=False)):
                    self.lock.unlink()
        finally:
            os.close(held)

    def __del__(self) -> None:
        self.release()

    def leftovers(self) -> list[Path]:
        """What runs have left that ended before their output had its name."""
        known = re.compile(rf"{re.escape(self._stem)}-[0-9a-f]{{8}}\.(partial|replaced|marks)")
        with os.scandir(self.folder) as entries:
            return sorted(self.folder / e.name for e in entries if known.fullmatch(e.name))

    def _clean(self) -> None:
        for path in self.leftovers():
            if path.suffix == ".replaced" and not os.path.lexists(self.target):
                # Killed between two renames, where the file system exchanges no names.
                path.rename(self.target)
            else:
                logger.info("removing what a run left that was killed: %s", path)
                remove(path)

    def check(self) -> bool:
        """Raise where another run writes; else remove what killed ones have left, if any."""
        found = os.path.lexists(self.lock) or bool(self.leftovers())
        if found:
            self.take()
            self.release()
        return found


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if os.path.lexists(path):
        logger.warning("could not remove %s", path)
