"""Matrix files, one block in and one block out: .npy, .zarr and .h5; netCDF 4 is HDF5 to read.

This package knows what the formats look like on disk; only `multimm.files.graph` knows Dask.
Every function opens the file itself and closes it again, so that a `StoredMatrix` can be sent
to any process that sees the same file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from multimm.errors import ArrayTypeError, FileFormatError, kind_of
from multimm.files import hdf5, identity, npy, raw, remote, zarr
from multimm.files.cf_attributes import warn
from multimm.files.output import hdf5 as output_hdf5
from multimm.files.output import zarr as output_zarr
from multimm.files.stored import (
    HOLDS,
    NUMERIC_KINDS,
    Location,
    StoredMatrix,
    Where,
    causes_stay,
    reason,
)


def whole(matrix: StoredMatrix, _: Where) -> StoredMatrix:
    """All of it: the format keeps nothing by block."""
    return matrix


class Format(NamedTuple):
    """What one file format can do."""

    inspect: Callable[[Location], StoredMatrix]
    #: By so many threads, where the format allows it.
    read: Callable[[StoredMatrix, Where, int], Any]
    #: Lays a matrix out in the empty file or folder at its path, and says how.
    create: Callable[..., StoredMatrix]
    write: Callable[[StoredMatrix, Where, Any, int], None]
    #: Has what this machine wrote of a block on the disk.
    sync: Callable[[StoredMatrix, Where], None]
    #: Blocks are written as storage chunks of one size, in a folder.
    regular: bool = False
    #: New files are made; others are read alone.
    written: bool = True
    #: The matrix with no more than the reading of one block needs: what its task is given.
    part: Callable[[StoredMatrix, Where], StoredMatrix] = whole


_NPY = Format(npy.inspect, npy.read, npy.create, raw.write, raw.sync)
_HDF5 = Format(hdf5.inspect, hdf5.read, output_hdf5.create, raw.write, raw.sync)
_ZARR = Format(
    zarr.inspect,
    zarr.read,
    output_zarr.create,
    output_zarr.write,
    output_zarr.sync,
    regular=True,
    part=zarr.part,
)
FORMATS: Mapping[str, Format] = {
    ".npy": _NPY,
    ".zarr": _ZARR,
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".nc": _HDF5._replace(written=False),
    ".nc4": _HDF5._replace(written=False),
}
#: What file systems and NumPy count up to.
MOST_BYTES = 2**63 - 1
#: A file that holds several arrays, and the name of one behind a colon or a slash.
_NAMED = r"(.+\.(?:h5|hdf5|zarr|nc4?)){}(.+)"


def _text(path: Any, dataset: Any) -> str:
    """The path as text."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise ArrayTypeError(
            f"a {kind_of(path)} where a path is needed: give the name of a file; what is open "
            "already is an operand of multimm.matmul, or goes to dask.array.from_array"
        )
    if not isinstance(dataset, str | None):
        raise ArrayTypeError(f"dataset={dataset!r}: the name of an array is needed, as text")
    given = os.fsdecode(path)
    if not given:
        raise FileFormatError("the path is empty: give the name of a file")
    return given


def locate(
    path: str | os.PathLike[str], dataset: str | None = None, *, outside: bool = False
) -> Location:
    """Split ``file.h5:/name`` or ``store.zarr/name`` and find the format.

    A local path that is there as it is given stands for itself; nothing else is looked up.

    Raises
    ------
    FileFormatError
        The suffix is none of those supported, or a dataset is named twice or where the
        format has none.
    ArrayTypeError
        What is given as a path or as a name is none, such as an open file.
    """
    given = _text(path, dataset)
    if "\0" in given or "\0" in (dataset or ""):
        raise FileFormatError(f"{given!r}: no name has a zero byte in it; choose another")
    text = _local(given)
    if not (suffix_of(text) in FORMATS and _whole(text)):
        for between in ":", "/":
            if match := re.fullmatch(_NAMED.format(between), text, re.IGNORECASE):
                text, name = match.groups()
                if dataset is not None and dataset.strip("/") != name.strip("/"):
                    raise FileFormatError(
                        f"{given}: the dataset is {name!r} in the path and {dataset!r} in the "
                        "option; name it once"
                    )
                dataset = name
                break
    suffix = suffix_of(text)
    if suffix not in FORMATS:
        raise FileFormatError(
            f"{given}: cannot tell a matrix format from the suffix {suffix!r}; "
            f"supported are {', '.join(FORMATS)}"
        )
    if suffix == ".npy" and dataset is not None:
        raise FileFormatError(f"{given}: a .npy file holds one array; leave out the dataset")
    parts = (dataset or "").split("/")
    name_in_file = "/".join(part for part in parts if part not in ("", ".")) or None
    if remote.is_remote(text):
        return Location(text.rstrip("/"), suffix, name_in_file)
    shown = "" if text == given or not remote.is_remote(given) else given
    try:
        path = os.path.abspath(text)
    except FileNotFoundError:
        raise FileFormatError(
            f"{given}: the current folder is gone; give an absolute path, or change to a folder "
            "that is there"
        ) from None
    return Location(path, suffix, name_in_file, shown, outside)


