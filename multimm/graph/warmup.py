"""Do once what block products would wait for the first time: compile, load, pin memory.

Compiling takes seconds where nothing is cached on disk, and loading some tenths. What only some
data needs would take them in the middle of a product: the kernels, ours and CuPy's, for elements
that packed parts do not carry, of which normal data has a handful in a large block. So the
operands here have such elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from multimm.gpu.elementwise.reduce import CAPACITIES
from multimm.gpu.precompile import MOST_PROCESSES, absent, compile_files, precisions
from multimm.gpu.transfer.pinned_copy import threads_beside_a_gpu
from multimm.graph.block_task import Block
from multimm.graph.lowering.rechunk import join
from multimm.graph.lowering.symmetric import link_diagonal
from multimm.graph.tasks.host_offload import download, upload
from multimm.graph.tasks.multiply import FLOAT32, Step, add, multiply, pack, transpose
from multimm.graph.tasks.sub_blocks import SubBlocks

#: Rows and columns of the result, and k: the least that gets the kernels of large blocks. All of
#: it takes 2 GB and, once compiled, 0.2 s.
SIDE, K = 8192, 2048
#: The same of a tall symmetric product, whose sums are cut into slices of k.
TALL_SIDE, TALL_K = 2048, 32768
#: Beside ones, too small for a packed operand's parts.
SMALL = 1e-12


def are_compiled() -> bool:
    """Whether there is nothing to compile for this process's current GPU."""
    return not absent(_capability())


def compile_kernels() -> None:
    """Compile what is not in the cache yet, on the share of this host's cores of one GPU.

    Raises
    ------
    KernelError
        A kernel does not compile, or the GPU is too old.
    """
    compile_files(_capability(), threads_beside_a_gpu(MOST_PROCESSES))


def run_tasks() -> None:
    """Run every kind of task that needs no host memory once on this process's current GPU.

    In the precisions that kernels are compiled for.

    Raises
    ------
    KernelError
        A kernel does not compile, or the GPU is too old.
    MemoryError
        2 GB are not free.
    """
    import cupy

    a, b = _operand(cupy, (SIDE, K)), _operand(cupy, (K, SIDE))
    tall = _operand(cupy, (TALL_K, TALL_SIDE))
    cupy.cuda.get_current_stream().synchronize()
    for precision in precisions(_capability()):
        step = Step("float32", "float32", precision=precision)
        partial = multiply(a, b, step=step)
        multiply(a, b, partial, step=step)
        multiply(b, a, step=replace(step, trans_a=True, trans_b=True))
        turned = replace(step, trans_a=True)
        sums = multiply(tall, verb=link_diagonal, step=turned)
        multiply(tall, sums, verb=link_diagonal, step=turned, complete=True)
        symmetric = replace(step, trans_b=True)
        multiply(a, partial, verb=link_diagonal, step=symmetric, complete=True)
        if precision != "ieee":
            packed_a, packed_b = pack(a, role="a", step=step), pack(b, role="b", step=step)
            multiply(packed_a, packed_b, partial, step=step)
            multiply(packed_a, partial, verb=link_diagonal, step=symmetric)
    add(partial, transpose(partial), step=step)
    whole = (slice(0, SIDE), slice(0, SIDE))
    join(SubBlocks([partial], ((whole, whole),), (partial.shape,), partial.shape))
    for count in CAPACITIES:  # a kernel each, for parts of k as for slices of it
        add(*[partial[:1]] * count, step=step)


def copy_both_ways() -> None:
    """Copy a block to this process's current GPU and back, through memory that is pinned for it.

    Raises
    ------
    MemoryError
        Some MB are not free.
    """
    download(upload(np.ones((SIDE, K), FLOAT32)))


def _capability() -> int:
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def _operand(cupy: Any, shape: tuple[int, int]) -> Block:
    """Ones, and one element that packed parts do not carry."""
    x = cupy.ones(shape, FLOAT32)
    x[1, 1] = SMALL
    return x
