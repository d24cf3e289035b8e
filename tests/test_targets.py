"""What may be written, and where: refused before anything is computed, created or lost."""

from __future__ import annotations

import dask
import dask.array as da
import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from foreign_files import names, put

from multimm import io
from multimm.cli import main
from multimm.cli.options import Workers
from multimm.errors import ArrayTypeError, FileFormatError

MATRIX = np.arange(9, dtype="float32").reshape(3, 3)


@pytest.fixture
def refused(monkeypatch):
    """Run a command line that must end with one line and code 2, before it starts workers."""

    def run(*args):
        monkeypatch.setattr(Workers, "open", lambda _: pytest.fail("workers were started"))
        result = CliRunner().invoke(main, [str(arg) for arg in args])
        assert result.exit_code == 2, result.output
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    return run


def container(path, *datasets):
    """A file that holds matrices under these names."""
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="w")
        for name in datasets:
            group.create_array(name, data=MATRIX)
        return path
    with h5py.File(path, "w") as file:
        for name in datasets:
            file[name] = MATRIX
    return path


def held(path, name):
    if path.suffix == ".zarr":
        return zarr.open_group(path, mode="r")[name][:]
    with h5py.File(path) as file:
        return file[name][:]


# Other datasets in the file -------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_files_of_one_array_are_replaced(tmp_path, suffix):
    path = container(tmp_path / f"m.{suffix}", "x")
    io.save_array(MATRIX, path, overwrite=True)  # no dataset named: the file is meant
    np.testing.assert_array_equal(io.open_array(path).compute(), MATRIX)
    container(path, "x", "y")
    with pytest.raises(FileFormatError, match=r"lost: x.*, y.*; name the .*:/NAME"):
        io.save_array(MATRIX, path, overwrite=True)
    np.testing.assert_array_equal(held(path, "y"), MATRIX)
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_what_is_to_be_replaced_has_to_be_there(tmp_path, suffix):
    path = container(tmp_path / f"m.{suffix}", "x", "deep/y")
    said = r"no 'C' to replace, but .*deep/y.* leave out overwrite=True .* to add it"
    with pytest.raises(FileFormatError, match=said):
        io.save_array(MATRIX, path, dataset="C", overwrite=True)
    np.testing.assert_array_equal(held(path, "x"), MATRIX)


def test_an_array_without_a_name_is_not_lost(tmp_path):
    path = put(tmp_path / "m.zarr", MATRIX)
    for overwrite in (False, True):
        with pytest.raises(FileFormatError, match="an array without a name"):
            io.save_array(MATRIX, path, dataset="C", overwrite=overwrite)
    np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], MATRIX)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_arrays_that_consolidated_metadata_lack_are_not_lost(tmp_path):
    path = container(tmp_path / "m.zarr", "C")
    zarr.consolidate_metadata(path)
    zarr.open_group(path, mode="a", use_consolidated=False).create_array("late", data=MATRIX)
    with pytest.raises(FileFormatError, match=r"lost: C, late"):
        io.save_array(MATRIX, path, overwrite=True)


@pytest.mark.parametrize("how", [{"dataset": "new"}, {"overwrite": True}])
def test_a_file_that_this_process_is_writing_is_not_replaced(tmp_path, how):
    """What it writes later would go into the file that has lost its name."""
    path = container(tmp_path / "m.h5", "C")
    with h5py.File(path, "r+") as file:
        with pytest.raises(FileFormatError, match="open for writing in this process; close it"):
            io.save_array(MATRIX, path, **how)
        file["C"][0, 0] = 99
    with h5py.File(path, "r") as file:
        assert file["C"][0, 0] == 99
        assert list(file) == ["C"]
        io.save_array(MATRIX, path, **how)  # who reads keeps what was opened
        assert file["C"][0, 0] == 99
    with io.Output(path, dataset="late") as output:
        dask.compute(output.store(da.from_array(MATRIX)))
        with h5py.File(path, "r+"), pytest.raises(FileFormatError, match="open for writing"):
            output.commit()
    assert [x.name for x in tmp_path.iterdir()] == ["m.h5"]


def test_what_cannot_be_read_is_not_replaced_for_one_dataset(tmp_path):
    path = tmp_path / "m.h5"
    path.write_bytes(b"no HDF5")
    with pytest.raises(FileFormatError, match="cannot tell what would be lost"):
        io.save_array(MATRIX, path, dataset="C", overwrite=True)
    assert path.read_bytes() == b"no HDF5"


@pytest.mark.parametrize("suffix", ["npy", "h5", "zarr"])
def test_the_command_replaces_no_factor_by_the_product(tmp_path, refused, suffix):
    for name in "ab":
        io.save_array(MATRIX, tmp_path / f"{name}.{suffix}")
    a, b, link = (tmp_path / f"{name}.{suffix}" for name in ("a", "b", "link"))
    link.symlink_to(b)
    for output, operand in ((a, "A"), (b, "B"), (link, "B")):
        error = refused("matmul", a, b, "-o", output, "--overwrite")
        assert f"-o {output}: this is {operand} itself" in error
        assert "choose another name" in error
    if suffix == "h5":
        assert "A itself" in refused("matmul", a, b, "-o", f"{a}:C", "--overwrite")
    if suffix != "npy":
        path = container(tmp_path / f"m.{suffix}", "x", "y")
        error = refused("matmul", f"{path}:x", f"{path}:y", "-o", f"{path}:x", "--overwrite")
        assert "this is A itself" in error


# What no matrix file holds --------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npy", "zarr", "h5"])
@pytest.mark.parametrize(
    "elements",
    [
        np.array([["abc", None]]),
        np.array([["abc"]]),
        np.array([["2026-01-01"]], "datetime64[D]"),
        np.zeros((2, 2), [("re", "f4"), ("im", "f4")]),
        np.zeros((2, 2), ml_dtypes.bfloat16),
    ],
    ids=lambda array: array.dtype.name,
)
@pytest.mark.parametrize("lazy", [False, True])
def test_elements_that_are_no_numbers_are_refused(tmp_path, suffix, elements, lazy):
    array = da.from_array(elements, chunks=1) if lazy else elements
    with io.Output(tmp_path / f"m.{suffix}") as output:
        with pytest.raises(FileFormatError, match="a matrix file holds") as info:
            output.store(array)
        assert str(elements.dtype) in str(info.value)
        assert names(tmp_path) == []


def test_sparse_blocks_are_not_dropped(tmp_path):
    csr = pytest.importorskip("scipy.sparse").csr_array
    for array in (csr(MATRIX), da.ones((3, 3)).map_blocks(csr, meta=csr(np.zeros((0, 0))))):
        with io.Output(tmp_path / "m.npy") as output:
            with pytest.raises(ArrayTypeError, match="csr_array"):
                output.store(array)
            assert names(tmp_path) == []


# What only shows at the end -------------------------------------------------------------


@pytest.mark.parametrize("alpha", ["nan", "inf", "-inf", "1e999"])
def test_an_alpha_that_cannot_be_checked(tmp_path, refused, alpha):
    matrix = put(tmp_path / "a.npy", MATRIX)
    error = refused("matmul", matrix, matrix, "-o", tmp_path / "c.npy", "--alpha", alpha)
    assert f"--alpha {float(alpha)}: the check needs a finite number" in error
    assert names(tmp_path) == ["a.npy"]
