"""The client that `start` and `connect` hand out, and what they install on its cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from distributed import Client, Status, Worker

from multimm.cluster.options import give_back

logger = logging.getLogger(__name__)


class ClusterClient(Client):
    """A `distributed.Client` that takes its own cluster down and leaves no thread behind.

    A cluster object in place of an address is owned: closing the client closes it.
    """

    #: Of this process's environment, what goes when the client is closed, if it is still that.
    borrowed: Mapping[str, str] = MappingProxyType({})

    def __init__(self, address: Any, *, timeout: float, security: Any) -> None:
        super().__init__(address, timeout=timeout, security=security)

    async def _start(self, timeout: Any = None, **kwargs: Any) -> Any:
        # distributed bounds the connection but not the handshake that follows: a listener
        # that accepts and stays silent would be waited for without end.
        return await asyncio.wait_for(super()._start(timeout=timeout, **kwargs), timeout)

    def start(self, **kwargs: Any) -> None:
        """Connect; stop the event loop's thread again when that fails.

        distributed leaves that thread running for good after a failed connection.
        """
        try:
            super().start(**kwargs)
        except BaseException:
            with suppress(Exception):
                super().close(timeout=2)
            self._loop_runner.stop()
            raise

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Close the client, then the cluster it owns; again does nothing.

        Again is when it is garbage, in any thread: a cluster's `close` would wait for a lock that
        is held while the thread of a new event loop begins, and by that thread for ever.
        """
        try:
            super().close(*args, **kwargs)
        finally:
            if self.cluster is not None and self.cluster.status is not Status.closed:
                self.cluster.close()
            give_back(self.borrowed)


def set_up_cluster(client: Client, *more: Any, overlap: bool = False) -> None:
    """Install multimm's plugins, and `more`, on the cluster; again changes nothing.

    With `overlap` GPU blocks travel during products, all pairs of workers meet and kernels are
    compiled when this returns. Raises `ClusterError`.
    """
    from multimm.cluster.plugins import cuda_ipc, host_memory
    from multimm.cluster.plugins.peer_memory import PeerMemory, let_go_in
    from multimm.cluster.plugins.transfer_counter import TransferCounter
    from multimm.cluster.plugins.ucxx_overlap import Overlap
    from multimm.cluster.plugins.warmup import WarmUp, wait_until_warm
    from multimm.gpu.emulated.packed import register_with_dask
    from multimm.graph.scheduler.install import install, refusal

    register_with_dask()  # this process may have loaded packed blocks before distributed
    if not overlap:
        return install(client, TransferCounter(), *more)
    ways = cuda_ipc.CudaIpc(), host_memory.HostMemory()
    install(client, TransferCounter(), Overlap(), *ways, PeerMemory(), WarmUp(), *more)
    try:
        let_go_in(client)
        cuda_ipc.begin_in(client)
        host_memory.begin_in(client)
        wait_until_warm(client)
        for reason in sorted(set(obstacles(client).values())):
            logger.warning("%s", reason)
    except OSError as error:
        raise refusal(error) from error


def obstacles(client: Client) -> dict[str, str]:
    """Why GPU blocks don't travel as they could, by the address of workers where they don't."""
    reasons: dict[str, str] = client.run(_obstacle)
    return {address: reason for address, reason in reasons.items() if reason}


def _obstacle(dask_worker: Worker) -> str:
    from multimm.cluster.plugins.cuda_ipc import CudaIpc
    from multimm.cluster.plugins.ucxx_overlap import Overlap

    for kind in (Overlap, CudaIpc):
        plugin = dask_worker.plugins.get(kind.name)
        reason = plugin.reason if isinstance(plugin, kind) else "the plugin is not installed"
        if reason:
            return reason
    return ""
