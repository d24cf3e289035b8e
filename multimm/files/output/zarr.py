"""Zarr outputs: a store of one array, or an array more in a group; and which files are Zarr's.

What an output replaces is removed file by file: metadata, and chunks that the metadata speak of.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from multimm.errors import FileFormatError
from multimm.files.output import kept
from multimm.files.raw import sync_one
from multimm.files.storage_chunks import at_a_time, boxes, within
from multimm.files.stored import StoredMatrix, Where, few, package
from multimm.files.zarr import METADATA, touched

#: What a group or an array has besides.
ATTRIBUTES = (".zattrs", ".zmetadata")
NAMES = (*METADATA, *ATTRIBUTES)
#: A chunk's name in its array's folder, as all of Zarr's encodings make it.
CHUNK = re.compile(r"(?:c[/.])?(\d+(?:[/.]\d+)*)|c|0")
#: What Zarr's own writer leaves of a file when it is killed.
LEFT = re.compile(r"\.[0-9a-f]{32}\.partial$")

#: Zarr's unfinished zarr.json has that number in place of its suffix.
UNFINISHED = (*NAMES, "zarr")


class Node(NamedTuple):
    """An array or a group, as its folder's metadata say."""

    array: bool
    zarr_format: int
    ndim: int
    #: A group's metadata tell of all below it.
    consolidated: bool
    #: It has attributes of its own.
    described: bool


def look(folder: Path) -> Node | None:
    """What a folder is, or None if it is neither array nor group."""
    found = _json(folder / "zarr.json")
    if found.get("zarr_format") == 3 and found.get("node_type") in ("array", "group"):
        ndim = len(found.get("shape") or ())
        index, own = bool(found.get("consolidated_metadata")), bool(found.get("attributes"))
        return Node(found["node_type"] == "array", 3, ndim, index, own)
    found = _json(folder / ".zarray")
    if found.get("zarr_format") == 2:
        return Node(True, 2, len(found.get("shape") or ()), False, bool(_json(folder / ".zattrs")))
    if _json(folder / ".zgroup").get("zarr_format") == 2:
        index, own = (folder / ".zmetadata").is_file(), bool(_json(folder / ".zattrs"))
        return Node(False, 2, 0, index, own)
    return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class Contents:
    """All that is in a folder: arrays by name, and files that are Zarr's and that are not."""

    arrays: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  #: those with attributes
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def remove(self) -> None:
        """Remove the files that are Zarr's, and folders that are empty then."""
        # Metadata last: without them nobody, the next run neither, knows chunks from other files.
        for path in sorted(self.files, key=lambda path: os.path.basename(path) in NAMES):
            with suppress(FileNotFoundError):
                os.unlink(path)
        for path in reversed(self.folders):
            with suppress(OSError):  # what is not ours is in it
                os.rmdir(path)


def contents(folder: Path) -> Contents:
    """What is in a store or in a group or array of it; links are not followed."""
    found = Contents()
    _collect(folder, "", found)
    return found


def _collect(folder: Path, name: str, found: Contents) -> None:
    node = look(folder)
    found.folders.append(str(folder))
    if node is not None and node.array:
        found.arrays.append(name)
        _collect_chunks(folder, "", node.ndim, found)
        return
    if node is not None and node.described:
        found.groups.append(name or "/")
    for entry in _sorted(folder):
        if entry.is_dir(follow_symlinks=False):
            _collect(folder / entry.name, f"{name}/{entry.name}".lstrip("/"), found)
        else:
            known = node is not None and LEFT.sub("", entry.name) in UNFINISHED
            _sort_in(entry, known, found)


def _collect_chunks(folder: Path, inside: str, ndim: int, found: Contents) -> None:
    for entry in _sorted(folder):
        name = f"{inside}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            found.folders.append(entry.path)
            _collect_chunks(folder / entry.name, f"{name}/", ndim, found)
            continue
        known = not inside and entry.name in NAMES
        _sort_in(entry, known or bool(LEFT.search(name)) or _is_chunk(name, ndim), found)


def _is_chunk(name: str, ndim: int) -> bool:
    match = CHUNK.fullmatch(name)
    if match is None:
        return False
    numbers = re.split("[/.]", match[1]) if match[1] else []
    return len(numbers) == ndim or (ndim == 0 and name in ("c", "0"))


def _sort_in(entry: os.DirEntry[str], known: bool, found: Contents) -> None:
    ours = known and entry.is_file(follow_symlinks=False)
    (found.files if ours else found.foreign).append(entry.path)


