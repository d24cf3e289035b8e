"""What an output will be, known before anything is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """What gets its name when all is written."""

    unit: Path  #: what is new as a whole: a file, a store, or the folder of an array or a group
    inner: str | None  #: the array's name in there
    replaces: bool  #: something has that name, and may go
    store: Path  #: the file or store that the unit is, or is in
    keeps: bool = False  #: it begins as a copy of what is there, with all that it holds (HDF5)
    zarr_format: int = 3  #: of what is replaced, or of the group that an array is added to

    @property
    def name(self) -> Path:
        """What one run writes at a time: a file, or an array in a store."""
        one_file = self.store.suffix.lower() != ".zarr"
        return self.unit if one_file else self.unit / (self.inner or "")

    @property
    def folder(self) -> Path:
        """Where the unfinished unit lies: not in a store, where readers would take it for a part.

        In the store's folder, then, if it is of the same file system.
        """
        outside = self.store.parent
        inside = self.unit.parent
        if inside == outside or (
            os.access(outside, os.W_OK | os.X_OK)
            and os.stat(outside).st_dev == os.stat(inside).st_dev
        ):
            return outside
        return inside
