"""What a client registers with its cluster before a product is sent."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import WorkerPlugin

from multimm.errors import DISTRIBUTION, ClusterError, callers_level
from multimm.graph.scheduler.killed import Killed
from multimm.graph.scheduler.lost_peers import LostPeers
from multimm.graph.scheduler.plugin import BlockPlacement

if TYPE_CHECKING:
    from distributed import Client

#: Seconds that workers have to answer. One that computes without Python's lock being free, or is
#: stopped, takes a plugin when it can, and the scheduler gives it to those that come. Arbitrary.
WAIT = 10.0

Plugins = dict[str, Any]  #: by name

#: By client: the identity of its scheduler, and the plugins that it has registered there, or was
#: told to. A client outlives its scheduler, and connects to the next one at the same address.
_served: WeakKeyDictionary[Client, tuple[str, Plugins]] = WeakKeyDictionary()


def install(client: Client, *more: Any) -> None:
    """Register what every product needs with the client's cluster, once for each scheduler.

    Parameters
    ----------
    client : distributed.Client
        A synchronous client is served at once. An asynchronous one cannot be waited for here:
        a warning says what to await, `multimm.cluster.prepare`.
    *more : distributed.SchedulerPlugin or distributed.WorkerPlugin
        Others, with names; they are registered again with the next scheduler, too.

    Raises
    ------
    ClusterError
        Where the scheduler or a worker cannot load the plugins.
    """
    scheduler, plugins = wanted = _wanted(client, more)
    before, had = _served.get(client, ("", {}))
    if scheduler == before and plugins.keys() == had.keys():
        return
    if client.asynchronous:
        warnings.warn(
            f"this client is asynchronous, so multimm cannot install its plugins "
            f"({', '.join(plugins)}) by itself: run `await multimm.cluster.prepare(client)` once, "
            "before the first product; until then results are right, but blocks are placed by "
            "Dask alone, which moves more bytes",
            RuntimeWarning,
            stacklevel=callers_level(),
        )
    elif not client.sync(_register, client, plugins):
        warnings.warn(
            f"a worker has not answered for {WAIT:.0f} s: products are sent nevertheless, and wait "
            "for it where it has a part in them",
            RuntimeWarning,
            stacklevel=callers_level(),
        )
    _served[client] = wanted


async def install_awaited(client: Client) -> None:
    """`install`, for who can wait: with an asynchronous client, in its event loop."""
    wanted = _wanted(client, ())
    # Also where `install` has warned and holds the client for served: what is there stays.
    await _register(client, wanted[1])
    _served[client] = wanted


def _wanted(client: Client, more: tuple[Any, ...]) -> tuple[str, Plugins]:
    """The scheduler, and what it is to have: also what the client had with the one before."""
    # What the client was told when it connected: to ask would take a millisecond.
    scheduler = client._scheduler_identity.get("id", "")
    _, had = _served.get(client, ("", {}))
    plugins = had or {plugin.name: plugin for plugin in (BlockPlacement(), LostPeers(), Killed())}
    return scheduler, plugins | {plugin.name: plugin for plugin in more}


async def _register(client: Client, plugins: Plugins) -> bool:
    """Register plugins by name, in the client's event loop; what a cluster has stays as it is.

    False: a worker has not answered in time, and may have some of them later.
    """
    in_time = True
    for name, plugin in plugins.items():
        of_workers = isinstance(plugin, WorkerPlugin)
        try:
            answer = asyncio.ensure_future(client.register_plugin(plugin))
            await asyncio.wait([answer], timeout=WAIT if of_workers else None)
            if answer.done():
                answer.result()
                continue
            in_time = False
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
        except Exception as error:
            # The scheduler keeps what a worker has refused, and would call the next try a success.
            if of_workers:
                with suppress(Exception):
                    await client.unregister_worker_plugin(name)
            raise refusal(error) from error
    return in_time


def refusal(error: Exception) -> ClusterError:
    """What to do about an error that distributed raises here for a worker or the scheduler."""
    # It raises whatever went wrong there, of any class: imports and unpickling fail with many.
    # Its own error for a connection that ended is an OSError.
    if isinstance(error, OSError):
        return ClusterError(
            f"a worker or the scheduler was lost while multimm's plugins were loaded ({error}): "
            "processes end so where memory is short; give each worker more (memory_limit=), and "
            "see the workers' logs"
        )
    return ClusterError(
        f"multimm's plugins cannot be loaded on the cluster ({error}): install the same "
        f"versions of {DISTRIBUTION}, dask and distributed on scheduler, workers and client"
    )
