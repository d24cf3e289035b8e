"""Outputs beside what is there: arrays added to files, other writers, what killed runs leave."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import dask
import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from commands import python
from foreign_files import FORMATS, NEW, OLD, get, names, put
from repeated import others_slow

from multimm import io
from multimm.errors import FileFormatError
from multimm.files import graph, raw
from multimm.files.output import commit, unfinished
from multimm.files.output import zarr as output_zarr

pytestmark = pytest.mark.usefixtures("in_this_thread")


# Arrays added to a file -----------------------------------------------------------------


def rich(path, userblock=0):
    """An HDF5 file of all that one can hold, and what is to be found in it later."""
    with h5py.File(path, "w", userblock_size=userblock) as file:
        file.attrs["experiment"] = "2026"
        file["x"] = OLD
        file["x"].attrs["unit"] = "mm"
        file["same"] = file["x"]
        file["chunked"] = file.create_dataset(None, data=OLD, chunks=(2, 2), compression="gzip")
        file["soft"] = h5py.SoftLink("/x")
        file["outside"] = h5py.ExternalLink("other.h5", "/x")
        file["nowhere"] = h5py.ExternalLink("gone.h5", "/x")
        file["type"] = np.dtype("f4,i4")
        file.create_group("deep/empty").attrs["why"] = "to be filled"
        file["deep/reference"] = file["x"].ref
    if userblock:
        with open(path, "rb+") as raw_file:
            raw_file.write(b"mine")
    return path


def found_in(path):
    found = {}
    with h5py.File(path) as file:
        found["/"] = dict(file.attrs)
        for name in ("x", "same", "chunked", "soft"):
            found[name] = file[name][:].tolist()
        for name in ("soft", "outside", "nowhere"):
            link = file.get(name, getlink=True)
            found[f"{name}'s link"] = (getattr(link, "filename", None), link.path)
        found["unit"] = file["x"].attrs["unit"]
        found["type"] = file["type"].dtype
        found["deep/empty"] = dict(file["deep/empty"].attrs)
        assert file["same"] == file[file["deep/reference"][()]] == file["x"]
    return found


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("name", ["symmetric", "deep/gram", "new/deeper/gram"])
def test_all_that_an_hdf5_file_holds_is_kept(tmp_path, userblock, name):
    path = rich(tmp_path / "m.h5", userblock)
    before = found_in(path)
    for array, overwrite in ((OLD, False), (NEW, True), (NEW[:2].astype("f4"), True)):
        io.save_array(da.from_array(array, chunks=2), path, dataset=name, overwrite=overwrite)
        assert found_in(path) == before
        with h5py.File(path) as file:
            assert file[name].dtype == array.dtype
            np.testing.assert_array_equal(file[name][:], array)
    if userblock:
        assert path.read_bytes()[:4] == b"mine"
    assert names(tmp_path) == ["m.h5"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("soft", "link to /x"),
        ("outside", "link to other.h5:/x"),
        ("outside/new", "link to other.h5:/x"),
        ("x/new", "'x' is a dataset"),
        ("deep", "a group"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_name_in_hdf5_stands_for_is_not_replaced(tmp_path, name, said, overwrite):
    path = rich(tmp_path / "m.h5")
    before = path.read_bytes()
    with pytest.raises(FileFormatError, match=said):
        io.save_array(NEW, path, dataset=name, overwrite=overwrite)
    assert path.read_bytes() == before


def test_a_whole_hdf5_file_goes_only_if_it_holds_one_array(tmp_path):
    def linked(file):
        file["link"] = h5py.ExternalLink("gone.h5", "/x")

    def grouped(file):
        file.create_group("plans")

    def noted(file):
        file.attrs["experiment"] = "2026"

    for index, more in enumerate((linked, grouped, noted)):
        path = put(tmp_path / f"{index}.h5", OLD)
        with h5py.File(path, "r+") as file:
            more(file)
        with pytest.raises(FileFormatError, match=r"lost: M \(4, 3\), .*; name the dataset"):
            io.save_array(NEW, path, overwrite=True)
        np.testing.assert_array_equal(io.open_array(path, dataset="M").compute(), OLD)


def test_an_hdf5_file_that_changes_meanwhile_is_left_as_it_is(tmp_path):
    path = put(tmp_path / "m.h5", OLD)
    with io.Output(path, dataset="C") as output:
        output.store(NEW).compute()
        with h5py.File(path, "r+") as file:
            file["M"][0, 0] = 77
        with pytest.raises(FileFormatError, match="changed while it was written"):
            output.commit()
    with h5py.File(path) as file:
        assert (list(file), file["M"][0, 0]) == (["M"], 77)
    assert names(tmp_path) == ["m.h5"]


def group_of(path, zarr_format, *, consolidated):
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    group.attrs["experiment"] = "2026"
    group.create_array("x", data=OLD)
    group.create_group("deep").create_array("y", data=OLD)
    if consolidated:
        zarr.consolidate_metadata(path, zarr_format=zarr_format)
    return path


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize(
    ("name", "zarr_format", "consolidated"),
    others_slow(
        itertools.product(["symmetric", "deep/gram", "new/deeper/gram"], [2, 3], [False, True]),
        *(("symmetric", 2, False), ("symmetric", 3, True), ("deep/gram", 2, True)),
        *(("new/deeper/gram", 2, True), ("new/deeper/gram", 3, False)),
    ),
)
def test_an_array_is_added_to_a_group(tmp_path, zarr_format, consolidated, name):
    path = group_of(tmp_path / "m.zarr", zarr_format, consolidated=consolidated)
    (tmp_path / "m.zarr" / "notes.txt").write_text("mine")
    for array, overwrite in ((OLD, False), (NEW[:2], True)):
        written = io.save_array(
            da.from_array(array, chunks=2), f"{path}:/{name}", overwrite=overwrite
        )
        assert written == path
        store = zarr.open_group(path, mode="r", use_consolidated=consolidated)
        np.testing.assert_array_equal(store[name][:], array)
        assert store[name].metadata.zarr_format == zarr_format
        assert dict(store.attrs) == {"experiment": "2026"}
        np.testing.assert_array_equal(store["x"][:], OLD)
        np.testing.assert_array_equal(store["deep/y"][:], OLD)
        assert names(tmp_path) == ["m.zarr"]
    with pytest.raises(FileFormatError, match="exists already"):
        io.save_array(NEW, path, dataset=name)
    assert (path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../../elsewhere", "cannot be an array's name"),
        ("zarr.json", "cannot be an array's name"),
        ("deep", "a group"),
        ("x/below", "an array without a name"),
        ("folder", "no Zarr array"),
        ("link", "is a link"),
    ],
)
def test_what_a_name_in_zarr_stands_for_is_not_replaced(tmp_path, name, said, overwrite):
    path = group_of(tmp_path / "m.zarr", 3, consolidated=False)
    (path / "folder").mkdir()
    (path / "folder" / "mine").touch()
    (path / "link").symlink_to(path / "x")
    with pytest.raises(FileFormatError, match=said):
        io.save_array(NEW, path, dataset=name, overwrite=overwrite)
    assert names(tmp_path) == ["m.zarr"]
    assert names(path) == ["deep", "folder", "link", "x", "zarr.json"]


def test_a_group_that_another_run_has_made_meanwhile_takes_the_array(tmp_path):
    path = tmp_path / "m.zarr"
    with io.Output(path, dataset="g/a") as output:
        output.store(OLD).compute()
        io.save_array(NEW, path, dataset="g/b")
        output.commit()
    group = zarr.open_group(path, mode="r")
    np.testing.assert_array_equal(group["g/a"][:], OLD)
    np.testing.assert_array_equal(group["g/b"][:], NEW)
    assert names(tmp_path) == ["m.zarr"]


# What is not ours -----------------------------------------------------------------------


def test_files_of_others_in_a_store_are_never_removed(tmp_path):
    places = ["notes.txt", "c/0/notes.txt", "c/0/1.txt", "c/7", "more/data.bin"]
    for index, place in enumerate(places):
        path = put(tmp_path / f"{index}.zarr", OLD, chunks=(2, 3))
        (path / place).parent.mkdir(exist_ok=True)
        (path / place).write_text("mine")
        with pytest.raises(FileFormatError, match=f"holds {place}, which Zarr did not write"):
            io.save_array(NEW, path, overwrite=True)
        assert (path / place).read_text() == "mine"
        np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], OLD)


def test_a_folder_is_no_store_for_the_name_of_a_file_in_it(tmp_path):
    none = "no Zarr store is never replaced"
    for name, text, said in (
        ("zarr.json", "{}", "holds 0.0, which Zarr did not write, and is never replaced"),
        (".zgroup", "", none), (".zarray", "[1]", none), (".zattrs", "{}", none),
    ):  # fmt: skip
        path = tmp_path / f"{name}.zarr"
        path.mkdir()
        (path / name).write_text(text)
        (path / "0.0").write_text("mine")
        with pytest.raises(FileFormatError, match=said):
            io.save_array(NEW, path, overwrite=True)
        assert names(path) == sorted(["0.0", name])


@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_a_link_in_a_circle_is_named_as_one(tmp_path, suffix):
    path = tmp_path / f"loop.{suffix}"
    path.symlink_to(path)
    with pytest.raises(FileFormatError, match="a link that leads nowhere is never replaced"):
        io.save_array(da.ones((2, 2)), path, overwrite=True)


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_of_another_kind_are_never_replaced(tmp_path, suffix):
    path = tmp_path / f"notes.{suffix}"
    path.write_text("mine, and no matrix")
    with pytest.raises(FileFormatError, match=r"never replaced|cannot tell what would be lost"):
        io.save_array(NEW, path, overwrite=True)
    assert path.read_text() == "mine, and no matrix"


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("exchanges", [True, False])
def test_what_comes_at_the_last_moment_is_not_lost(tmp_path, suffix, exchanges, monkeypatch):
    """Between the last look and the exchange; and where names cannot be exchanged."""
    path = put(tmp_path / f"c.{suffix}", OLD)
    theirs = tmp_path / "theirs"
    if suffix == "zarr":
        group_of(theirs, 3, consolidated=False)
    else:
        theirs.write_text("no matrix")
    exchange, calls = commit.exchange, []

    def late(one, other):
        if not calls:
            exchange(theirs, path)
        calls.append(other)
        return exchange(one, other) if exchanges else False

    monkeypatch.setattr(commit, "exchange", late)
    with io.Output(path, overwrite=True) as output:
        output.store(NEW).compute()
        with pytest.raises(FileFormatError):
            output.commit()
    if suffix == "zarr":
        np.testing.assert_array_equal(zarr.open_group(path, mode="r")["x"][:], OLD)
    else:
        assert path.read_text() == "no matrix"
    assert names(tmp_path) == [path.name, "theirs"]


def fails(number):
    """A call of the system that does."""

    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


def without_renameat2(monkeypatch, number=errno.EINVAL):
    monkeypatch.setattr(commit, "_renameat2", fails(number))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("suffix", FORMATS)
def test_file_systems_that_exchange_no_names(tmp_path, suffix, number, monkeypatch):
    without_renameat2(monkeypatch, number)
    path = tmp_path / f"c.{suffix}"
    io.save_array(OLD, path)
    io.save_array(NEW, path, overwrite=True)
    np.testing.assert_array_equal(get(path), NEW)
    with io.Output(tmp_path / f"d.{suffix}") as output:
        output.store(NEW).compute()
        put(output.path, OLD)
        with pytest.raises(FileFormatError, match="exists already"):
            output.commit()
    np.testing.assert_array_equal(io.open_array(output.path).compute(), OLD)
    assert names(tmp_path) == sorted([path.name, output.path.name])


def test_file_systems_without_links_either(tmp_path, monkeypatch):
    without_renameat2(monkeypatch)
    monkeypatch.setattr(os, "link", fails(errno.EPERM))
    np.testing.assert_array_equal(get(io.save_array(OLD, tmp_path / "c.npy")), OLD)
    assert names(tmp_path) == ["c.npy"]


# Who else writes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "overwrite", "renames"),
    others_slow(
        itertools.product(FORMATS, [False, True], [True, False]),
        *(("npy", True, True), ("npy", False, False), ("h5", False, True)),
        *(("zarr", True, False), ("zarr", False, True)),
    ),
)
def test_of_writers_that_commit_at_the_same_moment_one_wins(
    tmp_path, suffix, overwrite, renames, monkeypatch
):
    """As if on hosts that know nothing of each other: without the lock."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    monkeypatch.setattr(unfinished.Claim, "take", lambda _: None)
    monkeypatch.setattr(unfinished.Claim, "check", lambda _: False)
    if not renames:
        without_renameat2(monkeypatch)
    writers, races = 4, 4 if overwrite else 9
    with ThreadPoolExecutor(writers) as pool:
        for race in range(races):
            path = tmp_path / f"{race}.{suffix}"
            barrier = Barrier(writers)

            def write(number, path=path, barrier=barrier):
                matrix = np.full((4, 3), float(number))
                with io.Output(path, overwrite=overwrite) as output:
                    output.store(da.from_array(matrix, chunks=2)).compute(scheduler="sync")
                    barrier.wait()
                    try:
                        output.commit()
                    except FileFormatError as error:
                        return str(error)
                    return number

            ends = list(pool.map(write, range(writers)))
            winners = [end for end in ends if isinstance(end, int)]
            result = get(path)
            assert (result == result[0, 0]).all()
            assert int(result[0, 0]) in winners
            if not overwrite:
                assert len(winners) == 1
                assert all("exists already" in end for end in ends if isinstance(end, str))
            elif renames:
                assert len(winners) == writers
    assert names(tmp_path) == sorted(f"{race}.{suffix}" for race in range(races))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_run_says_so_before_it_computes(tmp_path, suffix, overwrite):
    path = tmp_path / f"c.{suffix}"
    if overwrite:
        put(path, OLD)
    with io.Output(path, overwrite=overwrite) as output:
        early = io.Output(path, overwrite=overwrite)
        output.store(NEW).compute()
        said = rf"another run is writing it \(process {os.getpid()} on "
        with pytest.raises(FileFormatError, match=said):
            io.Output(path, overwrite=overwrite)
        with pytest.raises(FileFormatError, match=said):
            early.store(NEW)
        output.commit()
    np.testing.assert_array_equal(get(path), NEW)
    io.save_array(OLD, path, overwrite=True)
    assert names(tmp_path) == [path.name]


