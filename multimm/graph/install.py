"""What a client registers with its cluster before a product is sent."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from distributed import WorkerPlugin

from multimm.errors import ClusterError
from multimm.graph.departed import Departed
from multimm.graph.placement import BlockPlacement

if TYPE_CHECKING:
    from distributed import Client

#: Clients whose scheduler has the plugins, or that were told how to register them.
_served: WeakSet[Client] = WeakSet()


def install(client: Client) -> None:
    """Register what every product needs with the client's cluster, once.

    Parameters
    ----------
    client : distributed.Client
        A synchronous client is served at once. An asynchronous one cannot be waited for here:
        a warning says what to await.

    Raises
    ------
    ClusterError
        Where the scheduler or a worker cannot load the plugins.
    """
    if client in _served:
        return
    if client.asynchronous:
        warnings.warn(
            "this client is asynchronous, so multimm cannot place blocks by itself: run "
            "`await client.register_plugin(multimm.graph.placement.BlockPlacement())` once; "
            "until then results are right but move more bytes",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        register(client, BlockPlacement(), Departed())
    _served.add(client)


def register(client: Client, *plugins: Any) -> None:
    """Register plugins with a synchronous client's cluster; a second time changes nothing.

    Parameters
    ----------
    client : distributed.Client
    *plugins : distributed.SchedulerPlugin or distributed.WorkerPlugin
        With a name.

    Raises
    ------
    ClusterError
        Where the scheduler or a worker cannot load one.
    """
    for plugin in plugins:
        name = plugin.name
        try:
            client.register_plugin(plugin)
        except Exception as error:
            # The scheduler keeps what a worker has refused, and would call the next try a success.
            if isinstance(plugin, WorkerPlugin):
                with suppress(Exception):
                    client.unregister_worker_plugin(name)
            # distributed re-raises here whatever went wrong on a worker, of any class.
            raise ClusterError(
                f"multimm's plugins cannot be loaded on the cluster ({error}): install the same "
                "versions of multimm, dask and distributed on scheduler, workers and client"
            ) from error
