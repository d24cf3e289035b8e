"""What is there already of an output's name, and whether it may go.

Nothing goes but the one array that is replaced. So a file with more in it, or anything that this
format's library did not write, is never replaced as a whole; an array is added to it by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multimm.errors import FileFormatError
from multimm.files import FORMATS
from multimm.files.output import hdf5, zarr
from multimm.files.output.target import Target
from multimm.files.stored import Location, few, reason

NPY_MAGIC = b"\x93NUMPY"


def find(place: Location, *, overwrite: bool) -> Target:
    """What has to be written for an array at `place`; with `overwrite` one may be replaced.

    Raises
    ------
    FileFormatError
        A format that is only read, a missing or unwritable folder, a target that exists, that is
        none of this format, or that holds more than would be replaced.
    """
    path, form = Path(place.path), FORMATS[place.suffix]
    folder = path.parent
    if not form.written:
        able = ", ".join(suffix for suffix, other in FORMATS.items() if other.written)
        raise FileFormatError(f"{path}: {place.suffix} is read and not written; choose {able}")
    if not folder.is_dir():
        raise FileFormatError(f"{path}: no folder {folder}; create it first")
    in_a_store = place.dataset is not None and path.is_dir()
    if not in_a_store and not os.access(folder, os.W_OK | os.X_OK):
        raise FileFormatError(f"{path}: no permission to write in {folder}")
    if form.regular:
        _check_name(place)
    unnamed = form.regular or place.suffix == ".npy"
    name = place.dataset or (None if unnamed else hdf5.DEFAULT)
    with _telling(path):
        if not _exists(path):
            return Target(path, name, False, path)
        if place.dataset is not None:
            return (_in_store if form.regular else _in_hdf5)(place, path, overwrite)
        if not overwrite:
            where = "a group" if form.regular else "it"
            adds = "" if place.suffix == ".npy" else f"; {path.name}:/NAME adds an array to {where}"
            raise _refuse_existing(path, adds)
        _check_whole(place, path, path)
        if not form.regular:
            return Target(path, name, True, path)
        zarr_format = zarr.store_at(path, path).metadata.zarr_format
        return Target(path, name, True, path, zarr_format=zarr_format)


def check(place: Location, path: Path, shown: Path) -> None:
    """Raise `FileFormatError` unless what lies at a path, `shown` in messages, may go."""
    with _telling(shown):
        _check_whole(place, path, shown)


def _check_whole(place: Location, path: Path, shown: Path) -> None:
    if FORMATS[place.suffix].regular:
        zarr.check_replaced(path, shown)
        return
    _check_file(path, shown)
    if place.suffix != ".npy":
        hdf5.check_replaced(path, shown)
        return
    with open(path, "rb") as file:
        if file.read(len(NPY_MAGIC)) not in (NPY_MAGIC, b""):
            raise FileFormatError(
                f"{shown}: a file that is not .npy is never replaced; choose another name"
            )


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Parsers raise anything on a foreign file: say what that means."""
    try:
        yield
    except (FileFormatError, FileNotFoundError):
        raise
    except Exception as error:
        raise FileFormatError(
            f"{path}: cannot tell what would be lost with it ({reason(error)}); write to another "
            "file, or remove this one"
        ) from error


def _exists(path: Path) -> bool:
    """Whether something has this name; an error where nothing can."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be written ({reason(error)}): choose another name"
        ) from error
    return True


def _refuse_existing(path: Path | Location, more: str = "") -> FileFormatError:
    return FileFormatError(
        f"{path}: exists already; choose another name, or have it replaced with "
        f"overwrite=True (--overwrite){more}"
    )


def _nothing_to_replace(place: Location, held: list[str]) -> FileFormatError:
    """Who says that an array is to be replaced has meant one that is there."""
    return FileFormatError(
        f"{place.path}: holds no {place.dataset!r} to replace, but {few(held) or 'nothing'}; leave "
        "out overwrite=True (--overwrite) to add it, or write to another file"
    )


def _check_file(path: Path, shown: Path) -> None:
    if not path.is_file():
        other = "link that leads nowhere" if path.is_symlink() else "device"
        what = "directory" if path.is_dir() else other
        raise FileFormatError(f"{shown}: a {what} is never replaced; choose another name")


def _in_hdf5(place: Location, path: Path, overwrite: bool) -> Target:
    """An array in a file that is there, which begins as a copy of that."""
    name = place.dataset or ""
    _check_file(path, path)
    there = hdf5.holds(path, name, overwrite=overwrite)
    if there and not overwrite:
        raise _refuse_existing(place)
    if overwrite and not there:
        raise _nothing_to_replace(place, [one for kind in hdf5.held(path) for one in kind])
    return Target(path, name, True, path, keeps=True)


def _in_store(place: Location, path: Path, overwrite: bool) -> Target:
    """An array in a store that is there: a folder in one of its groups."""
    here, zarr_format = path, zarr.store_at(path, path).metadata.zarr_format
    parts = (place.dataset or "").split("/")
    for depth, part in enumerate(parts):
        node = zarr.node_at(here)
        if node is None or zarr.is_array(node):
            what = "no Zarr group" if node is None else "an array without a name"
            raise FileFormatError(
                f"{here}: {what}, so that no {part!r} can be added to it; write to another file"
            )
        zarr_format, here = node.metadata.zarr_format, here / part
        if not _exists(here):
            if overwrite:
                raise _nothing_to_replace(place, zarr.contents(path).arrays)
            _check_writable(here.parent)
            rest = "/".join(parts[depth + 1 :]) or None
            return Target(here, rest, False, path, zarr_format=zarr_format)
        if here.is_symlink():
            raise FileFormatError(f"{here}: is a link: name what it leads to, or another array")
    if (node := zarr.node_at(here)) is None or not zarr.is_array(node):
        raise FileFormatError(
            f"{here}: {'no Zarr array' if node is None else 'a group'}, which is never replaced by "
            "an array; choose another name"
        )
    if not overwrite:
        raise _refuse_existing(place)
    _check_writable(here.parent)
    zarr.check_replaced(here, here)
    return Target(here, None, True, path, zarr_format=zarr_format)


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileFormatError(f"{folder}: no permission to write in this group")


def _check_name(place: Location) -> None:
    for part in (place.dataset or "").split("/"):
        if part == ".." or part.startswith("__") or part in zarr.NAMES:
            raise FileFormatError(
                f"{place.path}: {place.dataset!r} cannot be an array's name, for {part!r} is none "
                "in Zarr; choose another"
            )
