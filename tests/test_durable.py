"""What a power failure leaves of a finished file: all of it, and before, all of the older one."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from contextlib import contextmanager

import dask.array as da
import numpy as np
import pytest
from foreign_files import FORMATS, NEW, OLD, names, put
from repeated import others_slow

from multimm import io
from multimm.files import raw
from multimm.files.output import commit

pytestmark = pytest.mark.usefixtures("in_this_thread")


@pytest.fixture
def calls(monkeypatch):
    """What is synced and what is renamed, in the order in which it is."""
    seen = []
    fsync, rename = os.fsync, commit._renameat2

    def synced(descriptor):
        seen.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new, flags):
        seen.append(("rename", str(old), str(new)))
        rename(old, new, flags)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(commit, "_renameat2", renamed)
    return seen


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("suffix", FORMATS)
def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, suffix, overwrite, calls):
    path = tmp_path / f"c.{suffix}"
    if overwrite:
        put(path, OLD)
    io.save_array(da.from_array(NEW, chunks=2), path, overwrite=overwrite)
    (at,) = (index for index, call in enumerate(calls) if call[0] == "rename")
    _, unfinished, final = calls[at]
    assert final == str(path)
    synced = [call[1] for call in calls[:at]]
    wanted = [path, *path.rglob("*")] if path.is_dir() else [path]
    assert sorted(synced) == sorted(str(one).replace(str(path), unfinished, 1) for one in wanted)
    assert synced[-1] == unfinished
    assert calls[at + 1 :] == [("sync", str(tmp_path))]


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def disk(tmp_path):
    """A file system in a file: what is in the file is what a power failure leaves."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    try:
        run("truncate", "--size=64M", str(image))
        run("mkfs.ext4", "-q", str(image))
        run("mount", "-o", "loop", str(image), str(mounted))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    yield image, mounted
    run("umount", str(mounted))


@contextmanager
def after_power_failure(image):
    """The folder as a machine finds it that starts again now."""
    copy, again = image.with_name("copy"), image.with_name("again")
    shutil.copyfile(image, copy)
    again.mkdir(exist_ok=True)
    run("mount", "-o", "loop", str(copy), str(again))  # replays the journal
    try:
        yield again
    finally:
        run("umount", str(again))


@pytest.mark.parametrize(
    ("suffix", "overwrite"),
    others_slow(
        itertools.product(FORMATS, [False, True]), ("npy", True), ("h5", False), ("zarr", True)
    ),
)
def test_a_finished_file_outlives_a_power_failure(disk, suffix, overwrite):
    image, mounted = disk
    path = mounted / f"c.{suffix}"
    old, new = np.random.default_rng(0).random((2, 500, 500))
    if overwrite:
        put(path, old)
        run("sync", "--file-system", str(mounted))
    with io.Output(path, overwrite=overwrite) as output:
        output.store(da.from_array(new, chunks=250)).compute()
        with after_power_failure(image) as folder:
            if overwrite:
                np.testing.assert_array_equal(io.open_array(folder / path.name).compute(), old)
            else:
                assert not (folder / path.name).exists()
        output.commit()
        with after_power_failure(image) as folder:
            np.testing.assert_array_equal(io.open_array(folder / path.name).compute(), new)
            # What the crash has left is removed by the next run.
            io.save_array(old, folder / path.name, overwrite=True)
            assert names(folder) == [path.name, "lost+found"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_task_on_another_host_syncs_its_own_block(tmp_path, suffix, calls, monkeypatch):
    """What one host has in its memory, another can't have written to the disk."""
    with io.Output(tmp_path / f"c.{suffix}") as output:
        written = output.store(da.from_array(NEW, chunks=(2, 3)))
        written[0].compute()
        assert calls == []
        monkeypatch.setattr(raw, "machine", lambda _: "another one")
        written[1].compute()
        root = output._matrix.path
        wanted = {root}
        if suffix == "zarr":
            wanted |= {f"{root}/c", f"{root}/c/1", f"{root}/c/1/0"}
        assert {path for _, path in calls} == wanted
