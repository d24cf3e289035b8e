"""What a client registers with its cluster before a product is sent."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import WorkerPlugin

from multimm.errors import ClusterError
from multimm.graph.departed import Departed
from multimm.graph.placement import BlockPlacement

if TYPE_CHECKING:
    from distributed import Client

#: By client: the identity of its scheduler, and the plugins that it has registered there, or was
#: told to. A client outlives its scheduler, and connects to the next one at the same address.
_served: WeakKeyDictionary[Client, tuple[str, dict[str, Any]]] = WeakKeyDictionary()


def install(client: Client, *more: Any) -> None:
    """Register what every product needs with the client's cluster, once for each scheduler.

    Parameters
    ----------
    client : distributed.Client
        A synchronous client is served at once. An asynchronous one cannot be waited for here:
        a warning says what to await.
    *more : distributed.SchedulerPlugin or distributed.WorkerPlugin
        Others, with names; they are registered again with the next scheduler, too.

    Raises
    ------
    ClusterError
        Where the scheduler or a worker cannot load the plugins.
    """
    # What the client was told when it connected: to ask would take a millisecond.
    scheduler = client._scheduler_identity.get("id", "")
    before, had = _served.get(client, ("", {}))
    plugins = had or {plugin.name: plugin for plugin in (BlockPlacement(), Departed())}
    plugins = plugins | {plugin.name: plugin for plugin in more}
    if scheduler == before and plugins.keys() == had.keys():
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
        _register(client, plugins)
    _served[client] = scheduler, plugins


def _register(client: Client, plugins: dict[str, Any]) -> None:
    """Register plugins by name; what a cluster has already stays as it is."""
    for name, plugin in plugins.items():
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