def _local(given: str) -> str:
    """``file:///folder/name`` as a local path; others as they are."""
    if not given.lower().startswith("file://"):
        return given
    parts = _parts(given)
    if parts.netloc not in ("", "localhost"):
        raise FileFormatError(
            f"{given}: names a file on the host {parts.netloc!r}; a local file has three slashes, "
            f"file:///{parts.netloc}{parts.path}"
        )
    return unquote(given[len("file://") + len(parts.netloc) :])


def _parts(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:
        raise FileFormatError(f"{address}: no address ({error})") from error


def suffix_of(text: str) -> str:
    """The end of a path, or of an address without its query, that names the format."""
    if remote.is_remote(text) and text.lower().startswith(("http:", "https:")):
        text = _parts(text).path
    return Path(text).suffix.lower()


def _whole(text: str) -> bool:
    """Whether a path with a format's suffix is a file of its own, and no array inside another."""
    if remote.is_remote(text):
        return not re.fullmatch(_NAMED.format(":"), text, re.IGNORECASE)
    if os.path.lexists(text):
        return FORMATS[suffix_of(text)].regular or not os.path.isdir(text)
    inside = re.fullmatch(_NAMED.format(":"), text, re.IGNORECASE)
    return inside is None and os.path.isdir(os.path.dirname(text) or os.curdir)


@causes_stay
def inspect(place: Location) -> StoredMatrix:
    """Read shape, dtype and storage chunks of the matrix at `place`, and no element.

    Raises
    ------
    FileFormatError
        Nothing there, not readable, truncated, no such dataset, or not a numeric array of
        at least one dimension.
    """
    try:
        if not place.remote and identity.state(place.path) == identity.ABSENT:
            raise FileNotFoundError
        found = FORMATS[place.suffix].inspect(place)
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(f"{place.name}: no such file or directory") from error
    except Exception as error:  # parsers raise anything on a foreign file
        what = "cannot be read" if place.remote else f"not a readable {place.suffix} file"
        raise FileFormatError(f"{place}: {what} ({reason(error)})") from error
    if found.dtype.kind not in NUMERIC_KINDS:
        raise FileFormatError(f"{place}: elements are {found.dtype}; {HOLDS}")
    if min((0, *found.shape)) < 0 or min(found.chunks or (1,)) < 1:
        stored = f", in chunks of {found.chunks}" if found.chunks else ""
        raise FileFormatError(f"{place}: declares shape {found.shape}{stored}: it is damaged")
    if not found.shape:
        raise FileFormatError(f"{place}: holds a single value (0-d); a matrix is needed")
    if place.remote and not all(remote.is_known(told) for _, told in found.sources if told):
        warn(
            f"{place}: nothing says when it changed, neither a tag (ETag) nor a time: other "
            "content of the same size goes unnoticed; leave it as it is until all is computed, or "
            "copy it to a local folder"
        )
    if max((*found.shape, found.nbytes)) > MOST_BYTES:
        raise FileFormatError(
            f"{place}: declares {found.dtype} {found.shape}, which is more than any file holds "
            f"({MOST_BYTES:,} bytes): it is damaged, or was never written"
        )
    return found
