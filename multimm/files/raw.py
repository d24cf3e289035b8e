"""Blocks of an array that lies in a file as in memory, row after row: of .npy and our HDF5.

No library is asked, and no lock is held: blocks share no byte, so any number of processes may
write theirs at the same time.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import socket
from typing import Any

import numpy as np

from multimm.files.stored import StoredMatrix, Where

#: What `fsync` of a folder says where there is nothing to do.
NOTHING_TO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP}


def write(matrix: StoredMatrix, index: Where, block: Any, _: int = 1) -> None:
    """Set one block of a matrix in C order, through a map of the rows that it lies in."""
    start, stop, _ = index[0].indices(matrix.shape[0])
    window = (stop - start, *matrix.shape[1:])
    if math.prod(window) == 0:  # nothing can be mapped
        return
    rows: np.ndarray[Any, Any] = np.memmap(
        matrix.path,
        dtype=matrix.dtype,
        mode="r+",
        offset=matrix.offset + start * math.prod(matrix.shape[1:]) * matrix.dtype.itemsize,
        shape=window,
    )
    rows[(slice(None), *index[1:])] = block


def machine(path: str | os.PathLike[str]) -> str:
    """The running kernel, and the file system: who has both the same shares unsynced bytes."""
    return f"{_boot()} {os.stat(path).st_dev}"


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def sync(matrix: StoredMatrix, _: Where) -> None:
    """Have what this machine has written into the file on the disk."""
    sync_one(matrix.path)


def sync_one(path: str | os.PathLike[str]) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOTHING_TO_SYNC or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)
