"""Who may read and write what is put in the place of something else: whoever could before."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from multimm.files.zarr import METADATA


class Access(NamedTuple):
    """Owner, group and permission bits of files, and of folders of a store."""

    user: int
    group: int
    file: int
    folder: int

    def give(self, path: Path) -> None:
        """Set them for one file or folder, as far as this user may."""
        for owner in ((self.user, -1), (-1, self.group)):
            with suppress(PermissionError):
                os.chown(path, *owner)
        found = path.stat()
        mode = self.folder if stat.S_ISDIR(found.st_mode) else self.file
        if found.st_gid != self.group:  # another group gets what everybody has
            mode = mode & ~0o070 | (mode & 0o007) << 3
        path.chmod(mode)

    def give_all(self, path: Path) -> None:
        """Set them for a file, or for all that is in a folder, and at last the folder."""
        for folder, _, files in os.walk(path, topdown=False):
            for name in files:
                self.give(Path(folder, name))
            self.give(Path(folder))
        if not path.is_dir():
            self.give(path)


def access_of(path: Path) -> Access | None:
    """What a file or a store has; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        return Access(found.st_uid, found.st_gid, mode, mode)
    files = [path / name for name in METADATA if (path / name).is_file()]
    file = stat.S_IMODE(files[0].stat().st_mode) if files else mode & 0o666
    return Access(found.st_uid, found.st_gid, file, mode)
