""".zarr: a directory of chunks, as one array or as a group of named ones."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from multimm.errors import FileFormatError
from multimm.files.coded import check_meaning
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package

METADATA = ("zarr.json", ".zarray", ".zgroup")


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    zarr = package("zarr")
    if not os.path.isdir(place.path):
        raise FileFormatError(f"{place.path}: a file; only .zarr directories are supported")
    try:
        node = zarr.open(place.path, mode="r")
    except FileNotFoundError:  # zarr's errors for "no group" and "no array" derive from it
        raise FileFormatError(f"{place.path}: a directory without Zarr metadata") from None
    name = None
    if isinstance(node, zarr.Group):
        members = dict(node.members(max_depth=None))
        arrays = {key: item for key, item in members.items() if isinstance(item, zarr.Array)}
        name = choose_dataset(place, {key: item.shape for key, item in arrays.items()})
        node = arrays[name]
    elif place.dataset is not None:
        raise FileFormatError(
            f"{place.path}: holds one array without a name; leave out {place.dataset!r}"
        )
    found = replace(place, dataset=name)
    check_meaning(found, node.dtype, node.attrs)
    return StoredMatrix(found, node.shape, node.dtype, node.shards or node.chunks)


def _array(matrix: StoredMatrix, mode: str) -> Any:
    return package("zarr").open_array(matrix.path, path=matrix.dataset or "", mode=mode)


def read(matrix: StoredMatrix, index: Where) -> Any:
    """A copy of one block."""
    return _array(matrix, "r")[index]