def test_file_systems_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK))
    path = tmp_path / "c.npy"
    with io.Output(path) as output:
        output.store(NEW).compute()
        with pytest.raises(FileFormatError, match="another run is writing"):
            io.Output(path)
        lock = output._claim.lock
        output.commit()
    lock.write_text("multimm process 1 on another-host\n")  # of a run that was killed, perhaps
    with pytest.raises(FileFormatError, match=f"process 1 on .*; if it has ended, remove {lock}"):
        io.Output(path, overwrite=True)
    lock.unlink()
    io.save_array(NEW, path, overwrite=True)
    assert names(tmp_path) == ["c.npy"]


def test_a_lock_that_is_not_ours_is_left_alone(tmp_path):
    path = tmp_path / "c.npy"
    with io.Output(path) as output:
        output.store(NEW)
        lock = output._claim.lock
    secret = tmp_path / "secret"
    secret.write_text("do not touch")
    for make in (lock.symlink_to, lock.hardlink_to, lambda _: lock.write_text("do not touch")):
        make(secret)
        with pytest.raises(FileFormatError, match=r"cannot be locked .*: if no run .* remove"):
            io.save_array(NEW, path)
        assert lock.read_text() == secret.read_text() == "do not touch"
        lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(FileFormatError, match="cannot be locked"):
        io.save_array(NEW, path)


