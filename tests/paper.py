"""Clusters on paper."""

from __future__ import annotations

from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec


def gpus(workers: int = 4) -> ClusterSpec:
    """H200s of one host, joined by NVLink."""
    return ClusterSpec.homogeneous(H200, workers)


def cpus(workers: int, memory: int = 10**9) -> ClusterSpec:
    """CPU workers that talk TCP."""
    device = DeviceSpec("cpu", "cpu", memory, 50.0, 20.0)
    return ClusterSpec.homogeneous(device, workers, LOCAL_TCP)
