"""Whether a worker of Dask's has a GPU of its own, told without importing Dask or CUDA."""

from __future__ import annotations

from typing import Any


def by_dask_cuda(worker: Any) -> bool:
    """Whether dask-cuda gave a worker its GPU."""
    # Both LocalCUDACluster and `dask cuda worker` add dask_cuda's plugins to their workers.
    # That a GPU is visible, or that the worker reports one, is true of CPU workers as well.
    plugins = worker.plugins.values()
    return any(type(plugin).__module__.partition(".")[0] == "dask_cuda" for plugin in plugins)
