""".npy: one array behind a short header, read through memory maps."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np

from multimm.errors import FileFormatError
from multimm.files.stored import NUMERIC_KINDS, Location, StoredMatrix, Where, allocate


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    with open(place.path, "rb") as file:
        version = np.lib.format.read_magic(file)
        headers = np.lib.format
        read_header = (
            headers.read_array_header_1_0 if version == (1, 0) else headers.read_array_header_2_0
        )
        shape, fortran, dtype = read_header(file)
        fortran = fortran and len(shape) > 1
        found = StoredMatrix(place, shape, dtype, offset=file.tell(), fortran=fortran)
        held = os.fstat(file.fileno()).st_size - found.offset
    if held < found.nbytes and dtype.kind in NUMERIC_KINDS:
        raise FileFormatError(
            f"{place.path}: truncated: {found.nbytes:,} bytes of {dtype} {shape} promised, "
            f"{held:,} there"
        )
    return found


def _map(matrix: StoredMatrix, index: Where, mode: Any) -> np.ndarray[Any, Any]:
    """A view of one block that maps only the rows (or columns) it lies in."""
    axis = len(matrix.shape) - 1 if matrix.fortran else 0
    others = math.prod(matrix.shape[:axis] + matrix.shape[axis + 1 :])
    start, stop, _ = index[axis].indices(matrix.shape[axis])
    window = (*matrix.shape[:axis], stop - start, *matrix.shape[axis + 1 :])
    inside = (*index[:axis], slice(None), *index[axis + 1 :])
    if math.prod(window) == 0:  # nothing can be mapped in an empty file
        return np.empty(window, matrix.dtype)[inside]
    rows: np.ndarray[Any, Any] = np.memmap(
        matrix.path,
        dtype=matrix.dtype,
        mode=mode,
        offset=matrix.offset + start * others * matrix.dtype.itemsize,
        shape=window,
        order="F" if matrix.fortran else "C",
    )
    return rows[inside]


def read(matrix: StoredMatrix, index: Where) -> Any:
    """A copy of one block."""
    return np.array(_map(matrix, index, "r"), order="K")


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
