"""What workers say about themselves when they are asked."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from multimm.cluster.inspect.devices import cpu_name, current_gpu
from multimm.gpu.arrays import by_dask_cuda
from multimm.planning.devices import DeviceSpec

if TYPE_CHECKING:
    from distributed import Client, Worker

logger = logging.getLogger(__name__)

#: Seconds to wait for workers that were not asked before; they answer from their event
#: loop, in milliseconds, also while they compute.
ANSWER_SECONDS = 5.0
#: Name of the plugin of workers that read GPU blocks where they lie, where no UCXX takes them.
IPC_PLUGIN = "multimm-cuda-ipc"


class Answer(NamedTuple):
    """What a worker process says about itself."""

    gpu: DeviceSpec | None  #: its GPU, where dask-cuda gave it one
    cores: int  #: cores that its block products keep busy
    host_memory: int  #: all memory of its host, bytes
    cpu: str = ""  #: the name of its host's processor
    direct: bool = False  #: it reads GPU blocks of its host where they lie (CUDA IPC)


def run_on(
    client: Client,
    function: Callable[..., Any],
    addresses: Sequence[str],
    limit_s: float,
    **arguments: Any,
) -> dict[str, Any]:
    """What a function returns on each worker, all at the same time; not as tasks.

    A task would wait for the return of a worker that is lost; here it answers with its error.
    """

    async def gathered() -> dict[str, Any]:
        call = client.run(function, workers=list(addresses), on_error="return", **arguments)
        result: dict[str, Any] = await asyncio.wait_for(call, limit_s)
        return result

    replies: dict[str, Any] = client.sync(gathered)
    return replies


def ask(client: Client, addresses: list[str]) -> dict[str, Answer]:
    """The answers of workers, by address; none of those that are silent or lost."""
    try:
        replies = run_on(client, answer, addresses, ANSWER_SECONDS) if addresses else {}
    except (TimeoutError, OSError):
        logger.warning("workers did not answer in %g s: their kind is a guess", ANSWER_SECONDS)
        return {}
    return {address: reply for address, reply in replies.items() if isinstance(reply, Answer)}


def answer(dask_worker: Worker) -> Answer:
    """Runs on a worker: what it computes with."""
    from dask.system import CPU_COUNT
    from distributed.system import memory_limit

    blas_threads = int(os.environ.get("OMP_NUM_THREADS") or CPU_COUNT)
    cores = min(CPU_COUNT, dask_worker.state.nthreads * blas_threads)
    spills = type(dask_worker.data).__module__.partition(".")[0] == "dask_cuda"
    gpu = current_gpu(spills=spills) if by_dask_cuda(dask_worker) else None
    direct = getattr(dask_worker.plugins.get(IPC_PLUGIN), "direct", False)
    return Answer(gpu, cores, memory_limit(), cpu_name(), direct)
