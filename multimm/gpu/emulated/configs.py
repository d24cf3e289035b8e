"""How packed operands are laid out, and how the kernels that pack and multiply them cut their work:
kernels/split_pack.cu, sgemm_split.cu, sgemm_split_mma.cu.

Pure arithmetic: nothing in this module knows of CUDA, CuPy or a device. Figures of packing are what
was fastest on an H200.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, NamedTuple

from multimm.gpu.arch import RESERVED_BYTES, ArchLimits, Rules, check, defines, tiles_of
from multimm.gpu.elementwise.reduce import MAX_PARTS
from multimm.gpu.runtime.launch import Guard

SLAB = 64  #: of k; tiles are as high as they are wide
ROW_ALIGN = 128  #: rows are padded to a multiple
#: How many FP16 numbers stand for a float32, by precision.
PARTS = {"float32": 2, "tf32": 1}
PANEL = 64  #: rows
#: Residuals that a block may have; with more it keeps its source instead. Normal data has a handful
#: in 16384 x 16384, lognormal data of sigma 1 some 100. Arbitrary, but so many still cost little
#: beside the product: they are one of at most 1024 rows and 1024 terms.
RESIDUAL_CAP = 1024
#: Compile a kernel so that it does nothing unless an operand is refused, or if one is: its last
#: argument is the address of what packing has counted. See common/refused.cuh.
IF_REFUSED: Guard = (("GUARDED", RESIDUAL_CAP), ("REFUSED", 1))
UNLESS_REFUSED: Guard = (("GUARDED", RESIDUAL_CAP), ("REFUSED", 0))
#: Thread blocks that share a multiprocessor, and the float32 tiles that each may hold: more blocks
#: of fewer tiles are slower.
BLOCKS, MOST_HELD = 2, 6
#: Shared memory for a tile, and for all else, in bytes.
_TILE_BYTES, _OTHER_BYTES = 4 * SLAB * SLAB, 4 * 9 * SLAB
#: Times that a block looks for the others' maxima, about 1 ms, before it finds them alone, which
#: takes 0.2 ms by an estimate. Of large squares 95 of 100 blocks wait for 8 us or less (H200).
PATIENCE = 2**10


def held_on(limits: ArchLimits) -> int:
    """How many tiles a block holds on a GPU."""
    room = limits.shared_bytes // BLOCKS - RESERVED_BYTES - _OTHER_BYTES
    return max(1, min(MOST_HELD, room // _TILE_BYTES))


def pack_shared_bytes(held: int) -> int:
    """Dynamic shared memory of a block that holds so many tiles."""
    return held * _TILE_BYTES + _OTHER_BYTES


def pack_defines(parts: int, held: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_pack.cu."""
    return (("PARTS", parts), ("BLOCKS", BLOCKS), ("HELD", held), ("CAP", RESIDUAL_CAP))


