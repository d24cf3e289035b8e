"""Tasks of Gram products, whose operand blocks serve both sides: see `multimm.planning.gram`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from multimm.graph.tasks import (
    Block,
    Step,
    finished,
    gemm,
    is_gpu,
    is_packed,
    multiply,
    own_kernel,
    pack,
    stream_for,
    summed,
)
from multimm.planning.problem import PACKED_SLAB
from multimm.planning.triangle import triangle


def multiply_gram(a: Block, b: Block, partial: Block = None, *, step: Step) -> Block:
    """`multiply` of two blocks of one operand, both stored or packed as left factors are."""
    return multiply(a, _as_right(b), partial, step=step)


def multiply_diagonal(a: Block, partial: Block = None, *, step: Step) -> Block:
    """`multiply_gram` of a block and itself, but for most of what is above the diagonal: zeros."""
    with stream_for(a):
        return finished(_lower(a, partial, step))


def _lower(a: Block, partial: Block, step: Step) -> Block:
    turned = step.trans_a and not is_packed(a)
    size, k = a.shape[-2:][:: -1 if turned else 1]
    if len(triangle(size, step.precision)) > 1 and k >= PACKED_SLAB and _can_be_packed(a, step):
        a = pack(a, role="a", step=step)  # or each piece would pack its rows
    packed = is_packed(a)
    if packed and a.raw is not None:
        return gemm(a, _as_right(a), partial, step=step, tuned=False)
    pieces = triangle(size, a.scheme if packed else "")
    xp = _module_of(a.exponents if packed else a)
    result = xp.zeros((*a.shape[:-2], size, size), step.dtype)
    for rows, columns in pieces:
        left, right = _rows(a, rows, step), _as_right(_rows(a, columns, step))
        p = None if partial is None else partial[..., rows, columns]
        gemm(left, right, p, step=step, tuned=False, out=result[..., rows, columns])
    if packed:
        from multimm.gpu.residuals import add_residuals

        add_residuals(result, a, _as_right(a), alpha=step.alpha)
    return result


def _can_be_packed(a: Block, step: Step) -> bool:
    gpu = is_gpu(a) and a.ndim == 2 and step.precision != "ieee"
    return gpu and own_kernel(a, a, None, step)


def _rows(block: Block, rows: slice, step: Step) -> Block:
    """Rows of a left factor; of a packed one, what its parts carry of them."""
    if is_packed(block):
        return block.carried(rows)
    return block[..., rows] if step.trans_a else block[..., rows, :]


def _as_right(block: Block) -> Block:
    """A packed left factor as the right one: its transpose, of the same tiles."""
    if not is_packed(block):
        return block  # `step` says that it is stored transposed
    return replace(block, side="b", raw=None if block.raw is None else block.raw.T)


def _module_of(block: Block) -> Any:
    return sys.modules[type(block).__module__.partition(".")[0]]


def reflect(block: Block) -> Block:
    """The triangle below the diagonal copied to the one above: symmetric bit by bit."""
    xp = _module_of(block)
    with stream_for(block):
        lower = xp.tri(block.shape[-1], dtype=bool)
        return finished(xp.ascontiguousarray(xp.where(lower, block, block.swapaxes(-1, -2))))


def scale(block: Block, c: Block, *, step: Step, turned: bool) -> Block:
    """alpha S + beta C, or alpha S^T + beta C if `turned`, of a complete sum S."""
    return summed([block.swapaxes(-1, -2) if turned else block], c, step)
