"""Numbers that stand for others: what netCDF's attributes say of the array that carries them.

Its conventions (CF, as xarray and netCDF4 keep them) store a float as an integer, value =
scale_factor * stored + add_offset, and a number in place of what is missing. Neither is undone
here: where every value is another than what is stored, the array is refused, and where some may
be, a warning says so.
"""

from __future__ import annotations

import base64
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from multimm.errors import FileFormatError, callers_level, printable, without_secrets
from multimm.files.stored import Location

#: What changes all values -> the number that changes none.
CHANGES = {"scale_factor": 1.0, "add_offset": 0.0}
#: What stands for a missing value.
MISSING = ("_FillValue", "missing_value")
#: What bounds those that are not: netCDF's libraries give others as missing.
BOUNDS = ("valid_min", "valid_max", "valid_range")
#: Units of points in time, as CF has them: a unit, since a date.
_SINCE = re.compile(
    r"\s*(nano|micro|milli)?(s|secs?|seconds?|min|mins|minutes?|h|hrs?|hours?|d|days?|weeks?|"
    r"(common_|all_leap_|tropical_|sidereal_|leap_|julian_|gregorian_)?(years?|months?)|"
    r"ns|us|ms|[µμ]s|msecs?)\s+(since\s|as\s+%Y)",
    re.IGNORECASE,
)


def check_meaning(
    place: Location, dtype: np.dtype[Any], attributes: Mapping[str, Any]
) -> np.dtype[Any]:
    """The dtype that is meant; warn where some numbers may stand for none.

    It is the stored one, or bool where xarray has written booleans as integers.

    Raises
    ------
    FileFormatError
        A scale or an offset, integers that are to be read without their sign, or with one, or
        numbers that stand for times.
    """
    known = (*CHANGES, *MISSING, *BOUNDS)
    found = {name: attributes[name] for name in known if name in attributes}
    signed = {"u": "false", "i": "true"}.get(dtype.kind)
    changes = [name for name in found if name in CHANGES and not _is(found[name], CHANGES[name])]
    if signed is not None and _text(attributes.get("_Unsigned", "")).lower() == signed:
        found["_Unsigned"] = signed
        changes.append("_Unsigned")
    if changes:
        raise FileFormatError(
            f"{place}: {_listed(found, changes)}: its values are not the {dtype} numbers that are "
            "stored; decode them, as xarray.open_dataset and xarray.open_zarr do with chunks={}, "
            "and multiply x.data, or write that with multimm.io.save_array and multiply the file"
        )
    units, kind = (_text(attributes.get(name, "")) for name in ("units", "dtype"))
    if dtype.kind in "iuf" and (
        _SINCE.match(units) or kind.startswith(("datetime64", "timedelta64"))
    ):
        said = ", ".join(f"{name}={text!r}" for name, text in (("units", units), ("dtype", kind)))
        raise FileFormatError(
            f"{place}: its numbers stand for times ({said}): open it with xarray and multiply what "
            'you make of x.data, such as (x.data - start) / numpy.timedelta64(1, "s")'
        )
    missing = [name for name in found if name in MISSING and not _is(found[name], np.nan)]
    if missing:
        warn(
            f"{place}: {_listed(found, missing)} stands for missing values, which are multiplied "
            "as they are stored: if there are any, open it with xarray and multiply x.data"
        )
    bounds = [name for name in found if name in BOUNDS]
    if bounds:
        warn(
            f"{place}: {_listed(found, bounds)}: values outside stand for missing ones, and are "
            "multiplied as they are stored: if there are any, mask them first, as netCDF4 does"
        )
    return np.dtype(bool) if kind == "bool" and dtype.kind in "iu" else dtype


def warn(text: str) -> None:
    """Warn whoever calls multimm, in a text that may have names from files."""
    warnings.warn(printable(without_secrets(text)), UserWarning, stacklevel=callers_level())


def carried(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an array's attributes that `check_meaning` looks at, for when the file is closed."""
    names = (*CHANGES, *MISSING, *BOUNDS, "_Unsigned", "units", "dtype")
    return {name: attributes[name] for name in names if name in attributes}


#: What else says of numbers what they are: bounds, and what was counted of them.
_OF_VALUES = {*CHANGES, *MISSING, *BOUNDS, "_Unsigned", "dtype"}
_OF_VALUES |= {"actual_range", "flag_values", "flag_masks", "flag_meanings"}


def of_values(attributes: Mapping[str, Any]) -> set[str]:
    """Those of an array's attributes that say what its numbers stand for, and of no others'."""
    times = {"units", "calendar"} if _SINCE.match(_text(attributes.get("units", ""))) else set()
    return (_OF_VALUES | times) & {*attributes}


def _listed(found: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={_shown(found[name])}" for name in names)


def _shown(value: Any) -> str:
    """An attribute for a message: xarray writes numbers in Zarr 3 as text that nobody reads."""
    try:
        return _text(_numbers(value)) if isinstance(value, str) else _text(value)
    except ValueError:
        return _text(value)


def _text(value: Any) -> str:
    """An attribute without the array of one element that it comes in."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _is(value: Any, number: float) -> bool:
    """Whether an attribute is that number, or several times that; NaN is NaN."""
    try:
        given = _numbers(value)
    except (TypeError, ValueError):
        return False
    return np.array_equal(given, np.full(given.shape, number), equal_nan=True)


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return np.asarray(value, np.float64)  # JSON has no NaN, so it is a text
        except ValueError:
            # What xarray makes of a float in Zarr 3: the bytes of a double in base 64.
            return np.frombuffer(base64.b64decode(value, validate=True), "<f8")
    return np.asarray(value, np.complex128)
