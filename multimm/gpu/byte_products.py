"""Products of bytes on the INT8 tensor cores of Hopper GPUs: how byte_mma.cu is launched.

Residues of larger numbers (`multimm.gpu.residues`) and integers of 8 bits (`multimm.gpu.integers`)
are multiplied so.
"""

from __future__ import annotations

from typing import Any

from multimm.gpu.arch import LOWER, tiles_of
from multimm.gpu.runtime.launch import device_of, kernel_for

Defines = tuple[tuple[str, int], ...]

#: Tiles of D: of rows, packed operands are padded to that, and of columns.
ROWS, COLUMNS = 128, 256
#: Tiles of packed operands: k, and bytes.
DEPTH, TILE_BYTES = 128, 64 * 128
_SLOTS, _THREADS = 4, 384
_TILES = (("TILE_N", COLUMNS), ("SLOTS", _SLOTS), ("BAND", 16))
_SHARED = _SLOTS * ((ROWS + COLUMNS) * DEPTH + 2 * 8) + 1024


def defines(more: Defines = (), *, lower: bool = False) -> Defines:
    """Compile-time parameters of the kernel: of residues, unless `more` says INTEGER."""
    return (*_TILES, *more, *LOWER * lower)


def panels(rows: int) -> int:
    """Tiles along the rows of an operand."""
    return -(-rows // ROWS) * 2


def slabs(k: int) -> int:
    """Tiles along k."""
    return -(-k // DEPTH)


def launch(
    device: int, m: int, n: int, planes: int, arguments: tuple[Any, ...], more: Defines = (), *,
    lower: bool = False,
) -> None:  # fmt: skip
    """Multiply all planes, by the current stream; `arguments` are those behind m and n."""
    kernel = kernel_for(
        device, "byte_mma.cu", "byte_mma", defines(more, lower=lower), shared_bytes=_SHARED,
        specific=True,
    )  # fmt: skip
    tiles = planes * tiles_of(m, n, ROWS, COLUMNS, lower)
    grid = min(tiles, device_of(device).multiprocessors)
    kernel((grid, 1, 1), (_THREADS, 1, 1), (m, n, *arguments), shared_mem=_SHARED)
