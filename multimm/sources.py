"""Operands that are read or put together only when their product is computed.

Beside a Dask array nothing is read at the call: what can be sliced (a `zarr.Array`, an
`h5py.Dataset`, a variable of netCDF, a lazy `xarray.DataArray`) becomes a Dask array of its parts,
and a NumPy array that is large or mapped from a file is neither copied nor looked at.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import uuid
from collections import UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import dask.array as da
import numpy as np
from dask.array.core import Array, normalize_chunks, slices_from_chunks
from dask.utils import SerializableLock

from multimm.blocks import dense_form, is_sparse, plain
from multimm.errors import ArrayTypeError, FileFormatError, one_line
from multimm.settings import auto
from multimm.shapes import auto_of_empty

Where = tuple[slice, ...]

#: Bytes up to which a NumPy array is copied at the call, and named after its elements: it may be
#: changed afterwards, and the same call gives the same keys. Both take 20 ms for so many. Of larger
#: ones, blocks are views. Arbitrary.
COPIED = 2**24
#: What NumPy stacks the elements of, and may hold Dask arrays: the last ones of a stream, say.
NESTED = (list, tuple, deque, UserList)
#: Levels of lists in lists that are looked at: NumPy has no more dimensions.
DEPTH = 64
#: netCDF's library runs in one thread at a time, whatever file it reads.
_NETCDF = "multimm-netcdf"
#: Of a part of what can be sliced, for messages.
READ = "what is read of an operand"


def elements(x: Any, depth: int = DEPTH) -> Iterator[Any]:
    """What lists and tuples hold, however deep; anything else itself."""
    if not isinstance(x, NESTED) or not depth:
        yield x
        return
    for item in x:
        if type(item) not in (float, int):  # of long lists of numbers
            yield from elements(item, depth - 1)


def is_source(x: Any) -> bool:
    """Whether parts of it can be read by slices, and NumPy would read all of it to convert it."""
    kind = type(x)
    if isinstance(x, np.ndarray | np.generic) or kind.__module__.startswith(("pandas.", "cupy")):
        return False  # a pandas object is in memory, and its slices go by labels
    if not (hasattr(kind, "__getitem__") and hasattr(x, "dtype")) or getattr(x, "_in_memory", None):
        return False  # xarray's says so of data that is NumPy's
    shape = getattr(x, "shape", ())
    if not (isinstance(shape, tuple) and shape and all(isinstance(n, Integral) for n in shape)):
        return False
    try:
        np.dtype(x.dtype)
    except TypeError:
        return False  # a tensor of PyTorch, say, which is in memory
    return True


class Source:
    """Something that can be sliced, as `dask.array.from_array` takes it."""

    def __init__(
        self, source: Any, shape: Any = None, dtype: Any = None, chunks: Any = None
    ) -> None:
        self.source = source
        self.shape: tuple[int, ...] = tuple(map(int, source.shape)) if shape is None else shape
        self.ndim = len(self.shape)
        #: Reads the same when its user has closed the file, as `with h5py.File(...)` does.
        self.opener = _opener(source)
        self.dtype = np.dtype(self._dtype() if dtype is None else dtype)
        found = getattr(source, "shards", None) or getattr(source, "chunks", None)
        self.chunks = chunks if chunks is not None else found if _are_sizes(found) else None

    def _dtype(self) -> Any:
        """Of what slices are: netCDF4 unpacks numbers that it stores as integers."""
        try:
            return self[(slice(0, 0),) * self.ndim].dtype
        except ArrayTypeError:
            raise
        except Exception:  # whatever it raises where nothing can be read, too
            return self.source.dtype

    def __getitem__(self, where: Any) -> Any:
        """A part of it, as a dense array; masked elements are refused."""
        part = self._read(where)
        if is_sparse(part):
            plain(part, READ, f"read it, and pass {dense_form(part, 'it')}")
        part = np.asanyarray(part)
        if isinstance(part, np.ma.MaskedArray) and not np.ma.is_masked(part):
            part = part.data  # netCDF4 returns nothing else, whether elements are missing or not
        missing = isinstance(part, np.ma.MaskedArray)
        fill = "elements are missing: read it, and pass what numpy.ma.filled(it, value) returns"
        return plain(part, READ, fill if missing else "")

    def _read(self, where: Any) -> Any:
        try:
            return self.source[where]
        except Exception:  # whatever its library raises of a file that is closed
            if self.opener is None:
                raise
            return self.opener[where]

    def __reduce__(self) -> tuple[Any, ...]:
        """For workers: files are opened there, and what cannot travel is read first."""
        try:
            moved = self._elsewhere()
        except Exception:  # pickle passes on whatever an object raises
            moved = None
        if moved is None:
            moved = self[(slice(None),) * self.ndim]
        return Source, (moved, self.shape, self.dtype, self.chunks)

    def _elsewhere(self) -> Any:
        """What reads the same in another process; None, or an error, if nothing does."""
        if _of_this_process(self.source):
            return None
        if self.opener is None:
            return _pickled(self.source)
        if self.opener.is_written():  # netCDF's library does not say how it opened a file
            return None
        self.opener[(slice(0, 0),) * self.ndim]  # a name of what lies in memory, say, opens nothing
        return self.opener


@dataclass
class OpenedForEachRead:
    """An array in a file, on a worker: the file is open only while a part is read."""

    library: str  #: module with the class of files
    opened: str  #: that class
    path: str
    name: str  #: of the array in the file
    settings: dict[str, Any]  #: methods that are called with a value each, to read as the original

    def is_written(self) -> bool:
        """Whether it is open for writing: HDF5 locks such a file."""
        with open(self.path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a file system without locks
                return False
        return False

    def __getitem__(self, where: Any) -> Any:
        """A part of the array."""
        try:
            with getattr(import_module(self.library), self.opened)(self.path, "r") as file:
                array = file[self.name]
                for method, value in self.settings.items():
                    getattr(array, method)(value)
                return array[where]
        except (OSError, KeyError, IndexError) as error:
            raise FileFormatError(
                f"{self.path}: {self.name}, an operand, cannot be read ({one_line(error)}); leave "
                "the file as it is until the product is computed"
            ) from error


class _Anchoring(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Paths become absolute: a worker may run in another folder, where Zarr would find zeros."""

    anchored = False

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Path) or obj.is_absolute():
            return super().reducer_override(obj)
        self.anchored = True
        return type(obj), (str(obj.absolute()),)


