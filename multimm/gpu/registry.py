"""The named kernel configurations, and which of them a product runs with.

Pure arithmetic: a problem and a device in, a configuration and the reason for it out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from multimm.errors import KernelError
from multimm.gpu.tiles import ArchLimits, TileConfig

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A configuration with a name and the reason why it is in the table."""

    name: str
    config: TileConfig
    rate: float  #: speed of a busy multiprocessor, relative to "large"
    why: str


# The rates count instructions of the inner loop: fma / (fma + shared reads), relative to 8x8
# values per thread. They are estimates, not measurements.
REGISTRY: tuple[Entry, ...] = (
    Entry("large", TileConfig(128, 128, 8, 8, 8, 2), 1.00, "16 fma per shared read"),
    Entry("medium", TileConfig(64, 64, 16, 8, 4, 4), 0.97, "four times the tiles of large"),
    Entry("tall", TileConfig(128, 32, 16, 8, 4, 4), 0.97, "narrow D, 128x32 tiles"),
    Entry("wide", TileConfig(32, 128, 16, 4, 8, 4), 0.97, "flat D, 32x128 tiles"),
    Entry("small", TileConfig(32, 32, 16, 4, 4, 4), 0.94, "D of few tiles, much padding"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of a product: `batch` products of m x k by k x n."""

    m: int
    n: int
    k: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU that a product runs on."""

    limits: ArchLimits
    multiprocessors: int


def config_named(name: str) -> TileConfig:
    """Return the configuration of a name.

    Raises
    ------
    KernelError
        If the name is unknown; the message lists the known ones.
    """
    for entry in REGISTRY:
        if entry.name == name:
            return entry.config
    known = ", ".join(repr(entry.name) for entry in REGISTRY)
    raise KernelError(f"kernel configuration {name!r} is unknown; known are {known}")


def choose(problem: Problem, device: Device) -> tuple[TileConfig, str]:
    """Return the configuration with the least predicted time, and why.

    The busiest multiprocessor computes ``ceil(tiles / multiprocessors)`` whole tiles, padding
    included: its multiply-adds over its relative rate are the predicted time. k is the same for
    all tiles and does not count. The first of equals wins, so larger tiles do.

    Parameters
    ----------
    problem : Problem
    device : Device

    Returns
    -------
    config : TileConfig
    reason : str
        One line.
    """
    best = min(REGISTRY, key=lambda entry: _cost(entry, problem, device))
    config = best.config
    tiles = _tiles(config, problem)
    useful = problem.batch * problem.m * problem.n / max(1, tiles * config.block_m * config.block_n)
    reason = (
        f"{best.name}: {tiles} tiles of {config.block_m}x{config.block_n} on "
        f"{device.multiprocessors} multiprocessors, {useful:.0%} of them inside D ({best.why})"
    )
    logger.debug("m=%d n=%d k=%d: %s", problem.m, problem.n, problem.k, reason)
    return config, reason


def _tiles(config: TileConfig, problem: Problem) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch


def _cost(entry: Entry, problem: Problem, device: Device) -> float:
    """Multiply-adds per k of the busiest multiprocessor, in units of the fastest rate."""
    config = entry.config
    if config.blocks_per_multiprocessor(device.limits) < 1:
        return float("inf")
    turns = -(-_tiles(config, problem) // device.multiprocessors)
    return turns * config.block_m * config.block_n / entry.rate
