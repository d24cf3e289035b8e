"""Begins imports in a GPU worker's process: to import this module begins them.

Dask imports it as the worker is made (a preload of `multimm.cluster.start`), and calls its
`dask_setup` when the transport has started. Until then no garbage is looked for: that is a fifth of
what imports take.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

from multimm.cluster.imports_ahead import IN_WORKERS, TASKS, begin

_looks_for_garbage = gc.isenabled()
gc.disable()
begin(IN_WORKERS, driver=True)


def dask_setup(worker: Any) -> None:
    """Wait for what tasks need: they may come from now on.

    Look for garbage again, in the thread of the event loop: UCXX forbids it there at times.
    """
    import_module(TASKS)
    if _looks_for_garbage:
        gc.enable()
