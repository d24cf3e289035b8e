""".h5, .hdf5: named datasets in one file, which one task at a time may write; .nc to read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multimm.errors import FileFormatError
from multimm.files.coded import check_meaning
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    _refuse_netcdf3(place.path)
    with package("h5py").File(place.path, "r") as file:
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
    with package("h5py").File(path, "r") as file:
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
    with package("h5py").File(matrix.path, "r") as file:
        return file[matrix.dataset][index]


def create(matrix: StoredMatrix) -> None:
    """A new file for this matrix, without its values."""
    with package("h5py").File(matrix.path, "w") as file:
        file.create_dataset(matrix.dataset, matrix.shape, matrix.dtype)


def write(matrix: StoredMatrix, index: Where, block: Any) -> None:
    """Set one block."""
    with package("h5py").File(matrix.path, "r+") as file:
        file[matrix.dataset][index] = block
