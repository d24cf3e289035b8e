"""A script without ``if __name__ == "__main__":`` is told so: its worker processes find out."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from multimm.errors import ClusterError

UNGUARDED = (
    'multimm.cluster.start() without `if __name__ == "__main__":` in a script: worker processes '
    "import the script, and would start clusters, too; put start(), and what uses it, under that "
    "line"
)
FROM_STDIN = (
    "multimm.cluster.start() in a script that Python reads from standard input: worker processes "
    "cannot import it; save it as a file"
)
DAEMONIC = (
    "multimm.cluster.start() in a daemonic process, which may start no others: those of "
    "multiprocessing.Pool and Dask's workers are such; start the cluster in the main process, and "
    "multimm.cluster.connect() to it here, or use concurrent.futures.ProcessPoolExecutor"
)
#: In the environment of processes that `start` has started: the file by which they tell it.
VARIABLE = "MULTIMM_UNGUARDED"


@contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """What is yielded says whether a process started inside has imported such a script."""
    with TemporaryDirectory(prefix="multimm-") as folder:
        told = Path(folder) / "unguarded"
        os.environ[VARIABLE] = str(told)
        try:
            yield told.exists
        finally:
            os.environ.pop(VARIABLE, None)


def require() -> None:
    """Raise `ClusterError` in a script that worker processes cannot import, or where none may be.

    A worker process that still imports it tells the process that has started it, and ends in
    silence: that one raises the error, and a traceback of each worker would hide it. To go on would
    hang, as each of the two waits for the other.
    """
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise ClusterError(FROM_STDIN)
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        if process.daemon:
            raise ClusterError(DAEMONIC)
        return
    with suppress(KeyError, OSError):
        Path(os.environ[VARIABLE]).touch()
        raise SystemExit(1)
    raise ClusterError(UNGUARDED)
