"""What runs on workers: pure top-level functions on blocks.

Imports with dask, distributed and numpy alone: a scheduler that unpickles these tasks needs
no CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.failures import named
from multimm.gpu import library_gemm
from multimm.gpu.arrays import is_cupy
from multimm.gpu.dtypes import HALVES
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.integers import gemm as integers
from multimm.gpu.kernel_selection import Precision
from multimm.gpu.library_gemm import module_of
from multimm.gpu.problem import product_shape
from multimm.gpu.strides import ProductShape
from multimm.graph.block_task import Block
from multimm.graph.streams import computing, own_stream
from multimm.graph.tasks.dtype_check import DType, as_declared
from multimm.graph.tasks.sub_blocks import SubBlocks

FLOAT32 = np.dtype("float32")


@dataclass(frozen=True, slots=True)
class Step:
    """What one task does to its operands: D = alpha (op(A) op(B) + P) + beta C.

    Parameters
    ----------
    accumulate, dtype : str
        Of A B + P, and of the result D.
    trans_a, trans_b : bool
        Blocks are stored transposed.
    alpha, beta : scalar
    precision : str
    conj_a, conj_b : bool
        op conjugates complex blocks as well.
    dtype_a, dtype_b, dtype_c : dtype, optional
        That the arrays of A, B and C declare, None: nothing. With one of C there has to be a C.
    """

    accumulate: str
    dtype: str
    trans_a: bool = False
    trans_b: bool = False
    alpha: Any = 1
    beta: Any = 0
    precision: Precision = "float32"
    conj_a: bool = False
    conj_b: bool = False
    dtype_a: DType = None
    dtype_b: DType = None
    dtype_c: DType = None

    @property
    def inner(self) -> Step:
        """Of products that only add up, before the last one: P <- op(A) op(B) + P."""
        return replace(self, alpha=1, beta=0, dtype=self.accumulate, dtype_c=None)

    @property
    def hermitian(self) -> bool:
        """Whether a product of one array on both sides, transposed on one, is conjugated on one."""
        return self.conj_a != self.conj_b


def is_packed(block: Block) -> bool:
    """Whether a block is what `pack` makes on a GPU, told without importing CuPy."""
    return isinstance(block, PackedBlock)


def link(
    a: Block,
    b: Block,
    partial: Block = None,
    c: Block = None,
    *,
    step: Step,
) -> Block:
    """`gemm` of a k-tile's operands as they come, in the order of the current stream."""
    a, b = declared(a, step.dtype_a), declared(b, step.dtype_b)
    return gemm(a, b, partial, declared(c, step.dtype_c), step=step)


def declared(block: Block, dtype: DType) -> Block:
    """`as_declared`, joined if it comes in sub-blocks.

    What is packed stays as it is: it is float32, whatever it was.
    """
    if isinstance(block, SubBlocks):
        return block.joined()
    return block if is_packed(block) else as_declared(block, dtype)


def multiply(*last: Block, **more: Any) -> Block:
    """`launch` as a task: finished when it returns."""
    with stream_for(last[0]):
        return finished(launch(*last, **more))


def launch(
    *last: Block,
    verb: Callable[..., Block] = link,
    before: Sequence[Sequence[Block]] = (),
    step: Step,
    inner: Step | None = None,
    **more: Any,
) -> Block:
    """Block products of one k-tile after another, in the order of the current stream.

    Parameters
    ----------
    *last : Block
        Operands of the last k-tile, and the sums that it is added to or None.
    verb : callable, optional
        What multiplies the operands of a k-tile, in the order of the current stream: `link`, or
        its like of a symmetric product. Nobody waits for the GPU between two of them: it would be
        idle until the next one is launched. What each has made beside its result is free again in
        that order, so that no more of it is needed than for one.
    before : sequence of sequence of Block
        Operands of the other k-tiles.
    step, inner : Step
        Of the last k-tile, and of the others.
    **more
        For the last k-tile alone.
    """
    *operands, partial = last
    for k_tile in before:
        partial = verb(*k_tile, partial, step=inner)
    return verb(*operands, partial, step=step, **more)


