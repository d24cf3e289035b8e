"""Matrices through files: exact round trips, one block at a time, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from pathlib import Path

import dask
import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from clusters import in_threads
from commands import python
from distributed import Client
from foreign_files import get, names, put
from repeated import others_slow
from stand_in import GPUArray, gpu

from multimm import files, io
from multimm.errors import ArrayTypeError, DTypeError, FileFormatError, OptionError, ShapeError
from multimm.files import graph, stored
from multimm.gpu.transfer import pinned_copy as link

FORMATS = ["npy", "zarr", "h5", "hdf5"]


def numbers(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)


# Reading --------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", others_slow(FORMATS, "npy", "zarr", "h5"))
@pytest.mark.parametrize("shape", [(13, 7), (1, 5), (17,), (3, 4, 5), (0, 4)])
@pytest.mark.parametrize(
    "dtype",
    others_slow(["float32", "int64", "complex64", "bool", ">f8"], "complex64", "bool", ">f8"),
)
def test_open_gives_the_stored_values(tmp_path, suffix, shape, dtype):
    if suffix == "zarr" and 0 in shape:
        path = tmp_path / "m.zarr"
        zarr.create_array(store=path, shape=shape, chunks=(1, 2), dtype=dtype)
        expected = np.zeros(shape, dtype)
    else:
        expected = numbers(*shape, dtype=dtype)
        path = put(tmp_path / f"m.{suffix}", expected)
    array = io.open_array(path, chunks=tuple(max(1, size // 2) for size in shape))
    assert array.dtype == expected.dtype.newbyteorder("=")
    result = array.compute(scheduler="sync")
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "chunks", [None, "auto", 4, (4, -1), ((5, 8), (7,)), {-1: 4}, np.array([13, 4])]
)
def test_chunks_are_taken_as_dask_takes_them(tmp_path, chunks):
    matrix = numbers(13, 7)
    array = io.open_array(put(tmp_path / "m.npy", matrix), chunks=chunks)
    np.testing.assert_array_equal(array.compute(scheduler="sync"), matrix)
    if isinstance(chunks, int):
        assert array.chunks == ((4, 4, 4, 1), (4, 3))
    if isinstance(chunks, dict | np.ndarray):
        assert array.chunks == ((13,), (4, 3))


def test_chunks_that_do_not_fit(tmp_path):
    path = put(tmp_path / "m.npy", numbers(13, 7))
    unknown = ((float("nan"),), (7,))
    for chunks in (((5, 5), (7,)), 0, (4, 0), -5, 2.5, True, "", {2: 5}, {"x": 5}, unknown):
        with pytest.raises(ShapeError, match="chunks="):
            io.open_array(path, chunks=chunks)


def test_fortran_order_stays_fortran_order(tmp_path):
    matrix = np.asfortranarray(numbers(12, 10))
    array = io.open_array(put(tmp_path / "m.npy", matrix), chunks=(5, 4))
    np.testing.assert_array_equal(array.compute(scheduler="sync"), matrix)
    block = dict(array.__dask_graph__())[array.name, 1, 1]()
    assert block.flags.f_contiguous
    assert not block.flags.c_contiguous
    assert type(block) is np.ndarray


@pytest.mark.parametrize("suffix", ["npy", "zarr", "h5"])
def test_every_block_is_one_small_root_task(tmp_path, suffix):
    array = io.open_array(put(tmp_path / f"m.{suffix}", numbers(64, 64)), chunks=(16, 32))
    tasks = dict(array.__dask_graph__())
    assert set(tasks) == {(array.name, i, j) for i in range(4) for j in range(2)}
    assert all(not task.dependencies for task in tasks.values())
    assert all(len(pickle.dumps(task)) < 2000 for task in tasks.values())


@pytest.mark.parametrize(
    ("limit", "expected"), [("1kiB", (16, 16)), ("8kiB", (64, 32)), ("1MiB", (100, 70))]
)
@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_tiny_storage_chunks_are_grouped(tmp_path, suffix, limit, expected):
    path = put(tmp_path / f"m.{suffix}", numbers(100, 70), chunks=(8, 16))
    with dask.config.set({"array.chunk-size": limit}):
        assert io.open_array(path).chunksize == expected


WRITE_BEYOND = """
import resource, sys
import numpy as np
from multimm import io
array = np.zeros((1000, 1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    io.save_array(array, sys.argv[1])
except io.FileFormatError as error:
    print(error)
"""


def test_an_error_of_hdf5_is_what_failed_and_why(tmp_path):
    """HDF5's own has a time, the address of a buffer and more, and may be a RuntimeError."""
    path = tmp_path / "m.h5"
    run = python("-c", WRITE_BEYOND, path)
    said = f"{path}: cannot be created for float64 (1000, 1000) ("
    assert run.stdout.startswith(said), run.stderr
    assert run.stdout.endswith("File too large): make room, or write elsewhere\n")
    assert "errno" not in run.stdout
    path = put(tmp_path / "locked.h5", numbers(2, 2))
    with h5py.File(path, "r+"):
        run = python("-c", f"from multimm import io; io.open_array({str(path)!r})")
    assert "locked.h5: not a readable .h5 file (unable to lock file: Resource temp" in run.stderr


@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_the_space_of_a_file_is_taken_before_anything_is_computed(tmp_path, suffix, monkeypatch):
    taken = []

    def full(descriptor, start, size):
        taken.append(size - start)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(
            FileFormatError,
            match=r"cannot be created for .* \(No space left on device\): make room",
        ),
        io.Output(tmp_path / f"m.{suffix}") as output,
    ):
        output.store(numbers(100, 100))
    assert 40000 < taken[0] < 50000
    assert names(tmp_path) == []


READ_CORNER = """
import os, resource, sys
import numpy as np
from multimm import io
array = io.open_array(sys.argv[1], chunks=(1000, 1000))
mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
limit = mapped + 500_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    np.load(sys.argv[1], mmap_mode="r")
except OSError:
    pass
else:
    sys.exit("the limit does not bind")
corner = array[-1000:, -1000:].compute(scheduler="sync")
assert corner.shape == (1000, 1000) and corner[-1, -1] == 7 and corner.sum() == 7
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("order", others_slow(["C", "F"], "F"))
def test_a_block_of_a_file_larger_than_memory(tmp_path, order):
    path = tmp_path / "huge.npy"
    matrix = np.lib.format.open_memmap(  # 8 GB, all of it a hole in the file
        path, mode="w+", dtype="float32", shape=(50_000, 40_000), fortran_order=order == "F"
    )
    matrix[-1, -1] = 7
    del matrix
    assert python("-c", READ_CORNER, path).returncode == 0


@pytest.mark.parametrize("suffix", ["npy", "zarr", "h5"])
def test_only_the_blocks_asked_for_are_read(tmp_path, suffix, monkeypatch):
    path = put(tmp_path / f"m.{suffix}", numbers(40, 40))
    array = io.open_array(path, chunks=10)
    form = graph.FORMATS[f".{suffix}"]
    seen = []

    def read(matrix, index, threads):
        seen.append(index)
        return form.read(matrix, index, threads)

    monkeypatch.setitem(graph.FORMATS, f".{suffix}", form._replace(read=read))
    array[12:15, 25:38].compute(scheduler="sync")
    assert sorted(seen, key=str) == [(slice(10, 20), slice(20, 30)), (slice(10, 20), slice(30, 40))]


# Datasets -------------------------------------------------------------------------------


def several(path):
    if path.suffix == ".zarr":
        group = zarr.create_group(path)
        group.create_array("A", data=numbers(4, 5), chunks=(4, 5))
        group.create_group("deep").create_array("B", data=numbers(5, 6), chunks=(5, 6))
        group.create_array("v", data=numbers(5), chunks=(5,))
    else:
        with h5py.File(path, "w") as file:
            file["A"], file["deep/B"], file["v"] = numbers(4, 5), numbers(5, 6), numbers(5)
    return path


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_a_dataset_is_named_by_option_or_path(tmp_path, suffix):
    path = several(tmp_path / f"m.{suffix}")
    assert io.open_array(path, dataset="A").shape == (4, 5)
    assert io.open_array(path, dataset="/deep/B").shape == (5, 6)
    assert io.open_array(f"{path}:/deep/B").shape == (5, 6)
    assert io.open_array(f"{path}:v").shape == (5,)
    assert io.open_array(f"{path}:/A", dataset="A").shape == (4, 5)


@pytest.mark.parametrize("name", ["m.h5", "m.npy", "m.nc", "g/m.hdf5", "m.zarr"])
def test_an_array_of_a_store_may_be_called_as_a_file(tmp_path, name):
    """A folder is neither HDF5 nor .npy: who copies files into a store may keep their names."""
    expected = numbers(5, 4)
    zarr.create_group(tmp_path / "x.zarr").create_array(name, data=expected)
    for path in (f"x.zarr/{name}", f"x.zarr:/{name}"):
        np.testing.assert_array_equal(io.open_array(tmp_path / path), expected)


@pytest.mark.parametrize("suffix", ["nc", "nc4", "NC"])
def test_netcdf_that_is_hdf5_is_read_and_never_written(tmp_path, suffix):
    path = several(tmp_path / f"m.{suffix}")
    assert io.open_array(f"{path}:/deep/B").shape == (5, 6)
    array = io.open_array(path, dataset="A")
    np.testing.assert_array_equal(array.compute(scheduler="sync"), numbers(4, 5))
    for target in path, tmp_path / f"new.{suffix}":
        with pytest.raises(
            FileFormatError, match=r"not written; choose \.npy, \.zarr, \.h5, \.hdf5$"
        ):
            io.Output(target, overwrite=True)
    assert names(tmp_path) == [path.name]


def test_netcdf_that_is_not_hdf5_says_what_to_do(tmp_path):
    path = tmp_path / "m.nc"
    path.write_bytes(b"CDF\x01" + bytes(100))
    with pytest.raises(FileFormatError, match=r"m\.nc: netCDF 3, .*nccopy -k nc4.* xarray"):
        io.open_array(path)
    path.write_bytes(b"something else")
    with pytest.raises(FileFormatError, match=r"m\.nc: not a readable \.nc file"):
        io.open_array(path)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_the_only_matrix_needs_no_name(tmp_path, suffix):
    path = several(tmp_path / f"m.{suffix}")
    if suffix == "zarr":
        del zarr.open_group(path)["deep/B"]
    else:
        with h5py.File(path, "r+") as file:
            del file["deep/B"]
    assert io.open_array(path).shape == (4, 5)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_a_wrong_dataset_lists_the_right_ones(tmp_path, suffix):
    path = several(tmp_path / f"m.{suffix}")
    for options in ({"dataset": "nope"}, {"dataset": "deep"}, {}):
        with pytest.raises(FileFormatError, match=r"A \(4, 5\), deep/B \(5, 6\), v \(5,\)"):
            io.open_array(path, **options)
    with pytest.raises(FileFormatError, match="name it once"):
        io.open_array(f"{path}:/A", dataset="deep/B")


# Bad files ------------------------------------------------------------------------------


def truncated(path):
    put(path, numbers(50, 50))
    os.truncate(path, 5000)


def text(path):
    path.write_text("1 2 3\n")


def nothing(path):
    path.write_bytes(b"")


def folder(path):
    path.mkdir()


def broken_zarr(path):
    path.mkdir()
    (path / "zarr.json").write_text("{")


def archive(path):
    with open(path, "wb") as file:
        np.savez(file, a=numbers(2, 2))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("m.npy", None, "no such file"),
        ("m.csv", text, "supported are .npy, .zarr, .h5, .hdf5"),
        ("m", text, "supported are"),
        ("m.npy", truncated, "truncated: 10,000 bytes .* copy it again"),
        ("m.npy", text, "not a readable .npy"),
        ("m.npy", nothing, "not a readable .npy"),
        ("m.npy", folder, "Is a directory"),
        ("m.npy", archive, "not a readable .npy"),
        ("m.npy", lambda path: put(path, np.float32(3)), "0-d"),
        ("m.npy", lambda path: put(path, np.array([[1, "a"]], dtype=object)), "object"),
        ("m.npy", lambda path: put(path, np.array([["a"]])), "<U1"),
        ("m.npy", lambda path: put(path, np.zeros(2, "f4,i4")), "elements are"),
        ("m.npy", lambda path: put(path, np.zeros(2, "M8[s]")), "datetime64"),
        ("m.zarr", None, "no such file"),
        ("m.zarr", text, "only .zarr directories"),
        ("m.zarr", folder, "without Zarr metadata: give the one"),
        ("m.zarr", broken_zarr, "not a readable .zarr"),
        ("m.h5", text, "not a readable .h5"),
        ("m.h5", folder, "not a readable .h5"),
        ("m.h5", lambda path: put(path, np.array([[b"a"]], dtype="S1")), "elements are"),
        ("m.h5:/M", lambda path: put(path, numbers(3, 3)[0, 0]), "0-d"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, make, message):
    if make:
        make(tmp_path / name.partition(":")[0])
    with pytest.raises(FileFormatError, match=message) as caught:
        io.open_array(f"{tmp_path}/{name}")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_npy_file_has_no_datasets(tmp_path):
    with pytest.raises(FileFormatError, match="leave out the dataset"):
        io.open_array(put(tmp_path / "m.npy", numbers(2, 2)), dataset="A")


@pytest.mark.parametrize(("name", "package"), [("m.zarr", "zarr"), ("m.h5", "h5py")])
def test_a_missing_package_says_what_to_install(tmp_path, name, package, monkeypatch):
    path = put(tmp_path / name, numbers(2, 2))

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(stored, "import_module", missing)
    with pytest.raises(FileFormatError, match=rf"{package}.*pip install .*\[io\]"):
        io.open_array(path)


# Writing --------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("chunks", [(5, 4), (13, 10), ((3, 7, 3), (1, 9)), ((5, 8), (10,))])
@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_save_writes_every_block(tmp_path, suffix, chunks, scheduler):
    matrix = numbers(13, 10)
    with dask.config.set(scheduler=scheduler):
        path = io.save_array(da.from_array(matrix, chunks=chunks), tmp_path / f"c.{suffix}")
    assert path == tmp_path / f"c.{suffix}"
    np.testing.assert_array_equal(get(path), matrix)
    assert names(tmp_path) == [f"c.{suffix}"]


def test_workers_of_a_client_that_is_given_as_the_scheduler_write_at_the_same_time(tmp_path):
    matrix = numbers(8, 6)
    array = da.from_array(matrix, chunks=2)
    with (
        in_threads(2) as cluster,
        Client(cluster, set_as_default=False) as client,
        dask.config.set(scheduler=client),
    ):
        np.testing.assert_array_equal(get(io.save_array(array, tmp_path / "c.h5")), matrix)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "matrix",
    [
        numbers(6, 4, dtype="complex128"),
        numbers(6, 4, dtype="float16"),
        numbers(6, 4, dtype="bool"),
        numbers(9),
        numbers(2, 3, 4),
        numbers(0, 4),
        np.asfortranarray(numbers(6, 4)),
    ],
    ids=lambda matrix: f"{matrix.dtype}-{matrix.shape}",
)
def test_save_keeps_shape_and_dtype(tmp_path, suffix, matrix):
    with dask.config.set(scheduler="sync"):
        result = get(io.save_array(matrix, tmp_path / f"c.{suffix}"))
    assert (result.shape, result.dtype) == (matrix.shape, matrix.dtype)
    np.testing.assert_array_equal(result, matrix)


def test_zarr_chunks_divide_the_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "ZARR_CHUNK_BYTES", 100)
    io.save_array(da.from_array(numbers(50, 30), chunks=(12, 30)), tmp_path / "c.zarr")
    chunks = zarr.open_array(tmp_path / "c.zarr", mode="r").chunks
    assert chunks[0] * chunks[1] * 4 <= 200
    assert (12 % chunks[0], 30 % chunks[1]) == (0, 0)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "c.npy").symlink_to(tmp_path / "disk" / "real.npy")
    io.save_array(numbers(4, 4), tmp_path / "c.npy")
    assert (tmp_path / "c.npy").is_symlink()
    np.testing.assert_array_equal(get(tmp_path / "disk" / "real.npy"), numbers(4, 4))


def fail(block, exception):
    raise exception("on purpose")


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_nothing_and_spoils_nothing(tmp_path, suffix, exception, existing):
    path = tmp_path / f"c.{suffix}"
    if existing:
        io.save_array(numbers(4, 4), path)
    source = da.from_array(numbers(8, 4), chunks=(4, 4))
    broken = source.map_blocks(fail, exception, dtype="f4", meta=np.empty((0, 0), "f4"))
    array = da.concatenate([source, broken])
    with dask.config.set(scheduler="sync"), pytest.raises(exception, match="on purpose"):
        io.save_array(array, path, overwrite=existing)
    assert names(tmp_path) == ([path.name] if existing else [])
    if existing:
        np.testing.assert_array_equal(get(path), numbers(4, 4))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda block: block.mean(axis=0, keepdims=True), ShapeError, r"\(1, 2\), .* say \(4, 2\)"),
        (lambda block: block[0], ShapeError, "has shape"),
        (lambda block: block[:2], ShapeError, "has shape"),
        (lambda block: block / np.float64(3), DTypeError, "is float64, its array says float32"),
        (lambda block: block + 1j, DTypeError, "is complex64, its array says float32"),
        (lambda block: None, ArrayTypeError, "None, its array says float32"),
        (lambda block: np.ma.masked_less(block, 0), ArrayTypeError, "MaskedArray"),
    ],
)
def test_a_block_that_is_not_as_declared_is_not_written(tmp_path, suffix, change, error, said):
    array = da.from_array(numbers(8, 4), chunks=(4, 2))
    array = array.map_blocks(change, dtype="f4", meta=np.empty((0, 0), "f4"))
    with dask.config.set(scheduler="sync"), pytest.raises(error, match=said):
        io.save_array(array, tmp_path / f"c.{suffix}")
    assert names(tmp_path) == []


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_block_that_its_array_s_dtype_holds_is_written_in_that(tmp_path, suffix):
    matrix = numbers(8, 4).astype("f2")
    array = da.from_array(matrix, chunks=(4, 2)).map_blocks(np.copy)
    array = da.Array(array.dask, array.name, array.chunks, dtype="f4")
    path = io.save_array(array, tmp_path / f"c.{suffix}")
    assert io.open_array(path).dtype == "f4"
    np.testing.assert_array_equal(get(path), matrix)


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_output_may_be_stored_again(tmp_path, suffix):
    path = tmp_path / f"c.{suffix}"
    with io.Output(path) as output:
        dask.compute(output.store(da.from_array(numbers(8, 6), chunks=4)))
        dask.compute(output.store(da.from_array(numbers(5, 7), chunks=3)))
        output.commit()
    np.testing.assert_array_equal(get(path), numbers(5, 7))


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_was_never_stored_is_not_committed(tmp_path, suffix):
    path = io.save_array(numbers(8, 6), tmp_path / f"c.{suffix}")
    with io.Output(path, overwrite=True) as output, pytest.raises(OptionError, match="store"):
        output.commit()
    np.testing.assert_array_equal(get(path), numbers(8, 6))
    assert names(tmp_path) == [path.name]


def test_what_is_written_can_be_read_before_it_is_committed(tmp_path):
    matrix = numbers(8, 6)
    with io.Output(tmp_path / "c.zarr") as output:
        with pytest.raises(OptionError, match="store"):
            output.open()
        written = output.store(da.from_array(matrix, chunks=4))
        assert written.shape == written.numblocks == (2, 2)
        assert written.compute(scheduler="sync").all()
        np.testing.assert_array_equal(output.open().compute(scheduler="sync"), matrix)
        assert not (tmp_path / "c.zarr").exists()
    assert names(tmp_path) == []


def guard(block):
    pytest.fail("computed before the output was checked")


def lazy(shape=(4, 4), dtype="float32", chunks=4):
    return da.zeros(shape, dtype=dtype, chunks=chunks).map_blocks(
        guard, meta=np.empty((0, 0), dtype)
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [("missing/c.npy", "no folder"), ("file/c.npy", "no folder"), ("c.txt", "supported are")],
)
def test_an_impossible_target_is_refused_at_once(tmp_path, target, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match=message):
        io.save_array(lazy(), tmp_path / target)
    assert names(tmp_path) == ["file"]


def test_an_unwritable_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileFormatError, match="no permission"):
        io.save_array(lazy(), tmp_path / "c.npy")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_is_noticed_before_computing(tmp_path, suffix):
    huge = lazy((2**24, 2**24), chunks=(2**23, 2**24))
    with pytest.raises(FileFormatError, match=r"needs 1.00 PiB .* are free"):
        io.save_array(huge, tmp_path / f"c.{suffix}")
    assert names(tmp_path) == []


def test_unknown_sizes_are_refused(tmp_path):
    array = da.from_array(numbers(8), chunks=4)
    with pytest.raises(ShapeError, match="compute_chunk_sizes"):
        io.save_array(array[array > 0], tmp_path / "c.npy")
    with pytest.raises(ShapeError, match="at least one dimension"):
        io.save_array(np.float32(3), tmp_path / "c.npy")
    assert names(tmp_path) == []


def test_device_blocks_are_moved_to_the_host(tmp_path, monkeypatch):
    matrix = numbers(4, 3)
    monkeypatch.setattr(link, "to_host", lambda block: block.view(np.ndarray))
    with io.Output(tmp_path / "c.npy") as output:
        output.store(np.zeros_like(matrix))
        index = (slice(0, 4), slice(0, 3))
        writer = graph.Writer("", "", str(output._marks))
        assert graph.write_block(output._matrix, index, gpu(matrix), writer, 0).all()
        np.testing.assert_array_equal(np.load(Path(output._matrix.path)), matrix)


def test_blocks_that_are_read_to_a_gpu(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", numbers(4, 3))
    monkeypatch.setattr(graph, "to_device", lambda block: block.view(GPUArray))
    monkeypatch.setattr(graph, "threads_beside_a_gpu", lambda most: 2)
    matrix = files.inspect(files.locate(tmp_path / "a.npy", None))
    index = (slice(1, 4), slice(0, 2))
    block = graph.read_block(matrix, index, gpu=True)
    assert type(block) is GPUArray
    np.testing.assert_array_equal(block, numbers(4, 3)[index])


def test_blocks_for_a_gpu_need_cupy(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", numbers(4, 3))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(OptionError, match=r"gpu=True are CuPy arrays.*pip install .*cuda13"):
        io.open_array(tmp_path / "a.npy", gpu=True)


@pytest.mark.parametrize("path", ["A.H5:/x", "A.h5:/x", "a.HDF5:x", "a.Zarr:/g/x"])
def test_a_dataset_in_the_path_whatever_the_case_of_the_suffix(path):
    found = files.locate(path)
    assert found.path.endswith(path.partition(":")[0])
    assert found.dataset == path.partition(":")[2].strip("/")


@pytest.mark.parametrize("suffix", FORMATS)
def test_paths_that_the_system_refuses_are_named(tmp_path, suffix):
    os.symlink(tmp_path / f"loop.{suffix}", tmp_path / f"loop.{suffix}")
    for path in tmp_path / f"loop.{suffix}", tmp_path / f"{'x' * 300}.{suffix}":
        with pytest.raises(FileFormatError, match=r"too long|symbolic links"):
            io.open_array(path)


@pytest.mark.parametrize(
    ("shape", "chunks"), [([5, 3], [0, 3]), ([5, 3], [5, -1]), ([-5, 3], [5, 3])]
)
def test_sizes_that_no_array_has_are_damage(tmp_path, shape, chunks):
    (tmp_path / "x.zarr").mkdir()
    described = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "<f8", "order": "C"}
    described |= {"compressor": None, "filters": None, "fill_value": 0}
    (tmp_path / "x.zarr" / ".zarray").write_text(json.dumps(described))
    header = {"descr": "<f8", "fortran_order": False, "shape": tuple(shape)}
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(120))
    with pytest.raises(FileFormatError, match=r"damaged|not a readable"):
        io.open_array(tmp_path / "x.zarr")
    if min(shape) < 0:
        with pytest.raises(FileFormatError, match="damaged"):
            io.open_array(tmp_path / "x.npy")


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_address_of_a_local_file_is_written_and_read(tmp_path, suffix):
    address = f"file://{tmp_path}/x.{suffix}"
    assert io.save_array(numbers(3, 4), address) == tmp_path / f"x.{suffix}"
    np.testing.assert_array_equal(io.open_array(address), numbers(3, 4))
    with pytest.raises(FileFormatError, match="exists already"):
        io.save_array(numbers(3, 4), address)
