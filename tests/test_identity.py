"""What is read is what was opened: files, what they refer to, and what their numbers mean."""

from __future__ import annotations

import json
import os
import time

import fsspec
import h5py
import numpy as np
import pytest
import zarr
from foreign_files import read

import multimm
from multimm import io
from multimm.errors import FileFormatError
from multimm.files import identity

A = np.arange(12.0).reshape(3, 4)


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def npy(data=A):
    np.save("x.npy", data)


def hdf5(data=A):
    with h5py.File("x.h5", "w") as file:
        file["x"] = data


def link():
    hdf5()
    with h5py.File("link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("x.h5", "/x")


def virtual():
    link()
    layout = h5py.VirtualLayout(shape=A.shape, dtype="f8")
    layout[...] = h5py.VirtualSource("link.h5", "x", shape=A.shape)
    with h5py.File("virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)


def raw(name="raw.h5", path=None):
    A.tofile("x.raw")
    path = path or os.path.abspath("x.raw")
    with h5py.File(name, "w") as file:
        file.create_dataset("x", A.shape, "f8", external=[(path, 0, A.nbytes)])


def store(data=A, **more):
    zarr.create_array("x.zarr", data=data, chunks=(1, 4), compressors=None, overwrite=True, **more)


def rewritten():
    with h5py.File("x.h5", "r+") as file:
        file["x"][...] = A + 1


def in_place(path):
    """Other contents of the same size, with the times put back."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content[:-8] + np.float64(77).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def linked(path, target):
    if os.path.lexists(path):
        os.remove(path)
    os.symlink(target, path)


def npy_behind_a_link():
    np.save("one.npy", A)
    np.save("other.npy", A + 1)
    linked("x.npy", "one.npy")


def store_behind_a_link():
    for name, data in (("one.zarr", A), ("other.zarr", A + 1)):
        zarr.create_array(name, data=data, chunks=(1, 4), compressors=None)
    linked("x.zarr", "one.zarr")


def chunk_of_another():
    os.remove("one.zarr/c/0/0")
    os.link("other.zarr/c/0/0", "one.zarr/c/0/0")


def nested_v2():
    encoding = {"name": "v2", "separator": "/"}
    store(zarr_format=2, order="F", chunk_key_encoding=encoding)


CHANGES = {
    "npy link": (npy_behind_a_link, "x.npy", lambda: linked("x.npy", "other.npy")),
    "zarr link": (store_behind_a_link, "x.zarr", lambda: linked("x.zarr", "other.zarr")),
    "zarr chunk of another": (store_behind_a_link, "one.zarr", chunk_of_another),
    "nested chunk gone": (nested_v2, "x.zarr", lambda: os.remove("x.zarr/1/0")),
    "npy in place": (npy, "x.npy", lambda: in_place("x.npy")),
    "npy of another order": (npy, "x.npy", lambda: npy(np.asfortranarray(A * 2))),
    "npy of another shape": (npy, "x.npy", lambda: npy(A.reshape(4, 3))),
    "npy gone": (npy, "x.npy", lambda: os.remove("x.npy")),
    "npy cut off": (npy, "x.npy", lambda: os.truncate("x.npy", 140)),
    "hdf5": (hdf5, "x.h5", rewritten),
    "target of a link": (link, "link.h5", rewritten),
    "source of a virtual dataset": (virtual, "virtual.h5", rewritten),
    "raw data": (raw, "raw.h5", lambda: (A + 1).tofile("x.raw")),
    "zarr chunk": (store, "x.zarr", lambda: in_place("x.zarr/c/0/0")),
    "zarr chunk gone": (store, "x.zarr", lambda: os.remove("x.zarr/c/1/0")),
    "zarr resized": (store, "x.zarr", lambda: zarr.open_array("x.zarr").resize((2, 4))),
    "zarr chunk that was missing": (
        lambda: zarr.create_array("x.zarr", shape=A.shape, chunks=(1, 4), dtype="f8"),
        "x.zarr",
        lambda: zarr.open_array("x.zarr").__setitem__(0, 7.0),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_opening_is_named_before_numbers_are_used(what):
    make, path, change = CHANGES[what]
    make()
    opened = io.open_array(path)
    product = multimm.matmul(opened, np.eye(4))
    change()
    with pytest.raises(FileFormatError, match=r"open it again|gone|truncated|cannot be read"):
        product.compute(scheduler="sync")
    with pytest.raises(FileFormatError):
        io.save_array(opened, "out.npy")
    assert not [name for name in os.listdir() if name.startswith((".", "out"))]


@pytest.mark.parametrize("what", ["npy in place", "target of a link", "raw data", "zarr chunk"])
def test_a_file_that_is_opened_again_is_another_array(what):
    make, path, change = CHANGES[what]
    make()
    first = io.open_array(path)
    assert io.open_array(path).name == io.open_array(os.path.abspath(path)).name == first.name
    assert io.open_array(path, chunks=2).name != first.name
    change()
    assert io.open_array(path).name != first.name


def test_a_chunk_that_was_just_written_is_looked_at_again(monkeypatch):
    store()
    time.sleep(0.6)
    monkeypatch.setattr(identity, "TICK", 0.5)  # the metadata are older, the chunk is not
    monkeypatch.setattr(identity, "PATIENCE", 0.5)
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        in_place("x.zarr/c/0/0")

    in_place("x.zarr/c/0/0")
    with monkeypatch.context() as patch:
        patch.setattr(identity.time, "sleep", sleep)
        opened = io.open_array("x.zarr")
    assert waited == [0.5]
    assert opened.compute(scheduler="sync")[0, 3] == 77


def test_a_store_that_is_being_rewritten_is_opened_once_that_is_over(monkeypatch):
    """Half of the chunks rewritten, and the others read before their turn: two writes in one."""
    store()
    monkeypatch.setattr(identity, "TICK", 0.2)
    left = ["x.zarr/c/0/0", "x.zarr/zarr.json"] * 2

    def sleep(seconds):
        if left:
            in_place(left.pop()) if "/c/" in left[-1] else os.utime(left.pop())
        else:
            time_sleep(seconds)

    time_sleep = time.sleep
    with monkeypatch.context() as patch:
        patch.setattr(identity.time, "sleep", sleep)
        opened = io.open_array("x.zarr")
    assert not left
    assert opened.compute(scheduler="sync")[0, 3] == 77


def test_who_writes_for_ever_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(identity, "PATIENCE", 0.1)
    looks = []

    def look():
        looks.append(time.time_ns())
        return len(looks), [(1, 1, looks[-1], looks[-1])]

    assert identity.settled(look) == len(looks) == 6


def test_names_in_hdf5_are_asked_of_the_file():
    hdf5()
    with h5py.File("x.h5", "r+") as file:
        file["runs/first/x"] = A + 1
        file["hard"], file["soft"] = file["runs/first/x"], h5py.SoftLink("/runs/first/x")
        file["latest"], file["lost"] = h5py.SoftLink("/runs/first"), h5py.SoftLink("/nowhere")
    for name in ("runs/first/x", "hard", "soft", "latest/x", "runs//first/./x", "/hard"):
        np.testing.assert_array_equal(read(f"x.h5:{name}"), A + 1)
    np.testing.assert_array_equal(read("x.h5/soft"), A + 1)
    for name in ("lost", "runs", "runs/second"):
        with pytest.raises(FileFormatError, match=r"x\.h5"):
            io.open_array("x.h5", dataset=name)


def test_a_virtual_dataset_needs_its_sources():
    virtual()
    np.testing.assert_array_equal(read("virtual.h5"), A)
    os.remove("x.h5")
    with pytest.raises(FileFormatError, match=r"x\.h5"):
        io.open_array("virtual.h5")


def test_a_virtual_dataset_is_mapped_whole_or_says_what_else_it_holds():
    virtual()
    for name, more in (("part", {}), ("filled", {"fillvalue": 7.0})):
        layout = h5py.VirtualLayout(shape=A.shape, dtype="f8")
        layout[1:] = h5py.VirtualSource("link.h5", "x", shape=A.shape)[1:]
        with h5py.File("virtual.h5", "r+") as file:
            file.create_virtual_dataset(name, layout, **more)
    with pytest.raises(FileFormatError, match="sources don't cover all of it"):
        io.open_array("virtual.h5:part")
    found = read("virtual.h5:filled")
    assert (found[0] == 7.0).all()
    np.testing.assert_array_equal(found[1:], A[1:])


def test_values_outside_the_files_folder_need_consent():
    virtual()
    os.mkdir("inner")
    os.rename("virtual.h5", "inner/virtual.h5")  # HDF5 looks in the current folder, too
    with pytest.raises(FileFormatError, match="outside"):
        io.open_array("inner/virtual.h5")
    np.testing.assert_array_equal(read("inner/virtual.h5", outside=True), A)


def test_raw_data_are_read_where_every_process_finds_them():
    raw()
    np.testing.assert_array_equal(read("raw.h5"), A)
    raw(path="x.raw")
    with pytest.raises(FileFormatError, match=r"raw data x\.raw .* h5repack"):
        io.open_array("raw.h5")


def test_raw_data_outside_the_files_folder_need_consent():
    os.mkdir("inner")
    raw("inner/raw.h5")
    with pytest.raises(FileFormatError, match="outside"):
        io.open_array("inner/raw.h5")
    np.testing.assert_array_equal(read("inner/raw.h5", outside=True), A)


def test_raw_data_that_are_cut_short_are_no_zeros():
    raw()
    os.truncate("x.raw", A.nbytes - 8)
    with pytest.raises(FileFormatError, match="truncated"):
        io.open_array("raw.h5")


def test_a_source_that_is_smaller_by_now_is_named():
    for name, chunks in (("x.h5", (1, 4)), ("virtual.h5", None)):
        with h5py.File(name, "w") as file:
            if chunks:
                file.create_dataset("x", data=A, chunks=chunks, maxshape=(None, 4))
                continue
            for name, end in (("part", 3), ("all", h5py.h5s.UNLIMITED)):
                layout = h5py.VirtualLayout(A.shape, "f8", maxshape=(None, 4))
                source = h5py.VirtualSource("x.h5", "x", shape=A.shape, maxshape=(None, 4))
                layout[0:end, :] = source[0:end, :]
                file.create_virtual_dataset(name, layout)
    for name in "part", "all":
        np.testing.assert_array_equal(read(f"virtual.h5:{name}"), A)
    with h5py.File("x.h5", "r+") as file:
        file["x"].resize((2, 4))
    with pytest.raises(FileFormatError, match=r"has shape \(2, 4\) by now"):
        io.open_array("virtual.h5:part")
    np.testing.assert_array_equal(read("virtual.h5:all"), A[:2])


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_consolidated_metadata_that_are_older_are_not_used(zarr_format):
    group = zarr.create_group("g.zarr", zarr_format=zarr_format)
    group.create_array("x", data=A, chunks=(1, 4))
    zarr.consolidate_metadata("g.zarr")
    zarr.open_array("g.zarr", path="x", mode="r+").append(A + 1)
    zarr.open_group("g.zarr", use_consolidated=False).create_array("y", data=A, chunks=(3, 4))
    np.testing.assert_array_equal(read("g.zarr", dataset="x"), np.vstack([A, A + 1]))
    np.testing.assert_array_equal(read("g.zarr/y"), A)


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("path", ["g.zarr:x", "g.zarr", "memory://g.zarr:x", "memory://g.zarr"])
def test_an_array_that_only_consolidated_metadata_have_is_gone(zarr_format, path):
    system, root = fsspec.url_to_fs(path.partition(".zarr")[0] + ".zarr")
    store = "g.zarr" if "://" not in path else zarr.storage.FsspecStore.from_url("memory://g.zarr")
    group = zarr.create_group(store, zarr_format=zarr_format, overwrite=True)
    group.create_array("x", data=A, chunks=(1, 4))
    zarr.consolidate_metadata(store)
    np.testing.assert_array_equal(read(path), A)
    lazy = io.open_array(path)
    system.rm(f"{root}/x", recursive=True)
    with pytest.raises(FileFormatError, match=r"not there|no dataset|holds 0"):
        io.open_array(path)
    with pytest.raises(FileFormatError, match="gone"):
        lazy.compute(scheduler="sync")


def stored(path, zarr_format):
    zarr.create_array(path, data=A, chunks=(2, 2), zarr_format=zarr_format)
    return "c/1" if zarr_format == 3 else "1.0"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_behind_links_are_read_and_noticed(zarr_format):
    name = stored("x.zarr", zarr_format)
    os.rename(f"x.zarr/{name}", "elsewhere")
    os.symlink("../../elsewhere" if zarr_format == 3 else "../elsewhere", f"x.zarr/{name}")
    os.symlink(".", "x.zarr/0")  # nobody goes round in circles
    x = io.open_array("x.zarr")
    np.testing.assert_array_equal(x.compute(scheduler="sync"), A)
    chunk = "elsewhere/0" if zarr_format == 3 else "elsewhere"
    os.utime(chunk)
    with pytest.raises(FileFormatError, match="changed after the matrix was opened"):
        x.compute(scheduler="sync")


@pytest.mark.parametrize(("zarr_format", "at"), [(2, "1.0"), (3, "c/1/0"), (3, "c/1"), (3, "c")])
def test_links_to_chunks_that_are_elsewhere_are_no_missing_chunks(zarr_format, at):
    """git annex leaves such links of files that were not fetched."""
    stored("x.zarr", zarr_format)
    os.rename(f"x.zarr/{at}", "elsewhere")
    os.symlink("annex", f"x.zarr/{at}")
    with pytest.raises(FileFormatError, match=f"{at}: a link to annex, which is not there"):
        io.open_array("x.zarr")


@pytest.mark.parametrize("name", ["valid_min", "valid_max", "valid_range"])
def test_bounds_of_what_is_meant_are_named(name):
    with h5py.File("x.h5", "w") as file:
        file["x"] = A
        file["x"].attrs[name] = [0.0, 5.0] if name == "valid_range" else 5.0
    with pytest.warns(UserWarning, match=f"{name}=.*5.*values outside stand for missing ones"):
        np.testing.assert_array_equal(read("x.h5"), A)


def test_booleans_of_netcdf_are_booleans_and_times_are_refused():
    with h5py.File("x.nc", "w") as file:
        file["mask"], file["time"] = (A > 5).astype("i1"), A.astype("i8")
        file["mask"].attrs["dtype"] = "bool"
        file["time"].attrs["units"] = "days since 2000-01-01"
    found = read("x.nc:mask")
    assert found.dtype == bool
    np.testing.assert_array_equal(found, A > 5)
    with pytest.raises(FileFormatError, match="days since"):
        io.open_array("x.nc:time")


# ------------------------------------------------------------------ addresses


def test_addresses_are_read_through_fsspec():
    memory = fsspec.filesystem("memory")
    store()
    for folder, _, names in os.walk("x.zarr"):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                memory.pipe(f"/{folder}/{name}", file.read())
    npy()
    memory.put("x.npy", "/x.npy")
    hdf5()
    memory.put("x.h5", "/x.h5")
    for address in ("memory://x.zarr", "memory://x.npy", "memory://x.h5", "memory://x.h5:x"):
        np.testing.assert_array_equal(read(address), A)
    opened = io.open_array("memory://x.zarr")
    time.sleep(0.01)
    memory.pipe("/x.zarr/c/0/0", memory.cat("/x.zarr/c/1/0"))
    with pytest.raises(FileFormatError, match=r"memory://x\.zarr/c/0/0"):
        opened.compute(scheduler="sync")


@pytest.mark.parametrize(
    "address",
    ["nothing://bucket/x.zarr", "file://elsewhere/x.npy", "http://[::1/x.npy", "file://[/x.npy"],
)
def test_an_address_is_named_as_it_was_given(address):
    with pytest.raises(FileFormatError) as caught:
        io.open_array(address)
    assert address in str(caught.value)


def test_a_link_in_a_remote_file_reads_no_local_one():
    hdf5()
    link()
    fsspec.filesystem("memory").put("link.h5", "/link.h5")
    np.testing.assert_array_equal(read("link.h5:x"), A)
    with pytest.raises(FileFormatError, match=r"memory://link\.h5:x: the link x leads to another"):
        io.open_array("memory://link.h5:x")


def test_a_path_may_be_bytes_that_are_no_text():
    name = b"\xe9t\xe9.npy"
    io.save_array(A, name)
    assert os.listdir(b".") == [name]
    np.testing.assert_array_equal(read(name), A)


# -------------------------------------------------------------------- hostile


@pytest.mark.parametrize("name", ["pipe.npy", "pipe.h5"])
def test_a_pipe_is_refused_and_not_waited_for(name):
    os.mkfifo(name)
    with pytest.raises(FileFormatError, match="pipe"):
        io.open_array(name)


def test_a_pipe_in_place_of_what_was_opened_is_not_waited_for():
    npy()
    x = io.open_array("x.npy")
    os.remove("x.npy")
    os.mkfifo("x.npy")
    with pytest.raises(FileFormatError, match="named pipe"):
        x.compute(scheduler="sync")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"zarr_format":3,"shape":[' + "9" * 5000 + "]}", "\x00", "{}"]
)
def test_damaged_metadata_are_an_error_that_names_the_file(text, tmp_path):
    (tmp_path / "bad.zarr").mkdir()
    (tmp_path / "bad.zarr" / "zarr.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"bad\.zarr"):
        io.open_array("bad.zarr")


def test_a_store_that_declares_more_than_any_disk_holds_is_refused_at_once():
    store()
    with open("x.zarr/zarr.json", "r+") as file:
        said = json.load(file)
        said["shape"] = [10**12, 10**12]
        file.seek(0)
        json.dump(said, file)
        file.truncate()
    begun = time.process_time()
    with pytest.raises(FileFormatError, match="more than any file holds"):
        io.open_array("x.zarr")
    assert time.process_time() - begun < 1


def test_names_in_files_do_not_reach_the_terminal():
    with h5py.File("x.h5", "w") as file:
        file["red \x1b[31m"], file["other"] = A, A
    with pytest.raises(FileFormatError) as caught:
        io.open_array("x.h5")
    assert "\x1b" not in str(caught.value)
