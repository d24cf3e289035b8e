""".h5, .hdf5: named datasets in one file, which one task at a time may write; .nc to read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from multimm.errors import FileFormatError
from multimm.files.coded import check_meaning
from multimm.files.stored import Location, StoredMatrix, Where, allocate, choose_dataset, package

#: In an error's text: what failed, and the system's number and sentence.
_CAUSE = re.compile(r"\(([^(:,]+)[:,].*?errno = (\d+), error message = '([^']*)'", re.DOTALL)


@contextmanager
def _opened(path: str, mode: str) -> Iterator[Any]:
    """An open file. Of the system's errors HDF5 makes texts of buffers, times and numbers."""
    try:
        with package("h5py").File(path, mode) as file:
            yield file
    except (OSError, RuntimeError) as error:
        found = _CAUSE.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[2]), f"{found[1]}: {found[3]}", path) from error


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    _refuse_netcdf3(place.path)
    with _opened(place.path, "r") as file:
        name = choose_dataset(place, _shapes(file))
        item, found = file[name], replace(place, dataset=name)
        check_meaning(found, item.dtype, item.attrs)
        return StoredMatrix(found, item.shape, item.dtype, item.chunks)


def _refuse_netcdf3(path: str) -> None:
    with open(path, "rb") as file:
        if file.read(3) == b"CDF":
            raise FileFormatError(
                f"{path}: netCDF 3, which is no HDF5: convert it (nccopy -k nc4), or open it with "
                "xarray and multiply x.data"
            )


def held(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all datasets in a file."""
    with _opened(path, "r") as file:
        return _shapes(file)


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    h5py = package("h5py")
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            shapes[name] = item.shape

    file.visititems(visit)
    return shapes


def read(matrix: StoredMatrix, index: Where) -> Any:
    """A copy of one block."""
    with _opened(matrix.path, "r") as file:
        return file[matrix.dataset][index]


def create(matrix: StoredMatrix) -> None:
    """A new file for this matrix, without its values."""
    h5d, h5p = package("h5py").h5d, package("h5py").h5p
    early = h5p.create(h5p.DATASET_CREATE)
    early.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    with _opened(matrix.path, "w") as file:
        file.create_dataset(matrix.dataset, matrix.shape, matrix.dtype, dcpl=early)
    # Note: a file that a full disk keeps from being closed stays locked, and the next block's
    # error would speak of that alone.
    with open(matrix.path, "rb+") as file:
        allocate(file.fileno(), os.fstat(file.fileno()).st_size)


def write(matrix: StoredMatrix, index: Where, block: Any) -> None:
    """Set one block."""
    with _opened(matrix.path, "r+") as file:
        file[matrix.dataset][index] = block
