"""What a worker does before its first task: meet its peers, compile its kernels.

The first block between two GPU workers takes seconds: a connection is made, and the whole memory
pool of the one is mapped into the other's address space. So every worker fetches a small block
from every other one, and has them fetch one from it, as soon as it is there: at the start, when it
joins later, and when its nanny has started it again. Meanwhile its kernels are compiled and loaded,
in another thread.

Nobody waits for what comes behind that: what only blocks in host memory need, for half a second
that most products have no use for. Last, what has been imported until then is exempt from garbage
collection, where the process is the worker's own.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

from distributed import Worker, WorkerPlugin

from multimm.cluster.plugins.cuda_ipc import CudaIpc
from multimm.cluster.plugins.host_memory import HostMemory
from multimm.cluster.plugins.peer_memory import PeerMemory
from multimm.gpu.arrays import by_dask_cuda

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

NAME = "multimm-warm-up"
#: What runs tasks.
TASKS = "multimm.graph.warmup"
#: Bytes of the block that two workers exchange; large enough to go the way that large blocks go.
SAMPLE_BYTES = 2**22
#: Seconds for one exchange; a peer that needs longer is busy or gone, and is met later, if at all.
PEER_SECONDS = 30.0


class WarmUp(WorkerPlugin):
    """Exchanges a block with every peer, and compiles kernels on a GPU worker.

    Nothing depends on it but time: what goes wrong is logged, and the worker works.

    Attributes
    ----------
    met : set of str
        Addresses of peers from which a block has come.
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.met: set[str] = set()
        self._running: asyncio.Task[None] | None = None
        self._behind: asyncio.Task[None] | None = None

    def setup(self, worker: Worker) -> None:
        """Begin; the worker takes tasks meanwhile."""
        self.met = set()
        loop = asyncio.get_running_loop()
        self._running = loop.create_task(self._warm_up(worker))
        self._behind = loop.create_task(self._afterwards(worker, self._running))

    def teardown(self, worker: Worker) -> None:
        """Stop, if it is not over."""
        for task in (self._running, self._behind):
            if task is not None:
                task.cancel()

    async def finished(self) -> None:
        """Wait until peers have been met and kernels are loaded."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def over(self) -> None:
        """Wait for what comes behind that as well."""
        if self._behind is not None:
            await asyncio.wait([self._behind])

    async def _warm_up(self, worker: Worker) -> None:
        started = time.monotonic()
        compiling = asyncio.ensure_future(_compile(worker))
        try:
            for peer in await _peers(worker):
                await self._meet(worker, peer)
        except OSError as error:
            logger.info("no scheduler to ask for peers: %r", error)
        for plugin in worker.plugins.values():
            if isinstance(plugin, CudaIpc | HostMemory):
                plugin.begin(worker)
        await compiling
        logger.info("met %d workers in %.1f s", len(self.met), time.monotonic() - started)

    async def _afterwards(self, worker: Worker, before: asyncio.Task[None]) -> None:
        await asyncio.wait([before])
        if by_dask_cuda(worker):
            try:
                tasks = await asyncio.to_thread(importlib.import_module, TASKS)
                await asyncio.to_thread(tasks.copy_both_ways)
            except Exception as error:
                # A task that copies will say so again, to whom it concerns.
                logger.warning("copies to and from host memory were not tried: %r", error)
        _exempt_what_is_imported(worker)

    async def _meet(self, worker: Worker, peer: str) -> None:
        try:
            await asyncio.wait_for(self.fetch(worker, peer), PEER_SECONDS)
            # The way back is another connection, and another mapping.
            call = worker.rpc(peer).run(
                function=pickle.dumps(_fetch_from),
                kwargs=pickle.dumps({"address": worker.address}),
            )
            await asyncio.wait_for(call, PEER_SECONDS)
        except (OSError, TimeoutError) as error:
            logger.info("worker %s was not met: %r", peer, error)

    async def fetch(self, worker: Worker, peer: str) -> None:
        """Fetch a block from a peer, as blocks are fetched for tasks."""
        answer: Any = await worker.rpc(peer).run(function=pickle.dumps(_sample))
        if answer["status"] == "OK":
            self.met.add(peer)
            for plugin in worker.plugins.values():
                if isinstance(plugin, PeerMemory | CudaIpc | HostMemory):
                    await plugin.meet(worker, peer)


def _exempt_what_is_imported(worker: Worker) -> None:
    """A full collection stops a process for as long as it has objects to look at.

    That is 50 to 120 ms with all that is imported by now, a third of a product of 32768 x 32768.
    Workers without a nanny may be threads of a user's process, which is left as it is. Some objects
    are exempt from the start: Python 3.12 exempts its own.
    """
    if worker.nanny and gc.get_freeze_count() < len(gc.get_objects()):
        gc.collect()
        gc.freeze()


async def _peers(worker: Worker) -> list[str]:
    """All other workers, beginning with the next one, so that not all ask the same at once."""
    addresses = sorted(await worker.scheduler.ncores())
    later = [address for address in addresses if address > worker.address]
    return later + [address for address in addresses if address < worker.address]


async def _compile(worker: Worker) -> None:
    if not by_dask_cuda(worker):
        return
    try:
        tasks = await asyncio.to_thread(importlib.import_module, TASKS)
        if not await asyncio.to_thread(tasks.are_compiled):
            await asyncio.to_thread(tasks.compile_kernels)
        await asyncio.to_thread(tasks.run_tasks)
    except Exception as error:
        # A task that needs the kernel will say so again, to whom it concerns.
        logger.warning("kernels were not compiled beforehand: %r", error)


def _sample(dask_worker: Worker) -> Any:
    """Runs on the peer: a block where its blocks lie."""
    if by_dask_cuda(dask_worker):
        import cupy

        return cupy.zeros(SAMPLE_BYTES, "u1")
    import numpy as np

    return np.zeros(SAMPLE_BYTES, "u1")


async def _fetch_from(address: str, dask_worker: Worker) -> None:
    """Runs on the peer: the way back."""
    plugin = dask_worker.plugins.get(NAME)
    if isinstance(plugin, WarmUp) and address not in plugin.met:
        await plugin.fetch(dask_worker, address)


def wait_until_warm(client: Client) -> None:
    """Wait until all workers have compiled and met."""
    client.run(_finish)


async def _finish(dask_worker: Worker) -> None:
    plugin = dask_worker.plugins.get(NAME)
    if isinstance(plugin, WarmUp):
        await plugin.finished()


async def wait_until_over(dask_worker: Worker) -> None:
    """Runs on a worker: wait until nothing of the warm-up takes its time any more."""
    plugin = dask_worker.plugins.get(NAME)
    if isinstance(plugin, WarmUp):
        await plugin.over()
