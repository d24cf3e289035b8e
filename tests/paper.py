"""Clusters and matrices on paper."""

from __future__ import annotations

from collections.abc import Sequence

from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec


def gpus(workers: int = 4) -> ClusterSpec:
    """H200s of one host, joined by NVLink."""
    return ClusterSpec.homogeneous(H200, workers)


def cpus(workers: int, memory: int = 10**9) -> ClusterSpec:
    """CPU workers that talk TCP."""
    device = DeviceSpec("cpu", "cpu", memory, 50.0, 20.0)
    return ClusterSpec.homogeneous(device, workers, LOCAL_TCP)


def in_rows(owners: Sequence[int], shape: tuple[int, int]) -> MatrixSpec:
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=tuple(owners))
