"""What netCDF 4 keeps in HDF5 by rules of its own: dimensions, and numbers for what is missing.

Its library writes a number of its own wherever nothing was written, and says so nowhere but in
the fill value of the dataset. A dimension that grows is as long as the longest variable along it;
the others keep their length in the file, and read on as that number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from multimm.errors import FileFormatError
from multimm.files.cf_attributes import MISSING
from multimm.files.stored import Location, package

#: Numbers for what was never written, of netCDF's `netcdf.h`, by NumPy's kind and bytes.
DEFAULT_FILLS: dict[str, float] = {
    **{"i1": -127, "i2": -32767, "i4": -2147483647, "i8": -9223372036854775806},
    **{"u1": 255, "u2": 65535, "u4": 4294967295, "u8": 18446744073709551614},
    **{"f4": float(np.float32(9.96921e36)), "f8": 9.969209968386869e36},
}
#: Those that are hardly ever meant: a photograph's white is 255, or 65535.
NEVER_MEANT = ("f4", "f8", "i4", "i8")
#: How the name of a dimension begins that has no variable.
NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"


def is_netcdf(place: Location, file: Any) -> bool:
    """Whether netCDF's rules hold in an HDF5 file."""
    return place.suffix in (".nc", ".nc4") or "_NCProperties" in file.attrs


def check(place: Location, item: Any) -> None:
    """Raise `FileFormatError` for what netCDF reads as something else than what HDF5 has."""
    if not is_netcdf(place, item.file):
        return
    if bytes(np.bytes_(item.attrs.get("NAME", b""))).startswith(NO_VARIABLE):
        raise FileFormatError(f"{place}: a dimension of netCDF without values; name a variable")
    for axis, most in enumerate(item.maxshape):
        if most is None and (longest := _longest(item, axis)) > item.shape[axis]:
            raise FileFormatError(
                f"{place}: has {item.shape[axis]:,} of the {longest:,} entries that netCDF gives "
                f"axis {axis}: the rest was never written; write it, or open it with xarray and "
                "multiply x.data"
            )
    if _fill(item) is not None and is_partly_written(item):
        raise FileFormatError(
            f"{place}: parts of it were never written, and netCDF has {item.fillvalue} stand "
            "there; write them, set _FillValue, or open it with xarray and multiply x.data"
        )


def check_block(place: Location, item: Any, block: Any) -> None:
    """Raise `FileFormatError` for a block with the number that stands for what nobody wrote."""
    if not is_netcdf(place, item.file) or block.dtype.str[1:] not in NEVER_MEANT:
        return
    fill = _fill(item)
    if fill is not None and (block == fill).any():
        raise FileFormatError(
            f"{place}: holds {fill}, which netCDF puts where nothing was written; write all of it, "
            "set _FillValue, or open it with xarray and multiply x.data"
        )


def _fill(item: Any) -> Any:
    """The number that netCDF puts where nothing is written; None where its user set another."""
    default = DEFAULT_FILLS.get(item.dtype.str[1:])
    defined = item.id.get_create_plist().fill_value_defined()
    if default is None or defined != package("h5py").h5d.FILL_VALUE_USER_DEFINED:
        return None
    return item.fillvalue if item.fillvalue == default and not _says_missing(item) else None


def _says_missing(item: Any) -> bool:
    return any(name in item.attrs for name in MISSING)  # then there is a warning already


def is_partly_written(item: Any) -> bool:
    """Whether HDF5 has no bytes for a part of a dataset, which is not empty."""
    if item.chunks is None:
        return bool(item.size > 0 and item.id.get_storage_size() == 0)
    sides = zip(item.shape, item.chunks, strict=True)
    return bool(item.id.get_num_chunks() < math.prod(-(-a // b) for a, b in sides))


def _longest(item: Any, axis: int) -> int:
    """Length of a dimension that grows: of its longest variable."""
    lengths = [item.shape[axis]]
    scales = [item] if item.is_scale else list(item.dims[axis].values())
    for scale in scales[:1]:
        lengths.append(scale.shape[0] if scale.ndim else 0)
        for user, own in scale.attrs.get("REFERENCE_LIST", ()):
            lengths.append(item.file[user].shape[own])
    return max(map(int, lengths))
