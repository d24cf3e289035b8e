"""Tasks of symmetric products, whose operand blocks serve both sides.

See `multimm.planning.work.symmetric`.
"""

from __future__ import annotations

from dataclasses import replace

from multimm.gpu.arrays import is_cupy
from multimm.gpu.library_gemm import aligned, module_of
from multimm.graph.block_task import Block
from multimm.graph.tasks.multiply import (
    Step,
    add,
    by_real_products,
    computes_triangles,
    declared,
    finished,
    gemm,
    is_packed,
    link,
    on_int8,
    stream_for,
    summed,
)
from multimm.planning.cost.time import REAL
from multimm.planning.tiling.triangle import triangle

#: Rows and columns that a CPU mirrors at a time, so that what is read down columns stays in the
#: cache: of 64, 128, 256 and 512 within 1.6 times the fastest for float32, float64 and complex128
#: squares of 300 to 4096 on an AMD EPYC. All of 4096 float32 squares at once took ten times that.
TILE = 128


def link_symmetric(a: Block, b: Block, partial: Block = None, *, step: Step) -> Block:
    """`link` of two blocks of one operand, both stored or packed as left operands are."""
    return link(a, _as_right(b), partial, step=step)


def link_diagonal(a: Block, partial: Block = None, *, step: Step, complete: bool = False) -> Block:
    """`link_symmetric` of a block and itself; until complete, the upper half does not count."""
    a = declared(a, step.dtype_a)
    if _knows_transposes(a, step):
        if not (a.flags.c_contiguous or a.swapaxes(-1, -2).flags.c_contiguous):
            a = a.copy(order="C")  # BLAS would be given a copy for each side, and know of nothing
        return gemm(a, a, partial, step=step)
    by_int8 = on_int8(a, a, step) is not None
    if not by_int8 and is_cupy(a) and a.dtype == "complex64" and by_real_products(a, a, step):
        return gemm(a, a, partial, step=step, lower=True)  # mirrored, too
    if by_int8 or computes_triangles(a, step):
        sums = gemm(a, _as_right(a), partial, step=step, lower=True)
    else:
        sums = _in_sub_blocks(a, partial, step)
    # Another part of k may be computed the other way, which adds both triangles.
    both = complete or (by_int8 and sums.dtype == "complex64")
    return _mirrored(sums, step) if both else sums


def add_diagonal(*parts: Block, step: Step) -> Block:
    """The complete sum of the parts of k of a block on the diagonal."""
    with stream_for(parts[0]):
        sums = summed(parts, None, step)
        return finished(sums if _knows_transposes(sums, step) else _mirrored(sums, step))


def _knows_transposes(block: Block, step: Step) -> bool:
    """Whether NumPy knows a block's product by its own transpose: half of it, by BLAS's `syrk`.

    It mirrors that itself, bit by bit. 4000 x 100 in float32 take one core of an EPYC 36 ms so, and
    61 in sub-blocks and mirrored here.
    """
    exact = step.dtype_a is not None and step.dtype_a == step.accumulate
    on_gpu = is_cupy(block) or is_packed(block)
    return not on_gpu and exact and step.accumulate in REAL


def _in_sub_blocks(a: Block, partial: Block, step: Step) -> Block:
    """By products of a library, which knows no triangles."""
    (a,) = aligned(a)  # once: the sub-blocks on the diagonal are of one array on both sides
    size = a.shape[-1 if step.trans_a else -2]
    result = module_of(a).zeros((*a.shape[:-2], size, size), step.dtype)
    for rows, columns in triangle(size, step.accumulate):
        p = None if partial is None else partial[..., rows, columns]
        left, right = (a[..., x] if step.trans_a else a[..., x, :] for x in (rows, columns))
        result[..., rows, columns] = gemm(left, right, p, step=step)
    return result


def _as_right(block: Block) -> Block:
    """A packed left operand as the right one: its transpose, of the same tiles."""
    if not is_packed(block):
        return block  # `step` says that it is stored transposed
    return replace(block, side="b", raw=None if block.raw is None else block.raw.T)


def _mirrored(block: Block, step: Step) -> Block:
    """The triangle below the diagonal copied to the one above: symmetric bit by bit, or Hermitian.

    Of the latter the diagonal is real, as in BLAS's herk; but what is NaN stays so.
    """
    whole = _both_triangles(block, step)
    if step.hermitian:
        diagonal = module_of(block).arange(block.shape[-1])
        whole.imag[..., diagonal, diagonal] -= whole.imag[..., diagonal, diagonal]
    return whole


def _both_triangles(block: Block, step: Step) -> Block:
    """A copy in C order; on a CPU tile by tile."""
    xp, size = module_of(block), block.shape[-1]
    if is_cupy(block) or size <= TILE:
        lower = xp.tri(size, dtype=bool)
        return xp.ascontiguousarray(xp.where(lower, block, _turned(block, step)))
    whole = block.copy(order="C")
    for start in range(0, size, TILE):
        rows = slice(start, start + TILE)
        whole[..., rows, rows] = _both_triangles(block[..., rows, rows], step)
        for row in range(start + TILE, size, TILE):
            columns = slice(row, row + TILE)
            whole[..., rows, columns] = _turned(block[..., columns, rows], step)
    return whole


def _turned(block: Block, step: Step) -> Block:
    block = block.swapaxes(-1, -2)
    return block.conj() if step.hermitian else block


def scale(block: Block, c: Block, *, step: Step, turned: bool) -> Block:
    """alpha S + beta C of a complete sum S, or of its transpose if `turned`, conjugated if that is.

    A Hermitian S is so bit by bit: what is turned is what the other place has.
    """
    return add(_turned(block, step) if turned else block, c=c, step=step)