def residual_defines(parts: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_residuals.cu."""
    return (("PARTS", parts), ("CAP", RESIDUAL_CAP))


def tiles_for(rows: int, k: int) -> tuple[int, int]:
    """Panels of 64 rows, padded to pairs, and slabs of 64 k."""
    return -(-rows // ROW_ALIGN) * (ROW_ALIGN // PANEL), -(-k // SLAB)


class Cut(NamedTuple):
    """How kernels/split_pack.cu cuts an operand into tasks."""

    run: int  #: slabs that one block packs
    tasks: int
    at_once: bool  #: whether the blocks of a panel run at one time: no launch has to find maxima


@functools.lru_cache(maxsize=1024)
def cut_for(rows: int, k: int, held: int, multiprocessors: int) -> Cut:
    """Return how an operand of that size is cut on a GPU.

    Every multiprocessor has something to do if that is possible. Half of the blocks that run at one
    time may share a panel: the others copy or write while these wait.
    """
    panels, slabs = tiles_for(rows, k)
    if not panels or not slabs:
        return Cut(1, 0, True)
    places = multiprocessors * BLOCKS
    run = max(1, min(held, -(-panels * slabs // places)))
    blocks = -(-slabs // run)
    return Cut(run, panels * blocks, blocks <= places // 2)


#: Rows of a packed tile, and its bytes of float16.
TILE_ROWS = SLAB
TILE_BYTES = TILE_ROWS * SLAB * 2
#: Rows of D that a thread block computes.
TILE_M = 128
#: Compute capabilities: the only one with wgmma, and the first one with mma of these shapes.
WGMMA, MMA = 90, 80
#: Registers of a thread of sgemm_split that multiplies, and what it needs besides its sums.
REGISTERS, OTHER_REGISTERS = 232, 36
#: The most shared memory that a block may have on compute capability 9.0.
SHARED_BYTES = 232_448
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

    Parameters
    ----------
    products : int
        Tensor-core products: 3 of two parts each for FP32 accuracy, or 1 for ``tf32``.
    tile_n : int
        Columns of D that one thread block computes at a time.
    slots : int
        Places in shared memory for what is copied ahead.
    band : int
        Rows of tiles that are in flight together.
    """

    products: int
    tile_n: int
    slots: int
    band: int

    #: The kernel, the threads of a block, and whether it runs on one compute capability alone.
    file: ClassVar[str]
    threads: ClassVar[int]
    specific: ClassVar[bool]

    def __post_init__(self) -> None:
        check(self, self._common_rules(), self._rules())

    def _common_rules(self) -> Rules:
        return (
            (self.products in (1, 3), "products must be 3 (float32) or 1 (tf32)"),
            (self.band > 0, "band must be positive"),
        )

    def _rules(self) -> Rules:
        raise NotImplementedError

    @property
    def parts(self) -> int:
        """Parts of each operand: high and low, or high alone."""
        return 1 if self.products == 1 else 2

    @property
    def entry(self) -> str:
        """The kernel's name in its file."""
        return PurePosixPath(self.file).stem

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        raise NotImplementedError

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return {"PARTS": self.parts, "CAP": RESIDUAL_CAP, **defines(self, "products")}

    def tiles(self, m: int, n: int, lower: bool = False) -> int:
        """Return how many tiles D is made of, or how many are computed of a `lower` one."""
        return tiles_of(m, n, TILE_M, self.tile_n, lower)

    def runs_on(self, limits: ArchLimits) -> bool:
        """Whether a GPU has the instructions, and the shared memory."""
        capability = limits.capability
        able = capability == WGMMA if self.specific else capability >= MMA
        return able and self.shared_bytes <= limits.shared_bytes - RESERVED_BYTES


@dataclass(frozen=True, slots=True)
class WgmmaConfig(SplitConfig):
    """Of sgemm_split.cu: two warpgroups multiply and one copies; a slot has a part of a slab."""

    file: ClassVar[str] = "sgemm_split.cu"
    threads: ClassVar[int] = 384
    specific: ClassVar[bool] = True

    def _rules(self) -> Rules:
        return (
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
        )

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


@dataclass(frozen=True, slots=True)
class MmaConfig(SplitConfig):
    """Of sgemm_split_mma.cu: eight warps copy and multiply; a slot has half a slab of all parts."""

    file: ClassVar[str] = "sgemm_split_mma.cu"
    threads: ClassVar[int] = 256
    specific: ClassVar[bool] = False

    def _rules(self) -> Rules:
        widths = (64, 128) if self.products == 3 else (64, 128, 256)
        return (
            (
                self.tile_n in widths,
                f"tile_n must be one of {widths}: a thread has registers for no more sums",
            ),
            (
                self.slots >= 2,
                "slots must be at least 2: one is filled while another one is multiplied",
            ),
            (
                self.shared_bytes <= SHARED_BYTES,
                f"it needs {self.shared_bytes} bytes of shared memory, a block has at most "
                f"{SHARED_BYTES}: lower slots",
            ),
        )

    @property
    def shared_bytes(self) -> int:
        """All slots."""
        return self.slots * (TILE_M + self.tile_n) // TILE_ROWS * self.parts * TILE_BYTES // 2


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
