"""Whose array something is, and whether a worker of Dask's has a GPU: without importing CuPy."""

from __future__ import annotations

import functools
from typing import Any


def is_cupy(x: Any) -> bool:
    """Whether it is a CuPy array."""
    return _is_cupy(type(x))  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _is_cupy(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "strides")


def to_numpy(x: Any) -> Any:
    """A CuPy array in host memory; anything else as it is."""
    if not is_cupy(x):
        return x
    from multimm.gpu.transfer.pinned_copy import to_host

    return to_host(x)


def by_dask_cuda(worker: Any) -> bool:
    """Whether dask-cuda gave a worker its GPU."""
    # Both LocalCUDACluster and `dask cuda worker` add dask_cuda's plugins to their workers.
    # That a GPU is visible, or that the worker reports one, is true of CPU workers as well.
    plugins = worker.plugins.values()
    return any(type(plugin).__module__.partition(".")[0] == "dask_cuda" for plugin in plugins)
