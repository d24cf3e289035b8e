"""What products need, imported in a thread while workers and their transport start.

The driver and UCX take about a second to start, in this process and in each worker, and do not need
the interpreter for that. What tasks import takes as long: dask.array, and with it CuPy's sparse
matrices, SciPy, pandas and xarray; and Numba, for blocks that travel.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

logger = logging.getLogger(__name__)

THREAD = "multimm-imports"
#: Module that begins it in a worker, as Dask imports it there.
PRELOAD = "multimm.cluster.plugins.preload_imports"
#: What runs tasks.
TASKS = "multimm.graph.warmup"
#: What a GPU worker needs, first what it needs first: tasks, blocks of CuPy that travel, and loops
#: that copy blocks in host memory, which take 0.7 s to compile.
IN_WORKERS = (TASKS, "distributed.protocol.cupy", "multimm.gpu.transfer.loops:loops")
#: What a product needs in the process that asks for it.
IN_CLIENT = ("multimm.api",)


def begin(modules: Sequence[str], *, driver: bool) -> threading.Thread:
    """Import modules in a thread, which is returned, and start CUDA's `driver` before.

    What cannot be imported is left to whoever needs it.
    """
    thread = threading.Thread(target=_run, args=(modules, driver), name=THREAD, daemon=True)
    thread.start()
    return thread


def wait() -> None:
    """Until nothing is imported ahead any more.

    A task that is unpickled meanwhile may get a submodule of a package of which the rest is not
    there yet: Python waits for the submodule alone.
    """
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def _run(modules: Sequence[str], driver: bool) -> None:
    if driver:
        with suppress(OSError):  # none is installed
            # It makes no context: dask-cuda warns where there is one before its own.
            ctypes.CDLL("libcuda.so.1").cuInit(0)
    load(modules)


def load(names: Sequence[str]) -> None:
    """Import modules, and call functions ("module:function"), but for those that fail."""
    for name in names:
        module, _, function = name.partition(":")
        try:
            found = import_module(module)
            if function:
                getattr(found, function)()
        except Exception as error:
            logger.info("%s was not imported ahead: %r", name, error)