@dataclass
class _Pickled:
    """An object that was pickled; it arrives as the object."""

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def _pickled(source: Any) -> Any:
    """The object, or one that has the same files for a process in another folder."""
    anchored, _ = _dumped(source, buffer_callback=[].append)  # which copies no array
    return _Pickled(_dumped(source)[1]) if anchored else source


def _dumped(source: Any, **how: Any) -> tuple[bool, bytes]:
    """Whether a path was made absolute, and the object as bytes."""
    with BytesIO() as file:
        pickler = _Anchoring(file, protocol=5, **how)
        pickler.dump(source)
        return pickler.anchored, file.getvalue()


def _opener(source: Any) -> OpenedForEachRead | None:
    """What reads the same array elsewhere, for objects that hold an open file.

    None where nothing can: nobody else opens a file that is being written, as HDF5 locks it.
    """
    library, kind = type(source).__module__.partition(".")[0], type(source).__name__
    if library == "h5py" and kind == "Dataset" and source.file.mode == "r" and source.name:
        path = os.path.abspath(source.file.filename)
        return OpenedForEachRead("h5py", "File", path, source.name, {})
    if library == "netCDF4" and kind == "Variable":
        group = source.group()
        name = f"{group.path.rstrip('/')}/{source.name}"
        path, reads = os.path.abspath(group.filepath()), ("mask", "scale")
        settings = {f"set_auto_{read}": getattr(source, read) for read in reads}
        return OpenedForEachRead("netCDF4", "Dataset", path, name, settings)
    return None


def _of_this_process(source: Any) -> bool:
    """Whether it is a Zarr array that each process has for itself, or would empty by opening it.

    That is one at ``memory://``, and one in a ZIP file that is open for writing.
    """
    layer = getattr(source, "store", None)
    while layer is not None:
        if type(layer).__name__ == "ZipStore" and not layer.read_only:
            return True
        if "memory" in getattr(layer, "protocol", ()):
            return True
        below = (getattr(layer, name, None) for name in ("_store", "fs", "sync_fs"))
        layer = next((one for one in below if one is not None), None)
    return False


def _are_sizes(chunks: Any) -> bool:
    return isinstance(chunks, tuple) and all(isinstance(n, Integral) and int(n) > 0 for n in chunks)


def lazily(source: Any) -> Array:
    """A Dask array of a source's parts, of which nothing has been read."""
    whole = Source(source)
    chunks = normalize_chunks(
        _auto(whole),
        whole.shape,
        dtype=whole.dtype,
        previous_chunks=whole.chunks,
    )
    netcdf = type(source).__module__.startswith(("netCDF4", "h5netcdf"))
    lock = SerializableLock(_NETCDF) if netcdf else False
    meta = np.empty((0,) * whole.ndim, whole.dtype)
    return cast(
        "Array",
        da.from_array(whole, chunks=chunks, name=False, lock=lock, asarray=False, meta=meta),
    )


def in_blocks(x: Any, limit: int | None = None) -> Array:
    """A Dask array whose blocks are views of a NumPy or CuPy array: nothing is copied or read."""
    chunks = normalize_chunks(_auto(x, limit), x.shape, limit=limit, dtype=x.dtype)
    name = f"array-{uuid.uuid4().hex}"
    places = np.ndindex(*map(len, chunks))
    blocks = {
        (name, *at): x[where] for at, where in zip(places, slices_from_chunks(chunks), strict=True)
    }
    return Array(blocks, name, chunks, meta=x)


def in_memory(x: Any) -> Array:
    """A Dask array of a NumPy or CuPy array: a small one is copied, so that it may change.

    A larger one, and what is mapped from a file, must stay as it is until the product is computed.
    """
    if x.nbytes > COPIED or _is_mapped(x):
        return in_blocks(x)
    return cast("Array", da.from_array(x, chunks=_auto(x), asarray=False))


def _auto(x: Any, limit: int | None = None) -> Any:
    """Blocks of Dask's usual size, or of so many bytes; one of Python objects, which have none."""
    if x.dtype.hasobject:
        return -1
    usual = "auto" if limit is not None else auto(x.shape, x.dtype.itemsize)
    return auto_of_empty(usual, x.shape)


def _is_mapped(x: Any) -> bool:
    """Whether the elements lie in a file: to copy or to hash them would read it."""
    while isinstance(x, np.ndarray | memoryview) and not isinstance(x, np.memmap):
        x = x.obj if isinstance(x, memoryview) else x.base
    return isinstance(x, np.memmap | mmap.mmap)


def stacked(x: Any, part: Callable[[Any], Array]) -> Array:
    """The Dask array of nested lists, each of whose elements `part` makes one of."""
    if not isinstance(x, NESTED):
        return part(x)
    return cast("Array", da.stack([stacked(item, part) for item in x]))
