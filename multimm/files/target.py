"""Where a new matrix file may stand: checked before anything is computed for it."""

from __future__ import annotations

import os
from pathlib import Path

from multimm.errors import FileFormatError
from multimm.files import FORMATS
from multimm.files.stored import Location, listing, reason


def check(place: Location, *, overwrite: bool) -> None:
    """Raise unless a file may be put at `place`, whole, in place of what is there.

    Parameters
    ----------
    place : Location
        The dataset as the caller named it, or None.
    overwrite : bool
        An existing file may be replaced.

    Raises
    ------
    FileFormatError
        A format that is only read, a missing or unwritable folder, a target that exists, that is
        no file of this format, or that holds other datasets than the one named.
    """
    path = Path(place.path)
    folder = path.parent
    if not FORMATS[place.suffix].written:
        able = ", ".join(suffix for suffix, form in FORMATS.items() if form.written)
        raise FileFormatError(f"{path}: {place.suffix} is read and not written; choose {able}")
    if not folder.is_dir():
        raise FileFormatError(f"{path}: no folder {folder}; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileFormatError(f"{path}: no permission to write in {folder}")
    if not path.exists():
        return
    if not overwrite:
        raise FileFormatError(
            f"{path}: exists already; choose another name, or have it replaced with "
            "overwrite=True (--overwrite)"
        )
    if not FORMATS[place.suffix].owns(path):
        what = "directory" if path.is_dir() else "file"
        raise FileFormatError(
            f"{path}: a {what} that is no Zarr store is never replaced; choose another name"
        )
    if place.dataset is not None:
        _refuse_loss(place)


def _refuse_loss(place: Location) -> None:
    """Who names one dataset does not expect the file's others to go."""
    try:
        held = FORMATS[place.suffix].held(place.path)
    except FileFormatError:
        raise
    except Exception as error:  # parsers raise anything on a foreign file
        raise FileFormatError(
            f"{place.path}: cannot tell what would be lost with it ({reason(error)}); "
            "write to another file"
        ) from error
    others = {name: shape for name, shape in held.items() if name != place.dataset}
    if others:
        raise FileFormatError(
            f"{place}: the whole file would be replaced, and these datasets lost: "
            f"{listing(others)}; write to another file"
        )
