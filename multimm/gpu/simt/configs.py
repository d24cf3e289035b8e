"""The configurations of sgemm_ffma.cu, their names, and which of them a product runs with.

What a tile must keep to, its kernel asserts when it is compiled. Pure arithmetic: the sizes of a
product and a device in, a configuration and the reason for it out.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from multimm.errors import KernelError
from multimm.gpu.arch import MAX_PARTS, ArchLimits, Device, defines, tiles_of
from multimm.gpu.strides import GemmSizes

logger = logging.getLogger(__name__)


#: A warp's lanes along the side where a thread has more values, and along the other one.
FEW_LANES, MANY_LANES = 4, 8
#: Neighbouring floats that fill one 32-byte sector.
K_RUN = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How sgemm_ffma.cu cuts its work: the independent integers only.

    Parameters
    ----------
    block_m, block_n : int
        The tile of D that one thread block computes.
    block_k : int
        How much of k one tile of A and B has in shared memory.
    thread_m, thread_n : int
        Values of D that one thread holds in registers.
    stages : int
        Groups of tiles in shared memory; copies run `stages` - 1 of them ahead.
    group : int
        Tiles of k between two barriers.
    order : int
        0: multiply-adds go along rows of a thread's values, 1: along pairs of columns. Which of
        the two suits the register banks better, the compiler decides.
    min_blocks : int
        Thread blocks that must fit a multiprocessor together; bounds the registers.
    """

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int
    group: int
    order: int
    min_blocks: int

    @property
    def lanes_m(self) -> int:
        """Lanes of a warp along m; the other side has 32 / `lanes_m`."""
        return FEW_LANES if self.thread_m >= self.thread_n else MANY_LANES

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, both operands padded as if they were stored along k."""
        float_bytes, padding = 4, 4
        words_per_k = (self.block_m + padding) + (self.block_n + padding)
        return self.stages * self.group * self.block_k * words_per_k * float_bytes

    @property
    def registers_per_thread(self) -> int:
        """The most registers the compiler may give a thread."""
        fair_share = 65_536 // (self.min_blocks * self.threads)
        return min(255, fair_share // 8 * 8)

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return {**defines(self), "LANES_M": self.lanes_m}

    def blocks_per_multiprocessor(self, limits: ArchLimits) -> int:
        """Return how many blocks are resident at a time by shared memory, threads, registers."""
        reserved = 1024  # shared memory that the driver keeps for itself, per block
        registers = -(-self.registers_per_thread // 8) * 8  # they are handed out by eights
        return min(
            limits.blocks,
            limits.shared_bytes // (self.shared_bytes + reserved),
            limits.threads // self.threads,
            limits.registers // (registers * self.threads),
        )


class Entry(NamedTuple):
    """A configuration with a name, what was measured of it, and why it is in the table."""

    name: str
    config: TileConfig
    #: Multiply-adds of a busy multiprocessor per clock, as a share of all lanes, where A and B are
    #: copied 4 bytes at a time: only A (as in NN), both (NT), none (TN), only B (TT).
    rates: tuple[float, float, float, float]
    edge: int  #: a tile's first copies and its stores take as long as so many k on all lanes
    late: float  #: by what share a tile takes longer that its multiprocessor has alone
    why: str


# Fitted to 78 products on an H200 (132 multiprocessors, 1980 MHz, 66.9 TFLOP/s): squares in all
# transposes, the awkward list of the benchmarks and twenty more, each with all configurations
# and up to 18 numbers of slices; kernels compiled by NVRTC 13.0. What the model chooses takes 0.4 %
# longer than the fastest of the table, geometric mean, and 2 % at most but for two: 257 x 257 x 257
# would gain 6 % from slices, which `CALL` forbids, and 32 x 32 x 65536 takes 5 % longer. Predicted
# times are 2 % off (median). Without an entry all products together take longer: tiny 0.7 %, wide
# 0.6, tall and thin 0.4, slim and small 0.3, each of the four large ones 0.1 (2 to 3 % of some
# squares). portable wins nothing here: it is for GPUs with 64 KB of shared memory.
# A long block_k is slower where each multiprocessor has one tile, by a tenth of it however long k
# is. That the fully unrolled loop does not fit the instruction cache is a guess, not a profile.
# Rates and edges were fitted together, for the choice first: one alone is no measurement.
REGISTRY: tuple[Entry, ...] = (
    Entry("large", TileConfig(128, 256, 32, 16, 8, 3, 1, 0, 1), (0.845, 0.821, 0.919, 0.836),
          133, 0.14, "94 % multiply-adds"),
    Entry("turned", TileConfig(256, 128, 32, 16, 8, 3, 1, 0, 1), (0.796, 0.775, 0.834, 0.866),
          76, 0.09, "large turned over"),
    Entry("quick", TileConfig(128, 256, 16, 16, 8, 3, 2, 1, 1), (0.818, 0.795, 0.882, 0.804),
          83, 0.0, "large with half the code"),
    Entry("quick_turned", TileConfig(256, 128, 16, 16, 8, 3, 2, 1, 1), (0.811, 0.8, 0.837, 0.838),
          92, 0.0, "turned with half the code"),
    Entry("wide", TileConfig(64, 128, 16, 8, 8, 3, 1, 0, 3), (0.796, 0.73, 0.821, 0.757),
          44, 0.1, "a quarter of the tile of large"),
    Entry("tall", TileConfig(128, 64, 16, 8, 8, 3, 1, 0, 3), (0.754, 0.765, 0.816, 0.793),
          38, 0.12, "wide turned over"),
    Entry("thin", TileConfig(64, 128, 8, 8, 8, 4, 1, 0, 4), (0.716, 0.66, 0.684, 0.706),
          20, 0.1, "a short k: four blocks hide each other's edges"),
    Entry("slim", TileConfig(128, 64, 8, 8, 8, 4, 1, 0, 4), (0.7, 0.694, 0.687, 0.709),
          20, 0.08, "thin turned over"),
    Entry("tiny", TileConfig(32, 32, 16, 4, 4, 4, 1, 0, 12), (0.483, 0.44, 0.623, 0.5),
          18, 0.05, "many small D"),
    Entry("portable", TileConfig(128, 128, 8, 16, 8, 4, 1, 0, 2), (0.761, 0.712, 0.785, 0.763),
          47, 0.03, "33 KB of shared memory"),
    Entry("small", TileConfig(32, 64, 16, 4, 4, 4, 1, 0, 4), (0.624, 0.543, 0.729, 0.64),
          91, 0.16, "D of few tiles, much padding"),
)  # fmt: skip

#: What products run with whose operands turn out not to be packable: so few that all of them are
#: compiled before one is needed, for each product has to bring one along. Of the quick ones each
#: takes 3 s to compile, and large ones 4; they multiply 3 % slower.
INSTEAD = ("quick", "wide")

#: What `Entry.rates` are for: whether A and B are copied 4 bytes at a time.
_PATHS = ((True, False), (True, True), (False, False), (False, True))

CLOCKS_PER_SECOND = 1.98e9  # of an H200
LAUNCH = 4_000  # clocks
LANES, SCHEDULERS, WARP = 128, 4, 32  # of a multiprocessor: multiply-adds per clock; threads

#: What a call costs its caller, 12 us: a product that is done by then is not cut into slices, whose
#: second launch would cost the caller more than they save on the GPU.
CALL = 24_000
#: A slice of k is at least this long, and a product is cut into at most so many: `add_partials`
#: adds them, and P, in one launch.
MIN_SLICE, MAX_SLICES = 48, MAX_PARTS - 1
#: All sums together have at most so many values, 64 MiB: memory that no plan knows of.
MAX_SUMS = 2**24
#: Tiles on every multiprocessor for which numbers of slices are looked for; arbitrary.
MOST_FULL = 4
#: Adding slices: clocks of another launch and of each slice, and bytes read or written per clock.
#: Fitted.
SUM_START, SUM_SLICE, SUM_BYTES = 2_600, 60, 3_600


def entry_named(entries: Sequence[Any], name: str) -> Any:
    """Return the entry of a name from a table of configurations.

    Raises
    ------
    KernelError
        If the name is unknown; the message lists the known ones.
    """
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(repr(entry.name) for entry in entries)
    raise KernelError(f"kernel configuration {name!r} is unknown; known are {known}")


def choose(sizes: GemmSizes, device: Device, slices: int, names: Sequence[str] = ()) -> TileConfig:
    """Return the configuration with the least predicted time.

    The first of equals wins, so larger tiles do.

    Parameters
    ----------
    sizes : GemmSizes
    device : Device
    slices : int
        Of `slices_of_k`.
    names : sequence of str, optional
        Of the entries to choose from. Default: all.
    """
    entries = [entry_named(REGISTRY, name) for name in names] or REGISTRY
    best = min(entries, key=lambda entry: _clocks(entry, sizes, device, slices))
    m, n, k = sizes.m, sizes.n, sizes.k
    logger.debug("m=%d n=%d k=%d: %s (%s), %d slices of k", m, n, k, best.name, best.why, slices)
    config: TileConfig = best.config
    return config


def predicted_seconds(sizes: GemmSizes, device: Device) -> float:
    """Return how long the chosen configuration is predicted to take, at an H200's clock."""
    slices = slices_of_k(sizes, device)
    clocks = min(_clocks(entry, sizes, device, slices) for entry in REGISTRY)
    return clocks / CLOCKS_PER_SECOND


