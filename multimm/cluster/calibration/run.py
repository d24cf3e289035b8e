"""Measure what idle workers compute and how fast blocks travel between them, in seconds.

That is done when workers of a kind first start on a machine, too: a CPU core's rate is not in its
name, and links through a host's memory differ by ten times. With rates as shipped the seconds of
plans were off by 1.5 to 3 times on CPU workers. Of GPUs, one model's rates are shipped, which are
no default for another one. Workers that `start` has just begun are idle, and a second tells.

All workers are measured at the same time, as they work in a product: those of a host share its
power, its memory and its links. What a plan needs is the rate of the slowest.

The scheduler's time per task is not measured: it belongs to the scheduler's host, not to the
workers, and trivial tasks take another one than those of a product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from multimm.cluster.calibration import store
from multimm.cluster.calibration.probes import (
    Effort,
    copy_rate,
    fetch_seconds,
    forget_blocks,
    product_rate,
)
from multimm.cluster.calibration.store import DeviceRates, LinkRates, Rates, models, protocol
from multimm.cluster.inspect.cluster_spec import as_shipped, listed, silent
from multimm.cluster.inspect.devices import driver_version
from multimm.cluster.inspect.workers import run_on
from multimm.errors import ClusterError, OptionError
from multimm.planning.devices import SHARED_MEMORY
from multimm.planning.hardware import ClusterSpec
from multimm.planning.problem import BY_RESIDUES

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

_COPIES = "copies"  #: among precisions

#: By kind of device: blocks as plans cut them. Arbitrary but for their order.
EFFORT = {
    "gpu": Effort(8192, 32768, 0.5, 2**30, 2**30, 0.3),
    "cpu": Effort(1024, 1024, 0.3, 2**24, 2**26, 0.3),
}
#: The same of the first start: short, and large enough that a product's rate counts.
FIRST_EFFORT = {
    "gpu": Effort(8192, 32768, 0.15, 2**30, 2**30, 0.05),
    "cpu": Effort(1024, 1024, 0.15, 2**24, 2**26, 0.05),
}
#: Key of Dask's configuration that says whether a first start measures.
SETTING = "multimm.measure-at-start"
#: Days after which workers are measured again: libraries and machines change. Arbitrary.
DAYS = 90
#: Bytes of a block whose transfer is all latency.
SMALL_BYTES = 2**12
#: Seconds for each part of the measurement; kernels may have to be compiled within the first.
ANSWER_SECONDS = 120.0
#: Seconds to wait until blocks are given back; a worker that has just died is called for longer.
FORGET_SECONDS = 5.0


def measure_rates(client: Client, efforts: Mapping[str, Effort] | None = None) -> Rates:
    """The rates of a client's workers, which must be idle.

    Without a link where there is one worker, or where all are threads of one process.

    Raises
    ------
    OptionError
        For an asynchronous client.
    ClusterError
        Without workers, with workers that compute, and where a worker is lost meanwhile.
    """
    if client.asynchronous:
        raise OptionError(
            "an asynchronous client cannot measure, for measuring waits: use a synchronous one, "
            "as multimm.cluster.start() and connect() return"
        )
    workers = listed(client)
    if not workers:
        raise ClusterError("there are no workers to measure: start some, or wait for them")
    spec = as_shipped(client, workers)
    if quiet := silent(client, workers):
        raise ClusterError(
            f"worker {quiet[0]} does not say what it computes with: measure again when it answers"
        )
    hosts = {address: str(workers[address]["host"]) for address in spec.addresses}
    _refuse_busy(client)
    efforts = EFFORT if efforts is None else efforts
    try:
        rates = Rates(_devices(client, spec, efforts), _links(client, spec, hosts, efforts))
    finally:
        with suppress(TimeoutError, OSError):  # a lost worker keeps nothing
            run_on(client, forget_blocks, list(listed(client)), FORGET_SECONDS)
    _refuse_busy(client)
    if set(listed(client)) != set(workers):
        raise ClusterError(
            "workers joined or left while rates were measured: nothing was kept; measure again "
            "when all are there"
        )
    return rates


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
        store.keep(measure_rates(client, FIRST_EFFORT))
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


def _refuse_busy(client: Client) -> None:
    scheduler: Any = client.scheduler
    processing: Mapping[str, Sequence[object]] = client.sync(scheduler.processing)
    count = sum(map(len, processing.values()))
    if count:
        raise ClusterError(
            f"{count} tasks run or wait on the workers, and beside them no rate is worth "
            "anything: nothing was kept; measure when the workers are idle"
        )


def _on_workers(
    client: Client, function: Callable[..., Any], addresses: Sequence[str], **arguments: Any
) -> dict[str, float]:
    try:
        replies = run_on(client, function, addresses, ANSWER_SECONDS, **arguments)
    except (TimeoutError, OSError) as error:
        raise ClusterError(
            f"workers did not answer while rates were measured ({error!r}): nothing was kept; "
            "measure again when they do"
        ) from error
    for address in addresses:
        reply = replies.get(address)
        if isinstance(reply, ClusterError):
            raise ClusterError(
                f"rates cannot be measured on worker {address} ({reply}): nothing was kept; "
                "measure again when nothing else runs there"
            )
        if not isinstance(reply, float):
            raise ClusterError(
                f"rates cannot be measured on worker {address} ({reply!r}): nothing was kept; "
                "measure again when all workers are up, with the same multimm as here"
            )
    return replies


def _devices(
    client: Client, spec: ClusterSpec, efforts: Mapping[str, Effort]
) -> tuple[DeviceRates, ...]:
    devices = dict(zip(spec.addresses, spec.devices, strict=True))
    found: dict[str, dict[str, float]] = {}
    packs = {name for device in spec.devices for name in device.packs}
    for precision in ["ieee", *sorted(packs - {BY_RESIDUES})]:  # its rate is in proportion
        able = [at for at, one in devices.items() if precision in ("ieee", *one.packs)]
        found[precision] = _on_workers(
            client, product_rate, able, precision=precision, efforts=efforts
        )
    found[_COPIES] = _on_workers(client, copy_rate, list(devices), efforts=efforts)
    driver = driver_version()
    kinds: dict[tuple[str, float], list[str]] = {}
    for address, device in devices.items():
        kinds.setdefault((device.name, device.gflops), []).append(address)
    rates = []
    for (name, shipped), alike in kinds.items():
        slowest = {
            precision: _rounded(min(by_worker[address] for address in alike))
            for precision, by_worker in found.items()
            if set(alike) <= set(by_worker)
        }
        gflops, copies = slowest.pop("ieee"), slowest.pop(_COPIES)
        of = driver if devices[alike[0]].kind == "gpu" else ""
        packed = tuple(slowest.items())
        rates.append(DeviceRates(name, shipped, gflops, copies, packed, _today(), of))
        logger.info("%s: %g GFLOP/s, shipped %g; packed %s", name, gflops, shipped, slowest)
    return tuple(rates)


def _links(
    client: Client, spec: ClusterSpec, hosts: Mapping[str, str], efforts: Mapping[str, Effort]
) -> tuple[LinkRates, ...]:
    if spec.link == SHARED_MEMORY:
        return ()  # nothing travels
    gpu = spec.on_gpus
    effort = efforts["gpu" if gpu else "cpu"]
    rates = []
    for between in (False, True):
        peers = neighbours(hosts, between=between)
        if not peers:
            continue
        how = {"peers": peers, "seconds": effort.link_seconds, "gpu": gpu}
        one, size = list(peers)[:1], effort.block_bytes
        crowd = _on_workers(client, fetch_seconds, list(peers), nbytes=size, **how)
        (waits,) = _on_workers(client, fetch_seconds, one, nbytes=SMALL_BYTES, **how).values()
        rate = _rounded(_gbps(size, waits, max(crowd.values())))
        kind = protocol(spec, between=between), models(spec), between
        rates.append(LinkRates(*kind, rate, _rounded(waits), _today()))
        logger.info("%s", rates[-1])
    return tuple(rates)


def neighbours(hosts: Mapping[str, str], *, between: bool) -> dict[str, str]:
    """From whom each worker fetches: the next of its host, or one of the next host.

    Every worker sends to about as many as it receives from.

    >>> neighbours({"a": "x", "b": "x", "c": "y"}, between=False)
    {'a': 'b', 'b': 'a'}
    >>> neighbours({"a": "x", "b": "x", "c": "y"}, between=True)
    {'a': 'c', 'b': 'c', 'c': 'a'}
    """
    groups: dict[str, list[str]] = {}
    for address, host in hosts.items():
        groups.setdefault(host, []).append(address)
    rings = list(groups.values())
    peers: dict[str, str] = {}
    for i, ring in enumerate(rings):
        others = rings[(i + 1) % len(rings)] if between else ring[1:] + ring[:1]
        peers |= {address: others[j % len(others)] for j, address in enumerate(ring)}
    return {address: peer for address, peer in peers.items() if hosts[peer] != hosts[address]
            or (not between and peer != address)}  # fmt: skip


def _gbps(nbytes: int, waits: float, seconds: float) -> float:
    """GB/s behind the wait for the first byte, which is at most half of the time."""
    return nbytes / max(seconds - waits, seconds / 2) / 1e9


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _today() -> str:
    return date.today().isoformat()
