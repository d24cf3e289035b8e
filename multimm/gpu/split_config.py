"""How kernels/sgemm_split.cu cuts its work, and which configuration a product runs with.

Pure arithmetic: nothing in this module knows of CUDA, CuPy or a device.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import NamedTuple

from multimm.errors import KernelError
from multimm.gpu.add_config import MAX_PARTS
from multimm.gpu.pack_config import RESIDUAL_CAP
from multimm.gpu.registry import MAX_SUMS, entry_named
from multimm.gpu.tiles import tiles_of

logger = logging.getLogger(__name__)

#: k of a packed tile, rows of it, and its bytes of float16.
SLAB, TILE_ROWS = 64, 64
TILE_BYTES = TILE_ROWS * SLAB * 2
#: Rows of D that a thread block computes: two warpgroups of 64 rows.
TILE_M = 128
#: Rows of a packed operand are filled up to a multiple of this.
PACKED_ROWS = 128
#: Two warpgroups multiply and one copies.
THREADS = 384
#: Registers of a thread that multiplies, and what it needs besides its sums.
REGISTERS, OTHER_REGISTERS = 232, 36
#: The most shared memory that a block may have on compute capability 9.0, the only one.
SHARED_BYTES, CAPABILITY = 232_448, 90
#: A slice of k has at least so many slabs, and a product at most so many slices: `add_partials`
#: adds them, and P, in one launch.
MIN_SLABS, MAX_SLICES = 8, MAX_PARTS - 1
#: Operands that are packed for one product are packed and multiplied in stretches of k, at least so
#: long, and of so many multiplications: memory for a stretch is all that packing takes then, and
#: packing, which needs little power, comes between products, which run at a GPU's cap. A' A of
#: 1048576 x 8192 in `float32` takes 416 ms in 16 stretches, 445 in 4 (one H200); with 2048 columns
#: a stretch of 1048576 is as good as shorter ones.
LONG, MANY = 2**16, 2**42
#: Stretches begin at multiples of so many k: whole tiles, and cache lines.
GRAIN = 128
#: The narrowest tile; slices are counted by it, so that they depend on no configuration.
MIN_TILE_N = 64


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How sgemm_split.cu cuts its work: the independent integers only.

    Parameters
    ----------
    products : int
        Tensor-core products: 3 of two parts each for FP32 accuracy, or 1 for ``tf32``.
    tile_n : int
        Columns of D that one thread block computes at a time.
    slots : int
        Places in shared memory, each for one part of one slab.
    band : int
        Rows of tiles that are in flight together.
    """

    products: int
    tile_n: int
    slots: int
    band: int

    def __post_init__(self) -> None:
        rules = (
            (self.products in (1, 3), "products must be 3 (float32) or 1 (tf32)"),
            (
                self.tile_n in (64, 128, 192, 256),
                f"tile_n must be a multiple of {TILE_ROWS} up to 256: B is packed in such tiles",
            ),
            (
                self.registers <= REGISTERS,
                f"its sums take {self.registers} registers per thread, of {REGISTERS}: lower "
                "tile_n",
            ),
            (
                self.slots >= 2 * self.parts,
                f"slots must be at least {2 * self.parts}: a slab is copied while another one is "
                "multiplied",
            ),
            (
                self.shared_bytes <= SHARED_BYTES,
                f"it needs {self.shared_bytes} bytes of shared memory, a block has at most "
                f"{SHARED_BYTES}: lower slots",
            ),
            (self.band > 0, "band must be positive"),
        )
        for holds, sentence in rules:
            if not holds:
                raise KernelError(f"{self}: {sentence}")

    @property
    def parts(self) -> int:
        """Parts of each operand: high and low, or high alone."""
        return 1 if self.products == 1 else 2

    @property
    def registers(self) -> int:
        """Registers of a thread: sums and their rounded halves, or total, fresh and small; others.

        Of one product, what was put aside has half the width of the sums.
        """
        sums = self.tile_n // 2
        return (sums + sums // 2 if self.products == 1 else 3 * sums) + OTHER_REGISTERS

    @property
    def shared_bytes(self) -> int:
        """Slots, two barriers for each, and what aligning them may take."""
        slot = (TILE_M + self.tile_n) // TILE_ROWS * TILE_BYTES
        return self.slots * (slot + 2 * 8) + 1024

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        given = {name.upper(): value for name, value in asdict(self).items() if name != "products"}
        return {"PARTS": self.parts, "CAP": RESIDUAL_CAP, **given}

    def tiles(self, m: int, n: int, lower: bool = False) -> int:
        """Return how many tiles D is made of, or how many are computed of a `lower` one."""
        return tiles_of(m, n, TILE_M, self.tile_n, lower)


class SplitEntry(NamedTuple):
    """A configuration with a name, what was measured of it, and why it is in the table."""

    name: str
    config: SplitConfig
    clocks: int  #: of a block, per slab
    long_clocks: int  #: the same where it takes longer than `LONG_SECONDS`
    why: str


#: Clocks before the first slab of a tile and after its last one, estimated from small products.
TILE_CLOCKS = 3000
#: Clocks in a second when all multiprocessors are busy: the power limit lowers it to 1.4e9 in long
#: products. Measured at 8192 or estimated, in seconds: packing an element; adding slices of k,
#: once and for each byte that is moved.
CLOCK, PACK_SECONDS = 1.6e9, 3e-12
#: What a call takes besides, in seconds: zeros for packing, and four launches of which the last two
#: mostly find nothing to do. From products of 1024.
LAUNCH_SECONDS = 16e-6
ADD_SECONDS, BYTE_SECONDS = 4e-6, 0.3e-12

#: A product that takes longer meets the power limit, where narrow tiles, whose operands travel
#: more, lose more than wide ones: arbitrary.
LONG_SECONDS = 1e-3

# Clocks are from long products on an H200, whose tensor cores were 88, 80, 83 and 79 % busy; those
# of tf32 are 1234 and 648, and what every PROMOTE slabs costs, 1400 and 600, spread over them. In
# triangles of 512 to 4096 with k of 262144, held for 0.3 s, narrow tiles took 1.32 to 1.48 times
# half of what wide ones did, and 1.25 times for tf32: hence their long clocks.
SPLIT_REGISTRY: tuple[SplitEntry, ...] = (
    SplitEntry("split_wide", SplitConfig(3, 128, 6, 8), 1745, 1745, "least traffic per product"),
    SplitEntry("split_narrow", SplitConfig(3, 64, 9, 8), 960, 1250, "D of few tiles"),
    SplitEntry("tf32_wide", SplitConfig(1, 256, 4, 12), 1263, 1263, "least traffic per product"),
    SplitEntry("tf32_narrow", SplitConfig(1, 128, 7, 12), 660, 790, "D of few tiles"),
)


def split_config_named(name: str) -> SplitConfig:
    """Return the configuration of a name.

    Raises
    ------
    KernelError
        If the name is unknown; the message lists the known ones.
    """
    config: SplitConfig = entry_named(SPLIT_REGISTRY, name).config
    return config


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
    return _even(slabs, wanted)


def _even(slabs: int, wanted: int) -> tuple[int, int]:
    """So many slices, or fewer where these have whole slabs; and the slabs of each but the last."""
    length = -(-slabs // wanted)
    return -(-slabs // length), length


def lower_slices(size: int, k: int, products: int, multiprocessors: int) -> tuple[int, int]:
    """`split_slices` for the lower triangle of a square D: whatever takes the least time.

    Its tiles are few, and seldom a multiple of the multiprocessors; k is often long. The sums of
    all slices have no more values than those of sgemm_ffma may have.
    """
    slabs = -(-k // SLAB)
    most = max(1, min(MAX_SLICES, slabs // MIN_SLABS, MAX_SUMS // max(1, size * size)))

    def seconds(cut: tuple[int, int]) -> float:
        _, clocks = _fastest(size, size, cut, products, multiprocessors, lower=True)
        return clocks / CLOCK + _adding_seconds(size, size, cut[0])

    return min((_even(slabs, wanted) for wanted in range(1, most + 1)), key=seconds)


def slices_of(
    m: int, n: int, k: int, products: int, multiprocessors: int, lower: bool
) -> tuple[int, int]:
    """`split_slices`, or `lower_slices` where only the lower triangle of D is computed."""
    if lower:
        return lower_slices(m, k, products, multiprocessors)
    return split_slices(m, n, k, multiprocessors)


def stretch_of(m: int, n: int, k: int) -> int:
    """Return how long the stretches of k are in which operands are packed and multiplied.

    Of even length, but for the last one. It depends on sizes only: the bits do, too.

    >>> stretch_of(8192, 8192, 1048576), stretch_of(8192, 8192, 131073), stretch_of(8192, 8192, 99)
    (65536, 65664, 99)
    """
    count = min(k // LONG, m * n * k // MANY) or 1
    return min(k, -(-k // (count * GRAIN)) * GRAIN)


def choose_split(
    m: int, n: int, k: int, products: int, multiprocessors: int, lower: bool = False
) -> tuple[SplitConfig, str]:
    """Return the configuration with the least predicted time for a product, and why.

    The busiest multiprocessor computes ``ceil(tiles / multiprocessors)`` whole tiles, padding
    included. The first of equals wins.

    Parameters
    ----------
    m, n, k : int
    products : int
        3 for ``float32``, 1 for ``tf32``.
    multiprocessors : int
        Of the device.
    lower : bool
        Only tiles that reach the diagonal of a square D are computed.

    Returns
    -------
    config : SplitConfig
    reason : str
        One line.

    Raises
    ------
    KernelError
        If no configuration makes that many products.
    """
    cut = slices_of(m, n, k, products, multiprocessors, lower)
    best, _ = _fastest(m, n, cut, products, multiprocessors, lower)
    reason = (
        f"{best.name}: {best.config.tiles(m, n, lower)} tiles of {TILE_M}x{best.config.tile_n} on "
        f"{multiprocessors} multiprocessors ({best.why})"
    )
    if cut[0] > 1:
        reason += f", k cut into {cut[0]} slices"
    logger.debug("m=%d n=%d k=%d: %s", m, n, k, reason)
    return best.config, reason


def split_seconds(m: int, n: int, k: int, products: int, multiprocessors: int) -> float:
    """Return the predicted time of a call that packs both operands and multiplies them.

    Parameters
    ----------
    m, n, k, products, multiprocessors : int
        As for `choose_split`.
    """
    cut = split_slices(m, n, k, multiprocessors)
    _, clocks = _fastest(m, n, cut, products, multiprocessors)
    seconds = clocks / CLOCK + LAUNCH_SECONDS + (m + n) * k * PACK_SECONDS
    return seconds + _adding_seconds(m, n, cut[0])


def _adding_seconds(m: int, n: int, slices: int) -> float:
    return (slices > 1) * (ADD_SECONDS + (slices + 1) * m * n * BYTE_SECONDS * 4)


def _fastest(
    m: int, n: int, cut: tuple[int, int], products: int, multiprocessors: int, lower: bool = False
) -> tuple[SplitEntry, int]:
    """The entry with the least clocks of the busiest multiprocessor, and these."""
    slices, length = cut

    def clocks(entry: SplitEntry) -> int:
        turns = -(-entry.config.tiles(m, n, lower) * slices // multiprocessors)
        short, long = (
            turns * (length * slab + TILE_CLOCKS) for slab in (entry.clocks, entry.long_clocks)
        )
        return short if short <= LONG_SECONDS * CLOCK else long

    able = [entry for entry in SPLIT_REGISTRY if entry.config.products == products]
    if not able:
        raise KernelError(f"{products} products were asked for: 3 (float32) or 1 (tf32) are made")
    best = min(able, key=clocks)
    return best, clocks(best)
