"""Several workers on each GPU of this host: for a rehearsal, never for speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multimm.cluster.inspect.devices import visible_gpus

#: Of a GPU's memory, what the pools of its workers take together: CUDA and CuPy's libraries need
#: half a gigabyte for each process.
POOLS = 0.88
#: Host memory of a worker: blocks stay on the GPUs.
HOST_BYTES = 16 * 10**9


@contextmanager
def shared_gpus(workers: int) -> Iterator[Any]:
    """A client of so many GPU workers, set up as `multimm.cluster.start` sets them up.

    Parameters
    ----------
    workers : int
        Dealt out to the GPUs in turn.
    """
    from multimm.cluster.client import ClusterClient, set_up_cluster
    from multimm.cluster.options import StartOptions
    from multimm.cluster.plugins.gc_policy import SeldomGarbage, is_wanted
    from multimm.cluster.start import CONNECT_SECONDS, on_gpus

    gpus = visible_gpus()
    most = -(-workers // len(gpus))
    pool = int(POOLS * min(gpu.memory_bytes for gpu in gpus) / most)
    options = StartOptions(gpus, workers, 1, HOST_BYTES, "ucxx", pool, None, None)
    cluster = _cluster_class()(n_workers=workers, **on_gpus(options))
    client = ClusterClient(cluster, timeout=CONNECT_SECONDS, security=None)
    try:
        garbage = (SeldomGarbage(),) if is_wanted(None) else ()
        set_up_cluster(client, *garbage, overlap=True)
        yield client
    finally:
        client.close()  # and the cluster


def _cluster_class() -> Any:
    from dask_cuda import LocalCUDACluster

    class SharedGPUs(LocalCUDACluster):  # type: ignore[misc]
        """Its parent names each worker by its GPU, and so has one on each."""

        worker_spec: dict[Any, Any]
        cuda_visible_devices: list[Any]

        def new_worker_spec(self) -> dict[int, Any]:
            own, gpus = self.worker_spec, self.cuda_visible_devices
            number = len(own)
            first = number % len(gpus)
            turned = gpus[first:] + gpus[:first]  # all of them: a process maps its peers' memory
            try:
                self.cuda_visible_devices, self.worker_spec = turned, dict.fromkeys(turned[1:])
                [spec] = super().new_worker_spec().values()
            finally:
                self.cuda_visible_devices, self.worker_spec = gpus, own
            return {number: spec}

    return SharedGPUs
