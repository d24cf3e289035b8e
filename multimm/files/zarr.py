""".zarr: a directory of chunks, as one array or as a group of named ones."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from multimm.errors import FileFormatError
from multimm.files.boxes import boxes, within
from multimm.files.coded import check_meaning, warn
from multimm.files.decoding import of_zarr
from multimm.files.identity import ABSENT, check, mark, same, settled, sources, state
from multimm.files.remote import file_system, is_remote, telling
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package

#: By place in the grid of chunks: `identity.mark` of its file, and bytes in it.
ChunkFiles = dict[tuple[int, ...], tuple[int, int | None]]

METADATA = ("zarr.json", ".zarray", ".zgroup")


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    if not place.remote:
        _check_folder(place)
    store = _store(place.path)
    if place.dataset is not None:
        name, node = place.dataset, _array_at(store, place.dataset)
    else:
        name, node = None, _array_at(store, "")
    if node is None:
        arrays = _arrays(place, store)
        name = choose_dataset(place, {key: item.shape for key, item in arrays.items()})
        node = arrays[name]
    found = replace(place, dataset=name)
    dtype = check_meaning(found, node.dtype, node.attrs)
    matrix = StoredMatrix(found, node.shape, dtype, node.shards or node.chunks)
    matrix = _identified(matrix, node)
    if not settled(matrix.sources):
        matrix = _identified(matrix, node)
    if (
        node.fill_value is None
        and matrix.states is not None
        and len(matrix.states) < _chunks(matrix)
    ):
        warn(
            f"{found}: chunks are missing, and its fill_value is null: they are read as zeros, "
            "which may not be what was meant; write them, or set a fill_value"
        )
    return matrix


def _check_folder(place: Location) -> None:
    if not os.path.isdir(place.path):
        raise FileFormatError(f"{place.name}: a file; only .zarr directories are supported")
    for folder in {place.path, os.path.join(place.path, place.dataset or "")}:
        for name in (*METADATA, ".zattrs", ".zmetadata"):
            state(os.path.join(folder, name))  # a pipe would be waited for


def _store(path: str) -> Any:
    """What Zarr opens: a local path, or fsspec's file system."""
    if not is_remote(path):
        return path
    file_system(path)  # says what is missing
    return package("zarr.storage").FsspecStore.from_url(
        path, read_only=True, storage_options={"use_listings_cache": False}
    )


def _array_at(store: Any, name: str) -> Any:
    """The array of that name as its own metadata have it, or None."""
    zarr = package("zarr")
    try:
        node = zarr.open(store, path=name, mode="r")
    except FileNotFoundError:  # zarr's errors for "no group" and "no array" derive from it
        return None
    return node if isinstance(node, zarr.Array) else None


def _arrays(place: Location, store: Any) -> dict[str, Any]:
    """All arrays of a group, by name."""
    zarr = package("zarr")
    if place.dataset is not None and _array_at(store, "") is not None:
        raise FileFormatError(
            f"{place.name}: holds one array without a name; leave out {place.dataset!r}"
        )
    try:
        # Consolidated metadata may be older than the arrays.
        found = _members(zarr.open_group(store, mode="r", use_consolidated=False))
    except FileNotFoundError:
        found = {}
    if not found:  # stores that cannot be listed, such as over HTTP, have that alone
        try:
            found = _members(zarr.open_group(store, mode="r"))
        except FileNotFoundError:
            what = "an address" if place.remote else "a directory"
            raise FileFormatError(f"{place.name}: {what} without Zarr metadata") from None
    return found


def _members(group: Any) -> dict[str, Any]:
    zarr = package("zarr")
    return {
        name: item for name, item in group.members(max_depth=None) if isinstance(item, zarr.Array)
    }


def _array(matrix: StoredMatrix) -> Any:
    store, name = _store(matrix.path), matrix.dataset or ""
    found = _array_at(store, name)
    return package("zarr").open_group(store, mode="r")[name] if found is None else found


def _folder(matrix: StoredMatrix) -> str:
    """Where the array's own files lie."""
    return f"{matrix.path.rstrip('/')}/{matrix.dataset}" if matrix.dataset else matrix.path


def _identified(matrix: StoredMatrix, node: Any) -> StoredMatrix:
    """The matrix with the states of its files."""
    folder = _folder(matrix)
    names = ("zarr.json",) if node.metadata.zarr_format == 3 else (".zarray", ".zattrs")
    described = sources(f"{folder}/{name}" for name in names)
    if all(found == ABSENT for _, found in described):
        index = "zarr.json" if node.metadata.zarr_format == 3 else ".zmetadata"
        described = sources([f"{matrix.path.rstrip('/')}/{index}"])
    files = _remote_files if matrix.place.remote else _local_files
    found = files(folder, node)
    if found is None:
        return replace(matrix, sources=described, states=None, storage=of_zarr(node, None))
    states = {place: marked for place, (marked, _) in found.items()}
    sizes = [size for _, size in found.values() if size is not None]
    largest = max(sizes, default=0) if len(sizes) == len(found) else None
    return replace(matrix, sources=described, states=states, storage=of_zarr(node, largest))


