"""How the kernels of a product by residues are launched.

residue_rows   how large the rows of an operand are, and how many bits they have
residue_pack   each row as integers, and these as bytes: a plane for each modulus, or two
byte_mma       products of bytes, all planes in one launch
residue_join   integers from their residues, and numbers from these
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from multimm.gpu import byte_products
from multimm.gpu.byte_products import COLUMNS, ROWS, TILE_BYTES
from multimm.gpu.emulated.pack import source_of
from multimm.gpu.residues.certificate import Rows
from multimm.gpu.residues.formats import FORMATS, Format
from multimm.gpu.residues.moduli import COMPLEX, MOST, System, weights
from multimm.gpu.runtime.launch import by_value, kernel_for

Array = Any
Void = np.ndarray[Any, Any]

#: The longest k of a launch.
STRETCH = 2**15
#: Threads of a block: usual ones, and those of residue_rows.cu across rows.
_THREADS, _ACROSS = 256, 1024
#: Rows of a thread block of residue_join.cu, its columns, and rows of its grid.
_JOINED_ROWS, _JOINED_COLUMNS, _MOST_ROWS = 8, 128, 1024
#: 64-bit words of a summary (kernels/common/residues.cuh), and which of them packing writes.
WORDS, _BY_PACKING = 8, slice(3, 8)
#: Files, their compile-time parameters, and whether instructions are those of one chip alone: of
#: float64. What complex numbers need besides is compiled when they are met.
KERNELS = (
    *(("byte_mma.cu", byte_products.defines(lower=lower), True) for lower in (False, True)),
    *((f"residue_{name}.cu", (("ALONG_K", along), *FORMATS["float64"].defines), False)
      for name in ("rows", "pack") for along in (0, 1)),
    ("residue_join.cu", FORMATS["float64"].defines, False),
)  # fmt: skip


class Operand(NamedTuple):
    """A matrix whose rows lie along k, op(A) or the transpose of op(B), and what is known of it."""

    x: Array
    address: int
    ld: int
    along_k: bool  #: in memory
    rows: int
    k: int
    format: Format
    squares: Array  #: of each row: the sum
    lowest: Array  #: the lowest bit
    scales: Array
    large: Array
    summary: Array  #: of all rows

    @property
    def panels(self) -> int:
        """Tiles along the rows."""
        return byte_products.panels(self.rows)

    @property
    def slabs(self) -> int:
        """Tiles along k."""
        return byte_products.slabs(self.k)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The parameters of kernels that read it."""
        return (("ALONG_K", int(self.along_k)), *self.format.defines)

    def first_rows(self, summary: Array) -> Operand:
        """A few of its rows: what is found of them goes elsewhere."""
        return self._replace(rows=min(self.rows, ROWS), summary=summary)


