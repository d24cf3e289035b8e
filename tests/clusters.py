"""Clusters of this process, which start at once and lay their state open."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.core import normalize_chunks, slices_from_chunks
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, LocalCluster, wait
from distributed.protocol.serialize import families as known_families
from distributed.utils import get_mp_context

from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins import families
from multimm.cluster.plugins.transfer_counter import (
    TransferCounter,
    received_bytes,
    reset_received_bytes,
)
from multimm.graph.scheduler.install import install


def in_threads(workers: int = 4, threads: int = 1, **options: Any) -> LocalCluster:
    """A cluster whose workers are threads of this process, each with so many for its tasks."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=threads,
        processes=False,
        dashboard_address="127.0.0.1:0",
        **options,
    )


#: What worker processes are forked from has imported these.
IMPORTED = (
    "pytest", "dask.array", "distributed.worker", "distributed.protocol.numpy",
    "multimm.api", "multimm.cluster", "multimm.io", "multimm.graph.tasks.multiply",
    "multimm.graph.scheduler.install", "multimm.cluster.plugins.transfer_counter",
)  # fmt: skip


@contextmanager
def forked() -> Iterator[None]:
    """Worker processes that start meanwhile are forked: with a third of the work, and as mortal."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(list(IMPORTED))
        yield


def soon(condition: Callable[[], bool]) -> None:
    """Give a cluster, whose messages take their time, a minute to come to a condition."""
    deadline = time.monotonic() + 60  # processes may start meanwhile, on a machine that stalls
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that within 60 s"
        time.sleep(0.01)


@contextmanager
def counting(workers: int) -> Iterator[Client]:
    """A client of such a cluster that counts what travels, and does not drop copies by itself."""
    alone = {"distributed.scheduler.active-memory-manager.start": False}
    with (
        dask.config.set(alone),
        in_threads(workers, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        install(client, TransferCounter())
        yield client


def counting_client(workers: int) -> Any:
    """A fixture: such a client for all tests of a module."""

    @pytest.fixture(scope="module", name="client")
    def client() -> Iterator[Client]:
        with counting(workers) as client:
            yield client

    return client


def scattered(
    client: Client,
    x: np.ndarray,
    rows: int | tuple[int, int] | tuple[tuple[int, ...], ...],
    owners: Sequence[int],
) -> da.Array:
    """A matrix, or a stack, in chunks on workers by number.

    Of so many rows, or matrices; of a matrix also of so many rows and columns; or of these sizes.
    """
    addresses = sorted(listed(client))  # the client's own list lacks workers for a moment
    edges = rows if isinstance(rows, tuple) else (rows, *x.shape[1:])
    chunks = normalize_chunks(edges, x.shape)
    numbers = product(*(range(len(sizes)) for sizes in chunks))
    name = f"scattered-{np.random.default_rng().integers(10**9)}"
    blocks = list(zip(numbers, slices_from_chunks(chunks), owners, strict=True))
    futures = {}
    for number in set(owners):  # a call takes as long for many blocks as for one
        own = {str((name, *at)): x[where] for at, where, owner in blocks if owner == number}
        futures |= client.scatter(own, workers=[addresses[number]], hash=False)
    futures = {(name, *at): futures[str((name, *at))] for at, *_ in blocks}
    graph = HighLevelGraph.from_collections(name, futures)
    return da.Array(graph, name, chunks, dtype=x.dtype)


def received(client: Client, c: da.Array) -> tuple[da.Array, int]:
    """An array in memory, and how many bytes travelled for it."""
    reset_received_bytes(client)
    c = c.persist()
    wait(c)
    return c, sum(received_bytes(client).values())


@contextmanager
def asked_families():
    """Dask's own way of asking peers is back behind it, and nobody asks in another one."""
    worker = importlib.import_module("distributed.worker")
    before, known = worker.get_data_from_worker, dict(known_families)
    try:
        yield
    finally:
        worker.get_data_from_worker = before
        known_families.clear()
        known_families.update(known)
        families._asked.clear()
