"""Numbers that netCDF and xarray have stand for something else: an error, or the right value."""

from __future__ import annotations

import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr
from foreign_files import read

from multimm import io
from multimm.errors import FileFormatError

A = np.arange(12.0).reshape(3, 4)


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def variable(dtype, rows=3, name="x.nc", **how):
    """A file whose first rows alone are written, by netCDF's own library."""
    with netCDF4.Dataset(name, "w") as file:
        file.createDimension("r", 6)
        file.createDimension("c", 4)
        file.createVariable("m", dtype, ("r", "c"), **how)[:rows] = 1
    return f"{name}:m"


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8"])
@pytest.mark.parametrize("how", [{}, {"chunksizes": (3, 4)}, {"chunksizes": (2, 4)}])
@pytest.mark.parametrize("rows", [0, 3])
def test_what_was_never_written_is_no_number(dtype, how, rows):
    with pytest.raises(FileFormatError, match=r"x\.nc:m.*written"):
        read(variable(dtype, rows, **how))
    assert (read(variable(dtype, 6, **how)) == 1).all()


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "u4"])
def test_chunks_that_are_missing_are_no_numbers_of_short_dtypes(dtype):
    with pytest.raises(FileFormatError, match="never written"):
        io.open_array(variable(dtype, chunksizes=(3, 4)))
    whole = variable(dtype, 6, chunksizes=(3, 4))
    with netCDF4.Dataset("x.nc", "a") as file:  # a saturated pixel, which is meant
        file.set_auto_mask(False)
        file["m"][0, 0] = netCDF4.default_fillvals[dtype]
    assert read(whole)[0, 0] == netCDF4.default_fillvals[dtype]


def test_a_fill_value_of_the_users_own_is_read_with_a_warning():
    path = variable("f8", chunksizes=(3, 4), fill_value=-1.0)
    with pytest.warns(UserWarning, match="_FillValue=-1.0"):
        assert (read(path)[3:] == -1).all()


def test_rows_that_only_another_variable_has_are_not_left_out():
    with netCDF4.Dataset("x.nc", "w") as file:
        file.createDimension("t", None)
        file.createDimension("c", 4)
        file.createVariable("m", "f8", ("t", "c"))[:3] = A
        file.createVariable("n", "f8", ("t",))[:10] = 1
        assert file["m"].shape == (10, 4)
    with pytest.raises(FileFormatError, match="3 of the 10"):
        io.open_array("x.nc:m")
    assert read("x.nc:n").shape == (10,)
    with netCDF4.Dataset("x.nc", "a") as file:
        file["m"][:] = 2
    assert (read("x.nc:m") == np.full((10, 4), 2)).all()


def test_a_dimension_without_a_variable_is_no_array():
    path = variable("f8", 6)
    with pytest.raises(FileFormatError, match="dimension"):
        io.open_array("x.nc:r")
    assert (read(path) == 1).all()


def test_the_fill_value_of_zarr_2_is_what_xarray_has_for_missing():
    dataset = xr.Dataset({"m": (("x", "y"), np.where(A > 5, np.nan, A))})
    dataset.m.encoding["_FillValue"] = -7.0
    for zarr_format in 2, 3:
        dataset.to_zarr(f"{zarr_format}.zarr", zarr_format=zarr_format, consolidated=False)
        with pytest.warns(UserWarning, match=r"_FillValue=-7\.0 stands for missing"):
            io.open_array(f"{zarr_format}.zarr:m")


@pytest.mark.filterwarnings("error")
def test_a_fill_value_is_no_mask_where_xarray_has_none():
    dataset = xr.Dataset({"m": (("x", "y"), A), "n": (("x", "y"), A.astype("i4"))})
    dataset.to_zarr("x.zarr", zarr_format=2, consolidated=False)
    zarr.create_array(store="own.zarr", data=A, fill_value=3, zarr_format=2)
    for path in "x.zarr:m", "x.zarr:n", "own.zarr":
        np.testing.assert_array_equal(read(path), A)


@pytest.mark.parametrize("units", ["day as %Y%m%d.%f", "Hours since 1970-01-01"])
def test_points_in_time_are_refused(units):
    path = variable("f8", 6)
    with netCDF4.Dataset("x.nc", "a") as file:
        file["m"].units = units
    with pytest.raises(FileFormatError, match="stand for times"):
        io.open_array(path)
