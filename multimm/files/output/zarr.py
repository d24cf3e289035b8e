"""Zarr outputs: a store of one array, or an array more in a group; and which files are Zarr's."""

from __future__ import annotations

import os
import re
import stat
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from multimm.errors import FileFormatError
from multimm.files.output import kept
from multimm.files.output.target import Target
from multimm.files.raw import sync_one
from multimm.files.storage_chunks import box_by_box, boxes
from multimm.files.stored import StoredMatrix, Where, few, package
from multimm.files.zarr import METADATA, grid_place, touched

#: What a group or an array has besides its chunks.
NAMES = (*METADATA, ".zattrs", ".zmetadata")
#: What Zarr's own writer leaves of a file when it is killed: in place of a suffix, as of zarr.json.
LEFT = re.compile(r"\.[0-9a-f]{32}\.partial$")
UNFINISHED = (*NAMES, "zarr")


def node_at(folder: Path) -> Any:
    """The array or the group that a folder is, by its own metadata; None if it is neither."""
    zarr = package("zarr")
    with suppress(Exception):  # the library raises anything on what is damaged
        return zarr.open(folder, mode="r", use_consolidated=False)
    return None


def is_array(node: Any) -> bool:
    """Whether a node is an array, and no group."""
    return isinstance(node, package("zarr").Array)


def _below(node: Any, depth: int | None) -> dict[PurePath, Any]:
    """What an array or a group is, and what is in there, by name."""
    if is_array(node):
        return {PurePath(): node}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that files are not Zarr's
        return {PurePath(): node, **{PurePath(x): y for x, y in node.members(max_depth=depth)}}


class Contents(NamedTuple):
    """What is in a folder, by name."""

    arrays: list[str]
    groups: list[str]  #: those with attributes
    foreign: list[str]  #: files that are not Zarr's, and links


def contents(folder: Path) -> Contents:
    """What is in a store, or in a group or an array of it; links are not followed."""
    nodes = _below(node_at(folder), None)
    foreign = []
    for path, folders, names in os.walk(folder):
        here = PurePath(path).relative_to(folder)
        owner = next(above for above in (here, *here.parents) if above in nodes)
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        for name in (*links, *names):
            inside = (here / name).relative_to(owner).as_posix()
            regular = stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode)
            if not regular or not _is_zarrs(inside, nodes[owner]):
                foreign.append(str(here / name))
    arrays = [str(name) for name, node in nodes.items() if is_array(node)]
    groups = [
        str(x) if x.name else "the store"
        for x, y in nodes.items()
        if not is_array(y) and dict(y.attrs)
    ]
    return Contents(sorted(arrays), sorted(groups), sorted(foreign))


def _is_zarrs(name: str, node: Any) -> bool:
    """Whether Zarr writes files of that name into an array or a group."""
    if LEFT.sub("", name) in UNFINISHED:
        return True
    return is_array(node) and bool(LEFT.search(name) or grid_place(name, node.ndim) is not None)


def store_at(folder: Path, shown: Path) -> Any:
    """What a folder, `shown` in messages, is; FileFormatError if it is no store."""
    if (node := node_at(folder)) is None:
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
        more = f" and {len(found.foreign) - 1} more files" if len(found.foreign) > 1 else ""
        raise FileFormatError(
            f"{shown}: holds {found.foreign[0]}{more}, which Zarr did not write, and is never "
            "replaced; choose another name, or move what is yours"
        )
    if len(found.arrays) > 1 or found.groups:
        lost = found.arrays + [f"attributes of {group}" for group in found.groups]
        raise FileFormatError(
            f"{shown}: the whole store would be replaced, and these lost: {few(lost)}; name the "
            f"array that is meant, as in {shown.name}:/NAME, or write to another file"
        )


def create(matrix: StoredMatrix, target: Target) -> StoredMatrix:
    """The matrix in the empty folder at its path, with the groups above it, without its values.

    What is said of the array that it replaces stays, and axes have names where those beside do.
    """
    old, beside = None, []
    if target.replaces:
        old = next(iter(_arrays_at(target.unit)), None)
    elif not matrix.dataset:
        beside = _arrays_at(target.unit.parent)
    name = (matrix.dataset or "").rpartition("/")[2] or target.unit.name
    # Products of measured numbers hardly compress; uncompressed chunks also have no 2 GB limit.
    made = package("zarr").create_array(
        store=matrix.path,
        name=matrix.dataset,
        shape=matrix.shape,
        chunks=matrix.chunks,
        dtype=matrix.dtype,
        compressors=None,
        zarr_format=target.zarr_format,
        **kept.of_zarr(name, matrix.shape, matrix.dtype, target.zarr_format, old, beside),
    )
    return replace(matrix, dtype=made.dtype, chunks=made.chunks)


def _arrays_at(folder: Path) -> list[Any]:
    """The array that a folder is, or those in the group that it is."""
    node = node_at(folder)
    with suppress(Exception):  # as above
        return [] if node is None else [x for x in _below(node, 0).values() if is_array(x)]
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

    def encode(values: Any, part: Where) -> None:
        array[part] = values

    parts = list(boxes(index, array.chunks, array.dtype.itemsize))
    box_by_box(block, index, parts, encode, threads)


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
    zarr = package("zarr")
    above = [store / part for part in folder.relative_to(store).parents]
    for path in above:  # the innermost first
        group = zarr.open_group(path, mode="r").metadata
        if group.consolidated_metadata is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that they are no part of Zarr 3's specification
                zarr.consolidate_metadata(str(path), zarr_format=group.zarr_format)
            for changed in (path / "zarr.json", path / ".zmetadata", path):
                if changed.exists():
                    sync_one(changed)
