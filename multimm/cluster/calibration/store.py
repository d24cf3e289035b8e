"""Rates that were measured, kept in the user's cache: `multimm.cluster.calibration.run` finds them.

They replace the shipped constants for workers of the same kind, on this machine, until they are
measured again or the file is deleted. Whatever in it does not fit is ignored.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from multimm.errors import printable
from multimm.gpu.runtime import file_cache
from multimm.planning.devices import INFINIBAND, LOCAL_TCP, NVLINK, DeviceSpec, Link
from multimm.planning.hardware import ClusterSpec

logger = logging.getLogger(__name__)

_FORMAT = 3
#: Characters that a warning repeats of what is wrong with the file. Arbitrary.
MOST_CHARACTERS = 200
#: How blocks travel between workers on paper, which have no addresses.
_PROTOCOLS = {NVLINK.name: "cuda-ipc", INFINIBAND.name: "ucxx", LOCAL_TCP.name: "tcp"}


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

    protocol: str  #: "ucxx", "tcp", "tls", "cuda-ipc"
    devices: str  #: names of what the workers compute on
    between: bool  #: from one host to another
    gbps: float  #: that each worker receives, while all do
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
    """What a file holds; nothing where it is missing, not to be trusted, damaged or another's."""
    if where is None or (raw := file_cache.read(where)) is None:
        return Rates()
    try:
        return _parsed(json.loads(raw))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        said = printable(repr(error))[:MOST_CHARACTERS]
        logger.warning(
            "%s is damaged, or another release's (%s), and is ignored: measure again", where, said
        )
    return Rates()


def _parsed(content: Any) -> Rates:
    """Of the JSON; what plans cannot be made from is an error of a wrong value, type or key."""
    if content["format"] != _FORMAT:
        raise ValueError("another format")
    devices = [DeviceRates(*(x[name] for name in DeviceRates._fields)) for x in content["devices"]]
    found = Rates(
        tuple(x._replace(packed_gflops=tuple((a, b) for a, b in x.packed_gflops)) for x in devices),
        tuple(LinkRates(*(x[name] for name in LinkRates._fields)) for x in content["links"]),
    )
    for one in found.devices:
        DeviceSpec(one.name, "gpu", 1, one.gflops, one.copy_gbps, packed_gflops=one.packed_gflops)
        date.fromisoformat(one.measured)
    for link in found.links:
        Link(link.protocol, link.gbps, link.latency_s)
        date.fromisoformat(link.measured)
    return _joined(found)


def applied(spec: ClusterSpec, rates: Rates, *, scattered: bool = False) -> ClusterSpec:
    """The same cluster with measured rates in place of shipped ones, where there are any.

    `scattered` workers are on several hosts, and `spec` does not say where: what holds between
    hosts then holds for all.
    """
    by_device = {one.key: one for one in rates.devices}
    by_link = {one.key: one for one in rates.links}

    def found(*, between: bool) -> LinkRates | None:
        return by_link.get((protocol(spec, between=between), models(spec), between))

    return replace(
        spec,
        devices=tuple(_device(one, by_device.get((one.name, one.gflops))) for one in spec.devices),
        link=_link(spec.link, found(between=scattered)),
        between=_link(spec.between, found(between=True)),
    )


def protocol(spec: ClusterSpec, *, between: bool) -> str:
    """How blocks travel within a host, or `between` hosts.

    As addresses begin; but a GPU block is read where it lies, within a host.
    """
    link = (spec.between if between else spec.link).name
    if not spec.addresses:
        return _PROTOCOLS.get(link, link)
    scheme = spec.addresses[0].partition("://")[0]
    direct = link == NVLINK.name and not between and not scheme.startswith("ucx")
    return _PROTOCOLS[link] if direct else scheme


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
