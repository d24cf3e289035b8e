"""Where workers of this host keep what they spill."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multimm.gpu.runtime.trusted_files import open_folder


@contextmanager
def private_scratch() -> Iterator[None]:
    """Have nodes that are started inside take a folder of this user's alone.

    Dask would take /tmp/dask-scratch-space, whoever made it: workers load from there what they
    have spilled, and import modules that lie there. This one has the name that Dask gives it where
    another user was first, so that what a killed worker left is removed by the next one.
    """
    import dask

    base = Path(dask.config.get("temporary-directory") or tempfile.gettempdir())
    mine = base / f"dask-scratch-space-{os.geteuid()}"
    try:
        os.close(open_folder(mine, create=True))
        folder = str(mine)
    except OSError:
        folder = tempfile.mkdtemp(prefix="dask-scratch-space-", dir=base)
    with dask.config.set({"temporary-directory": folder}):
        yield
