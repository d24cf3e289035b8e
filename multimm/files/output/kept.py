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
#: What HDF5, and netCDF in it, have of an array's axes; references in there are made anew.
OF_AXES = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS"}
OF_AXES |= {"_Netcdf4Dimid", "_Netcdf4Coordinates"}


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
    unwanted = of_values(old.attrs) | OF_AXES
    for name in old.attrs:
        if name not in unwanted:
            _copy_attribute(old, new, name)
    if old.file != new.file:
        return
    same = old.shape == new.shape  # xarray opens no array of which some axes alone have scales
    for axis, dimension in enumerate(old.dims):
        if same and dimension.label:
            new.dims[axis].label = dimension.label
        for scale in list(dimension.values()):
            dimension.detach_scale(scale)
            if same:
                new.dims[axis].attach_scale(scale)
    if old.is_scale:
        _be_scale(old, new)
    if same:
        for name in {"_Netcdf4Dimid", "_Netcdf4Coordinates"} & {*old.attrs}:
            _copy_attribute(old, new, name)


def _be_scale(old: Any, new: Any) -> None:
    """Have a dataset say of others' axes what another said, if it is as long."""
    name = old.attrs.get("NAME", b"")
    if old.shape == new.shape:
        new.make_scale(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name))
    for user, axis in [*old.attrs.get("REFERENCE_LIST", ())]:
        dimension = old.file[user].dims[int(axis)]
        dimension.detach_scale(old)
        if old.shape == new.shape:
            dimension.attach_scale(new)


def _copy_attribute(old: Any, new: Any, name: str) -> None:
    """As it is stored: h5py would make other types of some."""
    h5a, h5s = package("h5py").h5a, package("h5py").h5s
    found = h5a.open(old.id, name.encode())
    kind, space = found.get_type(), found.get_space()
    made = h5a.create(new.id, name.encode(), kind, space)
    if space.get_simple_extent_type() != h5s.NULL:
        value = np.zeros(found.shape, found.dtype)
        found.read(value)
        made.write(value)


def from_file(path: Path, new: Any) -> None:
    """Copy the attributes of the only dataset in another file."""
    h5py = package("h5py")
    names: list[str] = []
    with h5py.File(path, "r") as file:
        file.visit(names.append)
        for old in [file[name] for name in names if isinstance(file[name], h5py.Dataset)]:
            give_hdf5(old, new)
