"""Matrices on disk as Dask arrays, lazily in and out, one task per block.

Reading: every block is a root task that opens the file, copies its own part and closes it.
Writing: every block is written by the task that follows its computation, into an unfinished
sibling of the target that gets the final name only when all is done. Neither side ever holds
more than a block, so matrices larger than memory pass through.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import dask.array as da
from dask.base import compute
from dask.utils import format_bytes, get_scheduler_lock

from multimm import files
from multimm.errors import FileFormatError, OptionError, ShapeError
from multimm.files import FORMATS, graph, target
from multimm.files.stored import HOLDS, NUMERIC_KINDS, StoredMatrix, reason
from multimm.operands import as_array, check_query_planning, check_waits, current_client

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


def open_array(
    path: PathLike,
    *,
    dataset: str | None = None,
    chunks: int | Sequence[Any] | str | None = None,
    gpu: bool = False,
    outside: bool = False,
) -> da.Array:
    """A matrix file as a lazy Dask array.

    What is computed later is what was opened: a task that meets a file, or a chunk, that changed
    since then raises `FileFormatError`.

    Parameters
    ----------
    path : str or path-like
        ``.npy`` (memory-mapped, C or Fortran order), ``.zarr`` directory, ``.h5``, ``.hdf5``,
        or a ``.nc`` or ``.nc4`` that is HDF5. Workers open it themselves, under the same
        absolute path. Addresses such as ``s3://bucket/x.zarr`` and ``https://host/x.npy`` are
        read through fsspec, where that is installed.
    dataset : str, optional
        Array inside a ``.zarr`` group or an HDF5 file, also behind its links;
        ``"file.h5:/name"`` and ``"store.zarr/group/name"`` say the same. Default: the only matrix
        in there.
    chunks : int, tuple, "auto" or None
        Blocks, as in `dask.array`. Default: the chunks of the file, whole multiples of them
        where they are small, up to Dask's ``array.chunk-size``.
    gpu : bool
        Blocks are CuPy arrays: each reading task moves its block to its own GPU.
    outside : bool
        Read raw data (external storage) and virtual sources of an HDF5 file that lie outside its
        folder. Say so only of files that you trust: they may name any file that you can read.

    Returns
    -------
    dask.array.Array
        Shape of the file, its dtype in native byte order; nothing has been read. Blocks of
        a Fortran-ordered ``.npy`` are Fortran-ordered.

    Raises
    ------
    FileFormatError
        No such file, not a readable matrix, no such dataset, several to choose from, the
        package for this format or address is missing, sources of an HDF5 dataset are missing or
        lie outside its folder, or the numbers stand for others: times, or attributes
        ``scale_factor``, ``add_offset`` or ``_Unsigned`` (netCDF, xarray) that change them.
    ArrayTypeError
        Dask's array query planning is switched on.
    ShapeError
        `chunks` that do not fit the matrix.

    Warns
    -----
    UserWarning
        An attribute ``_FillValue`` or ``missing_value`` other than NaN: where values are missing,
        that number is read. The ``fill_value`` of Zarr itself is what unwritten chunks hold.
    """
    check_query_planning("what open_array gives")
    matrix = files.inspect(files.locate(path, dataset, outside=outside))
    return graph.lazy(matrix, graph.blocks(matrix, chunks), gpu)


def save_array(
    array: Any, path: PathLike, *, dataset: str | None = None, overwrite: bool = False
) -> Path:
    """Compute an array and write it to a matrix file, block by block.

    Parameters
    ----------
    array : dask.array.Array, numpy.ndarray or cupy.ndarray
        At least one dimension. CuPy blocks are moved to the host as they are written.
    path, dataset, overwrite
        As in `Output`.

    Returns
    -------
    pathlib.Path
        The file written.

    Raises
    ------
    FileFormatError, ArrayTypeError, ShapeError
        As in `Output` and `Output.store`, before anything is computed.
    ShapeError, DTypeError, ArrayTypeError
        From tasks, of a block that is not what its array declares.
    ClusterError
        In the event loop of an asynchronous client, where nothing may wait.
    """
    check_query_planning("what save_array writes")
    check_waits("save_array", "multimm.io.save_array, array, path")
    with Output(path, dataset=dataset, overwrite=overwrite) as output:
        compute(output.store(array))
        return output.commit()


class Output:
    """A matrix file in the making, which gets its name only when it is complete.

    A context manager: leaving it without `commit`, for whatever reason, removes everything
    that was written and leaves an existing file as it was. A process that is killed, in Python
    by SIGTERM too, does not leave it: the unfinished file stays, as ``.NAME.partial-...``.

    >>> with Output("c.npy") as output:                                  # doctest: +SKIP
    ...     dask.compute(output.store(c))
    ...     if verify(a, b, output.open()):
    ...         output.commit()

    Parameters
    ----------
    path : str or path-like
        Target with suffix ``.npy``, ``.zarr``, ``.h5`` or ``.hdf5``. For workers on several
        hosts choose ``.zarr``: the others rely on one host's view of the file.
    dataset : str, optional
        Name inside the file. Default: ``"C"`` in HDF5, an unnamed array in Zarr.
    overwrite : bool
        Replace an existing file, as a whole and only on success: every dataset in it goes.

    Raises
    ------
    FileFormatError
        Unsupported suffix, netCDF, missing or unwritable folder, a target that exists, or one that
        holds other datasets where `dataset` (or the path) names one.
    """

    def __init__(
        self, path: PathLike, *, dataset: str | None = None, overwrite: bool = False
    ) -> None:
        place = files.locate(path, dataset)
        # Through links, so that the sibling lies on the file system of the real target.
        self.path = Path(os.path.realpath(place.path))
        self.overwrite = overwrite
        self._target = replace(place, path=str(self.path))
        target.check(self._target, overwrite=overwrite)
        if place.dataset is None and FORMATS[place.suffix].exclusive:
            place = replace(place, dataset="C")
        self._matrix: StoredMatrix | None = None
        self._unfinished = self._sibling("partial")
        self._place = replace(place, path=str(self._unfinished))

    @property
    def regular(self) -> bool:
        """The format wants blocks of one size; `store` cuts others again, at a cost."""
        return FORMATS[self._place.suffix].regular

    def _sibling(self, kind: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{kind}-{uuid.uuid4().hex[:8]}")

    def store(self, array: Any) -> da.Array:
        """Create the unfinished file and give a lazy array that, when computed, fills it.

        Called again, it begins anew.

        Parameters
        ----------
        array : dask.array.Array, numpy.ndarray or cupy.ndarray
            What to write; known chunk sizes.

        Returns
        -------
        dask.array.Array
            Booleans, one per block of `array` and in a block of its own: true once written.

        Raises
        ------
        FileFormatError
            Too little disk space, a dtype that the format lacks, or a file that cannot be
            created.
        ArrayTypeError
            Sparse or masked blocks.
        ShapeError
            Unknown chunk sizes or no dimension.

        Of a block that is not what its array declares, the task that writes it raises
        `ShapeError`, `DTypeError` or `ArrayTypeError`.
        """
        array = as_array(da.asanyarray(array), "array")
        if array.dtype.kind not in NUMERIC_KINDS:
            raise FileFormatError(
                f"{self.path}: elements are {array.dtype}; {HOLDS}; convert first, for instance "
                "with astype('float32')"
            )
        if array.ndim == 0:
            raise ShapeError("cannot write an array of shape (): it needs at least one dimension")
        if self.regular and not all(map(graph.regular, array.chunks)):
            # Two tasks must never write parts of one storage chunk.
            array = array.rechunk(tuple(max(sizes) for sizes in array.chunks))
        self._matrix = self._create(array)
        lock = _lock(array) if FORMATS[self._place.suffix].exclusive else None
        return graph.writes(self._matrix, array, lock)

    def _create(self, array: da.Array) -> StoredMatrix:
        chunks = graph.storage_chunks(array) if self.regular else None
        matrix = StoredMatrix(self._place, array.shape, array.dtype, chunks)
        free = shutil.disk_usage(self.path.parent).free
        if matrix.nbytes > free:
            raise FileFormatError(
                f"{self.path}: needs {format_bytes(matrix.nbytes)} ({matrix.nbytes:,} bytes), "
                f"{format_bytes(free)} are free in {self.path.parent}"
            )
        form = FORMATS[self._place.suffix]
        self.discard()  # of an earlier call, which failed perhaps
        try:
            form.create(matrix)
            written = form.inspect(self._place)
        except FileFormatError:
            raise
        except (OSError, ValueError, TypeError) as error:
            raise FileFormatError(
                f"{self.path}: cannot be created for {array.dtype} {array.shape} ({reason(error)})"
            ) from error
        if written.dtype.newbyteorder("=") != matrix.dtype.newbyteorder("="):
            raise FileFormatError(
                f"{self.path}: {self._place.suffix} has no {matrix.dtype}; convert first, "
                "for instance with astype('float32')"
            )
        return written

    def open(self, *, gpu: bool = False) -> da.Array:
        """What has been written so far, as `open_array` gives it; after `store`."""
        matrix = files.inspect(self._stored().place)
        return graph.lazy(matrix, graph.blocks(matrix, None), gpu)

    def _stored(self) -> StoredMatrix:
        if self._matrix is None:
            raise OptionError(
                f"{self.path}: nothing stored yet; call store() first, and compute what it gives"
            )
        return self._matrix

    def commit(self) -> Path:
        """Give the finished file its name, replacing an older one where that was allowed.

        Raises
        ------
        FileFormatError
            The target came into being meanwhile, or the folder does not let it be replaced.
        OptionError
            Nothing was stored.
        """
        self._stored()
        target.check(self._target, overwrite=self.overwrite)
        older = self._sibling("replaced")
        try:
            if self.path.is_dir():  # a directory cannot be renamed onto
                self.path.rename(older)
            self._unfinished.replace(self.path)
        except OSError as error:
            if older.exists():
                older.rename(self.path)
            raise FileFormatError(f"{self.path}: cannot be replaced ({reason(error)})") from error
        _remove(older)
        return self.path

    def discard(self) -> None:
        """Remove what was written and not committed."""
        _remove(self._unfinished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


def _lock(array: da.Array) -> Any:
    """What tasks of the scheduler that will compute can hold one at a time."""
    client = current_client()
    if client is None:
        return get_scheduler_lock(array)
    # Dask's function gives a lock within one process for a client that is given as the scheduler
    # and is not the current one, and refuses an asynchronous one in its event loop.
    from distributed import Lock

    return Lock(scheduler_rpc=client.scheduler, loop=client.loop)


def _remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not remove %s: %s", path, reason(error))
