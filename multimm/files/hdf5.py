""".h5, .hdf5: named datasets in one file; .nc to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from multimm.errors import FileFormatError
from multimm.files import netcdf, remote
from multimm.files.cf_attributes import carried, check_meaning
from multimm.files.hdf5_links import Search, no_dataset
from multimm.files.identity import Source, State, check, settled, state
from multimm.files.storage_chunks import of_hdf5
from multimm.files.stored import (
    HOLDS,
    Location,
    StoredMatrix,
    Where,
    choose_dataset,
    package,
)


@contextmanager
def _read_from(path: str) -> Iterator[Any]:
    """The open file at a local path or an address."""
    with ExitStack() as stack:
        content = stack.enter_context(remote.opened(path)) if remote.is_remote(path) else path
        yield stack.enter_context(package("h5py").File(content, "r"))


def inspect(place: Location) -> StoredMatrix:
    """Shape, dtype and layout, without reading an element."""
    _refuse_netcdf3(place)
    matrix, attributes = settled(partial(_found, place))
    return replace(matrix, dtype=check_meaning(matrix.place, matrix.dtype, attributes))


def _found(place: Location) -> tuple[tuple[StoredMatrix, dict[str, Any]], list[State]]:
    """The matrix as it is stored and what its attributes say of it, and the states of its files."""
    first = Source(place.path, state(place.path))  # from before it is opened
    with _read_from(place.path) as file:
        found = replace(place, dataset=place.dataset or _only_name(place, file))
        item = _dataset(found, file)
        _refuse_kinds(found, item)
        netcdf.check(found, item)
        search = Search(found, first)
        search.dataset(item)
        known = tuple(search.sources.values())
        matrix = StoredMatrix(
            found,
            item.shape,
            item.dtype,
            item.chunks,
            sources=known,
            inside=_inside(found, item),
            storage=of_hdf5(item),
        )
        return (matrix, carried(item.attrs)), [found for _, found in known]


def _inside(place: Location, item: Any) -> tuple[str, str] | None:
    """The local file, and the name in there, that links lead to."""
    return None if place.remote else (str(item.file.filename), str(item.name))


def _only_name(place: Location, file: Any) -> str:
    """The only matrix in a file, or the only thing that has a name."""
    shapes = _listed(file)
    return next(iter(file)) if not shapes and len(file) == 1 else choose_dataset(place, shapes)


def _dataset(place: Location, file: Any) -> Any:
    """The dataset of that name, behind all links."""
    h5py, name = package("h5py"), place.dataset or ""
    with suppress(KeyError, OSError, RuntimeError):  # as HDF5 says that nothing is there
        if isinstance(item := file[name], h5py.Dataset):
            # Behind an address HDF5 looks for what another file has in this one.
            if place.remote and item.file.filename != file.filename:
                raise _elsewhere(place, item.file.filename)
            return item
    link = file.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink) and place.remote:
        raise _elsewhere(place, link.filename)
    if why := no_dataset(file, name):
        raise FileFormatError(f"{place}: {why}")
    choose_dataset(place, _listed(file))  # says what there is
    raise KeyError(name)


def _elsewhere(place: Location, other: str) -> FileFormatError:
    return FileFormatError(
        f"{place}: the link {place.dataset} leads to another file, {other}, which nobody follows "
        "from an address; copy both to a local folder"
    )


def _refuse_kinds(place: Location, item: Any) -> None:
    """Raise for elements that h5py gives as numbers, or as objects, though they are others."""
    h5py = package("h5py")
    if item.shape is None:
        raise FileFormatError(f"{place}: an empty dataset, without a shape: name another")
    if h5py.check_string_dtype(item.dtype) is not None:
        raise FileFormatError(f"{place}: elements are texts; {HOLDS}")
    if h5py.check_vlen_dtype(item.dtype) is not None:
        raise FileFormatError(f"{place}: elements are lists of any length; {HOLDS}")


def _listed(file: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all datasets, each once, also behind links at the top level."""
    h5py = package("h5py")
    shapes: dict[str, tuple[int, ...]] = {}
    seen = set()

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None and item not in seen:
            seen.add(item)
            shapes[name] = item.shape

    file.visititems(add)
    for name in file:
        with suppress(KeyError, OSError, RuntimeError):  # a link that leads nowhere
            add(name, item := file[name])
            if isinstance(item, h5py.Group):
                item.visititems(lambda inner, x, above=name: add(f"{above}/{inner}", x))
    return shapes


def _refuse_netcdf3(place: Location) -> None:
    with remote.open_bytes(place.path) as file:
        start = file.read(3)
    if start == b"CDF":
        raise FileFormatError(
            f"{place.name}: netCDF 3, which is no HDF5: convert it (nccopy -k nc4), or open it "
            "with xarray and multiply x.data"
        )


def read(matrix: StoredMatrix, index: Where, _: int = 1) -> Any:
    """A copy of one block, of the files that were opened; HDF5 lets one thread in at a time."""
    check(matrix.sources)
    with _read_from(matrix.path) as file:
        item = file[matrix.dataset]
        if (item.shape, _inside(matrix.place, item)) != (matrix.shape, matrix.inside):
            raise FileFormatError(
                f"{matrix.place}: is another dataset than when it was opened, of shape "
                f"{item.shape}; open it again"
            )
        block = item[index]
        netcdf.check_block(matrix.place, item, block)
    check(matrix.sources)  # written to meanwhile
    return block