def looked_at(x: Array, side: str, trans: bool, summary: Array) -> Operand:
    """An operand, once residue_rows has seen it; `summary` holds zeros before."""
    import cupy

    of = FORMATS[x.dtype.name]
    x, source = source_of(x, side, trans)
    rows, stack = source.rows, source.stack
    found = Operand(
        x, stack.pointer, stack.ld, source.along_k, rows, source.k, of, cupy.empty(rows),
        cupy.empty(rows, np.int32), cupy.empty(rows, np.int32),
        cupy.empty(of.system.parts * rows, np.uint64), summary,
    )  # fmt: skip
    kernel = kernel_for(x.device.id, "residue_rows.cu", "residue_rows", found.defines)
    grid, threads = (rows, _THREADS) if found.along_k else (-(-rows // 32), _ACROSS)
    kernel((grid, 1, 1), (threads, 1, 1), (
        found.address, found.ld, rows, found.k, found.squares.data.ptr, found.lowest.data.ptr,
        summary.data.ptr,
    ))  # fmt: skip
    return found


def packed(x: Operand, count: int, limit: float) -> Array:
    """The planes of an operand's residues, for so many moduli."""
    import cupy

    planes = count * x.format.system.parts
    tiles = cupy.empty((planes, x.panels * x.slabs * TILE_BYTES), np.int8)
    x.large.fill(0)
    x.summary[_BY_PACKING] = 0
    device = tiles.device.id
    kernel = kernel_for(device, "residue_pack.cu", "residue_pack", x.defines)
    kernel((x.panels * x.slabs, 1, 1), (_THREADS, 1, 1), (
        x.address, x.ld, x.rows, x.k, x.squares.data.ptr, x.lowest.data.ptr, np.float64(limit),
        np.int32(count), _moduli_of_packing(x.format.system), tiles.data.ptr, x.scales.data.ptr,
        x.large.data.ptr, x.summary.data.ptr,
    ))  # fmt: skip
    kernel = kernel_for(device, "residue_pack.cu", "residue_fewest", x.defines)
    kernel((min(-(-x.rows // _THREADS), 64), 1, 1), (_THREADS, 1, 1), (
        x.rows, x.squares.data.ptr, x.large.data.ptr, x.summary.data.ptr,
    ))  # fmt: skip
    return tiles


def rows_of(words: Void, k: int) -> Rows:
    """What a summary says, once the operand is packed."""
    least = ~words
    (most,), (norm,) = words[2:3].view(np.float64), least[4:5].view(np.float64)
    return Rows(bool(words[3]), float(norm), float(most), tuple(float(x) / k for x in least[5:]))


def multiplied(
    a: Operand, b: Operand, tiles: tuple[Array, Array], *,
    conj: tuple[bool, bool] = (False, False), lower: bool = False,
) -> Array:  # fmt: skip
    """Residues of A B': shape (planes, rows, columns), of which m rows and n columns count.

    `conj`: whose conjugates are multiplied. `lower`: what is above the diagonal may be anything.
    """
    import cupy

    m, n, count = a.rows, b.rows, len(tiles[0])
    made = cupy.empty((count, -(-m // ROWS) * ROWS, -(-n // COLUMNS) * COLUMNS), np.uint8)
    arguments = (
        a.slabs, np.int32(count), _moduli_of_products(a.format.system), tiles[0].data.ptr,
        np.int32(conj[0]), tiles[1].data.ptr, np.int32(conj[1]), made.data.ptr, made.shape[2],
    )  # fmt: skip
    byte_products.launch(made.device.id, m, n, count, arguments, lower=lower)
    return made


def joined(
    a: Operand, b: Operand, residues: Array, *, alpha: float, beta: float, c: Array, partial: Array
) -> Array:
    """D = alpha (A B' + P) + beta C, of residues of A B'."""
    import cupy

    m, n, system = a.rows, b.rows, a.format.system
    d = cupy.empty((m, n), a.x.dtype)
    p, added = (None if x is None else cupy.ascontiguousarray(x, d.dtype) for x in (partial, c))
    kernel = kernel_for(d.device.id, "residue_join.cu", "residue_join", a.format.defines)
    grid = -(-n // _JOINED_COLUMNS), min(-(-m // _JOINED_ROWS), _MOST_ROWS), 1
    planes, height, width = residues.shape
    count = planes // system.parts
    kernel(grid, (_THREADS, 1, 1), (
        m, n, np.int32(count), _weights(system, count), residues.data.ptr, height * width, width,
        a.scales.data.ptr, b.scales.data.ptr, np.float64(alpha), np.float64(beta),
        0 if p is None else p.data.ptr, n, 0 if added is None else added.data.ptr, n, d.data.ptr, n,
    ))  # fmt: skip
    return d


# What kernels take by value is the same in each launch.
@functools.cache
def _moduli_of_packing(system: System) -> Void:
    moduli = system.moduli
    roots = system.roots or (0,) * MOST
    inverses, halves = [1 / x for x in moduli], [2**28 % x for x in moduli]
    return by_value(np.array([*moduli, *inverses, *halves, *roots], np.float64))


@functools.cache
def _moduli_of_products(system: System) -> Void:
    of_planes = np.ones(COMPLEX.parts * MOST, np.int32)
    given = np.repeat(system.moduli, system.parts)
    of_planes[: len(given)] = given
    inverses = (1 / of_planes).astype(np.float32)
    return by_value(np.concatenate([of_planes, inverses.view(np.int32)]))


@functools.cache
def _weights(system: System, count: int) -> Void:
    parts, whole, inverse = weights(system, count)
    limbs = np.zeros((system.parts, MOST, len(whole)))
    limbs[:, :count] = parts
    return by_value(np.array([*limbs.flat, *whole, inverse]))
