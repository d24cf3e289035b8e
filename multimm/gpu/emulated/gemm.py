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
from typing import Any

import numpy as np

from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated import broad, multiply, outliers, pack
from multimm.gpu.emulated.configs import PRODUCTS, broad_pays
from multimm.gpu.emulated.outliers import Lists
from multimm.gpu.emulated.pack import COUNTED, Source
from multimm.gpu.emulated.packed import why_refused
from multimm.gpu.kernel_selection import FFMA, Choice, note
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.runtime.workspace import capturing, copy, fill, workspace
from multimm.gpu.simt import gemm

logger = logging.getLogger(__name__)

Array = Any

_ALIGNMENT = 256  # of everything in the workspace, in bytes

NO_MEMORY = "no memory is left to pack the operands in"


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
    scheme, device = choice.precision, problem.device
    is_large = broad_pays(*problem.shape[1:], scheme, device_of(device))
    packing = pack.prepared(sources, scheme, device)
    offsets, size = _room(sources, scheme, is_large)
    multiplying = multiply.prepared(problem, PRODUCTS[scheme])
    adding = outliers.prepared(
        *problem.shape[1:], scheme, device, problem.alpha, problem.stacks[-1].ld
    )
    wide = broad.prepared(problem, sources, scheme) if is_large else None
    instead = gemm.prepared(problem, if_refused=True)

    def run(pointers: Sequence[int]) -> None:  # kept: it must refer to no operand
        import cupy

        a, b, c, partial, d = pointers
        stream = cupy.cuda.get_current_stream()
        try:
            head, release_head = workspace((-(-packing.head_bytes // 4),), device)
            body, release_body = workspace((size // 4,), device)
        except MemoryError:  # of CuPy's pool, or RMM's
            body = None
        if body is None:
            head = None  # its memory may be all that there is
            logger.warning("%s (%d bytes): a product runs with FP32 multiply-adds, slower and with "
                           "other bits", NO_MEMORY, packing.head_bytes + size)  # fmt: skip
            _without_packing(instead, pointers, device)
            note(Choice(FFMA, scheme, NO_MEMORY))
            return
        counts, first = head.data.ptr, body.data.ptr
        parts = [(first + tiles, first + exponents) for tiles, exponents in offsets]
        packing(counts, [(x, *at) for x, at in zip((a, b), parts, strict=False)])
        if len(parts) == 1:  # what was counted of A holds for B
            copy(counts + 16, counts, 16)
        multiplying((*parts[0], *parts[-1], c, partial, d, counts))
        of_a, of_b = (counts + packing.lists[i] for i in (0, -1))
        adding(
            Lists(*parts[0], 0, of_a, of_a + 8 * RESIDUAL_CAP),
            Lists(*parts[-1], 0, of_b, of_b + 8 * RESIDUAL_CAP), d, counts,
        )  # fmt: skip
        if wide is not None:
            wide(pointers, parts, counts)
        release_body()
        del body  # what comes instead may need its memory
        instead((*pointers, counts))
        release_head()
        if capturing():
            note(choice._replace(reason=f"{choice.reason}, whenever the graph's data "
                                        "are carried by FP16 parts"))  # fmt: skip
        else:
            note(choice, functools.partial(_what_ran, choice, head, stream))

    return run


def _room(
    sources: Sequence[Source], scheme: str, is_large: bool
) -> tuple[list[tuple[int, int]], int]:
    """Where tiles and exponents of each operand lie in a workspace, and its size, in bytes."""
    offsets, end = [], 0
    for source in sources:
        tiles = math.prod(source.tile_shape(scheme)) * 2
        if is_large:  # one slab more, if that
            tiles = max(tiles, broad.tile_bytes(source, scheme))
        exponents = end + _up(tiles)
        offsets.append((end, exponents))
        end = exponents + _up(source.height * 4)
    return offsets, end


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _without_packing(instead: Run, pointers: Sequence[int], device: int) -> None:
    """Compute by what comes instead, as if both operands were refused."""
    counts, release = workspace((COUNTED // 4,), device)
    fill(counts.data.ptr, 1, COUNTED)
    instead((*pointers, counts.data.ptr))
    release()


def _what_ran(choice: Choice, head: Array, stream: Any) -> Choice:
    """Wait for the stream, and read what packing has counted: why an operand was refused."""
    with head.device, stream:
        counts = head[: COUNTED // 4].get(stream=stream).view(np.uint64)
    reason = why_refused("a", *counts[:2]) or why_refused("b", *counts[2:4])
    if reason is None:
        return choice
    if any(counts[[0, 2, 5]]) or not counts[4]:
        return Choice(FFMA, choice.precision, reason)
    return choice._replace(reason=f"{reason}: {broad.WHAT[choice.precision]}")
