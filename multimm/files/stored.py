"""What a matrix on disk is, and the few things that all formats need."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from multimm.errors import FileFormatError, how_to_install, without_secrets
from multimm.files import remote
from multimm.files.identity import Source
from multimm.planning.matrix import Storage

Where = tuple[slice, ...]
Given = ParamSpec("Given")
Made = TypeVar("Made")

#: Kinds of NumPy dtype that a product is defined for: booleans, integers, floats, complex.
NUMERIC_KINDS = "biufc"
#: For messages about other elements.
HOLDS = "a matrix file holds booleans, integers, floats or complex numbers"
#: Of the system's errors HDF5 makes texts of buffers, times and numbers: what failed, and why.
_CAUSE = re.compile(r"\(([^(:,]+)[:,].*?errno = \d+, error message = '([^']*)'", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a matrix lies, or will lie, on disk."""

    path: str  #: absolute, of the file or directory; or its address (``s3://...``)
    suffix: str  #: the format, a key of `FORMATS`: an unfinished output has not its final name
    dataset: str | None  #: the array inside the file, for formats that hold several
    #: What messages call the file, where that is not its path: the address ``file://...``.
    given: str = field(default="", compare=False)
    #: An HDF5 file may have values read from other folders than its own.
    outside: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """The file as messages call it."""
        return self.given or self.path

    @property
    def remote(self) -> bool:
        """Whether it lies behind fsspec."""
        return remote.is_remote(self.path)

    def __repr__(self) -> str:
        return without_secrets(f"Location({self.path!r}, {self.suffix!r}, {self.dataset!r})")

    def __str__(self) -> str:
        return self.name if self.dataset is None else f"{self.name}:{self.dataset}"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix on disk and how to find any block of it."""

    place: Location
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  #: as stored, byte order included
    chunks: tuple[int, ...] | None = None  #: of storage; who reads part of one reads all of it
    offset: int = 0  #: bytes before the first element, where all are in one piece
    fortran: bool = False  #: columns are contiguous (.npy)
    sources: tuple[Source, ...] = ()  #: files that any block is read from, as they were opened
    #: Of each chunk file that there is, by its place in the grid: `identity.mark` (.zarr).
    states: Mapping[tuple[int, ...], int] | None = field(default=None, hash=False)
    inside: tuple[str, str] | None = None  #: file and name that links lead to (local HDF5)
    storage: Storage | None = None  #: for plans, where storage chunks are decoded as a whole

    @property
    def path(self) -> str:
        """Absolute path of the file or directory."""
        return self.place.path

    @property
    def dataset(self) -> str | None:
        """The array inside the file."""
        return self.place.dataset

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def causes_stay(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """Have a function's errors of a remote matrix, or place, come without those behind them.

    Those name addresses with passwords, and aiohttp's do not travel between processes.
    """

    @functools.wraps(call)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        try:
            return call(*args, **kwargs)
        except FileFormatError as error:
            given: Any = args[0]
            if not getattr(given, "place", given).remote:
                raise
            failed = error
        failed.__cause__ = failed.__context__ = None
        raise failed  # behind the `except`, which would put them there again

    return run


def reason(error: BaseException) -> str:
    """The first sentence of an error's text, or its type where it has none."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    if cause := _CAUSE.search(text):
        return ": ".join(cause.groups())
    first, *more = text.strip().splitlines() or [type(error).__name__]
    return " ".join([first, *more[:1]]) if first.endswith(":") else first


def allocate(descriptor: int, size: int) -> None:
    """Take the space of a new file at once, where its lack is an error before any work is done."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems without it
            raise


def package(name: str) -> Any:
    """An optional package, or the sentence that says how to install it."""
    try:
        return import_module(name)
    except ImportError:
        raise FileFormatError(
            f"this format needs the package {name}, which is not installed: {how_to_install('io')}"
        ) from None


def few(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    more = len(names) - 10
    return ", ".join(names[:10]) + (f" and {more} more" if more > 0 else "")


def choose_dataset(place: Location, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The dataset that was asked for, or the only matrix in the file."""
    listed = ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items())) or "none"
    if place.dataset is not None:
        if place.dataset not in shapes:
            raise FileFormatError(f"{place.name}: no dataset {place.dataset!r}; it holds: {listed}")
        return place.dataset
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 or len(shapes) == 1]
    if len(matrices) != 1:
        raise FileFormatError(
            f"{place.name}: holds {len(matrices)} matrices, so one must be named, as in "
            f"{Path(place.path).name}:/NAME; datasets: {listed}"
        )
    return matrices[0]
