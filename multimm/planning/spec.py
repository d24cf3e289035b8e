"""What callers write a plan's inputs with, under one name: matrices, devices, links, clusters.

Plain values, which know no Dask, no CUDA and no live client. multimm itself imports them from the
modules that they are in.
"""

from multimm.planning.devices import (
    H200,
    INFINIBAND,
    LOCAL_TCP,
    NVLINK,
    SHARED_MEMORY,
    DeviceSpec,
    Link,
)
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec

__all__ = [
    "H200",
    "INFINIBAND",
    "LOCAL_TCP",
    "NVLINK",
    "SHARED_MEMORY",
    "ClusterSpec",
    "DeviceSpec",
    "Link",
    "MatrixSpec",
]
