""".npy: one array behind a short header, read through memory maps."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from typing import Any

import numpy as np

from multimm.errors import FileFormatError
from multimm.files import remote
from multimm.files.identity import Source, State, of_stat, same, settled, state
from multimm.files.storage_chunks import boxes, fill
from multimm.files.stored import NUMERIC_KINDS, Location, StoredMatrix, Where, allocate

#: Bytes of a header at most, as for NumPy.
_LONGEST = 10_000
#: The text that NumPy and most others write; sizes stand behind the version, in 2 bytes or in 4.
_HEADER = re.compile(
    rb"\{ *'descr': *'([^']+)', *'fortran_order': *(True|False),"
    rb" *'shape': *\( *((?:\d+, *)+\d*|) *\),? *\}\s*"
)


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    with remote.open_bytes(place.path) as file:

        def look() -> tuple[Source, list[State]]:
            source = _source(place.path, file)
            return source, [source.state]

        source = settled(look)
        shape, fortran, dtype = _header(file)
        found = StoredMatrix(
            place, shape, dtype, offset=file.tell(), fortran=fortran, sources=(source,)
        )
        held = file.seek(0, os.SEEK_END) - found.offset
    if held < found.nbytes and dtype.kind in NUMERIC_KINDS:
        raise FileFormatError(
            f"{place.name}: truncated: {found.nbytes:,} bytes of {dtype} {shape} promised, "
            f"{held:,} there; copy it again, or write it anew"
        )
    return found


def _source(path: str, file: Any) -> Source:
    """The state of the file that was opened, whatever has its name by now."""
    if remote.is_remote(path):
        return Source(path, state(path))
    return Source(path, of_stat(path, os.fstat(file.fileno())))


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns are contiguous, and dtype; the file stands at the first element."""
    file.seek(0)
    version = np.lib.format.read_magic(file)
    begin = file.tell()
    # Note: NumPy parses with `ast`, which fails now and then while another thread does the same
    # (gh-106905 of CPython, in 3.11 before 3.11.8). What is written otherwise is left to NumPy.
    size = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if size <= _LONGEST and (usual := _HEADER.fullmatch(file.read(size))):
        descr, fortran_order, lengths = (part.decode() for part in usual.groups())
        shape = tuple(int(length) for length in lengths.split(",") if length.strip())
        fortran, dtype = fortran_order == "True", np.dtype(descr)
    else:
        file.seek(begin)
        headers = np.lib.format
        read_header = (
            headers.read_array_header_1_0 if version == (1, 0) else headers.read_array_header_2_0
        )
        shape, fortran, dtype = read_header(file)
    return shape, fortran and len(shape) > 1, dtype


def _window(matrix: StoredMatrix, index: Where) -> tuple[int, tuple[int, ...], Where]:
    """The rows (or columns) that a block lies in: where they begin, their shape, and it in them."""
    axis = len(matrix.shape) - 1 if matrix.fortran else 0
    others = math.prod(matrix.shape[:axis] + matrix.shape[axis + 1 :])
    start, stop, _ = index[axis].indices(matrix.shape[axis])
    window = (*matrix.shape[:axis], stop - start, *matrix.shape[axis + 1 :])
    inside = (*index[:axis], slice(None), *index[axis + 1 :])
    return matrix.offset + start * others * matrix.dtype.itemsize, window, inside


def _row(matrix: StoredMatrix) -> tuple[int, ...]:
    """What is mapped or received as a whole: pages of a map count as memory of the process."""
    axis = len(matrix.shape) - 1 if matrix.fortran else 0
    return (*matrix.shape[:axis], 1, *matrix.shape[axis + 1 :])


def _map(matrix: StoredMatrix, index: Where, file: Any) -> np.ndarray[Any, Any]:
    """A view of one block that maps only the rows (or columns) it lies in."""
    offset, window, inside = _window(matrix, index)
    if math.prod(window) == 0:  # nothing can be mapped in an empty file
        return np.empty(window, matrix.dtype)[inside]
    rows: np.ndarray[Any, Any] = np.memmap(
        file,
        dtype=matrix.dtype,
        mode="r",
        offset=offset,
        shape=window,
        order="F" if matrix.fortran else "C",
    )
    return rows[inside]


def _received(matrix: StoredMatrix, index: Where, file: Any) -> np.ndarray[Any, Any]:
    """A view of one block in the bytes of the rows (or columns) it lies in."""
    offset, window, inside = _window(matrix, index)
    size = math.prod(window) * matrix.dtype.itemsize
    file.seek(offset)
    content = file.read(size) if size else b""
    if len(content) < size:
        raise FileFormatError(
            f"{matrix.place}: truncated: {len(content):,} of {size:,} bytes came; copy it again, "
            "or write it anew"
        )
    order: Any = "F" if matrix.fortran else "C"
    return np.frombuffer(content, matrix.dtype).reshape(window, order=order)[inside]


def read(matrix: StoredMatrix, index: Where, threads: int = 1) -> Any:
    """A copy of one block, of the file that was opened."""
    with remote.open_bytes(matrix.path) as file:
        for path, before in matrix.sources:
            same(path, before, _source(path, file).state)
        described = matrix.shape, matrix.fortran, matrix.dtype
        if _header(file) != described:
            raise FileFormatError(
                f"{matrix.place}: its header is another than when it was opened; open it again"
            )
        if matrix.place.remote:  # of one connection
            view, threads = _received, 1
        else:
            view = _map
        index = tuple(slice(*at.indices(n)) for at, n in zip(index, matrix.shape, strict=True))
        block = np.empty(
            [at.stop - at.start for at in index],
            matrix.dtype,
            order="F" if matrix.fortran else "C",
        )
        parts = list(boxes(index, _row(matrix), matrix.dtype.itemsize))
        fill(block, index, parts, lambda to, part: np.copyto(to, view(matrix, part, file)), threads)
        for path, before in matrix.sources:  # written to meanwhile
            same(path, before, _source(path, file).state)
    return block


def create(matrix: StoredMatrix) -> StoredMatrix:
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
