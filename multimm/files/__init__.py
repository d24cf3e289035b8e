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

from multimm.errors import FileFormatError
from multimm.files import hdf5, hdf5_output, npy, raw, zarr, zarr_output
from multimm.files.stored import HOLDS, NUMERIC_KINDS, Location, StoredMatrix, Where, reason


class Format(NamedTuple):
    """What one file format can do."""

    inspect: Callable[[Location], StoredMatrix]
    read: Callable[[StoredMatrix, Where], Any]
    #: Lays a matrix out in the empty file or folder at its path, and says how.
    create: Callable[..., StoredMatrix]
    write: Callable[[StoredMatrix, Where, Any], None]
    #: Has what this machine wrote of a block on the disk.
    sync: Callable[[StoredMatrix, Where], None]
    #: Blocks are written as storage chunks of one size, in a folder.
    regular: bool = False
    #: New files are made; others are read alone.
    written: bool = True


_NPY = Format(npy.inspect, npy.read, npy.create, raw.write, raw.sync)
_HDF5 = Format(hdf5.inspect, hdf5.read, hdf5_output.create, raw.write, raw.sync)
_ZARR = Format(
    zarr.inspect, zarr.read, zarr_output.create, zarr_output.write, zarr_output.sync, regular=True
)
FORMATS: Mapping[str, Format] = {
    ".npy": _NPY,
    ".zarr": _ZARR,
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".nc": _HDF5._replace(written=False),
    ".nc4": _HDF5._replace(written=False),
}
#: A file that holds several arrays, and the name of one.
_NAMED = r"(.+\.(?:h5|hdf5|zarr|nc4?)){}(.+)"


def locate(path: str | os.PathLike[str], dataset: str | None = None) -> Location:
    """Split ``file.h5:/name`` and find the format, without looking at the disk.

    Raises
    ------
    FileFormatError
        The suffix is none of those supported, or a dataset is named twice or where the
        format has none.
    """
    text = os.fspath(path)
    if match := re.fullmatch(_NAMED.format(":"), text, re.IGNORECASE):
        text, name = match.groups()
        if dataset is not None and dataset.strip("/") != name.strip("/"):
            raise FileFormatError(
                f"{path}: the dataset is {name!r} in the path and {dataset!r} in the option; "
                "name it once"
            )
        dataset = name
    suffix = Path(text).suffix.lower()
    if suffix not in FORMATS:
        inside = re.fullmatch(_NAMED.format("/"), text, re.IGNORECASE)
        hint = "; for the array inside write {}:/{}".format(*inside.groups()) if inside else ""
        raise FileFormatError(
            f"{path}: cannot tell a matrix format from the suffix {suffix!r}; "
            f"supported are {', '.join(FORMATS)}{hint}"
        )
    if suffix == ".npy" and dataset is not None:
        raise FileFormatError(f"{path}: a .npy file holds one array; leave out the dataset")
    name_in_file = dataset.strip("/") or None if dataset else None
    return Location(os.path.abspath(text), suffix, name_in_file)


def inspect(place: Location) -> StoredMatrix:
    """Read shape, dtype and storage chunks of the matrix at `place`, and no element.

    Raises
    ------
    FileFormatError
        Nothing there, not readable, truncated, no such dataset, or not a numeric array of
        at least one dimension.
    """
    if not os.path.exists(place.path):
        raise FileFormatError(f"{place.path}: no such file or directory")
    try:
        found = FORMATS[place.suffix].inspect(place)
    except FileFormatError:
        raise
    except Exception as error:  # parsers raise anything on a foreign file
        raise FileFormatError(
            f"{place}: not a readable {place.suffix} file ({reason(error)})"
        ) from error
    if found.dtype.kind not in NUMERIC_KINDS:
        raise FileFormatError(f"{place}: elements are {found.dtype}; {HOLDS}")
    if not found.shape:
        raise FileFormatError(f"{place}: holds a single value (0-d); a matrix is needed")
    return found