# What killed runs leave -----------------------------------------------------------------

KILLED = """
import os, signal, sys
import dask, dask.array as da, numpy as np
from multimm import io

def block(x, block_info=None):
    if block_info[0]["chunk-location"] == (1, 0):
        print("in the middle", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return x

dask.config.set(scheduler="sync")
array = da.zeros((8, 3), chunks=(4, 3)).map_blocks(block, meta=np.empty((0, 0))) + 1
io.save_array(array, sys.argv[1], dataset=sys.argv[2] or None, overwrite=sys.argv[3] == "over")
"""


def killed_run(path, dataset="", overwrite=False):
    run = python("-c", KILLED, path, dataset, "over" if overwrite else "")
    assert run.stdout == "in the middle\n", run.stderr
    assert run.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("suffix", "dataset"),
    others_slow([("npy", ""), ("zarr", ""), ("h5", ""), ("h5", "a")], ("zarr", ""), ("h5", "a")),
)
def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path, suffix, dataset):
    path = put(tmp_path / f"c.{suffix}", OLD)
    before = io.open_array(path).compute()
    killed_run(path, dataset, overwrite=not dataset)
    left = [name for name in names(tmp_path) if name.startswith(".multimm-")]
    assert {name.rpartition(".")[2] for name in left} == {"lock", "marks", "partial"}
    np.testing.assert_array_equal(io.open_array(path).compute(), before)
    start = time.monotonic()
    io.save_array(NEW, path, dataset=dataset or None, overwrite=not dataset)
    assert time.monotonic() - start < 5  # no lease of a lock is waited for
    assert names(tmp_path) == [path.name]
    np.testing.assert_array_equal(io.open_array(path, dataset=dataset or None).compute(), NEW)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_block_that_is_written_too_late_leaves_nothing(tmp_path, monkeypatch, zarr_format):
    """Tasks go on after Ctrl-C, or another one's failure, and Zarr makes folders again."""
    zarr.create_group(tmp_path / "m.zarr", zarr_format=zarr_format)
    output = io.Output(tmp_path / "m.zarr/inner/new")
    flags = output.store(da.from_array(NEW, chunks=2))
    write = output_zarr.box_by_box

    def late(*args):
        output.discard()
        write(*args)

    monkeypatch.setattr(output_zarr, "box_by_box", late)
    with pytest.raises(FileFormatError, match="the output was given up before"):
        flags.compute()
    assert names(tmp_path) == ["m.zarr"]
    assert list(zarr.open_group(tmp_path / "m.zarr")) == []
    assert not any(name.startswith(".multimm") for name in names(tmp_path / "m.zarr"))


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_is_computed_after_the_output_was_given_up_says_so(tmp_path, suffix):
    with io.Output(tmp_path / f"c.{suffix}") as output:
        first = output.store(da.from_array(OLD, chunks=2))
        second = output.store(da.from_array(NEW, chunks=2))
        with pytest.raises(FileFormatError, match=r"given up .* what the last store\(\) gives"):
            first.compute()
    with pytest.raises(FileFormatError, match="before its `with` ends"):
        second.compute()
    assert names(tmp_path) == []


