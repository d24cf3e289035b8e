""".h5, .hdf5: named datasets in one file; .nc to read."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from multimm.errors import FileFormatError
from multimm.files import netcdf, remote
from multimm.files.cf_attributes import carried, check_meaning
from multimm.files.hdf5_links import Search
from multimm.files.identity import State, check, settled
from multimm.files.storage_chunks import of_hdf5
from multimm.files.stored import (
    HOLDS,
    Inside,
    Location,
    StoredMatrix,
    Where,
    choose_dataset,
    package,
)

#: In an error's text: what failed, and the system's number and sentence.
_CAUSE = re.compile(r"\(([^(:,]+)[:,].*?errno = (\d+), error message = '([^']*)'", re.DOTALL)

#: HDF5 opens a dataset a second time only with the same folder for its raw files.
RAW_FILES = threading.RLock()


@contextmanager
def opened(path: Any, mode: str) -> Iterator[Any]:
    """An open file, by its path or, of a remote one, what fsspec has opened."""
    with _told(path), package("h5py").File(path, mode) as file:
        yield file


@contextmanager
def _told(path: Any) -> Iterator[None]:
    """Of the system's errors HDF5 makes texts of buffers, times and numbers."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = _CAUSE.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[2]), f"{found[1]}: {found[3]}", path) from error


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    _refuse_netcdf3(place)
    matrix, attributes = settled(partial(_found, place))
    return replace(matrix, dtype=check_meaning(matrix.place, matrix.dtype, attributes))


def _found(place: Location) -> tuple[tuple[StoredMatrix, dict[str, Any]], list[State]]:
    """The matrix as it is stored and what its attributes say of it, and the states of its files."""
    h5py = package("h5py")
    with RAW_FILES, ExitStack() as stack:
        search = Search(place, stack)
        file = _open_first(search, stack)
        name = place.dataset
        if name is None:
            name = choose_dataset(place, _listed(file, search))
        found = replace(place, dataset=name)
        try:
            item, path = search.walk(file, place.path, name)
        except KeyError:
            choose_dataset(found, _listed(file, search))
            raise
        if not isinstance(item, h5py.Dataset):
            choose_dataset(found, _listed(file, search))
        _refuse_kinds(found, item)
        netcdf.check(found, item)
        inside = Inside(path, item.name) if place.remote else search.dataset(item, path)
        if place.remote and (item.is_virtual or item.external):
            raise FileFormatError(
                f"{found}: its values lie in other files, which HDF5 cannot reach behind an "
                "address; copy them all to a local folder"
            )
        known = tuple(search.sources.values())
        matrix = StoredMatrix(
            found,
            item.shape,
            item.dtype,
            item.chunks,
            sources=known,
            inside=inside,
            storage=of_hdf5(item),
        )
        return (matrix, carried(item.attrs)), [found for _, found in known]


def _open_first(search: Search, stack: ExitStack) -> Any:
    """The file that was named."""
    place = search.place
    if not place.remote:
        with _told(place.path):
            return search.file(place.path)
    search.add(place.path)
    content = stack.enter_context(remote.opened(place.path))
    search.files[place.path] = stack.enter_context(package("h5py").File(content, "r"))
    return search.files[place.path]


def _refuse_kinds(place: Location, item: Any) -> None:
    """Raise for elements that h5py gives as numbers, or as objects, though they are others."""
    h5py = package("h5py")
    if item.shape is None:
        raise FileFormatError(f"{place}: an empty dataset, without a shape: name another")
    of_netcdf = netcdf.is_netcdf(place, item.file)
    if of_netcdf and item.dtype.kind != "b" and h5py.check_enum_dtype(item.dtype) is not None:
        names = ", ".join(list(h5py.check_enum_dtype(item.dtype))[:4])
        raise FileFormatError(f"{place}: elements are of an enumeration ({names}, ...); {HOLDS}")
    if h5py.check_string_dtype(item.dtype) is not None:
        raise FileFormatError(f"{place}: elements are texts; {HOLDS}")
    if h5py.check_vlen_dtype(item.dtype) is not None:
        raise FileFormatError(f"{place}: elements are lists of any length; {HOLDS}")


def _listed(file: Any, search: Search) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all datasets, each once, also behind links at the top level."""
    h5py = package("h5py")
    shapes = _shapes(file)
    seen = {_identity(file[name]) for name in shapes}
    for name in file:
        if isinstance(file.get(name, getlink=True), h5py.HardLink):
            continue
        try:
            item, _ = search.walk(file, search.place.path, name)
        except (KeyError, OSError, FileFormatError) as error:
            if isinstance(error, FileFormatError) and not shapes and len(file) == 1:
                raise  # all that there is
            continue
        inner = _shapes(item) if isinstance(item, h5py.Group) else {"": item.shape}
        for part, shape in inner.items():
            one = item[part] if part else item
            if shape is not None and _identity(one) not in seen:
                seen.add(_identity(one))
                shapes[f"{name}/{part}".rstrip("/")] = shape
    return shapes


def _identity(item: Any) -> tuple[int, int]:
    """What two names of one object have in common."""
    info = package("h5py").h5o.get_info(item.id)
    return info.fileno, info.addr


def _refuse_netcdf3(place: Location) -> None:
    with remote.open_bytes(place.path) as file:
        start = file.read(3)
    if start == b"CDF":
        raise FileFormatError(
            f"{place.name}: netCDF 3, which is no HDF5: convert it (nccopy -k nc4), or open it "
            "with xarray and multiply x.data"
        )


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    h5py = package("h5py")
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            shapes[name] = item.shape

    file.visititems(visit)
    return shapes


def read(matrix: StoredMatrix, index: Where, _: int = 1) -> Any:
    """A copy of one block, of the files that were opened; HDF5 lets one thread in at a time."""
    h5py, inside = package("h5py"), matrix.inside
    assert inside is not None  # as `inspect` gives it
    check(matrix.sources)
    with ExitStack() as stack:
        content: Any = inside.path
        if remote.is_remote(inside.path):
            content = stack.enter_context(remote.opened(inside.path))
        file = stack.enter_context(opened(content, "r"))
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        if inside.raw and inside.raw != os.getcwd():
            stack.enter_context(RAW_FILES)
            access.set_efile_prefix(os.fsencode(inside.raw))
        item = h5py.Dataset(h5py.h5d.open(file.id, inside.name.encode(), access))
        if item.shape != matrix.shape:
            raise FileFormatError(
                f"{matrix.place}: has shape {item.shape} by now, and {matrix.shape} when it was "
                "opened; open it again"
            )
        block = item[index]
        netcdf.check_block(matrix.place, item, block)
    check(matrix.sources)  # written to meanwhile
    return block