def gemm(
    a: Block,
    b: Block,
    partial: Block = None,
    c: Block = None,
    *,
    step: Step,
    lower: bool = False,
) -> Block:
    """D = alpha (op(A) op(B) + P) + beta C; operands are left alone.

    Parameters
    ----------
    a, b : array, shapes (..., m, k) and (..., k, n) once transposed as `step` says
        Both NumPy or both CuPy; never written to. Or what `pack` made of them.
    partial : array of shape (..., m, n) and dtype ``step.accumulate``, optional
    c : array of shape (..., m, n), optional
    step : Step
    lower : bool
        m and n are equal, and what is above the diagonal is not asked for: our own kernels may
        leave there whatever memory held (`computes_triangles`). Of complex blocks `a` is `b`, and
        all is computed.

    Returns
    -------
    array of shape (..., m, n), dtype ``step.dtype``
        On the device of `a`, in the order of the current stream.
    """
    same: dict[str, Any] = {
        name: getattr(step, name) for name in ("trans_a", "trans_b", "alpha", "beta")
    }
    if step.accumulate == "complex64":  # asked for with dtype=, operands may have more
        narrow = as_complex64(a)
        a, b = narrow, narrow if b is a else as_complex64(b)
    if is_packed(a) or is_packed(b) or (is_cupy(a) and own_kernel(a, b, c, step)):
        from multimm.gpu import product

        left = as_float32(a)
        result = product.gemm(
            left,
            left if b is a else as_float32(b),
            precision=scheme_of(step.precision, a.dtype, b.dtype),
            c=as_float32(c),
            partial=partial,
            lower=lower,
            **same,
        )
        return result if step.dtype == "float32" else result.astype(step.dtype)
    if (made := by_residues(a, b, partial, c, step, lower=lower)) is not None:
        return made
    if is_cupy(a) and by_real_products(a, b, step):
        from multimm.gpu import complex_gemm

        return complex_gemm.gemm(
            a,
            b,
            precision=scheme_of(step.precision, a.dtype, b.dtype),
            conj_a=step.conj_a,
            conj_b=step.conj_b,
            c=c,
            partial=partial,
            dtype=step.dtype,
            lower=lower,
            **same,
        )
    same |= {"accumulate": step.accumulate, "dtype": step.dtype, "lower": lower}
    left, right = a.conj() if step.conj_a else a, b.conj() if step.conj_b else b
    return library_gemm.gemm(left, right, c=c, partial=partial, **same)


def pack(block: Block, *, role: str, step: Step) -> Block:
    """An operand block as the tensor cores take it; as it is where this GPU has none for it.

    Parameters
    ----------
    block : array
        float32 or narrower, on a GPU or, on a cluster that has lost its GPUs, not.
    role : {"a", "b"}
    step : Step
        Says whether the block is stored transposed, and the precision.
    """
    dtype = step.dtype_a if role == "a" else step.dtype_b
    if not is_cupy(block):
        return as_declared(block, dtype)
    from multimm.gpu import product

    trans = step.trans_a if role == "a" else step.trans_b
    with stream_for(block):
        block = as_float32(as_declared(block, dtype))
        scheme = scheme_of(step.precision, step.dtype_a, step.dtype_b)
        return product.packed(block, side=role, trans=trans, scheme=scheme)


def own_kernel(a: Block, b: Block, c: Block, step: Step) -> bool:
    """Our kernels compute float32, and what it holds; cupy.matmul serves every other dtype well."""
    return (
        step.accumulate == "float32"
        and float32_holds(step.dtype)
        and becomes_float32(a.dtype)
        and becomes_float32(b.dtype)
        and (c is None or becomes_float32(c.dtype))
        and a.ndim >= 2
        and b.ndim >= 2
        and not isinstance(step.alpha, complex)
        and not isinstance(step.beta, complex)
    )


def float32_holds(dtype: Any) -> bool:
    """Whether float32 holds a floating-point dtype, given by itself or by its name."""
    return dtype == FLOAT32 or str(dtype) in HALVES


def becomes_float32(dtype: Any) -> bool:
    """Whether kernels take a dtype as float32: what that holds, or float64, for ``dtype=float32``.

    Without that nothing that float64 is part of is summed in float32.
    """
    return float32_holds(dtype) or str(dtype) == "float64"


def as_float32(block: Block) -> Block:
    """A block of another dtype converted; None and what is packed stay what they are."""
    dtype = getattr(block, "dtype", FLOAT32)
    return block if dtype == FLOAT32 else block.astype(FLOAT32)


def as_complex64(block: Block) -> Block:
    """A block of a wider complex dtype converted; real ones stay what they are."""
    return block.astype("complex64", copy=False) if block.dtype.kind == "c" else block


def scheme_of(precision: Precision, a: Any, b: Any) -> Precision:
    """What operands of these dtypes are packed for, to keep a promise.

    Significands of float16 and bfloat16 have no more than the 11 bits of one tensor-core product of
    `tf32`, so that one is all that `float32` takes for them: what is left is the rounding of sums.

    >>> scheme_of("float32", "float16", "float16"), scheme_of("ieee", "float16", "float16")
    ('tf32', 'ieee')
    """
    if precision != "float32" or a == FLOAT32 or b == FLOAT32:  # names of dtypes take 2 us each
        return precision
    return "tf32" if str(a) in HALVES and str(b) in HALVES else precision


def by_real_products(a: Block, b: Block, step: Step) -> bool:
    """Whether complex blocks on a GPU are multiplied as real ones, on its tensor cores."""
    from multimm.gpu import complex_gemm

    return complex_gemm.takes(
        a,
        b,
        accumulate=step.accumulate,
        dtype=step.dtype,
        precision=scheme_of(step.precision, a.dtype, b.dtype),
        alpha=step.alpha,
        trans_a=step.trans_a,
        trans_b=step.trans_b,
    )


