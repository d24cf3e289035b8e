"""Start, reach and describe Dask clusters.

Nothing here imports `distributed`, `dask_cuda` or CuPy until a function needs it.
What runs on the workers is in `multimm.cluster.worker`.
"""

from multimm.cluster.connect import connect, prepare
from multimm.cluster.describe import describe, local
from multimm.cluster.start import start

__all__ = ["connect", "describe", "local", "prepare", "start"]
