"""How packed operands are laid out, how kernels cut their product, with which configuration, and
how long that takes: kernels/sgemm_split.cu, sgemm_split_mma.cu.

Pure arithmetic: nothing in this module launches anything.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import NamedTuple

from multimm.errors import KernelError
from multimm.gpu.arch import (
    MAX_PARTS,
    RESERVED_BYTES,
    RESIDUAL_CAP,
    ArchLimits,
    Device,
    defines,
    limits_for,
    tiles_of,
)
from multimm.gpu.simt.configs import CLOCKS_PER_SECOND as H200_CLOCK
from multimm.gpu.simt.configs import MAX_SUMS, predicted_seconds
from multimm.gpu.strides import GemmSizes

logger = logging.getLogger(__name__)

SLAB = 64  #: of k; tiles are as high as they are wide
ROW_ALIGN = 128  #: rows are padded to a multiple
#: How many FP16 numbers stand for a float32, by precision.
PARTS = {"float32": 2, "tf32": 1}
PANEL = 64  #: rows
#: The bound of the split kernel's error is below that of an FP32 dot product from here on.
SPLIT_K = 256


def tiles_for(rows: int, k: int) -> tuple[int, int]:
    """Panels of 64 rows, padded to pairs, and slabs of 64 k."""
    return -(-rows // ROW_ALIGN) * (ROW_ALIGN // PANEL), -(-k // SLAB)


#: Rows of a packed tile, and its bytes of float16.
TILE_ROWS = SLAB
TILE_BYTES = TILE_ROWS * SLAB * 2
#: Rows of D that a thread block computes.
TILE_M = 128
#: Compute capabilities: the only one with wgmma, and the first one with mma of these shapes.
WGMMA, MMA = 90, 80
#: A slice of k has at least so many slabs, and a product at most so many slices: `add_partials`
#: adds them, and P, in one launch.
MIN_SLABS, MAX_SLICES = 8, MAX_PARTS - 1
#: Operands that are packed for one product are packed and multiplied in stretches of k, at least so
#: long, and of so many multiplications: memory for a stretch, and for the sums of those before, is
#: all that packing takes then; operands are read once (kernels/split_pack.cu); and packing, which
#: needs little power, comes between products, which run at a GPU's cap. From trials on one H200.
LONG, MANY = 2**15, 2**41
#: Stretches begin at multiples of so many k: whole tiles, and cache lines.
GRAIN = 128
#: The narrowest tile; slices are counted by it, so that they depend on no configuration.
MIN_TILE_N = 64


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How a kernel cuts its work: the independent integers only.

    In sgemm_split.cu two warpgroups multiply and one copies; a slot has a part of a slab. In
    sgemm_split_mma.cu eight warps copy and multiply; a slot has half a slab of all parts.

    Parameters
    ----------
    products : int
        Tensor-core products of 16-bit numbers: 3 of two FP16 parts each for FP32 accuracy, or 1 for
        ``tf32``. Of data of a wide range 6 of three bfloat16 parts, or 2: one of TF32 takes as long
        as two.
    tile_n : int
        Columns of D that one thread block computes at a time.
    slots : int
        Places in shared memory for what is copied ahead.
    band : int
        Rows of tiles that are in flight together.
    specific : bool
        Of sgemm_split.cu, whose instructions one compute capability alone has; else the other's.
    """

    products: int
    tile_n: int
    slots: int
    band: int
    specific: bool

    @property
    def parts(self) -> int:
        """Parts of each operand: high, middle and low, high and low, or high alone."""
        return {1: 1, 2: 1, 3: 2, 6: 3}[self.products]

    @property
    def broad(self) -> bool:
        """Whether operands are packed by broad_pack.cu, for data of a wide range."""
        return self.products in BROAD_PRODUCTS.values()

    @property
    def tiles_of_slab(self) -> int:
        """Tiles of 128 bytes a row that a part of 64 k takes: TF32 has 4 bytes."""
        return 2 if self.products == 2 else 1

    @property
    def entry(self) -> str:
        """Name of the kernel, and of its file in front of ".cu"."""
        return "sgemm_split" if self.specific else "sgemm_split_mma"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 384 if self.specific else 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: slots; of sgemm_split barriers, and to align them."""
        part = (TILE_M + self.tile_n) // TILE_ROWS * TILE_BYTES
        if self.specific:
            return self.slots * (part + 2 * 8) + 1024
        return self.slots * part * self.parts // 2

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        own = {"PARTS": self.parts, "CAP": RESIDUAL_CAP, **defines(self, "products", "specific")}
        return own | {"BROAD": 1} if self.broad else own

    def tiles(self, m: int, n: int, lower: bool = False) -> int:
        """Return how many tiles D is made of, or how many are computed of a `lower` one."""
        return tiles_of(m, n, TILE_M, self.tile_n, lower)

    def runs_on(self, limits: ArchLimits) -> bool:
        """Whether a GPU has the instructions, and the shared memory."""
        capability = limits.capability
        able = capability == WGMMA if self.specific else capability >= MMA
        return able and self.shared_bytes <= limits.shared_bytes - RESERVED_BYTES


def split_slices(m: int, n: int, k: int, multiprocessors: int) -> tuple[int, int]:
    """Return into how many slices k is cut, each summed on its own, and the slabs of each.

    They keep a device busy where D has few tiles, and do not depend on the configuration, so
    that all configurations give the same bits. The last slice may be shorter.
    """
    slabs = -(-k // SLAB)
    tiles = -(-m // TILE_M) * -(-n // MIN_TILE_N)
    if not 0 < 2 * tiles <= multiprocessors or slabs < 2 * MIN_SLABS:
        return 1, slabs
    wanted = min(multiprocessors // tiles, slabs // MIN_SLABS, MAX_SLICES)
    return even_slices(slabs, wanted)


def even_slices(slabs: int, wanted: int) -> tuple[int, int]:
    """So many slices, or fewer where these have whole slabs; and the slabs of each but the last."""
    length = -(-slabs // wanted)
    return -(-slabs // length), length


def stretch_of(m: int, n: int, k: int) -> int:
    """Return how long the stretches of k are in which operands are packed and multiplied.

    Of even length, but for the last one, and long enough for the sums to be fewer than what is
    packed at a time. It depends on sizes only: the bits do, too.

    >>> stretch_of(8192, 8192, 1048576), stretch_of(8192, 8192, 65537), stretch_of(8192, 8192, 99)
    (32768, 32896, 99)
    """
    least = max(LONG, -(-m * n // max(1, m + n)))
    count = min(k // least, m * n * k // MANY) or 1
    return min(k, -(-k // (count * GRAIN)) * GRAIN)


#: Products of the tensor cores, by the precision that they are for.
PRODUCTS = {"float32": 3, "tf32": 1}
#: The same of data whose range within a row FP16 parts do not carry; sgemm_split.cu alone.
BROAD_PRODUCTS = {"float32": 6, "tf32": 2}
#: Four launches that mostly find nothing to do wait for such data, behind products that are
#: predicted to take so long: 7 us, 1 % of them.
BROAD_SECONDS = 0.6e-3


class SplitEntry(NamedTuple):
    """A configuration with a name, what was measured of it, and why it is in the table."""

    name: str
    config: SplitConfig
    clocks: int  #: of a block, per slab, on an H200
    long_clocks: int  #: the same where all blocks take longer than `LONG_SECONDS`
    why: str


#: Clocks before the first slab of a tile and after its last one, estimated from small products.
TILE_CLOCKS = 3000
#: Clocks in a second when all multiprocessors are busy: the power limit lowers it to 1.4e9 in long
#: products. Measured at 8192 or estimated, in seconds: packing an element; adding slices of k,
#: once and for each byte that is moved.
CLOCK, PACK_SECONDS = 1.6e9, 2.4e-12
#: What a call takes besides, in seconds: zeros for packing, and four launches of which the last two
#: mostly find nothing to do. From products of 1024.
LAUNCH_SECONDS = 16e-6
ADD_SECONDS, BYTE_SECONDS = 4e-6, 0.3e-12

#: Sums of slices have at most `MAX_SUMS` values, or one for so many elements of the operands, whose
#: packed parts have 2 or 4 bytes each: what plans reckon with (`multimm.planning.cost.memory`).
SUMS_SHARE = 16
#: Fewer slices that are predicted to take so many times the least are as good.
ENOUGH = 1.01

#: A product that takes longer meets the power limit, where narrow tiles, whose operands travel
#: more, lose more than wide ones: arbitrary. The more multiprocessors are at work, the lower it
#: makes their clock: with a share of them, a slab takes share^0.4 of its long clocks, and no less
#: than without a limit. From 157 products, of which it is off by 4 % (root mean square).
LONG_SECONDS, POWER, UNLIMITED = 1e-3, 0.4, 0.68

# Clocks are from products on an H200. Long ones are those where all multiprocessors have a tile in
# every turn, held for 0.5 s: triangles of 512 to 6144 and squares of 1024 to 3072, k of 2^17 to
# 2^21. What every PROMOTE slabs of tf32 costs is spread over them.
SPLIT_REGISTRY: tuple[SplitEntry, ...] = (
    SplitEntry("split_wide", SplitConfig(3, 128, 6, 8, True), 1745, 2340, "least traffic"),
    SplitEntry("split_narrow", SplitConfig(3, 64, 9, 8, True), 960, 1640, "D of few tiles"),
    SplitEntry("tf32_wide", SplitConfig(1, 256, 4, 12, True), 1263, 1400, "least traffic"),
    SplitEntry("tf32_narrow", SplitConfig(1, 128, 7, 12, True), 660, 735, "D of few tiles"),
    SplitEntry("mma_wide", SplitConfig(3, 128, 3, 8, False), 3850, 3850, "least traffic"),
    SplitEntry("mma_narrow", SplitConfig(3, 64, 4, 8, False), 2300, 2300, "D of few tiles"),
    SplitEntry("tf32_mma_wide", SplitConfig(1, 256, 4, 8, False), 2750, 2750, "least traffic"),
    SplitEntry("tf32_mma_narrow", SplitConfig(1, 128, 6, 8, False), 1680, 1680, "D of few tiles"),
)
#: The same for data of a wide range, in large products alone. Long clocks are from products of
#: 8192 x 8192 x 4096, packed before and held for 0.8 s on an H100: 116.6 and 346.5 TFLOP/s. Others
#: are twice those above: not measured.
BROAD_REGISTRY: tuple[SplitEntry, ...] = (
    SplitEntry("bf16_broad", SplitConfig(6, 128, 6, 8, True), 3490, 3800, "wide range"),
    SplitEntry("tf32_broad", SplitConfig(2, 256, 4, 12, True), 2530, 2560, "wide range"),
)

#: FP16 multiply-adds with FP32 sums per clock and multiprocessor that mma does, by compute
#: capability: NVIDIA's whitepapers of GA100 and, of chips that exist with the full and with half
#: the rate, the lower one of GA102, AD102 and GB202. Of Hopper's, what makes the clocks above
#: comparable: peaks of mma there are not published, nor those of sm_100.
MMA_RATES = {80: 1024, 86: 256, 87: 512, 89: 256, 90: 1024, 100: 1024, 120: 256}
MMA_RATE = MMA_RATES[90]


def entries_for(limits: ArchLimits, products: int | None = None) -> tuple[SplitEntry, ...]:
    """Return what runs on a GPU, of so many products or of any; only the best kind of kernel.

    Those for data of a wide range only where their number of products is given.
    """
    able = [
        entry
        for entry in (BROAD_REGISTRY if products in BROAD_PRODUCTS.values() else SPLIT_REGISTRY)
        if entry.config.runs_on(limits) and products in (None, entry.config.products)
    ]
    specific = [entry for entry in able if entry.config.specific]
    return tuple(specific or able)


@functools.lru_cache(maxsize=1024)
def slices_of(
    m: int, n: int, k: int, products: int, device: Device, lower: bool = False
) -> tuple[int, int]:
    """Return into how many slices k is cut, each summed on its own, and the slabs of each.

    As many as take about the least time, where that is long, or only the `lower` triangle of a
    square D is computed: tiles of D are seldom a multiple of the multiprocessors, of which some
    have nothing to do in the last turn. Else see `split_slices`. The sums of all slices take a
    part of the memory of the packed operands, or little.
    """
    if not lower:
        few = split_slices(m, n, k, device.multiprocessors)
        if _fastest(m, n, few, products, device)[1] <= LONG_SECONDS * CLOCK:
            return few
    slabs = -(-k // SLAB)
    values = max(MAX_SUMS, (m if lower else m + n) * k // SUMS_SHARE)
    most = max(1, min(MAX_SLICES, slabs // MIN_SLABS, values // max(1, m * n)))
    cuts = [even_slices(slabs, wanted) for wanted in range(1, most + 1)]

    def seconds(cut: tuple[int, int]) -> float:
        _, clocks = _fastest(m, n, cut, products, device, lower)
        return clocks / CLOCK + _adding_seconds(m, n, cut[0])

    times = [seconds(cut) for cut in cuts]
    return next(cut for cut, time in zip(cuts, times, strict=True) if time <= ENOUGH * min(times))


def choose_split(
    m: int, n: int, cut: tuple[int, int], products: int, device: Device, lower: bool = False
) -> SplitConfig:
    """Return the configuration with the least predicted time for a product.

    The busiest multiprocessor computes ``ceil(tiles / multiprocessors)`` whole tiles, padding
    included. The first of equals wins.

    Parameters
    ----------
    m, n : int
    cut : (int, int)
        Of k, by `slices_of`.
    products : int
        3 for ``float32``, 1 for ``tf32``.
    device : Device
    lower : bool
        Only tiles that reach the diagonal of a square D are computed.

    Raises
    ------
    KernelError
        If no configuration makes that many products.
    """
    best, _ = _fastest(m, n, cut, products, device, lower)
    logger.debug("m=%d n=%d: %s (%s)", m, n, best.name, best.why)
    return best.config


def split_seconds(m: int, n: int, k: int, products: int, device: Device) -> float:
    """Return the predicted time of a call that packs both operands and multiplies them.

    Parameters
    ----------
    m, n, k, products, device
        As for `slices_of`.
    """
    cut = slices_of(m, n, k, products, device)
    _, clocks = _fastest(m, n, cut, products, device)
    seconds = clocks / CLOCK + LAUNCH_SECONDS + (m + n) * k * PACK_SECONDS
    return seconds + _adding_seconds(m, n, cut[0])


def _adding_seconds(m: int, n: int, slices: int) -> float:
    return (slices > 1) * (ADD_SECONDS + (slices + 1) * m * n * BYTE_SECONDS * 4)


@functools.lru_cache
def pays(products: int, device: Device) -> bool:
    """Whether large products are faster than FP32 multiply-adds, as far as models tell."""
    size = 8192
    if not entries_for(device.limits, products):
        return False
    plain = predicted_seconds(GemmSizes(size, size, size), device)
    return split_seconds(size, size, size, products, device) < plain


@functools.lru_cache(maxsize=1024)
def broad_pays(m: int, n: int, k: int, precision: str, device: Device) -> bool:
    """Whether a product is prepared for data of a wide range: see `BROAD_SECONDS`.

    Parameters
    ----------
    m, n, k : int
    precision : {"float32", "tf32"}
    device : Device
    """
    if not entries_for(device.limits, BROAD_PRODUCTS[precision]):
        return False
    return split_seconds(m, n, k, PRODUCTS[precision], device) >= BROAD_SECONDS


def precisions_that_pay(capability: int, multiprocessors: int) -> tuple[str, ...]:
    """Return those for which operands are packed on a GPU; none on one that is too old for all."""
    if capability < MMA:
        return ()
    device = Device(limits_for(capability), multiprocessors)
    return tuple(precision for precision, products in PRODUCTS.items() if pays(products, device))


def mma_gflops(
    capability: int, multiprocessors: int, clock: float
) -> tuple[tuple[str, float], ...]:
    """Return predicted rates of large products of packed operands, by precision.

    In GFLOP/s, and only where they pay and sgemm_split_mma computes them: that was never measured.

    Parameters
    ----------
    capability, multiprocessors : int
    clock : float
        The GPU's highest, in Hz.
    """
    if capability == WGMMA or capability < MMA:
        return ()
    limits = limits_for(capability)
    rate = multiprocessors * CLOCK * clock / H200_CLOCK * _mma_rate(capability) / MMA_RATE / 1e9
    return tuple(
        (precision, rate * max(map(_flops_of_a_clock, entries_for(limits, PRODUCTS[precision]))))
        for precision in precisions_that_pay(capability, multiprocessors)
    )


def _flops_of_a_clock(entry: SplitEntry) -> float:
    """Operations of a multiprocessor in a long product on an H200."""
    return 2 * TILE_M * entry.config.tile_n * SLAB / entry.long_clocks


def _fastest(
    m: int, n: int, cut: tuple[int, int], products: int, device: Device, lower: bool = False
) -> tuple[SplitEntry, float]:
    """The entry with the least clocks of the busiest multiprocessor, and these."""
    slices, length = cut

    def clocks(entry: SplitEntry) -> float:
        tiles = entry.config.tiles(m, n, lower) * slices
        turns = -(-tiles // device.multiprocessors)
        slower = 1.0 if entry.config.specific else MMA_RATE / _mma_rate(device.limits.capability)
        short = turns * (length * entry.clocks * slower + TILE_CLOCKS)
        if short <= LONG_SECONDS * CLOCK:
            return short
        share: float = (tiles / (turns * device.multiprocessors)) ** POWER
        limited = max(UNLIMITED, share) if entry.config.specific else 1.0
        return turns * (length * entry.long_clocks * limited * slower + TILE_CLOCKS)

    known = sorted({*PRODUCTS.values(), *BROAD_PRODUCTS.values()})
    if products not in known:
        raise KernelError(f"{products} products were asked for: {known} are made")
    able = entries_for(device.limits, products)
    if not able:
        raise KernelError(
            f"tensor-core products need a GPU of compute capability {MMA / 10} or newer, this one "
            f"has {device.limits.capability / 10}: use precision='ieee'"
        )
    best = min(able, key=clocks)
    return best, clocks(best)


def _mma_rate(capability: int) -> int:
    """Of a GPU, or of the nearest older one that is known."""
    return MMA_RATES[max(known for known in MMA_RATES if known <= capability)]
