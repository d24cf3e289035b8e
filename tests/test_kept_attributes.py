"""What a new array keeps of the one that it replaces, and what it must not keep."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from foreign_files import NEW, OLD, read

from multimm import io
from multimm.errors import ArrayTypeError, FileFormatError

MEANS = {
    "scale_factor": 0.5,
    "_FillValue": -1.0,
    "valid_max": 3.0,
    "units": "days since 2000-01-01",
}


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def hdf5_with(**attributes):
    with h5py.File("x.h5", "w") as file:
        file["x"] = OLD
        file["x"].attrs.update(attributes)
        file["other"] = OLD


@pytest.mark.parametrize("new", [NEW, NEW[:2], NEW.astype("f4"), NEW[0]])
def test_attributes_of_a_dataset_stay(new):
    listed = {"text": "mm", "bytes": np.bytes_(b"ab"), "numbers": np.arange(3, dtype=">i2")}
    hdf5_with(**listed, empty=h5py.Empty("f4"), texts=np.array(["a", "bc"], object))
    io.save_array(new, "x.h5:x", overwrite=True)
    with h5py.File("x.h5") as file:
        found = file["x"].attrs
        assert found["text"] == "mm"
        assert found["bytes"] == b"ab"
        assert found["numbers"].dtype == ">i2"
        assert found["empty"] == h5py.Empty("f4")
        assert [*found["texts"]] == ["a", "bc"]
        np.testing.assert_array_equal(file["x"], new)


def test_attributes_stay_where_a_whole_file_is_replaced():
    with h5py.File("x.h5", "w") as file:
        file["x"] = OLD
        file["x"].attrs["unit"] = "mm"
    io.save_array(NEW, "x.h5", overwrite=True)
    with h5py.File("x.h5") as file:
        assert file["C"].attrs["unit"] == "mm"


def test_a_user_block_is_not_lost():
    with h5py.File("x.h5", "w", userblock_size=512) as file:
        file["x"] = OLD
    with open("x.h5", "rb+") as file:
        file.write(b"mine")
    with pytest.raises(FileFormatError, match="user block of 512 bytes"):
        io.save_array(NEW, "x.h5", overwrite=True)


@pytest.mark.parametrize("path", ["x.h5:x", "2.zarr:x", "3.zarr:x"])
@pytest.mark.filterwarnings("error")
def test_what_the_old_numbers_stood_for_goes(path):
    hdf5_with(**MEANS, note="kept")
    for zarr_format in 2, 3:
        group = zarr.create_group(f"{zarr_format}.zarr", zarr_format=zarr_format)
        group.create_array("x", data=OLD, attributes=MEANS | {"note": "kept"})
    io.save_array(NEW, path, overwrite=True)
    np.testing.assert_array_equal(read(path), NEW)
    if path.startswith("x"):
        with h5py.File("x.h5") as file:
            assert dict(file["x"].attrs) == {"note": "kept"}
    else:
        assert dict(zarr.open_array(path.replace(":", "/")).attrs) == {"note": "kept"}


@pytest.mark.parametrize("name", ["m", "t"])
def test_a_dataset_with_dimension_scales_is_not_replaced(name):
    with h5py.File("x.h5", "w") as file:
        file["m"], file["t"], file["labelled"] = OLD, OLD[:, 0], OLD
        file["t"].make_scale("time")
        file["m"].dims[0].attach_scale(file["t"])
        file["labelled"].dims[1].label = "place"
    with pytest.raises(FileFormatError, match=f"'{name}' has dimension scales, or is one"):
        io.save_array(NEW, f"x.h5:{name}", overwrite=True)
    io.save_array(NEW, "x.h5:labelled", overwrite=True)
    with h5py.File("x.h5") as file:
        assert file["m"].dims[0]["time"] == file["t"]
        assert file["labelled"].dims[1].label == "place"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_store_of_xarrays_stays_one(zarr_format):
    zeros = np.where(OLD > 5, OLD, 0)
    for dtype in "f8", "i4":
        before = {"m": (("x", "y"), OLD.astype(dtype)), "n": (("x", "y"), OLD)}
        coords = {"x": np.arange(4) * 2}
        xr.Dataset(before, coords).to_zarr(
            "x.zarr", mode="w", zarr_format=zarr_format, consolidated=False
        )
        io.save_array(zeros.astype(dtype), "x.zarr/m", overwrite=True)
        io.save_array(zeros[:2].astype(dtype), "x.zarr/k")
        with xr.open_zarr("x.zarr", consolidated=False) as after:
            assert after.m.dims == ("x", "y")
            assert after.m.dtype == dtype
            np.testing.assert_array_equal(after.m, zeros)
            np.testing.assert_array_equal(after.k, zeros[:2])
            np.testing.assert_array_equal(after.n, OLD)
        io.save_array(zeros[:3], "x.zarr/m", overwrite=True)  # of another length
        with xr.open_zarr("x.zarr", consolidated=False) as after:
            assert after.m.dims == ("m_0", "y")


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_replaced_store_keeps_its_format_and_attributes(zarr_format):
    zarr.create_array("x.zarr", data=OLD, zarr_format=zarr_format, attributes={"unit": "mm"})
    io.save_array(NEW, "x.zarr", overwrite=True)
    found = zarr.open_array("x.zarr")
    assert found.metadata.zarr_format == zarr_format
    assert dict(found.attrs) == {"unit": "mm"}
    np.testing.assert_array_equal(read("x.zarr"), NEW)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_attributes_of_a_group_are_not_lost(zarr_format):
    group = zarr.create_group("x.zarr", zarr_format=zarr_format, attributes={"title": "runs"})
    group.create_array("x", data=OLD)
    with pytest.raises(FileFormatError, match=r"lost: x, attributes of the store; name"):
        io.save_array(NEW, "x.zarr", overwrite=True)


@pytest.mark.parametrize("suffix", ["npy", "h5", "zarr"])
def test_a_zero_byte_in_a_name_is_refused(suffix):
    for path, more in ((f"a\0b.{suffix}", {}), (f"a.{suffix}", {"dataset": "x\0y"})):
        with pytest.raises(FileFormatError, match="zero byte"):
            io.save_array(NEW, path, **more)
        with pytest.raises(FileFormatError, match="zero byte"):
            io.open_array(path, **more)


@pytest.mark.parametrize(
    ("path", "more", "error", "said"),
    [
        (3, {}, ArrayTypeError, "a builtins.int where a path is needed"),
        (None, {}, ArrayTypeError, "a builtins.NoneType where a path is needed"),
        (
            OLD,
            {},
            ArrayTypeError,
            "a numpy.ndarray where a path .* is an operand of multimm.matmul",
        ),
        ("", {}, FileFormatError, "the path is empty"),
        ("x.h5", {"dataset": 3}, ArrayTypeError, "dataset=3: the name of an array"),
        ("x.h5", {"dataset": b"x"}, ArrayTypeError, "dataset=b'x': the name of an array"),
    ],
)
def test_what_is_no_path_is_refused(path, more, error, said):
    for call in (io.open_array, lambda *args, **how: io.save_array(NEW, *args, **how)):
        with pytest.raises(error, match=said) as caught:
            call(path, **more)
        assert "\n" not in str(caught.value)
