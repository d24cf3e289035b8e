"""HDF5 outputs: a file of one array, or an array more in a copy of a file that is there.

The library lays out the file and takes the array's space, which is contiguous. Its values are
written by `multimm.files.raw`, without the library and its locks. What is there is never written
into: HDF5 files do not survive a crash in the middle of that.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimm.errors import FileFormatError
from multimm.files import identity
from multimm.files.hdf5_links import end_of
from multimm.files.identity import State
from multimm.files.output import kept
from multimm.files.output.target import Target
from multimm.files.stored import StoredMatrix, allocate, few, package

#: Where nobody names the dataset.
DEFAULT = "C"


def create(matrix: StoredMatrix, target: Target) -> StoredMatrix:
    """The matrix in the empty file at its path, or added to what is in there, without its values.

    A dataset of its name is replaced, and so is that of a whole file; attributes of either stay.
    """
    h5py = package("h5py")
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # blocks come, everywhere
    with h5py.File(matrix.path, "r+" if os.path.getsize(matrix.path) else "w") as file:
        older = file.get(matrix.dataset)
        if older is not None:
            del file[matrix.dataset]  # its name; it is there as long as it is open
        made = file.create_dataset(matrix.dataset, matrix.shape, matrix.dtype, dcpl=early)
        if older is not None:
            kept.give_hdf5(older, made)
        elif target.replaces and not target.keeps and target.unit.stat().st_size:
            kept.from_file(target.unit, made)  # of mkstemp, say, it is empty
        offset = made.id.get_offset() or 0  # none of an empty array
        written = replace(matrix, dtype=made.dtype, offset=offset)
    # A file that a full disk keeps from being closed stays locked, and the next error would
    # speak of that alone: so the space is taken when it is closed.
    with open(matrix.path, "rb+") as raw:
        allocate(raw.fileno(), os.fstat(raw.fileno()).st_size)
    return written


@contextmanager
def _target(path: Path) -> Iterator[Any]:
    """The open file that is to be replaced, which nobody in this process may be writing.

    HDF5 gives one file to all who open it in a process. What goes into it once another has its name
    would be lost without a word.
    """
    with package("h5py").File(path, "r") as file:
        if file.mode != "r":
            raise FileFormatError(
                f"{path}: is open for writing in this process; close it first, or write to another "
                "file"
            )
        yield file


def holds(path: Path, dataset: str, *, overwrite: bool) -> bool:
    """Whether a file has a dataset of that name, which may be replaced.

    Raises FileFormatError for the name of a group or a link, or through a dataset or a link; with
    `overwrite` also for a dataset with dimension scales.
    """
    h5py = package("h5py")
    with _target(path) as file:
        names = dataset.split("/")
        for depth in range(1, len(names) + 1):
            name = "/".join(names[:depth])
            link = file.get(name, getlink=True)
            if link is None:
                return False
            if not isinstance(link, h5py.HardLink):
                raise FileFormatError(
                    f"{path}: {name!r} is a link to {end_of(link)}: name what it leads to, or "
                    "another array"
                )
            item = file[name]
            last = depth == len(names)
            if isinstance(item, h5py.Dataset) != last:
                what = "a dataset" if isinstance(item, h5py.Dataset) else "a group or a type"
                raise FileFormatError(
                    f"{path}: {name!r} is {what}, where {dataset!r} is to be written: choose "
                    "another name"
                )
        if overwrite and kept.SCALES & {*item.attrs}:
            raise FileFormatError(
                f"{path}: {dataset!r} has dimension scales, or is one, which say what its axes "
                "are: write to another name, or replace it by what knows them, such as xarray"
            )
    return True


def held(path: Path) -> tuple[list[str], list[str]]:
    """What a file holds, for a message: arrays, and all else that has a name."""
    h5py = package("h5py")
    arrays: list[str] = []
    others: list[str] = []

    def look(name: str, link: Any) -> None:
        item = file[name] if isinstance(link, h5py.HardLink) else None
        if isinstance(item, h5py.Dataset):
            arrays.append(f"{name} {item.shape}")
            return
        if isinstance(item, h5py.Group):
            others.extend(f"attribute {key} of {name}" for key in item.attrs)
            kind = "" if len(item) else "a group"
        else:
            kind = "a link" if item is None else "a type"
        others.extend([f"{name} ({kind})"] if kind else [])

    with _target(path) as file:
        if file.userblock_size:
            others.append(f"a user block of {file.userblock_size:,} bytes")
        others.extend(f"attribute {key} of /" for key in file.attrs)
        file.visititems_links(look)
    return arrays, others


def check_replaced(path: Path, shown: Path) -> None:
    """Raise `FileFormatError` unless a file, `shown` in messages, holds one array at most."""
    arrays, others = held(path) if path.stat().st_size else ([], [])
    if len(arrays) > 1 or others:
        raise FileFormatError(
            f"{shown}: the whole file would be replaced, and these lost: "
            f"{few([*arrays, *others])}; name the dataset that is meant, as in {shown.name}:/NAME, "
            "or write to another file"
        )


def state(path: str | Path) -> State:
    """What changes when a file does."""
    return identity.of_stat(str(path), os.stat(path))


def copy(source: Path, unfinished: Path) -> State:
    """Copy a file into an empty one; what its state was. OSError where somebody writes it."""
    with _target(source):  # a writer that uses HDF5 has it locked
        before = state(source)
        shutil.copyfile(source, unfinished)
        if state(source) != before:
            raise OSError(errno.EBUSY, "it changes while it is copied")
    return before