@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_an_empty_file_is_replaced(tmp_path, suffix):
    """As `tempfile` makes one."""
    path = tmp_path / f"c.{suffix}"
    path.touch()
    io.save_array(NEW, path, overwrite=True)
    np.testing.assert_array_equal(get(path), NEW)


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_was_replaced_is_removed_by_the_next_run_too(tmp_path, suffix, monkeypatch):
    """Killed when the new one had its name, and the older one was not removed."""
    path = put(tmp_path / f"c.{suffix}", OLD)

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(io, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            io.save_array(NEW, path, overwrite=True)
    np.testing.assert_array_equal(get(path), NEW)
    assert {name.rpartition(".")[2] for name in names(tmp_path)} == {"marks", "partial", suffix}
    io.save_array(OLD, path, overwrite=True)
    np.testing.assert_array_equal(get(path), OLD)
    assert names(tmp_path) == [path.name]


def test_a_store_that_lost_its_name_gets_it_back(tmp_path):
    """Killed between two renames, where names cannot be exchanged."""
    path = put(tmp_path / "c.zarr", OLD)
    with io.Output(path, overwrite=True) as output:
        output.store(NEW)
        older = output._claim.new_path("replaced")
    path.rename(older)
    with pytest.raises(FileFormatError, match="exists already"):
        io.save_array(NEW, path)
    np.testing.assert_array_equal(get(path), OLD)
    assert names(tmp_path) == ["c.zarr"]


# Names and modes ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("stem", ["n" * 251, "é" * 125, "a\nb", "e\u0301", "-rf ~", "\udcff"])
def test_whatever_name_the_file_system_takes(tmp_path, suffix, stem):
    stem = os.fsdecode(os.fsencode(stem)[: 255 - len(suffix) - 1])
    path = tmp_path / f"{stem}.{suffix}"
    for matrix in (OLD, NEW):
        io.save_array(matrix, path, overwrite=matrix is NEW)
        np.testing.assert_array_equal(get(path), matrix)
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_name_that_is_too_long_is_refused_before_anything_is_computed(tmp_path, suffix):
    with pytest.raises(FileFormatError, match=r"cannot be written .File name too long"):
        io.Output(tmp_path / f"{'n' * 253}.{suffix}")


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def bits(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o400, 0o444])
def test_permission_bits_stay(tmp_path, suffix, mode, umask):
    path = tmp_path / f"c.{suffix}"
    io.save_array(OLD, path)
    folder = suffix == "zarr"
    assert bits(path) == (0o750 if folder else 0o640)
    file = path / "zarr.json" if folder else path
    file.chmod(mode)
    outer = 0o770 if folder else mode
    path.chmod(outer)
    with io.Output(path, overwrite=True) as output:
        output.store(NEW).compute()
        (unfinished,) = tmp_path.glob("*.partial")
        assert not bits(unfinished) & 0o077 & ~(mode | (mode & 0o444) >> 2)
        output.commit()
    assert (bits(path), bits(file)) == (outer, mode)
    np.testing.assert_array_equal(get(path), NEW)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_and_group_stay(tmp_path):
    path = put(tmp_path / "c.npy", OLD)
    os.chown(path, 12, 34)
    io.save_array(NEW, path, overwrite=True)
    assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)


