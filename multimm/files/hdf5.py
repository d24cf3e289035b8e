""".h5 and .hdf5: named datasets in one file, which one task at a time may write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multimm.files.coded import check_meaning
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    with package("h5py").File(place.path, "r") as file:
        name = choose_dataset(place, _shapes(file))
        item, found = file[name], replace(place, dataset=name)
        check_meaning(found, item.dtype, item.attrs)
        return StoredMatrix(found, item.shape, item.dtype, item.chunks)


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
