"""GPU memory of a killed worker: given back by the workers that still map it.

For transfers over NVLink UCX maps the memory pool of each peer on this host into the worker that
reads it or writes it (CUDA IPC), and never unmaps it: not when its connections are closed, nor when
the peer's process has ended (UCX 1.21, https://github.com/openucx/ucx/issues/11753). The driver
keeps memory that is mapped anywhere. So the pool of a killed worker, some 64 GB, would be lost for
as long as any other worker lives, and the worker that replaces it could not make its own.

The driver counts how often a process has opened an allocation. UCX opens a peer's pool once. Here
each worker opens it once more, to learn its address, when it meets the peer. When the scheduler
says that the peer is gone, and its process has ended, both are closed. UCX finds its mappings by
the peer's process number, so nobody uses the closed one again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed import Worker, WorkerPlugin

from multimm.cluster.inspect.workers import by_dask_cuda
from multimm.graph.scheduler.lost_peers import after_removal

logger = logging.getLogger(__name__)

NAME = "multimm-peer-memory"
#: Seconds from the loss of a peer to the first look at its process. Copies from its memory that run
#: on the GPU go on after connections are closed, but none takes as long. Arbitrary otherwise.
SECONDS = 0.5
#: Looks at a process that has not ended: a worker that is closed takes a few seconds for it.
LOOKS = 60


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory pool of a worker's GPU, as other processes may open it."""

    pid: int
    started: str  #: in the system's ticks: a process number may be used again
    handle: bytes  #: of CUDA IPC


class PeerMemory(WorkerPlugin):
    """Knows the pools of its peers on this host, and lets go of them when their workers are lost.

    Attributes
    ----------
    mapped : dict of str to (Pool, int)
        By the peer's address: its pool, and where this process has it mapped.
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.mapped: dict[str, tuple[Pool, int]] = {}

    def setup(self, worker: Worker) -> None:
        """Hear of lost workers, after distributed has closed the connections to them."""
        self.mapped = {}

        def let_go(address: str) -> None:
            if (found := self.mapped.pop(address, None)) is not None:
                worker._ongoing_background_tasks.call_soon(_let_go, *found)

        self._undo = after_removal(worker, let_go)

    def teardown(self, worker: Worker) -> None:
        """Leave distributed's own answer; the mappings end with the process."""
        self._undo()

    async def meet(self, worker: Worker, peer: str) -> None:
        """Find out where this process has mapped the pool of a peer on this host."""
        if peer in self.mapped or _host(peer) != _host(worker.address):
            return
        answer: Any = await worker.rpc(peer).run(function=pickle.dumps(_own_pool))
        if answer["status"] == "OK" and (pool := answer["result"]) is not None:
            self.mapped[peer] = pool, _open(pool)


def _host(address: str) -> str | None:
    return urlsplit(address).hostname


def _own_pool(dask_worker: Worker) -> Pool | None:
    """Runs on the peer: its pool, if one allocation is all of it."""
    if not by_dask_cuda(dask_worker) or not dask_worker.address.startswith("ucx"):
        return None
    import cupy

    with cupy.cuda.Device(0):
        handle = cupy.cuda.runtime.ipcGetMemHandle(cupy.zeros(2**22, "u1").data.ptr)
    return Pool(os.getpid(), _started(os.getpid()), bytes(handle))


def _open(pool: Pool) -> int:
    import cupy

    with cupy.cuda.Device(0):
        return int(cupy.cuda.runtime.ipcOpenMemHandle(pool.handle))


async def _let_go(pool: Pool, address: int) -> None:
    """Close a mapping, UCX's and ours, once the process that it is of has ended."""
    for _ in range(LOOKS):
        await asyncio.sleep(SECONDS)
        if _started(pool.pid) != pool.started:
            closed = await asyncio.get_running_loop().run_in_executor(None, _close, address)
            logger.info("let go of the memory of process %d (%d mappings)", pool.pid, closed)
            return
    logger.info("process %d was removed and lives: its memory stays mapped", pool.pid)


def _close(address: int) -> int:
    """How many of the two times that a mapping was opened could be closed."""
    import cupy

    with cupy.cuda.Device(0):
        for times in range(2):
            try:
                cupy.cuda.runtime.ipcCloseMemHandle(address)
            except cupy.cuda.runtime.CUDARuntimeError:  # UCX took another way, and has none
                return times
    return 2


def _started(pid: int) -> str:
    """When a process was started; empty if it has ended."""
    try:
        # Behind the program's name, in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
