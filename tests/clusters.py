"""Clusters of this process, which start at once and lay their state open."""

from __future__ import annotations

from typing import Any

from distributed import LocalCluster


def in_threads(workers: int = 4, **options: Any) -> LocalCluster:
    """A cluster whose workers are threads of this process, each with one for its tasks."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        **options,
    )
