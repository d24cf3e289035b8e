"""Workers of a kind that was never measured on this machine: measured once, when they start.

A CPU core's rate is not in its name, and links through a host's memory differ by ten times: rates
as shipped were off by 1.5 to 3 times on CPU workers, and so were the seconds of plans. Of GPUs, one
model's rates are shipped, which are no default for another one. Workers that `start` has just
begun are idle, and a second tells.
"""

from __future__ import annotations

import logging
from datetime import date, timedelta
from typing import TYPE_CHECKING

from multimm.cluster.calibration import store
from multimm.cluster.calibration.probes import Effort
from multimm.cluster.calibration.run import measure_rates
from multimm.cluster.inspect.cluster_spec import as_shipped, listed
from multimm.cluster.inspect.devices import driver_version
from multimm.errors import ClusterError
from multimm.planning.devices import SHARED_MEMORY
from multimm.planning.hardware import ClusterSpec

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: Key of Dask's configuration that says whether it is done.
SETTING = "multimm.measure-at-start"
#: What is measured: short, and large enough that a product's rate counts.
EFFORT = {
    "gpu": Effort(8192, 32768, 0.15, 2**30, 2**30, 0.05),
    "cpu": Effort(1024, 1024, 0.15, 2**24, 2**26, 0.05),
}
#: Days after which workers are measured again: libraries and machines change. Arbitrary.
DAYS = 90


def measure_at_first_start(client: Client) -> None:
    """Measure idle workers and their links, unless that was done in the last `DAYS` days.

    GPUs are measured again with another driver. What stands in the way is logged, and plans are
    made from the rates that are shipped.
    """
    import dask

    if not dask.config.get(SETTING, True):
        return
    workers = listed(client)
    if not workers or _are_known(as_shipped(client, workers)):
        return
    try:
        store.keep(measure_rates(client, EFFORT))
    except ClusterError as error:
        logger.info("plans are made from rates as shipped: %s", error)


def _are_known(spec: ClusterSpec) -> bool:
    """Whether all that plans for these workers go by was measured lately."""
    rates, driver = store.stored(), driver_version() if spec.on_gpus else ""
    devices = tuple(one for one in rates.devices if one.driver == driver)
    found = store.applied(spec, rates._replace(devices=devices))
    days = [device.measured for device in found.devices]
    if spec.workers > 1 and spec.link.name != SHARED_MEMORY.name:
        days.append(found.link.measured)
    oldest = (date.today() - timedelta(DAYS)).isoformat()
    return all(day >= oldest for day in days)