def _sorted(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def store_at(folder: Path, shown: Path) -> Node:
    """What a folder, `shown` in messages, is; FileFormatError if it is no store."""
    if (node := look(folder)) is None:
        what = "directory" if folder.is_dir() else "file"
        raise FileFormatError(
            f"{shown}: a {what} that is no Zarr store is never replaced; choose another name"
        )
    return node


def check_replaced(folder: Path, shown: Path) -> None:
    """Raise `FileFormatError` unless a folder, `shown` in messages, is a store that may go.

    It may if it holds one array at most, and no files that are not Zarr's.
    """
    store_at(folder, shown)
    found = contents(folder)
    if found.foreign:
        first = os.path.relpath(found.foreign[0], folder)
        more = f" and {len(found.foreign) - 1} more files" if len(found.foreign) > 1 else ""
        raise FileFormatError(
            f"{shown}: holds {first}{more}, which Zarr did not write, and is never replaced; "
            "choose another name, or move what is yours"
        )
    if len(found.arrays) > 1 or found.groups:
        lost = found.arrays + [f"attributes of {group}" for group in found.groups]
        raise FileFormatError(
            f"{shown}: the whole store would be replaced, and these lost: {few(lost)}; name the "
            f"array that is meant, as in {shown.name}:/NAME, or write to another file"
        )


def create(
    matrix: StoredMatrix, zarr_format: int = 3, named: Path | None = None, *, replaces: bool = False
) -> StoredMatrix:
    """The matrix in the empty folder at its path, with the groups above it, without its values.

    `named` is the folder that it gets, where one may be whose attributes the new one keeps.
    """
    old, beside = None, []
    if named is not None and replaces:
        old = next(iter(_opened(named)), None)
    elif named is not None and not matrix.dataset and look(named.parent) is not None:
        beside = _opened(named.parent)
    name = (matrix.dataset or "").rpartition("/")[2] or (named.name if named else "")
    # Products of measured numbers hardly compress; uncompressed chunks also have no 2 GB limit.
    made = package("zarr").create_array(
        store=matrix.path,
        name=matrix.dataset,
        shape=matrix.shape,
        chunks=matrix.chunks,
        dtype=matrix.dtype,
        compressors=None,
        zarr_format=zarr_format,
        **kept.of_zarr(name, matrix.shape, matrix.dtype, zarr_format, old, beside),
    )
    return replace(matrix, dtype=made.dtype, chunks=made.chunks)


def _opened(folder: Path) -> list[Any]:
    """The array that a folder is, or those in the group that it is."""
    zarr = package("zarr")
    with suppress(Exception):  # the library raises anything on what is damaged
        found = zarr.open(folder, mode="r")
        if isinstance(found, zarr.Array):
            return [found]
        group = zarr.open_group(folder, mode="r", use_consolidated=False)
        return [item for _, item in group.arrays()]
    return []


def _array(matrix: StoredMatrix) -> Any:
    found = package("zarr").open_array(matrix.path, path=matrix.dataset or "", mode="r+")
    # Without a fill value nothing says what a chunk is that is not there.
    return (
        found if found.fill_value is not None else found.with_config({"write_empty_chunks": True})
    )


def write(matrix: StoredMatrix, index: Where, block: Any, threads: int = 1) -> None:
    """Set one block, so many storage chunks at a time."""
    array = _array(matrix)

    def one(part: Where) -> None:
        array[part] = block[within(part, index)]

    at_a_time(one, list(boxes(index, array.chunks, array.dtype.itemsize)), threads)


def drop(matrix: StoredMatrix, index: Where) -> None:
    """Remove one block's chunks from a store that was removed meanwhile, and what is empty then.

    Zarr makes folders again that are gone, and without metadata nobody knows what is in them.
    """
    top = Path(matrix.path)
    root = top / (matrix.dataset or "")
    for position in product(*touched(matrix, index)):
        numbers = [*map(str, position)]
        for path in (root.joinpath("c", *numbers), root / ".".join(numbers)):
            with suppress(FileNotFoundError):
                path.unlink()
            with suppress(OSError):  # others are in it, or it is gone
                while (path := path.parent).is_relative_to(top):
                    path.rmdir()


def sync(matrix: StoredMatrix, index: Where) -> None:
    """Have the chunks of one block on the disk, and the folders that they are in."""
    array = _array(matrix)
    root = Path(matrix.path, matrix.dataset or "")
    folders = {root}
    for position in product(*touched(matrix, index)):
        path = root / array.metadata.encode_chunk_key(position)
        with suppress(FileNotFoundError):  # a chunk of zeros is none
            sync_one(path)
            folders.update(path.parents[: len(path.relative_to(root).parts)])
    for folder in sorted(folders, reverse=True):
        sync_one(folder)


def consolidate(store: Path, folder: Path) -> None:
    """Bring metadata of a store up to date that tell of all below them, above a new folder."""
    above = [store / part for part in folder.relative_to(store).parents]
    for group in above:  # the innermost first
        node = look(group)
        if node is not None and node.consolidated:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that they are no part of Zarr 3's specification
                package("zarr").consolidate_metadata(str(group), zarr_format=node.zarr_format)
            for path in (group / "zarr.json", group / ".zmetadata", group):
                if path.exists():
                    sync_one(path)
