"""Clusters of this process, which start at once and lay their state open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
from distributed import Client, LocalCluster

from multimm.cluster.worker import TransferCounter
from multimm.graph.install import install


def in_threads(workers: int = 4, **options: Any) -> LocalCluster:
    """A cluster whose workers are threads of this process, each with one for its tasks."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        **options,
    )


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
