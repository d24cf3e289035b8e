"""What was opened, so that what is read later can be told from it: the state of each file.

A state is the inode, the size and the times of the last change of contents and of the entry, in
nanoseconds. The last one tells of contents that were written in place and of times set back. Of a
remote object it is what its file system says: a tag, a size, times.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from multimm.errors import FileFormatError, without_secrets
from multimm.files import remote

State = tuple[int | str, ...]
Seen = TypeVar("Seen")
#: Seconds in which a file system may give two changes the same time: a tick of Linux's clock of
#: 100 Hz, doubled.
TICK = 0.02
#: Seconds that are waited for files to be left alone (arbitrary: who goes on longer is noticed when
#: blocks are read).
PATIENCE = 1.0
#: State of what is not there.
ABSENT: State = ()


class Source(NamedTuple):
    """A file that is read, and its state when the matrix was opened."""

    path: str
    state: State

    def __repr__(self) -> str:
        return without_secrets(f"Source({self.path!r}, {self.state!r})")


def of_stat(path: str, found: os.stat_result) -> State:
    """The state of a file, or folder; `FileFormatError` for what may never end."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise FileFormatError(
            f"{path}: no regular file but a named pipe, a socket or a device, whose end nobody "
            "knows; write the matrix to a file first"
        )
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def state(path: str) -> State:
    """The state of what is there now; `ABSENT` if nothing is."""
    if remote.is_remote(path):
        return remote.state(path)
    try:
        return of_stat(path, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT


def states(paths: Sequence[str]) -> list[State]:
    """The states of several files, of which all are remote or none."""
    if len(paths) > 1 and remote.is_remote(paths[0]):
        return list(remote.states(paths))
    return [state(path) for path in paths]


def size_of(found: State) -> int | None:
    """Bytes of what is there; None where that is not told."""
    told = str(found[0]).removeprefix("size=") if isinstance(found[0], str) else str(found[1])
    return int(told) if told.isdecimal() else None


def largest_file(found: Iterable[State]) -> int | None:
    """Bytes of the largest of some files; None where that is not told of each."""
    largest = 0
    for one in found:
        if (size := size_of(one)) is None:
            return None
        largest = max(largest, size)
    return largest


def sources(paths: Iterable[str]) -> tuple[Source, ...]:
    """The files with their states, each once."""
    return tuple(Source(path, state(path)) for path in dict.fromkeys(paths))


def settled(look: Callable[[], tuple[Seen, Iterable[State]]]) -> Seen:
    """What `look` sees, beside the states of its files, so that any change from now on will show.

    Files that were written a moment ago could be written again without another time, or are chunks
    of a store that somebody is rewriting: then it looks again after a moment, until nothing
    changes any more, or `PATIENCE` is over.
    """
    for _ in range(max(1, round(PATIENCE / TICK))):
        seen, found = look()
        newest = max(map(changed, found), default=0)
        if not 0 <= time.time() - newest / 1e9 < TICK:
            return seen
        time.sleep(TICK)
    return look()[0]


def changed(found: State) -> int:
    """When the entry of a local file changed last, in nanoseconds; 0 of what has none."""
    return int(found[3]) if len(found) == 4 else 0


def check(opened: Iterable[Source]) -> None:
    """Raise `FileFormatError` for the first file that is not what was opened."""
    for path, before in opened:
        same(path, before, state(path))


def same(path: str, before: State, now: State) -> None:
    """Raise `FileFormatError` unless a file's state is that of when it was opened."""
    if now == before:
        return
    if now == ABSENT:
        what = "is gone"
    elif before == ABSENT:
        what = "came into being"
    else:
        what = "changed"
    raise FileFormatError(
        f"{path}: {what} after the matrix was opened; open it again "
        "(multimm.io.open_array) and compute with that"
    )


def mark(found: State) -> int:
    """A state in 64 bits, for many of them."""
    return int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=8).digest(), "big")
