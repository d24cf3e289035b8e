""".npy: one array behind a short header, read through memory maps."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from multimm.errors import FileFormatError
from multimm.files import raw, remote
from multimm.files.identity import State, check, settled, sources
from multimm.files.storage_chunks import box_by_box, boxes
from multimm.files.stored import NUMERIC_KINDS, Location, StoredMatrix, Where, allocate

#: Times that a header may be parsed while other threads parse Python; arbitrary.
TRIES = 100
#: Of the format. The last one is the second with names of fields in UTF-8, which no matrix has.
VERSIONS = (1, 0), (2, 0), (3, 0)


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    return settled(partial(_found, place))


def _found(place: Location) -> tuple[StoredMatrix, list[State]]:
    """The matrix, and the state of its file, from before it is opened."""
    known = sources([place.path])
    with remote.open_bytes(place.path) as file:
        shape, fortran, dtype = _header(file)
        found = StoredMatrix(
            place, shape, dtype, offset=file.tell(), fortran=fortran, sources=known
        )
        held = file.seek(0, os.SEEK_END) - found.offset
    if held < found.nbytes and dtype.kind in NUMERIC_KINDS:
        raise FileFormatError(
            f"{place.path}: truncated: {found.nbytes:,} bytes of {dtype} {shape} promised, "
            f"{held:,} there; copy it again, or write it anew"
        )
    return found, [known[0].state]


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns are contiguous, and dtype; the file stands at the first element."""
    headers = np.lib.format
    for _ in range(TRIES):
        file.seek(0)
        version = headers.read_magic(file)
        if version not in VERSIONS:
            known = ", ".join("{}.{}".format(*one) for one in VERSIONS)
            raise ValueError("its version is {}.{}, not one of ".format(*version) + known)
        # Parsing fails now and then while another thread does the same (gh-106905 of CPython, in
        # 3.11 before 3.11.8).
        with suppress(SystemError):
            first = version == (1, 0)
            read = headers.read_array_header_1_0 if first else headers.read_array_header_2_0
            shape, fortran, dtype = read(file)
            return shape, fortran and len(shape) > 1, dtype
    raise SystemError("other threads parse Python all the time")


def read(matrix: StoredMatrix, index: Where, threads: int = 1) -> Any:
    """A copy of one block, of the file that was opened."""
    check(matrix.sources)
    index = tuple(slice(*at.indices(n)) for at, n in zip(index, matrix.shape, strict=True))
    sizes = [at.stop - at.start for at in index]
    block = np.empty(sizes, matrix.dtype, order="F" if matrix.fortran else "C")
    parts = list(boxes(index, raw.rows(matrix, 1), matrix.dtype.itemsize))
    with remote.open_bytes(matrix.path) as file:

        def copy(to: Any, part: Where) -> None:
            to[...] = raw.view(matrix, part, file)

        # Over a connection one by one.
        box_by_box(block, index, parts, copy, 1 if matrix.place.remote else threads)
    check(matrix.sources)  # written to meanwhile
    return block


def create(matrix: StoredMatrix, _: object) -> StoredMatrix:
    """The matrix in the empty file at its path, without its values."""
    described: Any = np.lib.format.dtype_to_descr(matrix.dtype)
    header = {"descr": described, "fortran_order": False, "shape": matrix.shape}
    with open(matrix.path, "wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        offset = file.tell()
        # Note: a mapped write into a hole of a full disk kills the process (SIGBUS), so
        # the space is taken now, where its lack is an ordinary error.
        file.flush()
        allocate(file.fileno(), offset + matrix.nbytes)
        file.truncate(offset + matrix.nbytes)
    return replace(matrix, dtype=np.lib.format.descr_to_dtype(described), offset=offset)
