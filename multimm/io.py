"""Matrices on disk as Dask arrays, lazily in and out, one task per block.

Reading: every block is a root task that opens the file, copies its own part and closes it.
Writing: every block is written by the task that follows its computation, into an unfinished
sibling of the target that gets the final name only when all is done. Neither side ever holds
more than a block, so matrices larger than memory pass through.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import dask.array as da
from dask.base import compute, is_dask_collection
from dask.utils import format_bytes

from multimm import files
from multimm.errors import FileFormatError, OptionError, ShapeError
from multimm.files import FORMATS, graph, identity, raw
from multimm.files.output import commit, hdf5, replaceable, zarr
from multimm.files.output.permissions import Access, access_of
from multimm.files.output.target import Target
from multimm.files.output.unfinished import Claim, remove
from multimm.files.stored import HOLDS, NUMERIC_KINDS, StoredMatrix, reason
from multimm.operands import as_array, as_dask, check_query_planning, check_waits
from multimm.planning.tiling.grid import is_regular

__all__ = ["Output", "open_array", "save_array"]

PathLike = str | os.PathLike[str]
#: Times that a target may come or go just when an output gets its name; arbitrary.
TRIES = 100


def __dir__() -> list[str]:
    return sorted(__all__)


def open_array(
    path: PathLike,
    *,
    dataset: str | None = None,
    chunks: int | Sequence[Any] | Mapping[int, Any] | str | None = None,
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
        read through fsspec, where the package for them is installed. Endpoints, credentials and
        certificates come from the environment of each process (``AWS_ENDPOINT_URL``,
        ``SSL_CERT_FILE``, ``FSSPEC_S3_ANON=true``) or from its own configuration files.
    dataset : str, optional
        Array inside a ``.zarr`` group or an HDF5 file, also behind its links;
        ``"file.h5:/name"`` and ``"store.zarr/group/name"`` say the same. Default: the only matrix
        in there.
    chunks : int, tuple, dict, "auto" or None
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
        lie outside its folder, its raw data have a relative path, or the numbers stand for others:
        times, what was never written (netCDF), or attributes ``scale_factor``, ``add_offset`` or
        ``_Unsigned`` (netCDF, xarray) that change them.
    ArrayTypeError
        `path` is no path, such as an open file, or Dask's array query planning is switched on.
    ShapeError
        `chunks` that do not fit the matrix.
    OptionError
        Dask's setting ``array.chunk-size`` is no size; `gpu` without CuPy.

    Warns
    -----
    UserWarning
        An attribute ``_FillValue`` or ``missing_value`` other than NaN: where values are missing,
        that number is read. ``valid_range``, ``valid_min`` or ``valid_max``: values outside are
        read, too. The ``fill_value`` of Zarr itself is what unwritten chunks hold; in
        Zarr 2 xarray has it stand for missing values as well.
    UserWarning
        Changes would go unnoticed: of remote objects without a tag or a time of their last change,
        and of the chunks of a Zarr array over HTTP with more than 4096 of them.
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
    that was written and leaves an existing file as it was. What a process that is killed leaves,
    ``.multimm-....partial``, the next `Output` of the same target removes.

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
        Name inside the file; ``"file.h5:/name"`` says the same. It is added to what a file, or a
        group of a store, holds, and groups above it are made. HDF5 files are copied for that.
        Default: ``"C"`` in a new HDF5 file, an unnamed array in a new store.
    overwrite : bool
        Replace what exists, only on success: the array of that name, or, without a name, a file
        that holds one array and nothing else. Permission bits stay, the group too where it can. So
        do the array's attributes, but for those that say what the old numbers stood for (a scale, a
        fill value, a time), and names of axes. An HDF5 dataset with dimension scales is refused.

    Raises
    ------
    FileFormatError
        Unsupported suffix, netCDF, a remote address, missing or unwritable folder, a target that
        exists, no such array to replace, one that holds more than would be replaced, or another
        run that is writing it.
    """

    def __init__(
        self, path: PathLike, *, dataset: str | None = None, overwrite: bool = False
    ) -> None:
        place = files.locate(path, dataset)
        if place.remote:
            raise FileFormatError(
                f"{place.name}: remote addresses are read and not written; write to a local path "
                "and copy it, or use dask.array.to_zarr(c, url)"
            )
        # Through links, so that the unfinished file lies on the file system of the real target.
        self.path = Path(os.path.realpath(place.path))
        self.overwrite = overwrite
        self._named = replace(place, path=str(self.path))
        self._format = FORMATS[place.suffix]
        self._target = self._find()
        self._claim = Claim(self._target.name, self._target.folder)
        if self._claim.check():
            self._target = self._find()
        self._matrix: StoredMatrix | None = None
        self._unfinished: Path | None = None
        self._marks: Path | None = None  #: which blocks are written
        self._made: os.stat_result | None = None
        self._access: Access | None = None
        self._copied: identity.State = ()

    def _find(self) -> Target:
        for _ in range(TRIES):
            with suppress(FileNotFoundError):  # it is replaced while it is looked at
                return replaceable.find(self._named, overwrite=self.overwrite)
        raise self._unsettled()

    @property
    def regular(self) -> bool:
        """The format wants blocks of one size; `store` cuts others again, at a cost."""
        return self._format.regular

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
            Too little disk space, a dtype that the format lacks, a file that cannot be
            created, or another run that is writing to the same target.
        ArrayTypeError
            Sparse or masked blocks; lazy objects other than Dask arrays and xarray's DataArrays.
        ShapeError
            Unknown chunk sizes or no dimension.

        Of a block that is not what its array declares, the task that writes it raises
        `ShapeError`, `DTypeError` or `ArrayTypeError`; where the disk is full, `FileFormatError`.
        """
        array = as_dask(as_array(_held(array), "array", lazily=True))
        if array.dtype.kind not in NUMERIC_KINDS:
            raise FileFormatError(
                f"{self.path}: elements are {array.dtype}; {HOLDS}; convert first, for instance "
                "with astype('float32')"
            )
        if array.ndim == 0:
            raise ShapeError("cannot write an array of shape (): it needs at least one dimension")
        if self.regular and not all(map(is_regular, array.chunks)):
            # Two tasks must never write parts of one storage chunk.
            array = array.rechunk(tuple(max(sizes) for sizes in array.chunks))
        self._matrix = self._create(array)
        machine = raw.machine(self._matrix.path)
        writer = graph.Writer(str(self._named), machine, str(self._marks))
        return graph.writes(self._matrix, array, writer)

    def _create(self, array: da.Array) -> StoredMatrix:
        self.discard()  # of an earlier call, which failed perhaps
        found = self._target = self._find()
        self._claim = Claim(found.name, found.folder)
        self._check_space(int(array.nbytes))
        self._claim.take()
        self._unfinished, self._made = self._claim.new_path(), None
        self._marks = self._claim.new_path("marks")
        place = replace(self._named, path=str(self._unfinished), dataset=found.inner)
        chunks = graph.storage_chunks(array) if self.regular else None
        matrix = StoredMatrix(place, array.shape, array.dtype, chunks)
        try:
            self._begin(self._unfinished)
            self._marks.write_bytes(bytes(array.npartitions))
            written = self._format.create(matrix, found)
        except FileFormatError:
            raise
        except Exception as error:  # HDF5's of a full disk may be a RuntimeError
            full = isinstance(error, OSError | RuntimeError)
            todo = "make room, or write elsewhere" if full else "choose another format, or astype"
            raise FileFormatError(
                f"{self.path}: cannot be created for {array.dtype} {array.shape} "
                f"({reason(error)}): {todo}"
            ) from error
        if written.dtype.newbyteorder("=") != matrix.dtype.newbyteorder("="):
            raise FileFormatError(
                f"{self.path}: {place.suffix} has no {matrix.dtype}; convert first, "
                "for instance with astype('float32')"
            )
        return written

    def _check_space(self, nbytes: int) -> None:
        found = self._target
        needed = nbytes + (found.unit.stat().st_size if found.keeps else 0)
        free = shutil.disk_usage(found.folder).free
        if needed > free:
            copied = " with a copy of what it holds" if found.keeps else ""
            raise FileFormatError(
                f"{self.path}: needs {format_bytes(needed)} ({needed:,} bytes){copied}, "
                f"{format_bytes(free)} are free in {found.folder}"
            )

    def _begin(self, unfinished: Path) -> None:
        """Make an empty file or folder, or a copy of what is there.

        Nobody else may look into what replaces something: at the end it is as open as that was.
        """
        replaces = self._target.replaces
        self._access = access_of(self._target.unit) if replaces else None
        if self.regular:
            unfinished.mkdir(0o700 if replaces else 0o777)
        else:
            unfinished.touch(0o600 if replaces else 0o666, exist_ok=False)
        self._made = os.stat(unfinished)
        if self._target.keeps:
            self._copied = hdf5.copy(self._target.unit, unfinished)

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

        When it returns, the file and its name are on the disk: also a crash of the machine leaves
        it whole. Until then the older one is.

        Raises
        ------
        FileFormatError
            Not all blocks were written, the target came into being or changed meanwhile, the disk
            is full, or the folder does not let it be replaced.
        OptionError
            Nothing was stored.
        """
        self._stored()
        try:
            self._finish()
        except OSError as error:
            raise FileFormatError(
                f"{self.path}: cannot be put in place ({reason(error)})"
            ) from error
        self._matrix = None
        self.discard()
        return self.path

    def _finish(self) -> None:
        unfinished = self._unfinished
        assert unfinished is not None
        self._check_written()
        access = access_of(self._meanwhile().unit) or self._access  # of what is gone by now
        if access is not None:
            access.give_all(unfinished)
        commit.sync(unfinished)
        # A store is one folder, to which others may be adding, or which they may be replacing.
        with commit.in_turn(self.path.parent) if self.regular else nullcontext():
            self._put(unfinished)

    def _check_written(self) -> None:
        assert self._marks is not None
        marks = self._marks.read_bytes()
        if missing := marks.count(0):
            raise FileFormatError(
                f"{self.path}: {missing:,} of {len(marks):,} blocks were not written: compute all "
                "of what store() gives before commit()"
            )

    def _put(self, unfinished: Path) -> None:
        for _ in range(TRIES):
            found = self._meanwhile()
            # A group that was to be made has come into being: what is in ours goes into that.
            source = unfinished / os.path.relpath(found.unit, self._target.unit)
            try:
                if found.replaces:
                    self._exchange(source, found)
                else:
                    commit.put_new(source, found.unit)
                    raw.sync_one(found.unit.parent)
            except (FileExistsError, FileNotFoundError):
                if not source.exists():
                    raise
                continue  # it came or went just now
            self._consolidate(found)
            return
        raise self._unsettled()

    def _unsettled(self) -> FileFormatError:
        return FileFormatError(f"{self.path}: comes and goes; choose another name")

    def _meanwhile(self) -> Target:
        """What the target is by now; an error where what is written is no longer for that."""
        found, planned = self._find(), self._target
        kept = found.keeps == planned.keeps
        if kept and planned.keeps:
            kept = hdf5.state(planned.unit) == self._copied
        fits = found.unit.is_relative_to(planned.unit) and (
            found.unit == planned.unit or found.zarr_format == planned.zarr_format
        )
        if not kept or not fits:
            raise FileFormatError(
                f"{self._named}: {self.path.name} changed while it was written, and was left as it "
                "is; write again, or to another file"
            )
        return found

    def _exchange(self, source: Path, found: Target) -> None:
        """Put `source` in the place of what is there, which goes if it may."""
        if commit.exchange(source, found.unit):
            older = source
            try:
                self._check_older(found, older)
            except BaseException:
                commit.exchange(source, found.unit)
                raise
        else:
            self._check_older(found, found.unit)
            older = self._claim.new_path("replaced")
            try:
                commit.replace(source, found.unit, older)
            except FileExistsError:
                remove(older)
                raise
        raw.sync_one(found.unit.parent)
        remove(older)

    def _check_older(self, found: Target, path: Path) -> None:
        if not found.keeps:
            replaceable.check(self._named, path, found.unit)
        elif hdf5.state(path)[:-1] != self._copied[:-1]:  # renaming sets the last time
            raise FileFormatError(
                f"{self._named}: {self.path.name} changed just now, and was left as it is; write "
                "again, or to another file"
            )

    def _consolidate(self, found: Target) -> None:
        if found.unit == found.store or not self.regular:
            return
        try:
            zarr.consolidate(found.store, found.unit)
        except Exception as error:  # the library raises anything on a group that is damaged
            raise FileFormatError(
                f"{self._named}: written, but the store's consolidated metadata are not up to date "
                f"({reason(error)}); call zarr.consolidate_metadata"
            ) from error

    def discard(self) -> None:
        """Remove what was written and not committed, and let others write."""
        # First: a task that still writes misses them afterwards.
        if self._marks is not None:
            remove(self._marks)
            self._marks = None
        if self._unfinished is not None:
            with suppress(FileNotFoundError):
                # Another one has the name if the last step was not done: what was there before.
                if self._made and os.path.samestat(os.stat(self._unfinished), self._made):
                    remove(self._unfinished)
            self._unfinished = None
        self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


def _held(x: Any) -> Any:
    """The Dask array in a lazy DataArray or Variable of xarray; anything else as it is."""
    labelled = type(x).__module__.startswith("xarray.") and hasattr(x, "data")
    return x.data if labelled and is_dask_collection(x) else x
