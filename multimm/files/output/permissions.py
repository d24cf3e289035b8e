"""Who may read and write what is put in the place of something else: whoever could before."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from multimm.files.zarr import METADATA


class Access(NamedTuple):
    """Of what is replaced: owner, group and permission bits."""

    found: os.stat_result
    file: int  #: bits of the files in a folder

    def give(self, path: Path) -> None:
        """Set them for one file or folder, as far as this user may."""
        for owner in ((self.found.st_uid, -1), (-1, self.found.st_gid)):
            with suppress(PermissionError):
                os.chown(path, *owner)
        mode = stat.S_IMODE(self.found.st_mode) if path.is_dir() else self.file
        if path.stat().st_gid != self.found.st_gid:  # another group gets what everybody has
            mode = mode & ~0o070 | (mode & 0o007) << 3
        path.chmod(mode)

    def give_all(self, path: Path) -> None:
        """Set them for a file, or for all that is in a folder, and at last the folder."""
        for one in (*sorted(path.rglob("*"), reverse=True), path):
            self.give(one)


def access_of(path: Path) -> Access | None:
    """What a file or a store has; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    files = [path / name for name in METADATA if (path / name).is_file()]
    bits = files[0].stat().st_mode if files else found.st_mode
    return Access(found, stat.S_IMODE(bits) & (0o666 if path.is_dir() else 0o7777))
