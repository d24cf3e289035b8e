"""Who asks other processes of its host for blocks in a way of its own, and how Dask comes to it.

Dask knows *families* of serializers. A receiver names those that it can read, and the sender takes
the first one that can send an object. `cuda_ipc` and `host_memory` are such families: the message
says where a block lies, and the receiver copies it from there. Dask has no setting for what a
worker asks for: the function that asks is replaced for those who ask so.

While a block is copied the sender refers to it: `Worker.get_data` waits until the receiver has
answered, and the copy is over before that. Long copies run in other threads: a worker whose event
loop waited for them would begin no task.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import ConnectionPool, send_recv
from distributed.protocol.serialize import register_serialization_family

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: What Dask's workers ask for.
DASKS = ("dask", "pickle", "error")
#: Threads that copy in a process; arbitrary: a few keep its memory busy.
THREADS = 4

#: What the workers and clients of this process ask for through their connections.
_asked: weakref.WeakKeyDictionary[ConnectionPool, tuple[str, ...]] = weakref.WeakKeyDictionary()
#: Of the message that is being read: what fills its blocks.
_copies: ContextVar[list[Callable[[], None]] | None] = ContextVar("copies", default=None)


class NeverReadError(OSError):
    """A process is there and cannot be read: its blocks are asked for in another way.

    Parameters
    ----------
    family : str
        What nobody in this process asks for any more.
    """

    def __init__(self, family: str, reason: str) -> None:
        super().__init__(reason)
        self.family = family


def answer(family: str, say_where: Callable[..., Any], read: Callable[..., Any]) -> None:
    """Have this process know a family, and ask for it where `ask` says so; again changes nothing.

    `say_where` serializes: it raises `NotImplementedError` for what travels otherwise.
    """
    module: Any = importlib.import_module("distributed.worker")
    register_serialization_family(family, say_where, read)
    if not hasattr(module.get_data_from_worker, "wraps_dask"):
        module.get_data_from_worker = _asking(module.get_data_from_worker)


def ask(rpc: ConnectionPool, family: str) -> None:
    """Ask for a family through these connections, before all others, from now on."""
    others = (name for name in _asked.get(rpc, DASKS) if name != family)
    _asked[rpc] = (family, *others)


def ask_as_client(client: Client, family: str) -> None:
    """Ask workers themselves for results: the scheduler would read and send them.

    A client that was told how to fetch them does as it was told.
    """
    if client.direct_to_workers is not False and client.rpc.deserializers is None:
        ask(client.rpc, family)
        client.direct_to_workers = True


def stop_asking(family: str) -> None:
    """Ask for it no more, whoever does in this process."""
    for rpc, names in [*_asked.items()]:
        _asked[rpc] = tuple(name for name in names if name != family)


def asked(rpc: ConnectionPool) -> tuple[str, ...] | None:
    """What to ask for in calls of one's own; None for what Dask would. The peer must keep it."""
    return _asked.get(rpc)


def same_host(context: Mapping[str, Any] | None) -> bool:
    """Whether both ends of a connection have one address; Dask hands this to a serializer."""
    if not context:
        return False
    ends = {get_address_host(context[end]["address"]) for end in ("sender", "recipient")}
    return len(ends) == 1


def behind(copy: Callable[[], None]) -> None:
    """Have a block filled in another thread, before anybody has the message that it came in.

    At once, where nobody waits for that: in calls of one's own.
    """
    copies = _copies.get()
    if copies is None:
        copy()
    else:
        copies.append(copy)


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process, and not of the one it was forked from; nor the event loop's.

    Tasks may fill those, and wait there for a block.
    """
    return ThreadPoolExecutor(THREADS, "multimm-copies")


def _asking(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Dask's handshake, with a wait for copies before the sender hears that all is well."""

    @functools.wraps(original)
    async def get_data_from_worker(
        rpc: ConnectionPool, keys: Any, worker: str, **kwargs: Any
    ) -> Any:
        serializers = asked(rpc)
        if serializers is None or kwargs.get("serializers") is not None:
            return await original(rpc, keys, worker, **kwargs)
        comm = await rpc.connect(worker)
        copies: list[Callable[[], None]] = []
        context = _copies.set(copies)
        try:
            response = await send_recv(
                comm,
                op="get_data",
                keys=keys,
                who=kwargs.get("who"),
                serializers=serializers,
            )
            loop = asyncio.get_running_loop()
            begin = functools.partial(loop.run_in_executor, _threads(os.getpid()))
            await asyncio.gather(*map(begin, copies))
            if response["status"] == "OK":
                await comm.write("OK")
            return response
        except BaseException as error:
            comm.abort()  # the sender still waits for an answer
            if isinstance(error, NeverReadError):
                stop_asking(error.family)
                logger.warning("%s", error)
            raise
        finally:
            _copies.reset(context)
            rpc.reuse(worker, comm)

    setattr(get_data_from_worker, "wraps_dask", True)  # noqa: B010
    return get_data_from_worker
