"""``multimm tune``: measure the rates of workers and links, for later plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.options import CLUSTER, DEBUG, Workers, add
from multimm.cli.terminal import say
from multimm.errors import printable

if TYPE_CHECKING:
    from multimm.cluster.calibration.store import Rates


@click.command(short_help="Measure the workers, for later plans.")
@add(*CLUSTER)
@DEBUG
def tune(**options: Any) -> None:
    """Measure the rates of block products and of blocks that travel.

    On the workers that --gpus, --workers or --scheduler name, which should be idle. Later plans
    for such workers are made from what is found. It is kept in the user's cache (MULTIMM_CACHE_DIR
    names another place).
    """
    from multimm.cluster.calibration import store
    from multimm.cluster.calibration.run import measure_rates

    with Workers(**options).open() as client:
        found = measure_rates(client)
    for line in rate_lines(found):
        say(line)
    path = store.keep(found)
    say(f"kept in {printable(path)}" if path else "the rates could not be kept: see the log")


def rate_lines(found: Rates) -> Iterator[str]:
    """A line for each kind of worker and each way between them."""
    for device in found.devices:
        rates = dict(device.packed_gflops)
        packed = "".join(f", {name} {rate:.4g}" for name, rate in rates.items())
        yield (
            f"{device.name}: ieee {device.gflops:.4g} GFLOP/s "
            f"(shipped {device.shipped_gflops:.4g}){packed}; copies {device.copy_gbps:.4g} GB/s"
        )
    for link in found.links:
        where = "between hosts" if link.between else "within a host"
        yield (
            f"{link.protocol} {where}: {link.gbps:.3g} GB/s to every worker at once, "
            f"{link.latency_s * 1e6:.0f} us at least"
        )
