"""Blocks of an array that lies in a file as in memory: of .npy, and those that we write to HDF5.

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

from multimm.errors import FileFormatError
from multimm.files.stored import StoredMatrix, Where

#: What `fsync` of a folder says where there is nothing to do.
NOTHING_TO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP}


def rows(matrix: StoredMatrix, count: int) -> tuple[int, ...]:
    """The shape of so many rows, or columns where these are contiguous."""
    axis = len(matrix.shape) - 1 if matrix.fortran else 0
    return (*matrix.shape[:axis], count, *matrix.shape[axis + 1 :])


def view(matrix: StoredMatrix, index: Where, file: Any, mode: Any = "r") -> np.ndarray[Any, Any]:
    """A view of one block, in a map of the rows (or columns) that it lies in.

    Where `file` is an object behind an address: in their bytes.
    """
    axis = len(matrix.shape) - 1 if matrix.fortran else 0
    order: Any = "F" if matrix.fortran else "C"
    start, stop, _ = index[axis].indices(matrix.shape[axis])
    shape, itemsize = rows(matrix, stop - start), matrix.dtype.itemsize
    offset, size = matrix.offset + start * math.prod(rows(matrix, 1)) * itemsize, math.prod(shape)
    whole: np.ndarray[Any, Any]
    if not size:  # nothing can be mapped in an empty file
        whole = np.empty(shape, matrix.dtype)
    elif matrix.place.remote:
        file.seek(offset)
        content = file.read(size * itemsize)
        if len(content) < size * itemsize:
            raise FileFormatError(
                f"{matrix.place}: truncated: {len(content):,} of {size * itemsize:,} bytes came; "
                "copy it again, or write it anew"
            )
        whole = np.frombuffer(content, matrix.dtype).reshape(shape, order=order)
    else:
        whole = np.memmap(file, matrix.dtype, mode, offset, shape, order)
    return whole[(*index[:axis], slice(None), *index[axis + 1 :])]


def write(matrix: StoredMatrix, index: Where, block: Any, _: int = 1) -> None:
    """Set one block."""
    view(matrix, index, matrix.path, "r+")[...] = block


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
