""".zarr: a directory of chunks, as one array or as a group of named ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimm.errors import FileFormatError
from multimm.files.coded import check_meaning
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package

METADATA = ("zarr.json", ".zarray", ".zgroup")


def owns(path: Path) -> bool:
    """The directory carries Zarr metadata, of version 2 or 3."""
    return any((path / name).exists() for name in METADATA)


def held(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all arrays in a store."""
    zarr = package("zarr")
    node = zarr.open(path, mode="r")
    if isinstance(node, zarr.Array):
        return {"an array without a name": node.shape}
    # Consolidated metadata may be older than some of the arrays.
    node = zarr.open_group(path, mode="r", use_consolidated=False)
    members = node.members(max_depth=None)
    return {name: item.shape for name, item in members if isinstance(item, zarr.Array)}


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


def create(matrix: StoredMatrix) -> None:
    """A new file for this matrix, without its values."""
    # Products of measured numbers hardly compress; uncompressed chunks also have no 2 GB limit.
    package("zarr").create_array(
        store=matrix.path,
        name=matrix.dataset,
        shape=matrix.shape,
        chunks=matrix.chunks,
        dtype=matrix.dtype,
        compressors=None,
    )


def write(matrix: StoredMatrix, index: Where, block: Any) -> None:
    """Set one block."""
    _array(matrix, "r+")[index] = block
