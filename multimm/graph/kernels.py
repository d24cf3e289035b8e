"""Compile what block products launch, before the first of them has to wait for it."""

from __future__ import annotations

from multimm.graph.tasks import FLOAT32, Step, add, multiply, pack, transpose

#: Rows, columns and k of the blocks that are multiplied for it: large enough for the kernels of
#: large blocks, small enough (64 MB each, 3 ms a product) not to matter.
SIZE = 4096
PRECISIONS = ("float32", "tf32", "ieee")


def compile_kernels() -> None:
    """Run every kind of task once, on this process's current GPU.

    Raises
    ------
    KernelError
        A kernel does not compile, or the GPU is too old.
    """
    import cupy

    x = cupy.ones((SIZE, SIZE), FLOAT32)
    cupy.cuda.get_current_stream().synchronize()
    for precision in PRECISIONS:
        step = Step("float32", "float32", precision=precision)
        partial = multiply(x, x, step=step)
        multiply(x, x, partial, step=step)
        if precision != "ieee":
            a, b = pack(x, role="a", step=step), pack(x, role="b", step=step)
            multiply(a, b, partial, step=step)
    add(x, transpose(x), step=Step("float32", "float32"))