def _grid_place(key: str, ndim: int) -> tuple[int, ...] | None:
    """Where in the grid of chunks a file belongs, by its path in the array's folder.

    >>> _grid_place("c/0/12", 2), _grid_place("3.4", 2), _grid_place("zarr.json", 2)
    ((0, 12), (3, 4), None)
    """
    parts = key.replace("/", ".").split(".")
    parts = parts[1:] if parts[0] == "c" else parts
    if len(parts) != ndim or not all(part.isdecimal() for part in parts):
        return None
    return tuple(map(int, parts))


def _local_files(folder: str, node: Any) -> ChunkFiles:
    found: ChunkFiles = {}
    for at, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(at, file)
            place = _grid_place(os.path.relpath(path, folder), node.ndim)
            if place is not None and (now := state(path)) != ABSENT:
                found[place] = mark(now), int(now[1])
    return found


def _remote_files(address: str, node: Any) -> ChunkFiles | None:
    """None where the file system cannot list: then nobody knows which chunks there are."""
    system, folder = file_system(address)
    if "http" in str(system.protocol):
        return None
    folder = folder.strip("/")
    found: ChunkFiles = {}
    for path, info in system.find(folder, detail=True).items():
        place = _grid_place(path.strip("/").removeprefix(f"{folder}/"), node.ndim)
        if place is not None:
            found[place] = mark(telling(system, path, info)), info.get("size")
    return found


def _chunks(matrix: StoredMatrix) -> int:
    """How many chunks the grid has."""
    sizes = zip(matrix.shape, matrix.chunks or (), strict=True)
    return math.prod(-(-size // chunk) for size, chunk in sizes)


def part(matrix: StoredMatrix, index: Where) -> StoredMatrix:
    """The matrix with the states of those chunk files alone that a block is read from."""
    states = matrix.states
    if states is None:
        return matrix
    ranges = _touched(matrix, index)
    if math.prod(map(len, ranges)) <= len(states):
        own = {at: states[at] for at in product(*ranges) if at in states}
    else:
        own = {
            at: found
            for at, found in states.items()
            if all(one in within for one, within in zip(at, ranges, strict=True))
        }
    return replace(matrix, states=own)


def _touched(matrix: StoredMatrix, index: Where) -> list[range]:
    """The chunks that a block lies in, in each dimension."""
    sides = zip(index, matrix.shape, matrix.chunks or (), strict=True)
    spans = ((at.indices(size), chunk) for at, size, chunk in sides)
    return [
        range(start // chunk, -(-stop // chunk) if stop > start else start // chunk)
        for (start, stop, _), chunk in spans
    ]


def read(matrix: StoredMatrix, index: Where) -> Any:
    """A copy of one block, of the chunks that were there when the matrix was opened."""
    check(matrix.sources)
    array = _array(matrix)
    if (array.shape, array.shards or array.chunks) != (matrix.shape, matrix.chunks):
        raise FileFormatError(
            f"{matrix.place}: has shape {array.shape} by now, and {matrix.shape} when it was "
            "opened; open it again"
        )
    _check_chunks(matrix, array, index)
    block = _decoded(array, index)
    _check_chunks(matrix, array, index)  # written to meanwhile
    check(matrix.sources)
    return block


def _decoded(array: Any, index: Where) -> Any:
    """A copy of one block, with few storage chunks in memory beside it."""
    parts = list(boxes(index, array.chunks, array.dtype.itemsize))
    if len(parts) == 1:
        return np.asarray(array[index])
    block = np.empty([at.stop - at.start for at in index], array.dtype)
    for part in parts:
        block[within(part, index)] = array[part]
    return block


def _check_chunks(matrix: StoredMatrix, array: Any, index: Where) -> None:
    """Raise unless each chunk file that a block lies in is as it was, or still missing."""
    if matrix.states is None:
        return
    folder = _folder(matrix)
    for at in product(*_touched(matrix, index)):
        path = f"{folder}/{array.metadata.encode_chunk_key(at)}"
        before, now = matrix.states.get(at), state(path)
        if before != (None if now == ABSENT else mark(now)):
            same(path, ABSENT if before is None else ("opened",), now)
