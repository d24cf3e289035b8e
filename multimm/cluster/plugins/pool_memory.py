"""What a GPU worker that replaces a killed one waits for: the memory of its pool.

dask-cuda gives a worker its memory pool as it starts, and a worker that gets none ends; its nanny
tries once. The driver has the memory of a killed process back only when nobody maps it any more
(`multimm.cluster.plugins.peer_memory`), which takes a second or two. So a worker waits for it.
Where something else has taken the memory meanwhile, it begins with a smaller pool, which grows.

Dask loads this module in each worker process of `multimm.cluster.start` (a preload), before
dask-cuda makes the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from multimm.cluster.inspect.devices import free_bytes, visible_gpus

logger = logging.getLogger(__name__)

#: Seconds to wait. Survivors let go about a second after the loss; a process takes some three to
#: come here. Arbitrary otherwise.
SECONDS = 15.0
#: Between two looks.
GLANCE = 0.25
#: Bytes of a GPU that a worker needs beside its pool, for its context and its kernels: an H100's
#: takes 0.5 GB, and what UCX and libraries load comes on top.
BESIDE = 1_500_000_000
#: Bytes that a pool's size is a multiple of, to RMM.
ALIGNMENT = 256


async def dask_setup(worker: Any) -> None:
    """Wait until the worker's GPU has the memory that its pool is to take."""
    setup = next((p for p in worker._pending_plugins if hasattr(p, "initial_pool_size")), None)
    if setup is None or setup.initial_pool_size is None:
        return
    from dask_cuda.utils import parse_device_bytes

    wanted = int(parse_device_bytes(setup.initial_pool_size, alignment_size=ALIGNMENT))
    gpu = visible_gpus()[0]  # dask-cuda has put the worker's own first
    until = time.monotonic() + SECONDS
    while (free := free_bytes(gpu)) is not None and free < wanted + BESIDE:
        if time.monotonic() > until:
            setup.initial_pool_size = max(0, free - BESIDE) // ALIGNMENT * ALIGNMENT
            setup.maximum_pool_size = wanted
            logger.warning(
                "this worker's GPU has %.1f GB free, and its pool is to take %.1f GB: it begins "
                "with what there is, and grows; see with nvidia-smi what else uses the GPU",
                free / 1e9,
                wanted / 1e9,
            )
            return
        await asyncio.sleep(GLANCE)
