""".zarr: a directory of chunks, as one array or as a group of named ones."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np

from multimm.errors import FileFormatError
from multimm.files.cf_attributes import check_meaning, warn
from multimm.files.identity import (
    ABSENT,
    State,
    check,
    largest_file,
    mark,
    same,
    settled,
    size_of,
    sources,
    state,
    states,
)
from multimm.files.remote import file_system, is_remote, telling
from multimm.files.storage_chunks import box_by_box, boxes, of_zarr
from multimm.files.stored import Location, StoredMatrix, Where, choose_dataset, package

METADATA = ("zarr.json", ".zarray", ".zgroup")
#: Chunks that are asked for one by one, where nothing can be listed: 4 s at 32 in 30 ms.
MOST_ASKED = 4096
#: Bytes that several threads hold while they decode; arbitrary: 16 threads, with chunks of 60 MB.
DECODED = 2 * 10**9


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    if not place.remote and not os.path.isdir(place.path):
        raise FileFormatError(f"{place.path}: a file; only .zarr directories are supported")
    store = _store(place.path)
    name, node = place.dataset, _array_at(store, place.dataset or "")
    if node is None:
        arrays = _arrays(place, store)
        name = choose_dataset(place, {key: item.shape for key, item in arrays.items()})
        node = arrays[name]
        if _array_at(store, name) is None:
            raise FileFormatError(
                f"{place.path}: its consolidated metadata tell of {name}, which is not there: call "
                "zarr.consolidate_metadata on it"
            )
    found = replace(place, dataset=name)
    dtype = check_meaning(found, node.dtype, _attributes(node))
    matrix = StoredMatrix(found, node.shape, dtype, node.shards or node.chunks)
    matrix, empty = settled(partial(_seen, matrix, node))
    if empty:  # of a shard Zarr takes that for the fill value
        (path,) = _files(_folder(matrix), node, empty[:1])
        raise FileFormatError(
            f"{path}: an empty file in place of a chunk, as a run that was killed may leave it: "
            "write the chunk again, or remove the file if the fill value is meant"
        )
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


def _attributes(node: Any) -> Mapping[str, Any]:
    """Those of an array; what xarray writes into Zarr 2 is missing where it is the fill value."""
    metadata = node.metadata
    if metadata.zarr_format == 3 or "_ARRAY_DIMENSIONS" not in node.attrs:
        return cast("Mapping[str, Any]", node.attrs)
    masks = {} if metadata.fill_value is None else {"_FillValue": metadata.fill_value}
    return {**masks, **node.attrs}


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
            f"{place.path}: holds one array without a name; leave out {place.dataset!r}"
        )
    found: dict[str, Any] = {}
    group = None
    # Consolidated metadata may be older than the arrays; stores that cannot be listed, such as over
    # HTTP, have these alone.
    for consolidated in (False, None):
        with suppress(FileNotFoundError):
            group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
            members = group.members(max_depth=None)
            found = {name: x for name, x in members if isinstance(x, zarr.Array)}
        if found:
            break
    if group is None:
        what = "an address" if place.remote else "a directory"
        raise FileFormatError(
            f"{place.path}: {what} without Zarr metadata: give the one with zarr.json, .zarray or "
            ".zgroup in it"
        )
    if not found and _unlisted(place.path):
        raise FileFormatError(
            f"{place}: no array but a group, or nothing, and over HTTP nobody can list what there "
            f"is: name an array, as in {place.path}/NAME, or call zarr.consolidate_metadata on it"
        )
    return found


def _unlisted(path: str) -> bool:
    """Whether nobody can list what is at an address."""
    return is_remote(path) and "http" in str(file_system(path)[0].protocol)


def _array(matrix: StoredMatrix) -> Any:
    found = _array_at(_store(matrix.path), matrix.dataset or "")
    if found is None:
        raise FileFormatError(f"{matrix.place}: is gone; open it again")
    return found


def _folder(matrix: StoredMatrix) -> str:
    """Where the array's own files lie."""
    return f"{matrix.path.rstrip('/')}/{matrix.dataset}" if matrix.dataset else matrix.path


def _seen(
    matrix: StoredMatrix, node: Any
) -> tuple[tuple[StoredMatrix, list[tuple[int, ...]]], list[State]]:
    """The matrix with the states of its files as they are now, which are empty, and these."""
    folder = _folder(matrix)
    names = ("zarr.json",) if node.metadata.zarr_format == 3 else (".zarray", ".zattrs")
    described = sources(f"{folder}/{name}" for name in names)
    if _unlisted(matrix.path):
        chunks = _asked(matrix, folder, node)
    elif matrix.place.remote:
        chunks = _listed(folder, node)
    else:
        chunks = _walked(folder, node)
    every = [found for _, found in described] + list((chunks or {}).values())
    largest = None if chunks is None else largest_file(chunks.values())
    marks = None if chunks is None else {at: mark(found) for at, found in chunks.items()}
    storage = of_zarr(node, largest)
    empty = [at for at, found in (chunks or {}).items() if size_of(found) == 0]
    return (replace(matrix, sources=described, states=marks, storage=storage), empty), every


def grid_place(key: str, ndim: int) -> tuple[int, ...] | None:
    """Where in the grid of chunks a file belongs, by its path in the array's folder.

    >>> grid_place("c/0/12", 2), grid_place("3.4", 2), grid_place("zarr.json", 2)
    ((0, 12), (3, 4), None)
    """
    if ndim == 0 and key == "0":  # as Zarr 2 calls it
        return ()
    parts = key.replace("/", ".").split(".")
    parts = parts[1:] if parts[0] == "c" else parts
    if len(parts) != ndim or not all(part.isdecimal() for part in parts):
        return None
    return tuple(map(int, parts))


