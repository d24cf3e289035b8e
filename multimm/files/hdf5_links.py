"""Which files an HDF5 dataset is read from: behind links, virtual datasets and raw storage.

HDF5 gives fill values, without a word, for a source that is not there and for what no source
covers. Here each source is looked for in the places that HDF5 looks in, and must be there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

from multimm.errors import FileFormatError
from multimm.files.identity import ABSENT, Source, state
from multimm.files.netcdf import is_partly_written
from multimm.files.remote import is_remote
from multimm.files.stored import Inside, Location, package

#: Links, or virtual datasets, behind each other: arbitrary, HDF5 itself follows 16 links.
DEEPEST = 16


class Search:
    """The files that reading one dataset touches, found by walking to it; `stack` closes them."""

    def __init__(self, place: Location, stack: ExitStack) -> None:
        self.place = place
        self.stack = stack
        self.sources: dict[str, Source] = {}
        self.files: dict[str, Any] = {}

    def file(self, path: str) -> Any:
        """An HDF5 file of these, opened once; its state counts from before that."""
        if path not in self.files:
            self.add(path)
            self.files[path] = self.stack.enter_context(package("h5py").File(path, "r"))
        return self.files[path]

    def add(self, path: str) -> None:
        """Remember the state of a file that is read."""
        if path not in self.sources:
            found = state(path)
            if found == ABSENT:
                self.fail(f"its source {path} is not there")
            self.sources[path] = Source(path, found)

    def fail(self, why: str) -> NoReturn:
        """Raise what is wrong."""
        raise FileFormatError(f"{self.place}: {why}")

    def walk(self, file: Any, path: str, name: str, depth: int = 0) -> tuple[Any, str]:
        """The object of that name and the file it lies in; links are followed one by one.

        Raises KeyError where there is no such name, FileFormatError for a link to nowhere.
        """
        h5py = package("h5py")
        if depth > DEEPEST:
            self.fail(f"its links go round in circles, or are more than {DEEPEST} deep")
        item: Any = file["/"]
        for part in name.split("/"):
            if part in ("", "."):
                continue
            if not isinstance(item, h5py.Group):
                raise KeyError(part)
            link = item.get(part, getlink=True)
            if link is None:
                raise KeyError(part)
            if isinstance(link, h5py.ExternalLink):
                if is_remote(path):
                    self.fail(
                        f"the link {part} leads to another file, {link.filename}, which nobody "
                        "follows from an address; copy both to a local folder"
                    )
                there = self.beside(path, str(link.filename), "HDF5_EXT_PREFIX")
                if there is None:
                    self.fail(f"the link {part} leads to the file {link.filename}: not there")
                path, target = there, str(link.path)
                item, path = self._follow(self.file(path), path, target, part, depth)
            elif isinstance(link, h5py.SoftLink):
                target = str(link.path)
                if not target.startswith("/"):
                    target = f"{item.name}/{target}"
                item, path = self._follow(item.file, path, target, part, depth)
            else:
                item = item[part]
        return item, path

    def _follow(self, file: Any, path: str, target: str, link: str, depth: int) -> tuple[Any, str]:
        try:
            return self.walk(file, path, target, depth + 1)
        except KeyError:
            self.fail(f"the link {link} leads to {target} in {path}: nothing is there")

    def beside(self, path: str, name: str, variable: str) -> str | None:
        """The file that HDF5 finds under a name that stands in the file at `path`."""
        for folder in self.folders(path, name, variable):
            found = os.path.join(folder, name)
            if os.path.exists(found):
                return os.path.abspath(found)
            # Of an absolute path whose file has moved, HDF5 looks for the last part.
            found = os.path.join(folder, os.path.basename(name))
            if os.path.isabs(name) and os.path.exists(found):
                return os.path.abspath(found)
        return None

    @staticmethod
    def folders(path: str, name: str, variable: str) -> Iterator[str]:
        """Where HDF5 looks, in its order."""
        if os.path.isabs(name) and os.path.exists(name):
            yield "/"
        yield from filter(None, os.environ.get(variable, "").split(":"))
        yield os.path.dirname(path)
        yield os.getcwd()
        yield os.path.dirname(os.path.realpath(path))

    def allow(self, path: str, owner: str, what: str) -> None:
        """Raise where a file outside the owner's folder is read without consent."""
        folder = os.path.dirname(os.path.realpath(owner))
        inside = os.path.realpath(path).startswith(os.path.join(folder, ""))
        if not inside and not self.place.outside:
            self.fail(
                f"its {what} {path} lies outside the folder of {owner}: if you trust the file, "
                "allow it with open_array(..., outside=True) (--outside)"
            )

    def dataset(self, item: Any, path: str, depth: int = 0) -> Inside:
        """Find and check all that a dataset is read from."""
        if depth > DEEPEST:
            self.fail(f"its virtual datasets are more than {DEEPEST} deep")
        made = item.id.get_create_plist()
        raw = self._raw(item, made, path)
        if item.is_virtual:
            self._virtual(item, made, path, depth)
        elif not made.get_external_count():
            self._unwritten(item, made)
        return Inside(path, item.name, raw)

    def _raw(self, item: Any, made: Any, path: str) -> str:
        """The folder of raw files, each of which must be there and long enough."""
        folder, relative = "", False
        h5f = package("h5py").h5f
        needed = item.size * item.dtype.itemsize
        for number in range(made.get_external_count()):
            name, offset, size = made.get_external(number)
            name = os.fsdecode(name)
            relative = relative or not os.path.isabs(name)
            options = [
                *filter(None, [os.environ.get("HDF5_EXTFILE_PREFIX", "")]),
                os.getcwd(),
                os.path.dirname(path),
            ]
            if folder:
                options = [folder]
            found = [at for at in options if os.path.exists(os.path.join(at, name))]
            if not found:
                self.fail(f"its raw data {name} are not there")
            folder = found[0]
            raw = os.path.abspath(os.path.join(folder, name))
            self.allow(raw, path, "raw data")
            self.add(raw)
            part = needed if size == h5f.UNLIMITED else min(size, needed)
            needed -= part
            if os.stat(raw).st_size < offset + part:
                self.fail(
                    f"its raw data {raw} are truncated: {offset + part:,} bytes promised, "
                    f"{os.stat(raw).st_size:,} there"
                )
        return folder if relative else ""

    def _unwritten(self, item: Any, made: Any) -> None:
        """Raise where HDF5 would give whatever lies in memory for what was never written."""
        h5d = package("h5py").h5d
        undefined = made.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
        if not (undefined or made.get_fill_time() == h5d.FILL_TIME_NEVER) or not item.size:
            return
        if is_partly_written(item):
            self.fail(
                "parts of it were never written, and it has no fill value: nothing says what "
                "stands there; write them, or set a fill value"
            )

    def _virtual(self, item: Any, made: Any, path: str, depth: int) -> None:
        """Check each source of a virtual dataset, and that they cover it."""
        h5d = package("h5py").h5d
        covered = 0
        for source in item.virtual_sources():
            counted = "%b" in source.file_name or "%b" in source.dset_name
            number = 0
            while True:
                file = source.file_name.replace("%b", str(number)).replace("%%", "%")
                name = source.dset_name.replace("%b", str(number)).replace("%%", "%")
                if not self._source(source, file, name, path, depth, last=counted and number > 0):
                    break
                number += 1
                if not counted:
                    break
            unlimited = counted or not _limited(source.vspace)
            covered += item.size if unlimited else source.vspace.get_select_npoints()
        filled = made.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED
        if covered < item.size and not filled:
            self.fail(
                "it is virtual, its sources don't cover all of it, and no fill value was set for "
                "the rest: map it whole, or set a fillvalue"
            )

    def _source(
        self, source: Any, file: str, name: str, path: str, depth: int, *, last: bool
    ) -> bool:
        """Check one source; give False where it is missing and the one before was the last."""
        there = path if file == "." else self.beside(path, file, "HDF5_VDS_PREFIX")
        if there is None:
            if last:
                return False
            self.fail(f"it is virtual, and its source {file} is not there")
        self.allow(there, path, "virtual source")
        try:
            item, inner = self.walk(self.file(there), there, name)
        except KeyError:
            if last:
                return False
            self.fail(f"it is virtual, and its source {there} has no dataset {name}")
        if (
            _limited(source.src_space)
            and source.src_space.get_select_type() != package("h5py").h5s.SEL_ALL
        ):
            _, ends = source.src_space.get_select_bounds()
            if len(ends) != item.ndim or any(
                end >= size for end, size in zip(ends, item.shape, strict=False)
            ):
                self.fail(
                    f"it is virtual, and its source {there}:{name} has shape {item.shape} by now, "
                    "less than what is mapped"
                )
        self.dataset(item, inner, depth + 1)
        return True


def _limited(space: Any) -> bool:
    """Whether a selection has an end, and does not follow what its sources grow to."""
    h5s = package("h5py").h5s
    if space.get_select_type() != h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return True
    return h5s.UNLIMITED not in {
        number for numbers in space.get_regular_hyperslab() for number in numbers
    }