def on_int8(a: Block, b: Block, step: Step) -> ProductShape | None:
    """Sizes of a large product of doubles or complex numbers that INT8 tensor cores may compute."""
    if not is_cupy(a) or step.alpha == 0 or min(a.ndim, b.ndim) < 2:
        return None
    if {step.accumulate, step.dtype} != {a.dtype.name}:
        return None
    from multimm.gpu.residues import gemm as residues

    shape = product_shape(a.shape, b.shape, step.trans_a, step.trans_b)
    taken = residues.takes(a, b, shape.result, shape.k, step.precision)
    return shape if taken else None


def by_residues(a: Block, b: Block, partial: Block, c: Block, step: Step, *, lower: bool) -> Block:
    """`gemm` there; None where it has to run another way."""
    if (shape := on_int8(a, b, step)) is None:
        return None
    from multimm.gpu.residues import gemm as residues

    scalars = [complex(x) for x in (step.alpha, 0 if c is None else step.beta)]
    real = not any(x.imag for x in scalars)
    alpha, beta = (x.real for x in scalars) if real else (1.0, 0.0)
    made = residues.gemm(
        a, b, shape.result, trans=(step.trans_a, step.trans_b), conj=(step.conj_a, step.conj_b),
        alpha=alpha, beta=beta, c=c if beta else None, partial=partial, lower=lower,
    )  # fmt: skip
    if made is None or real:
        return made
    last: dict[str, Any] = {"alpha": step.alpha, "beta": step.beta, "c": c, "dtype": step.dtype}
    return library_gemm.add_partials([made], **last)


def computes_triangles(a: Block, step: Step) -> bool:
    """Whether products of a block and its transpose leave out what is above the diagonal."""
    if is_packed(a) or (is_cupy(a) and own_kernel(a, a, None, step)):
        return True
    return integers.leaves_out(a, np.dtype(step.accumulate))


def add(*parts: Block, c: Block = None, step: Step) -> Block:
    """alpha ((P0 + P1) + ...) + beta C: an addition of the tree over the parts of k."""
    with stream_for(parts[0]):
        return finished(summed(parts, declared(c, step.dtype_c), step))


def summed(parts: Sequence[Block], c: Block, step: Step) -> Block:
    """`add` in the order of the current stream."""
    if is_cupy(parts[0]) and own_kernel(parts[0], parts[-1], c, step):
        from multimm.gpu.elementwise.reduce import add_partials

        beta = 0.0 if c is None else step.beta
        sums = add_partials(parts, alpha=step.alpha, beta=beta, c=as_float32(c))
        return sums if step.dtype == "float32" else sums.astype(step.dtype)
    given: dict[str, Any] = {"alpha": step.alpha, "beta": step.beta, "c": c, "dtype": step.dtype}
    if is_cupy(parts[0]) and parts[0].dtype == "complex64":
        from multimm.gpu import complex_gemm

        return complex_gemm.add_partials(parts, **given)
    return library_gemm.add_partials(parts, **given)


@named
def transpose(block: Block) -> Block:
    """`swap_axes` as a task: finished when it returns."""
    block = plain(block)
    with stream_for(block):
        return finished(swap_axes(block))


def adjoint(block: Block) -> Block:
    """`transpose` of a conjugated block."""
    with stream_for(block):
        turned = swap_axes(block)
        return finished(module_of(turned).conjugate(turned, out=turned))


def swap_axes(block: Block) -> Block:
    """The last two axes swapped, C-contiguous, on the block's device."""
    if is_cupy(block):
        from multimm.gpu.elementwise.transpose import transpose as on_gpu

        return on_gpu(block)
    return library_gemm.transpose(block)


def read(
    reader: Callable[..., Block], where: tuple[slice, ...], given: Sequence[Any] = ()
) -> Block:
    """One operand block from its source."""
    return finished(reader(where, *given))


def wait_for(*blocks: Block) -> None:
    """Nothing, once the blocks are there."""


def stream_for(block: Block, *, computes: bool = True) -> AbstractContextManager[None]:
    """This thread's stream on the block's device, if it is a GPU; a task that computes waits."""
    if isinstance(block, SubBlocks):
        return stream_for(block.blocks[0], computes=computes)
    own = computing if computes else own_stream
    if is_packed(block):
        return own(block.device_id)
    return own(block.device.id) if is_cupy(block) else nullcontext()


def finished(block: Block) -> Block:
    """Wait for the block's stream.

    A task that has returned counts as done: what it made may be sent to another worker, and
    what it read may be freed, before the kernel has run.
    """
    if is_cupy(block):
        import cupy

        with block.device:
            cupy.cuda.get_current_stream().synchronize()
    return block
