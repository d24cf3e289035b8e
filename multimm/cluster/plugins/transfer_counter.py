"""How many bytes each worker has received from its peers.

The scheduler keeps no totals of block traffic and a worker's own transfer log is cut off
after a fixed number of entries, so a plugin counts where the blocks come in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from dask.sizeof import sizeof
from distributed import Worker, WorkerPlugin

from multimm.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

NAME = "multimm-transfers"


class TransferCounter(WorkerPlugin):
    """Counts the bytes of every block that its worker fetches from another worker.

    Both ways in are covered: dependencies of tasks and copies made on the scheduler's
    request (``Worker.gather_dep``), and ``replicate`` or ``rebalance`` (``Worker.gather``).
    Counted is the payload as Dask measures it (``nbytes`` for arrays), after the block
    arrived; what is scattered by a client, or shuffled by Dask's P2P rechunking, is not.
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.received = 0

    def setup(self, worker: Worker) -> None:
        """Step between the worker and its two ways of fetching."""
        # Attributes of the instance shadow the methods. The handler through which clients
        # scatter holds the original `update_data`, so only `Worker.gather` meets ours.
        vars(worker)["gather_dep"] = self._count_fetched(worker.gather_dep)
        vars(worker)["update_data"] = self._count_stored(worker.update_data)

    def teardown(self, worker: Worker) -> None:
        """Step out again."""
        vars(worker).pop("gather_dep", None)
        vars(worker).pop("update_data", None)

    def _add(self, data: dict[Any, object]) -> None:
        self.received += sum(sizeof(value) for value in data.values())

    def _count_fetched(self, fetch: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def gather_dep(*args: Any, **kwargs: Any) -> Any:
            event = await fetch(*args, **kwargs)
            # Only a successful fetch carries data; a busy or dead peer sent nothing.
            self._add(getattr(event, "data", {}))
            return event

        return gather_dep

    def _count_stored(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def update_data(data: dict[Any, object], *args: Any, **kwargs: Any) -> Any:
            self._add(data)
            return store(data, *args, **kwargs)

        return update_data


def received_bytes(client: Client) -> dict[str, int]:
    """Bytes that each live worker has received from others since the last reset, by address.

    The client is one of `multimm.cluster.start` or `connect`; workers of others do not count.
    """
    return _ask(client, reset=False)


def reset_received_bytes(client: Client) -> dict[str, int]:
    """Set every worker's count to zero and return what it was; see `received_bytes`."""
    return _ask(client, reset=True)


def _ask(client: Client, *, reset: bool) -> dict[str, int]:
    counts: dict[str, int | None] = client.run(_read, reset=reset)
    silent = [address for address, count in counts.items() if count is None]
    if silent:
        raise ClusterError(
            f"workers {', '.join(silent)} do not count transfers: get the client from "
            "multimm.cluster.start() or multimm.cluster.connect(address)"
        )
    return {address: count for address, count in counts.items() if count is not None}


def _read(dask_worker: Worker, *, reset: bool) -> int | None:
    plugin = dask_worker.plugins.get(NAME)
    if not isinstance(plugin, TransferCounter):
        return None
    count = plugin.received
    if reset:
        plugin.received = 0
    return count
