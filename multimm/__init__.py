"""Dense matrix multiplication for Dask arrays, on GPUs and on CPUs.

>>> import dask.array as da, multimm
>>> x = da.ones((4, 3), chunks=2)
>>> multimm.matmul(x, x.T).sum().compute().item()
48.0
"""

from __future__ import annotations

from multimm import cluster
from multimm.api import gemm, matmul, plan, transpose
from multimm.dispatch import accelerate
from multimm.errors import MultimmError
from multimm.verify import verify

__all__ = [
    "MultimmError",
    "accelerate",
    "cluster",
    "gemm",
    "matmul",
    "plan",
    "transpose",
    "verify",
]
