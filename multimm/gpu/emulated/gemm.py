"""Products of arrays on the tensor cores: both operands are packed, multiplied and made good.

    split_pack       parts of A and B; counts what the parts do not carry, and refuses too much
    sgemm_split      the product of the parts
    split_residuals  adds a few elements that the parts do not carry
    broad_pack,      in large products: parts of a wider range, if those of FP16 carry too little of
    sgemm_split      finite operands, and their product; twice, each of one half of k
    sgemm_ffma       the product of A and B, in case that an operand was refused

What is needed is known on the GPU alone: each kernel looks, and returns if it has nothing to do.
So the host never waits, and a captured graph does for each data what that data needs.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated import broad, multiply, outliers, pack
from multimm.gpu.emulated.broad import Broad
from multimm.gpu.emulated.configs import PRODUCTS, broad_pays
from multimm.gpu.emulated.outliers import Adding, Lists
from multimm.gpu.emulated.pack import COUNTED, Packing, Source
from multimm.gpu.emulated.packed import why_refused
from multimm.gpu.kernel_selection import FFMA, Choice, note
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.driver_launch import capturing, copy, fill
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.runtime.workspace import workspace
from multimm.gpu.simt import gemm

logger = logging.getLogger(__name__)

Array = Any

_ALIGNMENT = 256  # of everything in the workspace, in bytes

#: Of a larger head, which products of 65536 squares have, a copy of what packing has counted is
#: kept until somebody asks for it: one more call. Arbitrary.
KEPT_BYTES = 2**20


def prepared(problem: Problem, choice: Choice) -> Run:
    """Return what computes products like this one.

    Parameters
    ----------
    problem : Problem
        A single one, addressable and not empty; neither A nor B repeats elements, and alpha is
        not 0. An array and its transpose are packed once where half of D is asked for.
    choice : Choice
        Its precision is what operands are packed for.

    Returns
    -------
    callable
        Takes the addresses of A, B, C, P and D, and launches on the current stream. It notes what
        ran.
    """
    sources = [
        Source.of(side, flag, x.shape, stack)
        for x, stack, side, flag in zip(
            problem.arrays, problem.stacks, "ab", problem.trans, strict=False
        )
    ][: 1 if problem.symmetric else 2]
    scheme, device = choice.precision, device_of(problem.device)
    is_large = broad_pays(*problem.shape[1:], scheme, device)
    return _Product(
        problem.device,
        choice,
        pack.prepared(sources, scheme, problem.device),
        _Room.of(sources, scheme, is_large),
        multiply.prepared(problem, PRODUCTS[scheme]),
        outliers.prepared(
            *problem.shape[1:], scheme, problem.device, problem.alpha, problem.stacks[-1].ld
        ),
        broad.prepared(problem, sources, scheme) if is_large else None,
        gemm.prepared(problem, None, if_refused=True),
    )


class _Room(NamedTuple):
    """Where packed operands lie in a workspace, in bytes."""

    offsets: tuple[tuple[int, int], ...]  #: tiles and exponents of A, and of B if it is another
    size: int

    @classmethod
    def of(cls, sources: Sequence[Source], scheme: str, is_large: bool) -> _Room:
        offsets, end = [], 0
        for source in sources:
            tiles = math.prod(source.tile_shape(scheme)) * 2
            if is_large:  # one slab more, if that
                tiles = max(tiles, broad.tile_bytes(source, scheme))
            exponents = end + _up(tiles)
            offsets.append((end, exponents))
            end = exponents + _up(source.height * 4)
        return cls(tuple(offsets), end)


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Product:
    """The launches of a product with all decided but where its operands lie."""

    device: int
    choice: Choice
    packing: Packing
    room: _Room
    multiply: Run
    add: Adding
    broad: Broad | None
    instead: Run

    def __call__(self, pointers: Sequence[int]) -> None:
        import cupy

        a, b, c, partial, d = pointers
        stream = cupy.cuda.get_current_stream()
        try:
            head, release_head = workspace((-(-self.packing.head_bytes // 4),), self.device)
            body, release_body = workspace((self.room.size // 4,), self.device)
        except MemoryError:  # of CuPy's pool, or RMM's
            body = None
        if body is None:
            head = None  # its memory may be all that there is
            self._without_packing(pointers)
            return
        counts, first = head.data.ptr, body.data.ptr
        parts = [(first + tiles, first + exponents) for tiles, exponents in self.room.offsets]
        self.packing(counts, [(x, *at) for x, at in zip((a, b), parts, strict=False)])
        if len(parts) == 1:  # what was counted of A holds for B
            copy(counts + 16, counts, 16)
        self.multiply((*parts[0], *parts[-1], c, partial, d, counts))
        self.add(self._lists(0, counts, *parts[0]), self._lists(-1, counts, *parts[-1]), d, counts)
        if self.broad is not None:
            self.broad(pointers, parts, counts)
        release_body()
        del body  # what comes instead may need its memory
        self.instead((*pointers, counts))
        release_head()
        if capturing():
            note(self.choice._replace(reason=f"{self.choice.reason}, whenever the graph's data "
                                             "are carried by FP16 parts"))  # fmt: skip
        else:
            note(
                self.choice, functools.partial(_what_ran, self.choice, self._counted(head), stream)
            )

    def _counted(self, head: Array) -> Array:
        """What the head begins with, in little memory: until the next product it stays taken."""
        if self.packing.head_bytes <= KEPT_BYTES:
            return head
        counts, _ = workspace((COUNTED // 4,), self.device)
        copy(counts.data.ptr, head.data.ptr, COUNTED)
        return counts

    def _without_packing(self, pointers: Sequence[int]) -> None:
        """Compute by what comes instead, as if both operands were refused."""
        reason = "no memory is left to pack the operands in"
        logger.warning("%s (%d bytes): a product runs with FP32 multiply-adds, slower and with "
                       "other bits", reason, self.packing.head_bytes + self.room.size)  # fmt: skip
        counts, release = workspace((COUNTED // 4,), self.device)
        fill(counts.data.ptr, 1, COUNTED)
        self.instead((*pointers, counts.data.ptr))
        release()
        note(Choice(FFMA, self.choice.precision, reason))

    def _lists(self, i: int, head: int, tiles: int, exponents: int) -> Lists:
        places = head + self.packing.lists[i]
        return Lists(tiles, exponents, 0, places, places + 8 * RESIDUAL_CAP)


def _what_ran(choice: Choice, counted: Array, stream: Any) -> Choice:
    """Wait for the stream, and read what packing has counted: why an operand was refused."""
    with counted.device, stream:
        counts = counted[: COUNTED // 4].get(stream=stream).view(np.uint64)
    reason = why_refused("a", *counts[:2]) or why_refused("b", *counts[2:4])
    if reason is None:
        return choice
    if any(counts[[0, 2, 5]]) or not counts[4]:
        return Choice(FFMA, choice.precision, reason)
    return choice._replace(reason=f"{reason}: {broad.WHAT[choice.precision]}")
