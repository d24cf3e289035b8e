"""Products of data whose range within a row FP16 parts do not carry: kernels/broad_pack.cu and
sgemm_split.cu with BROAD.

Operands are packed once more, into the memory of their FP16 parts: as three bfloat16 parts for
"float32", and as TF32 for "tf32". These take more memory, so k is cut in two, and the second half
goes on from what the first one has left in D.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated import multiply
from multimm.gpu.emulated.configs import BROAD_PRODUCTS, SLAB, TILE_BYTES, tiles_for
from multimm.gpu.emulated.pack import Source
from multimm.gpu.problem import NOTHING, Problem
from multimm.gpu.runtime.launch import device_of, kernel_for
from multimm.gpu.runtime.launch_cache import Run

#: Parts of an element, and tiles of 128 bytes a row that 64 k take, by precision.
BROAD_PARTS, SLAB_TILES = {"float32": 3, "tf32": 1}, {"float32": 3, "tf32": 2}
#: What multiplies, for `last_choice`.
WHAT = {"float32": "six products of bfloat16 parts", "tf32": "one product of TF32"}
#: Thread blocks that pack at one time on a multiprocessor: what their registers leave room for.
BLOCKS = 5
_THREADS, _FLOAT = 256, 4
_STRUCT = struct.Struct("16Q")  # of the kernel: 8 members for each of two operands
_BY_VALUE = np.dtype((np.void, _STRUCT.size))
Broad = Callable[[Sequence[int], Sequence[tuple[int, int]], int], None]  #: see `prepared`


def pack_defines(precision: str) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/broad_pack.cu."""
    return (("PARTS", BROAD_PARTS[precision]), ("BLOCKS", BLOCKS), ("CAP", RESIDUAL_CAP))


def tile_bytes(source: Source, precision: str) -> int:
    """Bytes of an operand's tiles, of half of k at a time."""
    panels, slabs = tiles_for(source.rows, source.k)
    return panels * -(-slabs // 2) * SLAB_TILES[precision] * TILE_BYTES


class _Part(NamedTuple):
    """A stretch of k: its launches with all decided but addresses."""

    tasks: int
    starts: tuple[int, ...]  #: of each operand, in bytes from its first element
    members: tuple[tuple[int, ...], ...]  #: of each operand, those of the kernel's struct
    multiply: Run


def prepared(problem: Problem, sources: Sequence[Source], precision: str) -> Broad:
    """Decide how a product is computed if its data has a wide range.

    Parameters
    ----------
    problem : Problem
        As for `gemm.prepared`; its k has two slabs at least.
    sources : sequence of Source
        Its operands, or one for both.
    precision : {"float32", "tf32"}

    Returns
    -------
    callable
        Computes D on the current stream, if what packing has counted says so. Takes the addresses
        of A, B, C, P and D; of each operand that is packed, memory for `tile_bytes`, and the
        exponents of kernels/split_pack.cu; and the address of what packing has counted.
    """
    a, b, c, addend, d = problem.operands
    _, slabs = tiles_for(1, problem.shape.k)
    middle = -(-slabs // 2) * SLAB
    parts = []
    for first, length in ((0, middle), (middle, problem.shape.k - middle)):
        part = problem._replace(shape=problem.shape._replace(k=length))
        if first == 0:
            part = part._replace(alpha=1.0, beta=0.0, operands=(a, b, NOTHING, addend, d))
        else:
            part = part._replace(operands=(a, b, c, d, d))
        members, starts, tasks = [], [], 0
        for source in sources:
            ld = source.stack.ld
            starts.append(_FLOAT * first * (1 if source.along_k else ld))
            _, rows, _, along_k, wide = source.members()
            members.append((ld, rows, length, along_k, wide))
            panels, here = tiles_for(rows, length)
            tasks += panels * here
        multiplying = multiply.prepared(part, BROAD_PRODUCTS[precision])
        parts.append(_Part(tasks, tuple(starts), tuple(members), multiplying))
    kernel = kernel_for(problem.device, "broad_pack.cu", "broad_pack", pack_defines(precision))
    blocks = device_of(problem.device).multiprocessors * BLOCKS

    def run(pointers: Sequence[int], packed: Sequence[tuple[int, int]], counts: int) -> None:
        a, b, c, addend, d = pointers
        for i, part in enumerate(parts):
            values: list[int] = []
            for x, start, members, (tiles, exponents) in zip(
                (a, b), part.starts, part.members, packed, strict=False
            ):
                values += (x + start, *members, tiles, exponents)
            values += [0] * (16 - len(values))
            operands = np.frombuffer(_STRUCT.pack(*values), _BY_VALUE)
            kernel((min(part.tasks, blocks), 1, 1), (_THREADS, 1, 1), (operands, counts))
            last = i == len(parts) - 1
            part.multiply((*packed[0], *packed[-1], c * last, d if i else addend, d, counts))

    return run
