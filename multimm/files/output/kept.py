"""What a new array keeps of the one that it replaces: attributes, and what says of its axes.

Not kept is what says what the old numbers stand for: a scale, a number for missing values, a time.
An axis of another length has another name, for xarray opens no store in which one has two lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multimm.files.cf_attributes import of_values
from multimm.files.stored import package

#: Where xarray and netCDF keep the names of axes in Zarr 2.
NAMES = "_ARRAY_DIMENSIONS"
#: Those of an HDF5 dataset that has scales of its axes, or is one of others' axes.
SCALES = {"DIMENSION_LIST", "REFERENCE_LIST"}


def of_zarr(
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    zarr_format: int,
    old: Any,
    beside: Sequence[Any],
) -> dict[str, Any]:
    """Options of `zarr.create_array` for what replaces `old`; None: for what is new `beside`."""
    attributes: dict[str, Any] = {} if old is None else dict(old.attrs)
    for key in of_values(attributes):
        del attributes[key]
    known, lengths = _axes(old), () if old is None else old.shape
    attributes.pop(NAMES, None)
    if not known and not (old is None and any(map(_axes, beside))):
        return {"attributes": attributes}
    same = [axis < len(known) and lengths[axis] == size for axis, size in enumerate(shape)]
    names = [known[axis] if kept else f"{name}_{axis}" for axis, kept in enumerate(same)]
    if zarr_format == 3:
        return {"attributes": attributes, "dimension_names": names}
    # In Zarr 2 xarray takes what equals the fill value for missing.
    fill = np.nan if dtype.kind in "fc" else None
    return {"attributes": {**attributes, NAMES: names}, "fill_value": fill}


def _axes(array: Any) -> tuple[Any, ...]:
    """The names of an array's axes; empty if it has none."""
    if array is None:
        return ()
    named = getattr(array.metadata, "dimension_names", None) or array.attrs.get(NAMES)
    return tuple(named or ())


def give_hdf5(old: Any, new: Any) -> None:
    """Copy the attributes of a dataset to the one that replaces it, in the same file or another."""
    labels = {"DIMENSION_LABELS"} if old.ndim != new.ndim else set()
    for name in {*old.attrs} - of_values(old.attrs) - labels:
        new.attrs[name] = old.attrs[name]


def from_file(path: Path, new: Any) -> None:
    """Copy the attributes of the only dataset in another file."""
    h5py = package("h5py")

    def give(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            give_hdf5(item, new)

    with h5py.File(path, "r") as file:
        file.visititems(give)
