"""Which files an HDF5 dataset is read from: behind links, virtual datasets and raw storage.

HDF5 gives fill values, without a word, for a source that is not there and for what no source
covers. Here each source is looked for in the places that HDF5 looks in, and must be there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, NoReturn

from multimm.errors import FileFormatError
from multimm.files.identity import ABSENT, Source, size_of, state
from multimm.files.netcdf import is_partly_written
from multimm.files.stored import Location, package

#: Virtual datasets behind each other: arbitrary.
DEEPEST = 16


def end_of(link: Any) -> str:
    """Where a soft or external link leads to."""
    return f"{getattr(link, 'filename', '')}:{link.path}".removeprefix(":")


def no_dataset(file: Any, name: str) -> str:
    """Of a name that is no dataset: what the link leads to that it is; empty if it is none."""
    h5py, link = package("h5py"), file.get(name, getlink=True)
    if not isinstance(link, h5py.ExternalLink | h5py.SoftLink):
        return ""
    return f"the link {name} leads to {end_of(link)}, where no dataset is"


class Search:
    """The files that reading one dataset touches, with their states, by their paths."""

    def __init__(self, place: Location, first: Source) -> None:
        self.place = place
        self.sources = {first.path: first}

    def add(self, path: str) -> None:
        """Remember the state of a file that is read."""
        if path not in self.sources:
            self.sources[path] = Source(path, state(path))

    def fail(self, why: str) -> NoReturn:
        """Raise what is wrong."""
        raise FileFormatError(f"{self.place}: {why}")

    def dataset(self, item: Any, depth: int = 0) -> None:
        """Find and check all that a dataset is read from."""
        if self.place.remote:
            if item.is_virtual or item.external:
                self.fail(
                    "its values lie in other files, which HDF5 cannot reach behind an address; "
                    "copy them all to a local folder"
                )
            return
        path = os.path.abspath(item.file.filename)
        self.add(path)
        if item.is_virtual:
            self._virtual(item, path, depth)
        elif item.external:
            self._raw(item, path)
        else:
            self._unwritten(item)

    def _raw(self, item: Any, path: str) -> None:
        """Check the raw files of a dataset (external storage)."""
        needed = item.size * item.dtype.itemsize
        for name, offset, size in item.external:
            if not os.path.isabs(name):
                self.fail(
                    f"its raw data {name} are looked for in the folder that a process runs in, "
                    "and workers may run elsewhere: have HDF5's h5repack -l CONTI write a copy "
                    "that holds them"
                )
            self._allow(name, path, "raw data")
            self.add(name)
            part = min(size, needed)
            needed -= part
            found = self.sources[name].state
            if found == ABSENT or (size_of(found) or 0) < offset + part:
                self.fail(f"its raw data {name} are not there, or truncated")

    def _unwritten(self, item: Any) -> None:
        """Raise where HDF5 would give whatever lies in memory for what was never written."""
        h5d, made = package("h5py").h5d, item.id.get_create_plist()
        undefined = made.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
        never = undefined or made.get_fill_time() == h5d.FILL_TIME_NEVER
        if never and item.size and is_partly_written(item):
            self.fail(
                "parts of it were never written, and it has no fill value: nothing says what "
                "stands there; write them, or set a fill value"
            )

    def _virtual(self, item: Any, path: str, depth: int) -> None:
        """Check each source of a virtual dataset, and that they cover it."""
        if depth > DEEPEST:
            self.fail(f"its virtual datasets are more than {DEEPEST} deep")
        h5py, covered = package("h5py"), 0
        ends: tuple[int, ...]
        for source in item.virtual_sources():
            there = path if source.file_name == "." else self._beside(path, source.file_name)
            self._allow(there, path, "virtual source")
            self.add(there)
            with h5py.File(there, "r") as file:
                found = file.get(source.dset_name)
                if not isinstance(found, h5py.Dataset):
                    why = no_dataset(file, source.dset_name) or f"no {source.dset_name} is"
                    self.fail(f"it is virtual, and in its source {there} {why}")
                self.dataset(found, depth + 1)
                ends = ()
                with suppress(RuntimeError, ValueError):  # all of it, or as much as there is
                    _, ends = source.src_space.get_select_bounds()
                if any(end >= size for end, size in zip(ends, found.shape, strict=False)):
                    self.fail(
                        f"it is virtual, and its source {there}:{source.dset_name} has shape "
                        f"{found.shape} by now, less than what is mapped"
                    )
            try:
                covered += source.vspace.get_select_npoints()
            except RuntimeError:  # it has no end, and grows with its source
                covered = item.size
        filled = item.id.get_create_plist().fill_value_defined()
        if covered < item.size and filled != h5py.h5d.FILL_VALUE_USER_DEFINED:
            self.fail(
                "it is virtual, its sources don't cover all of it, and no fill value was set for "
                "the rest: map it whole, or set a fillvalue"
            )

    def _beside(self, path: str, name: str) -> str:
        """The source that HDF5 finds under a name that stands in the file at `path`."""
        folders = os.environ.get("HDF5_VDS_PREFIX", "").split(":")
        folders += [os.path.dirname(path), os.getcwd(), os.path.dirname(os.path.realpath(path))]
        # Of an absolute path whose file has moved, HDF5 looks for the last part.
        last = os.path.basename(name) if os.path.isabs(name) else name
        tried = [name] if last != name else []
        tried += [os.path.join(folder, last) for folder in filter(None, folders)]
        for found in filter(os.path.exists, tried):
            return os.path.abspath(found)
        self.fail(f"it is virtual, and its source {name} is not there")

    def _allow(self, path: str, owner: str, what: str) -> None:
        """Raise where a file outside the owner's folder is read without consent."""
        folder = os.path.dirname(os.path.realpath(owner))
        inside = os.path.realpath(path).startswith(os.path.join(folder, ""))
        if not inside and not self.place.outside:
            self.fail(
                f"its {what} {path} lies outside the folder of {owner}: if you trust the "
                "file, allow it with open_array(..., outside=True)"
            )
