"""Start, reach and describe Dask clusters.

Importing it loads neither `distributed` nor `dask_cuda` nor CuPy: functions import what needs them.
Plugins that run on the workers are in `transfers`, `transport` and `warm`, functions that are sent
there in `answers` and `probes`; what products need there comes from `multimm.graph.install`.
"""

from multimm.cluster.connect import connect, prepare
from multimm.cluster.describe import describe
from multimm.cluster.start import start
from multimm.cluster.this_process import local

__all__ = ["connect", "describe", "local", "prepare", "start"]