@pytest.mark.parametrize("url", ["s3://bucket/c.zarr", "memory://c.npy", "https://host/c.h5"])
def test_remote_addresses_are_not_written(url):
    with pytest.raises(FileFormatError, match=r"read and not written; .*to_zarr"):
        io.save_array(NEW, url)


# Blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i1", ">i4", "u8", "f2", ">f8", "g", "c8", ">c16", "G"])
@pytest.mark.parametrize("chunks", [(3, 2), (7, 5), (1, 1)])
def test_hdf5_reads_what_was_written_beside_it(tmp_path, dtype, chunks):
    matrix = np.random.default_rng(0).integers(0, 9, (7, 5)).astype(dtype)
    path = io.save_array(da.from_array(matrix, chunks=chunks), tmp_path / "c.h5")
    with h5py.File(path) as file:
        assert file["C"].dtype == matrix.dtype
        assert file["C"].chunks is None
        np.testing.assert_array_equal(file["C"][:], matrix)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_disk_that_is_full_is_one_line(tmp_path, suffix, monkeypatch):
    form = graph.FORMATS[f".{suffix}"]
    monkeypatch.setitem(graph.FORMATS, f".{suffix}", form._replace(write=fails(errno.ENOSPC)))
    with pytest.raises(FileFormatError, match=r"a block cannot be written .No space left") as info:
        io.save_array(da.from_array(NEW, chunks=2), tmp_path / f"c.{suffix}")
    assert "\n" not in str(info.value)
    assert str(tmp_path / f"c.{suffix}") in str(info.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_is_full_when_all_is_synced_leaves_the_old(
    tmp_path, suffix, number, monkeypatch
):
    path = put(tmp_path / f"c.{suffix}", OLD)
    monkeypatch.setattr(os, "fsync", fails(number))
    with pytest.raises(FileFormatError, match=os.strerror(number)):
        io.save_array(NEW, path, overwrite=True)
    np.testing.assert_array_equal(io.open_array(path).compute(), OLD)
    assert names(tmp_path) == [path.name]


def test_file_systems_that_sync_no_folders(tmp_path, monkeypatch):
    sync, hosts = os.fsync, itertools.count()

    def fsync(file):
        (fails(errno.EINVAL) if stat.S_ISDIR(os.fstat(file).st_mode) else sync)(file)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(raw, "machine", lambda _: str(next(hosts)))  # each task on one of its own
    np.testing.assert_array_equal(get(io.save_array(NEW, tmp_path / "c.zarr")), NEW)


HOLDER = """
import sys, h5py
with h5py.File(sys.argv[1], "r+"):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_writer_of_hdf5_that_is_stopped_holds_up_nobody(tmp_path):
    matrix = np.random.default_rng(0).random((90, 90))
    with io.Output(tmp_path / "c.h5") as output:
        written = output.store(da.from_array(matrix, chunks=40))
        path = max(tmp_path.iterdir(), key=lambda one: one.stat().st_size)
        command = [sys.executable, "-c", HOLDER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout.readline() == b"open\n"
            assert written.compute().all()
            holder.kill()
        output.commit()
    np.testing.assert_array_equal(get(tmp_path / "c.h5"), matrix)


def test_a_store_is_not_replaced_while_an_array_is_being_added(tmp_path, monkeypatch):
    path = tmp_path / "m.zarr"
    zarr.create_group(path).create_array("old", data=OLD)
    part, whole = io.Output(f"{path}:new"), io.Output(path, overwrite=True)
    for output in part, whole:
        dask.compute(output.store(NEW))
    refused = []

    def replace():
        try:
            whole.commit()
        except FileFormatError as error:
            refused.append(str(error))

    thread = threading.Thread(target=replace)
    found, looked = io.Output._meanwhile, []

    def then_the_other(self):
        target = found(self)
        looked.append(self)
        if looked == [part, part]:  # the last look before the array gets its name
            thread.start()
            thread.join(1)  # which is how long it would take without a lock, many times over
        return target

    monkeypatch.setattr(io.Output, "_meanwhile", then_the_other)
    part.commit()
    thread.join()
    whole.discard()
    assert "lost: new, old" in refused[0]
    group = zarr.open_group(path, mode="r")
    np.testing.assert_array_equal(group["new"], NEW)
    np.testing.assert_array_equal(group["old"], OLD)
    assert names(tmp_path) == ["m.zarr"]


def test_a_lock_on_the_folder_is_waited_for_and_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "LONGEST", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        io.save_array(NEW, tmp_path / "m.zarr")
    finally:
        os.close(folder)
    np.testing.assert_array_equal(get(tmp_path / "m.zarr"), NEW)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_file_whose_blocks_were_not_all_written_gets_no_name(tmp_path, format_):
    path = put(tmp_path / f"m.{format_}", OLD)
    before = get(path) if format_ != "h5" else io.open_array(path).compute()
    lazy = da.from_array(NEW, chunks=2)
    for some in lambda flags: None, lambda flags: flags[:1].compute():
        with io.Output(path, overwrite=True) as output:
            some(output.store(lazy))
            with pytest.raises(FileFormatError, match=r"of 4 blocks were not written: compute"):
                output.commit()
        np.testing.assert_array_equal(io.open_array(path), before)
        assert names(tmp_path) == [path.name]
    with io.Output(path, overwrite=True) as output:
        flags = output.store(lazy)
        flags[:1].compute()
        flags[1:].compute()  # in as many steps as their user likes
        output.commit()
    np.testing.assert_array_equal(io.open_array(path), NEW)
    assert names(tmp_path) == [path.name]
