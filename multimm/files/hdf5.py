""".h5, .hdf5: named datasets in one file; .nc to read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from multimm.errors import FileFormatError
from multimm.files.coded import check_meaning
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package

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
