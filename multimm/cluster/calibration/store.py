"""Rates that were measured, kept in the user's cache: `multimm.cluster.calibration.run` finds them.

They replace the shipped constants for workers of the same kind, on this machine, until they are
measured again or the file is deleted. Whatever in it does not fit is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from multimm.gpu.runtime import file_cache
from multimm.planning.devices import LOCAL_TCP, NVLINK, RATES, DeviceSpec, Link
from multimm.planning.hardware import ClusterSpec

logger = logging.getLogger(__name__)

_FORMAT = 3
#: What a measured rate may be, at most, times what was shipped, or at least a part of it; and
#: rates and latencies of links, GB/s and seconds, and rates of copies, GB/s. Arbitrary: what is
#: beyond was not measured.
_FAR, _LINKS, _LATENCIES, _COPIES = 1e4, (1e-4, 1e6), (1e-9, 60.0), (1e-2, 1e6)
#: How blocks travel between workers on paper, which have no addresses.
_PROTOCOLS = {NVLINK.name: "ucxx", LOCAL_TCP.name: "tcp"}


class DeviceRates(NamedTuple):
    """Of one kind of worker."""

    name: str  #: of the device
    shipped_gflops: float  #: without a measurement; tells CPU workers of more cores apart
    gflops: float  #: float32 block products with fused multiply-adds alone
    copy_gbps: float  #: read and written where a block is copied
    packed_gflops: tuple[tuple[str, float], ...]  #: of packed operands, by precision
    measured: str  #: the day
    driver: str = ""  #: of GPUs, its version

    @property
    def key(self) -> tuple[str, float]:
        """What they hold for."""
        return self.name, self.shipped_gflops


class LinkRates(NamedTuple):
    """Of one way between workers."""

    protocol: str  #: "ucxx", "tcp", "tls"
    devices: str  #: names of what the workers compute on
    between: bool  #: from one host to another
    gbps: float  #: that each worker receives, while all do
    pair_gbps: float  #: of one pair alone
    latency_s: float
    measured: str  #: the day

    @property
    def key(self) -> tuple[str, str, bool]:
        """What they hold for."""
        return self.protocol, self.devices, self.between


class Rates(NamedTuple):
    """All that is known."""

    devices: tuple[DeviceRates, ...] = ()
    links: tuple[LinkRates, ...] = ()


#: By file, as this process found or measured them.
_known: dict[Path | None, Rates] = {}


def path() -> Path | None:
    """The file; None for a user without a home directory."""
    home = file_cache.directory()
    return home and home / "rates.json"


def stored() -> Rates:
    """What was measured by this process, or before it began; the file is read once."""
    where = path()
    if where not in _known:
        _known[where] = _read(where)
    return _known[where]


def keep(found: Rates) -> Path | None:
    """Add to what is known; return the file, or None if only this process knows it."""
    where = path()
    if where is None:
        _known[where] = _joined(_known.get(where, Rates()), found)
        logger.warning("the rates hold for this process alone: set MULTIMM_CACHE_DIR")
        return None
    # Another process may have written meanwhile; what only this one knows is kept, too.
    rates = _joined(_known.get(where, Rates()), _read(where), found)
    _known[where] = rates
    content = {
        "format": _FORMAT,
        "devices": [one._asdict() for one in rates.devices],
        "links": [one._asdict() for one in rates.links],
    }
    written = file_cache.write(where, json.dumps(content, indent=1).encode())
    return where if written else None


def forget() -> None:
    """Have this process read the file anew."""
    _known.clear()


def _joined(*several: Rates) -> Rates:
    """One entry for each key, the last one."""
    devices = {one.key: one for rates in several for one in rates.devices}
    links = {one.key: one for rates in several for one in rates.links}
    return Rates(tuple(devices.values()), tuple(links.values()))


def _read(where: Path | None) -> Rates:
    return file_cache.load(where, _parsed, "measure again") or Rates()


def _parsed(content: Any) -> Rates:
    if content["format"] != _FORMAT:
        raise file_cache.OtherVersionError("is of another version")
    return Rates(
        tuple(_device_rates(entry) for entry in content["devices"]),
        tuple(_link_rates(entry) for entry in content["links"]),
    )


def _device_rates(entry: Mapping[str, Any]) -> DeviceRates:
    shipped = file_cache.number(entry["shipped_gflops"], *RATES)
    near = shipped / _FAR, shipped * _FAR
    packed = tuple(
        (file_cache.text(name), file_cache.number(rate, *near))
        for name, rate in entry["packed_gflops"]
    )
    return DeviceRates(
        file_cache.text(entry["name"]),
        shipped,
        file_cache.number(entry["gflops"], *near),
        file_cache.number(entry["copy_gbps"], *_COPIES),
        packed,
        _day(entry["measured"]),
        file_cache.text(entry["driver"]) if entry["driver"] != "" else "",
    )


def _link_rates(entry: Mapping[str, Any]) -> LinkRates:
    if type(entry["between"]) is not bool:
        raise TypeError(f"{entry['between']!r} is neither true nor false")
    return LinkRates(
        file_cache.text(entry["protocol"]),
        file_cache.text(entry["devices"]),
        entry["between"],
        file_cache.number(entry["gbps"], *_LINKS),
        file_cache.number(entry["pair_gbps"], *_LINKS),
        file_cache.number(entry["latency_s"], *_LATENCIES),
        _day(entry["measured"]),
    )


def _day(value: object) -> str:
    return date.fromisoformat(file_cache.text(value)).isoformat()


def applied(spec: ClusterSpec, rates: Rates, *, scattered: bool = False) -> ClusterSpec:
    """The same cluster with measured rates in place of shipped ones, where there are any.

    `scattered` workers are on several hosts, and `spec` does not say where: what holds between
    hosts then holds for all.
    """
    by_device = {one.key: one for one in rates.devices}
    by_link = {one.key: one for one in rates.links}
    way = protocol(spec), models(spec)
    return replace(
        spec,
        devices=tuple(_device(one, by_device.get((one.name, one.gflops))) for one in spec.devices),
        link=_link(spec.link, by_link.get((*way, scattered))),
        between=_link(spec.between, by_link.get((*way, True))),
    )


def protocol(spec: ClusterSpec) -> str:
    """How blocks travel, as addresses begin with it."""
    if spec.addresses:
        return spec.addresses[0].partition("://")[0]
    return _PROTOCOLS.get(spec.link.name, spec.link.name)


def models(spec: ClusterSpec) -> str:
    """What the workers compute on."""
    return " and ".join(sorted({device.name for device in spec.devices}))


def _device(device: DeviceSpec, found: DeviceRates | None) -> DeviceSpec:
    if found is None:
        return device
    packed = tuple(rate for rate in found.packed_gflops if rate[0] in device.packs)
    return replace(
        device,
        gflops=found.gflops,
        copy_gbps=found.copy_gbps,
        packed_gflops=packed,
        measured=found.measured,
    )


def _link(link: Link, found: LinkRates | None) -> Link:
    if found is None:
        return link
    # A lone fetch of an idle worker waits for less than those of a product, which came with the
    # link: 2.5 ms on H200s.
    latency = max(link.latency_s, found.latency_s)
    return replace(link, gbps=found.gbps, latency_s=latency, measured=found.measured)