def slices_of_k(sizes: GemmSizes, device: Device) -> int:
    """Return into how many slices k is cut, each summed on its own, to keep a device busy.

    It depends on sizes and the device only, so that all configurations and layouts give the same
    bits.
    """
    if sizes.batch > 1 or sizes.m * sizes.n == 0:
        return 1
    return _slices(sizes.m, sizes.n, sizes.k, device, sizes.lower)


@functools.lru_cache(4096)
def _slices(m: int, n: int, k: int, device: Device, lower: bool) -> int:
    """The number of slices with the least predicted time, of operands in C order.

    Worth trying are those with which some configuration fills every multiprocessor with just a
    whole number of tiles.
    """
    most = min(MAX_SLICES, k // MIN_SLICE, MAX_SUMS // (m * n))
    if most < 2:
        return 1
    sizes = GemmSizes(m, n, k, scattered_a=True, lower=lower)
    if min(_clocks(entry, sizes, device, 1) for entry in REGISTRY) <= CALL:
        return 1
    wanted = {
        full * device.multiprocessors // _tiles(entry.config, sizes)
        for entry in REGISTRY
        for full in range(1, MOST_FULL + 1)
    }
    # Of one length, the number that it comes to.
    counts = {-(-k // slice_length(k, min(count, most))) for count in wanted if count > 1}
    return min(
        (1, *sorted(counts)),
        key=lambda slices: min(_clocks(entry, sizes, device, slices) for entry in REGISTRY),
    )


def slice_length(k: int, slices: int) -> int:
    """Return the length of all slices of k but the last, which may be shorter."""
    return -(-k // (slices * K_RUN)) * K_RUN  # each begins with a whole sector


def _tiles(config: TileConfig, sizes: GemmSizes) -> int:
    edges = sizes.m, sizes.n, config.block_m, config.block_n
    return tiles_of(*edges, lower=sizes.lower) * sizes.batch


def _clocks(entry: Entry, sizes: GemmSizes, device: Device, slices: int) -> float:
    """Predicted clocks of the busiest multiprocessor, of the launch and of adding slices."""
    config = entry.config
    resident = config.blocks_per_multiprocessor(device.limits)
    if resident < 1:
        return math.inf
    path = (sizes.scattered_a or sizes.ragged_a, sizes.scattered_b or sizes.ragged_b)
    k = sizes.k if slices == 1 else slice_length(sizes.k, slices)
    area = config.block_m * config.block_n
    tile = area * (k / entry.rates[_PATHS.index(path)] + entry.edge) / LANES
    tiles = _tiles(config, sizes) * slices / device.multiprocessors
    clocks = LAUNCH + tile * _turns(config.threads // WARP, tiles, resident, entry.late)
    if slices > 1:
        moved = (slices + 1) * sizes.m * sizes.n * 4
        clocks += SUM_START + slices * SUM_SLICE + moved / SUM_BYTES
    return clocks


def _turns(warps: int, tiles: float, resident: int, late: float) -> float:
    """For how many tiles the busiest multiprocessor takes time, if it has `tiles` on average."""
    most = math.ceil(tiles)
    if 1 < resident < most == tiles:
        most += 1  # where blocks wait for others to end, they never come out even
    turns = math.ceil(most * warps / SCHEDULERS) * SCHEDULERS / warps  # schedulers have whole warps
    if most == 1 or min(most, resident) * warps <= SCHEDULERS:
        return turns * (1 + late)
    if resident == 1 and most == tiles and late:  # 8 tiles each took as long as 8.9 (large), 8.8
        return turns + 0.9
    return max(turns, tiles + late) if resident == 1 else turns
