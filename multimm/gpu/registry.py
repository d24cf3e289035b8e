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
    """A configuration with a name, what was measured of it, and why it is in the table."""

    name: str
    config: TileConfig
    #: Multiply-adds of a busy multiprocessor per clock, as a share of all lanes, where A and B are
    #: scattered: only A (as in NN), both (NT), none (TN), only B (TT).
    rates: tuple[float, float, float, float]
    start: int  #: clocks that a launch takes besides: code is fetched, the first tiles arrive
    why: str


# From trials on an H200 (132 multiprocessors, 1980 MHz, 66.9 TFLOP/s), kernels compiled by NVRTC
# 13, each beside cuBLAS FP32 in the same run: rates and starts fitted where a configuration was
# among the fastest, estimated elsewhere. Best of the table in TFLOP/s, NN/NT/TN/TT:
#   8192: large 51.6, busy 48.4, tight 53.8, turned 52.5 (cuBLAS 51.1/51.2/53.4/50.7)
#   2048: quick 49.3, busy 47.0, quick 50.0, tall 46.5 (cuBLAS 50.4/48.7/52.0/48.4)
#   1024: wide 41.4, wide 37.1, wide 42.8, tall 40.8 (cuBLAS 38.1/36.7/40.2/40.5)
#   512: small 23.8/20.5/26.4/22.1 (cuBLAS 18.0/17.8/18.6/18.2)
# The long start of a long block_k is what the fit says; that its fully unrolled loop has to be
# fetched first is the likely cause, not a profiled one. "portable" fits every chip since sm_75 and
# was not timed.
REGISTRY: tuple[Entry, ...] = (
    Entry("large", TileConfig(128, 256, 32, 16, 8, 3, 1, 1, 1), (0.795, 0.66, 0.77, 0.766),
          130_000, "94 % multiply-adds"),
    Entry("turned", TileConfig(256, 128, 32, 16, 8, 3, 1, 0, 1), (0.768, 0.68, 0.814, 0.809),
          130_000, "a scattered B on the short side"),
    Entry("tight", TileConfig(128, 128, 32, 16, 8, 3, 1, 0, 2), (0.755, 0.706, 0.829, 0.743),
          130_000, "two blocks share a multiprocessor"),
    Entry("quick", TileConfig(128, 256, 16, 16, 8, 3, 2, 0, 1), (0.778, 0.647, 0.788, 0.70),
          18_000, "large with half the code"),
    Entry("busy", TileConfig(128, 128, 16, 8, 8, 4, 1, 0, 2), (0.74, 0.746, 0.77, 0.66),
          18_000, "16 warps hide scattered copies"),
    Entry("wide", TileConfig(64, 128, 16, 8, 8, 3, 1, 0, 2), (0.773, 0.678, 0.77, 0.684),
          18_000, "a quarter of the tile of large"),
    Entry("tall", TileConfig(128, 64, 16, 8, 8, 4, 1, 0, 2), (0.726, 0.637, 0.77, 0.76),
          18_000, "wide turned over"),
    Entry("portable", TileConfig(128, 128, 8, 16, 8, 4, 1, 0, 2), (0.68, 0.60, 0.72, 0.62),
          18_000, "33 KB of shared memory"),
    Entry("small", TileConfig(32, 64, 16, 4, 4, 4, 1, 0, 4), (0.50, 0.42, 0.56, 0.46),
          5_000, "D of few tiles, much padding"),
)  # fmt: skip

#: What `Entry.rates` are for: whether A and B are scattered.
_PATHS = ((True, False), (True, True), (False, False), (False, True))

#: A slice of k is at least this long, and a product is cut into at most so many: `add_partials`
#: adds that many parts in one launch.
MIN_SLICE, MAX_SLICES = 256, 64
#: Slices are only cut from a k of this length, of a D with fewer squares of 64 x 64 than half
#: the multiprocessors.
SLICED_K, SQUARE = 2048, 64


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of a product: `batch` products of m x k by k x n.

    An operand is scattered if it is stored along k, and turned on its way to shared memory.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    scattered_a: bool = False
    scattered_b: bool = False


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
    included. The first of equals wins, so larger tiles do.

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
    best = min(REGISTRY, key=lambda entry: _clocks(entry, problem, device))
    config = best.config
    slices = slices_of_k(problem, device)
    tiles = _tiles(config, problem) * slices
    area = config.block_m * config.block_n * max(1, tiles)
    useful = problem.batch * slices * problem.m * problem.n / area
    reason = (
        f"{best.name}: {tiles} tiles of {config.block_m}x{config.block_n} on "
        f"{device.multiprocessors} multiprocessors, {useful:.0%} of them inside D ({best.why})"
    )
    if slices > 1:
        reason += f", k cut into {slices} slices"
    logger.debug("m=%d n=%d k=%d: %s", problem.m, problem.n, problem.k, reason)
    return config, reason


def slices_of_k(problem: Problem, device: Device) -> int:
    """Return into how many slices k is cut, each summed on its own, to keep a device busy.

    It does not depend on the configuration, so that all configurations give the same bits.
    """
    squares = -(-problem.m // SQUARE) * -(-problem.n // SQUARE)
    if problem.batch > 1 or problem.k < SLICED_K or not 0 < 2 * squares <= device.multiprocessors:
        return 1
    wanted = min(-(-2 * device.multiprocessors // squares), problem.k // MIN_SLICE, MAX_SLICES)
    return -(-problem.k // slice_length(problem.k, wanted))


def slice_length(k: int, slices: int) -> int:
    """Return the length of all slices of k but the last, which may be shorter."""
    unit = 32  # whole tiles of k of every configuration
    return -(-k // (slices * unit)) * unit


def _tiles(config: TileConfig, problem: Problem) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch


def _clocks(entry: Entry, problem: Problem, device: Device) -> float:
    """Predicted clocks of the busiest multiprocessor."""
    config = entry.config
    if config.blocks_per_multiprocessor(device.limits) < 1:
        return float("inf")
    slices = slices_of_k(problem, device)
    turns = -(-_tiles(config, problem) * slices // device.multiprocessors)
    k = -(-problem.k // slices)
    rate = entry.rates[_PATHS.index((problem.scattered_a, problem.scattered_b))]
    lanes = 128
    return turns * k * config.block_m * config.block_n / (lanes * rate) + entry.start
