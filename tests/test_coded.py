"""Files whose numbers stand for others, as netCDF's may, are not taken as they are stored."""

from __future__ import annotations

import base64
import struct

import h5py
import numpy as np
import pytest
import zarr
from commands import command
from foreign_files import put

import multimm
from multimm.errors import FileFormatError


def stored(path, array, attributes):
    """A file that carries these attributes, each as h5py and Zarr give it back."""
    put(path, array)
    if path.suffix == ".zarr":
        zarr.open_array(path, mode="r+").attrs.update(attributes)
    else:
        with h5py.File(path, "r+") as file:
            file["M"].attrs.update(attributes)
    return path


SMALL = np.arange(12).reshape(3, 4)
#: What xarray makes of a NaN in a Zarr 3 store.
NAN = base64.b64encode(struct.pack("<d", np.nan)).decode()


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -1},
            "scale_factor=0.5, add_offset",
        ),
        ({"scale_factor": 0.5}, "scale_factor=0.5: its values are not the int16 numbers"),
        ({"add_offset": 273.15}, "add_offset=273.15: its values"),
        ({"scale_factor": "0.5"}, "scale_factor=0.5: its"),
        ({"scale_factor": "half"}, "scale_factor=half: its"),
        ({"scale_factor": float("nan")}, "scale_factor=nan: its"),
        ({"_Unsigned": "true"}, "_Unsigned=true: its values are not the int16 numbers"),
    ],
)
def test_what_means_other_numbers_is_refused(tmp_path, suffix, attributes, said):
    path = stored(tmp_path / f"m.{suffix}", SMALL.astype("i2"), attributes)
    with pytest.raises(
        FileFormatError, match=r"xarray\.open_dataset .* multiply x\.data"
    ) as caught:
        multimm.io.open_array(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_attributes_of_h5py_and_netcdf4_are_arrays_of_one(tmp_path):
    attributes = {"scale_factor": np.array([0.01]), "_FillValue": np.array([-1], "i2")}
    path = stored(tmp_path / "m.h5", SMALL.astype("i2"), attributes)
    with pytest.raises(FileFormatError, match=r"m\.h5:M: scale_factor=0\.01: its"):
        multimm.io.open_array(path)


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
@pytest.mark.parametrize(
    ("dtype", "attributes"),
    [
        ("f4", {"_FillValue": float("nan")}),  # what xarray writes for every float
        ("f4", {"_FillValue": NAN}),
        ("f4", {"_FillValue": "NaN", "missing_value": float("nan")}),
        ("i2", {"scale_factor": 1.0, "add_offset": 0}),
        ("u1", {"_Unsigned": "true"}),
        ("f8", {"units": "K", "long_name": "temperature"}),
    ],
)
def test_attributes_that_change_nothing_say_nothing(tmp_path, suffix, dtype, attributes):
    path = stored(tmp_path / f"m.{suffix}", SMALL.astype(dtype), attributes)
    array = multimm.io.open_array(path)
    np.testing.assert_array_equal(array.compute(scheduler="sync"), SMALL.astype(dtype))


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"_FillValue": -9999}, "_FillValue=-9999 stands for"),
        ({"missing_value": 1e20}, "missing_value=1e+20 stands for"),
        ({"_FillValue": float("nan"), "missing_value": 0.0}, "missing_value=0.0 stands for"),
        ({"_FillValue": base64.b64encode(struct.pack("<d", 7)).decode()}, "_FillValue="),
    ],
)
def test_a_number_for_what_is_missing_is_warned_of_where_the_file_is_opened(
    tmp_path, suffix, attributes, said
):
    path = stored(tmp_path / f"m.{suffix}", SMALL.astype("f4"), attributes)
    with pytest.warns(UserWarning, match="missing values") as caught:
        array = multimm.io.open_array(path)
    assert [record.filename for record in caught] == [__file__]
    assert said in str(caught[0].message)
    assert array.shape == (3, 4)


def test_the_command_line_warns_once_in_one_line(tmp_path):
    path = stored(tmp_path / "m.h5", np.eye(4, dtype="f4"), {"_FillValue": -9999})
    process = command("matmul", path, path, "-o", "c.npy", "--workers", 1, cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (line,) = errors.splitlines()
    assert line.startswith(
        f"multimm: warning: {path}:M: _FillValue=-9999 stands for missing values"
    )
