"""GPU memory of an ended worker: given back by the processes that still map it.

For transfers over NVLink UCX maps the memory pool of a peer on this host into the process that
reads it or writes it (CUDA IPC), and never unmaps it: not when its connections are closed, nor when
the peer's process has ended (UCX 1.21, https://github.com/openucx/ucx/issues/11753). The driver
keeps memory that is mapped anywhere. So the pool of a killed worker, some 64 GB, would be lost for
as long as another worker lives that read from it, or the client that fetched a result. The worker
that replaces it could not make its own.

Workers tell their peers and their clients which pool they have. A thread for each pool waits until
its process has ended. Then it opens the pool once more, which gives the address where UCX has it,
and closes it as often as it was opened. UCX finds its mappings by the peer's process number, so
nobody uses the closed one again. What `multimm.cluster.plugins.cuda_ipc` maps, it unmaps itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Worker, WorkerPlugin

from multimm.gpu.arrays import by_dask_cuda

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

NAME = "multimm-peer-memory"
#: Of Dask's events: a worker says which pool it has.
TOPIC = "multimm-memory-pool"
#: Seconds from the end of a process to the release. Copies from its memory that run on the GPU go
#: on after its end, but none takes as long. Arbitrary otherwise.
SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory pool of a worker's GPU, as other processes may open it."""

    boot: str  #: the running system that the process belongs to
    pid: int
    started: str  #: in the system's ticks: a process number may be used again
    handle: bytes  #: of CUDA IPC


_watched: set[Pool] = set()
#: Held while memory is unmapped. An interpreter that ends waits for that, and has nobody begin it.
_unmapping = threading.Lock()
atexit.register(_unmapping.acquire)


class PeerMemory(WorkerPlugin):
    """Tells peers and clients of this worker's pool, and lets go of pools of ended peers."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Tell clients."""
        if (pool := _pool_of(worker)) is not None:
            worker.log_event(TOPIC, {"pool": asdict(pool)})

    async def meet(self, worker: Worker, peer: str) -> None:
        """Ask a peer for its pool, and let go of it when the peer has ended."""
        answer: Any = await worker.rpc(peer).run(function=pickle.dumps(_pool_of))
        if answer["status"] == "OK" and answer["result"] is not None:
            when_ended(answer["result"], unmap_all)


def let_go_in(client: Client) -> None:
    """Have the client's process let go of pools whose workers have ended, also of later workers."""

    def announced(event: tuple[float, dict[str, dict[str, Any]]]) -> None:
        when_ended(Pool(**event[1]["pool"]), unmap_all)

    client.subscribe_topic(TOPIC, announced)
    for pool in client.run(_pool_of).values():  # of those that are there
        if pool is not None:
            when_ended(pool, unmap_all)


def _pool_of(dask_worker: Worker) -> Pool | None:
    """Runs on a worker: its pool, if UCX maps it."""
    through_ucx = by_dask_cuda(dask_worker) and dask_worker.address.startswith("ucx")
    return own_pool() if through_ucx else None


def own_pool() -> Pool:
    """The pool from which this process takes GPU memory, if one allocation is all of it."""
    import cupy

    with cupy.cuda.Device(0):
        handle = cupy.cuda.runtime.ipcGetMemHandle(cupy.zeros(2**22, "u1").data.ptr)
    return Pool(_boot(), os.getpid(), _started(os.getpid()), bytes(handle))


def is_here(pool: Pool) -> bool:
    """Whether the pool's process runs on this host, and is seen by this one."""
    return pool.boot == _boot() and pool.started == _started(pool.pid)


def when_ended(pool: Pool, unmap: Callable[[Pool], None]) -> None:
    """Wait in a thread until the pool's process has ended, and have the pool unmapped here.

    Nothing is done for processes of other hosts, and for those that have ended by now.
    """
    if pool in _watched or pool.boot != _boot() or pool.pid == os.getpid():
        return
    try:
        process = os.pidfd_open(pool.pid)
    except OSError as error:  # it has ended, or this kernel has no such call
        logger.debug("process %d is not watched: %s", pool.pid, error)
        return
    if _started(pool.pid) != pool.started:
        os.close(process)
        return
    _watched.add(pool)
    name, args = f"{NAME}-{pool.pid}", (pool, process, unmap)
    threading.Thread(target=_wait_and_unmap, args=args, name=name, daemon=True).start()


def _wait_and_unmap(pool: Pool, process: int, unmap: Callable[[Pool], None]) -> None:
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll()
    os.close(process)
    time.sleep(SECONDS)
    with _unmapping:
        unmap(pool)
    logger.info("let go of the memory of process %d", pool.pid)
    _watched.discard(pool)


def unmap_all(pool: Pool) -> None:
    """Close all mappings of a pool in this process, whoever has opened them."""
    import cupy

    runtime = cupy.cuda.runtime
    with suppress(runtime.CUDARuntimeError), cupy.cuda.Device(0):
        address = runtime.ipcOpenMemHandle(pool.handle)  # an error, if nobody maps it any more
        while True:
            runtime.ipcCloseMemHandle(address)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> str:
    """When a process was started; empty if it has ended."""
    try:
        # Behind the program's name, in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