def _walked(folder: str, node: Any, within: str = "") -> dict[tuple[int, ...], State]:
    """The states of the chunks in a local folder, also behind links to files and folders."""
    found: dict[tuple[int, ...], State] = {}
    with os.scandir(f"{folder}/{within}") as entries:
        for entry in entries:
            key = f"{within}{entry.name}"
            place = grid_place(key, node.ndim)
            part = entry.name == "c" or entry.name.isdecimal()  # of the path of a chunk
            if entry.is_dir():
                if part and place is None and key.count("/") <= node.ndim:
                    found |= _walked(folder, node, f"{key}/")
            elif place is not None or part:
                now = state(entry.path)
                if now == ABSENT and entry.is_symlink():
                    raise FileFormatError(
                        f"{entry.path}: a link to {os.readlink(entry.path)}, which is not there, "
                        "in place of chunks: bring them there (git annex get, mount), or remove "
                        "the link if the fill value is meant"
                    )
                if place is not None and now != ABSENT:
                    found[place] = now
    return found


def _listed(address: str, node: Any) -> dict[tuple[int, ...], State]:
    """The states of the chunks at an address, as they are listed."""
    system, folder = file_system(address)
    folder = folder.strip("/")
    found: dict[tuple[int, ...], State] = {}
    for path, info in system.find(folder, detail=True).items():
        place = grid_place(path.strip("/").removeprefix(f"{folder}/"), node.ndim)
        if place is not None:
            found[place] = telling(system, path, info)
    return found


def _asked(matrix: StoredMatrix, folder: str, node: Any) -> dict[tuple[int, ...], State] | None:
    """The states of the chunks that there are, of all that there may be; None of too many."""
    count = _chunks(matrix)
    if count > MOST_ASKED:
        warn(
            f"{matrix.place}: has {count:,} chunks, and over HTTP each is asked for by itself: of "
            f"more than {MOST_ASKED:,} nobody notices changes; leave them as they are until all "
            "is computed, or copy the store to a local folder"
        )
        return None
    whole = tuple(slice(0, size) for size in matrix.shape)
    places = list(product(*touched(matrix, whole)))
    found = states(_files(folder, node, places))
    return {at: now for at, now in zip(places, found, strict=True) if now != ABSENT}


def _files(folder: str, node: Any, places: Iterable[tuple[int, ...]]) -> list[str]:
    """The paths, or addresses, of chunks."""
    return [f"{folder}/{node.metadata.encode_chunk_key(at)}" for at in places]


def _chunks(matrix: StoredMatrix) -> int:
    """How many chunks the grid has."""
    sizes = zip(matrix.shape, matrix.chunks or (), strict=True)
    return math.prod(-(-size // chunk) for size, chunk in sizes)


def part(matrix: StoredMatrix, index: Where) -> StoredMatrix:
    """The matrix with the states of those chunk files alone that a block is read from."""
    states = matrix.states
    if states is None:
        return matrix
    own = {at: states[at] for at in product(*touched(matrix, index)) if at in states}
    return replace(matrix, states=own)


def touched(matrix: StoredMatrix, index: Where) -> list[range]:
    """The chunks that a block lies in, in each dimension."""
    sides = zip(index, matrix.shape, matrix.chunks or (), strict=True)
    spans = ((at.indices(size), chunk) for at, size, chunk in sides)
    return [
        range(start // chunk, -(-stop // chunk) if stop > start else start // chunk)
        for (start, stop, _), chunk in spans
    ]


def read(matrix: StoredMatrix, index: Where, threads: int = 1) -> Any:
    """A copy of one block, of the chunks that were there when the matrix was opened."""
    check(matrix.sources)
    array = _array(matrix)
    if (array.shape, array.shards or array.chunks) != (matrix.shape, matrix.chunks):
        raise FileFormatError(
            f"{matrix.place}: has shape {array.shape} by now, and {matrix.shape} when it was "
            "opened; open it again"
        )
    _check_chunks(matrix, array, index)
    block = np.empty([at.stop - at.start for at in index], array.dtype)
    parts = list(boxes(index, array.chunks, array.dtype.itemsize)) if block.size else []

    def decode(target: Any, part: Where) -> None:
        target[...] = array[part]

    try:
        box_by_box(block, index, parts, decode, _at_a_time(matrix, threads))
    finally:
        _check_chunks(matrix, array, index)  # written to meanwhile
    check(matrix.sources)
    return block


def _at_a_time(matrix: StoredMatrix, threads: int) -> int:
    """How many threads decode: what they hold beside the block stays below `DECODED`."""
    each = matrix.storage.decoding if matrix.storage else 0
    return max(1, min(threads, DECODED // max(1, each)))


def _check_chunks(matrix: StoredMatrix, array: Any, index: Where) -> None:
    """Raise unless each chunk file that a block lies in is as it was, or still missing."""
    if matrix.states is None:
        return
    places = list(product(*touched(matrix, index)))
    paths = _files(_folder(matrix), array, places)
    for at, path, now in zip(places, paths, states(paths), strict=True):
        before = matrix.states.get(at)
        if before != (None if now == ABSENT else mark(now)):
            same(path, ABSENT if before is None else ("opened",), now)
