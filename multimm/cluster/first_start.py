"""CPU workers of a kind that was never measured on this machine: measured once, when they start.

A core's rate is not in its name, and links through a host's memory differ by ten times. The rates
that are shipped were off by 1.5 to 3 times on CPU workers, so a plan's seconds were, too. Workers
that `start` has just begun are idle, and half a second of products tells.

GPU workers are left alone: their rates follow from clocks and counts that the driver says.
"""

from __future__ import annotations

import logging
from datetime import date, timedelta
from typing import TYPE_CHECKING

from multimm.cluster.calibration import store
from multimm.cluster.calibration.probes import Effort
from multimm.cluster.calibration.run import measure_rates
from multimm.cluster.describe import describe
from multimm.errors import ClusterError
from multimm.planning.devices import SHARED_MEMORY
from multimm.planning.hardware import ClusterSpec

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: Key of Dask's configuration that says whether it is done.
SETTING = "multimm.measure-at-start"
#: What is measured: short, and large enough that a product's rate counts.
EFFORT = {"cpu": Effort(1024, 0.15, 2**24, 0.05)}
#: Days after which workers are measured again: libraries and machines change. Arbitrary.
DAYS = 90


def measure_at_first_start(client: Client) -> None:
    """Measure idle CPU workers and their links, unless that was done in the last `DAYS` days.

    What stands in the way is logged, and plans are made from the rates that are shipped.
    """
    import dask

    if not dask.config.get(SETTING, True):
        return
    spec = describe(client)
    if spec is None or spec.on_gpus or _is_known(spec):
        return
    try:
        store.keep(measure_rates(client, EFFORT))
    except ClusterError as error:
        logger.info("plans are made from rates as shipped: %s", error)


def _is_known(spec: ClusterSpec) -> bool:
    """Whether all that plans for these workers go by was measured lately."""
    days = [device.measured for device in spec.devices]
    if spec.workers > 1 and spec.link.name != SHARED_MEMORY.name:
        days.append(spec.link.measured)
    oldest = (date.today() - timedelta(DAYS)).isoformat()
    return all(day >= oldest for day in days)
