"""Start, reach and describe Dask clusters.

Importing it loads neither `distributed` nor `dask_cuda` nor CuPy: functions import what needs them.
`inspect` reads what a cluster is, `calibration` measures it, `plugins` run on its workers. What
products need on the scheduler comes from `multimm.graph.scheduler.install`.
"""

from multimm.cluster.connect import connect, prepare
from multimm.cluster.describe import describe
from multimm.cluster.local import local
from multimm.cluster.start import start

__all__ = ["connect", "describe", "local", "prepare", "start"]


def __dir__() -> list[str]:
    return sorted(__all__)
