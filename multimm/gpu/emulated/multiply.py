"""Products of packed operands on the tensor cores: how their kernels are launched.

On Hopper kernels/sgemm_split.cu, on other GPUs from sm_80 on kernels/sgemm_split_mma.cu. What the
tiles cannot carry (values that are not finite, and others that the pack lists) is not looked at
here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multimm.errors import KernelError
from multimm.gpu.arch import LOWER, UNLESS_REFUSED
from multimm.gpu.emulated import outliers
from multimm.gpu.emulated.configs import (
    PARTS,
    SLAB,
    SplitConfig,
    choose_split,
    slices_of,
    split_config_named,
)
from multimm.gpu.emulated.outliers import Lists
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.kernel_selection import Choice, note
from multimm.gpu.problem import Problem
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import device_of, kernel_for
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt.split_k import can_be_added, slice_step, summed
from multimm.gpu.validate import check_epilogue

logger = logging.getLogger(__name__)

Array = Any

_PLAIN = np.float32(1), np.float32(0)  # alpha and beta


def gemm(
    a: PackedBlock, b: PackedBlock, choice: Choice, *, alpha: float, beta: float, c: Array,
    partial: Array, out: Array, lower: bool, config: object,
) -> Array:  # fmt: skip
    """D = alpha * (A @ B + P) + beta * C of packed operands that fit together.

    Parameters
    ----------
    a, b : PackedBlock
        With tiles, and not empty.
    choice : Choice
        For `last_choice`.
    alpha, beta, c, partial, out, lower, config
        As for `multimm.gpu.gemm`; there is a C unless beta is 0.
    """
    operands = (*a.operands, *b.operands, c, partial)
    known = ("packed", operands, out, a.header, b.header, alpha, beta, lower)
    if config is None and (done := launch_cache.again(*known)) is not None:
        return done
    sizes = a.rows, b.rows, a.k
    problem = check_epilogue(c, partial, out, sizes, alpha, beta, lower, a.device_id)
    import cupy

    with cupy.cuda.Device(problem.device):
        problem = problem.with_result()
        found = problem.addressable()
        run = _with_residuals(found, a, b, choice, config)
        # The copies stay referenced until everything that reads them is in the stream.
        run([*(0 if x is None else x.data.ptr for x in operands[:-2]), *found.pointers[2:]])
        *_, result = problem.arrays
        if config is None and found.stands_for(problem):
            launch_cache.keep(*known, result=result, run=run)
    return result if out is None else out


def _with_residuals(
    problem: Problem, a: PackedBlock, b: PackedBlock, choice: Choice, config: object
) -> Run:
    """What multiplies such blocks; takes the addresses of their arrays, of C, P and D."""
    launch = prepared(problem, PARTS[choice.precision], config)
    odd = problem.alpha != 0 and bool(a.uncarried or b.uncarried)
    add = outliers.prepared(problem, choice.precision) if odd else None
    counts, turned = (a.uncarried, b.uncarried), problem.turned

    def run(pointers: Sequence[int]) -> None:
        *sides, c, partial, d = pointers
        lists = [
            Lists(tiles, exponents, count, *more)
            for count, (tiles, exponents, *more) in zip(counts, (sides[:4], sides[4:]), strict=True)
        ]
        left, right = lists[::-1] if turned else lists
        launch((*left[:2], *right[:2], c, partial, d, 0))
        if add is not None:
            add(left, right, d, 0)
        note(choice)

    return run


def prepared(problem: Problem, parts: int, config: object = None) -> Run:
    """Return what multiplies packed operands of a product's sizes.

    With two parts, A @ B is accurate as with FP32 arithmetic: from k = 256 on componentwise within
    (k + 2) * 2**-24 of abs(A) @ abs(B). Of random data that is 24 * 2**-24 up to k = 2**17; of
    constant data, whose roundings have one sign, about 70 * 2**-24 from k = 8192 on. With one part
    it is a ``tf32`` product.

    Parameters
    ----------
    problem : Problem
        C, P and D are addressable, A and B are not looked at. Not empty.
    parts : int
        Of each element: 2, or 1 for ``tf32``.
    config : SplitConfig or str, optional
        Or the name of one; by default `configs.choose_split` decides. The bits of the result are
        the same.

    Returns
    -------
    callable
        Takes the addresses of the tiles and exponents of A and of B, of C, P and D (0 for what is
        not there), and of what packing has counted: nothing is computed for operands that are
        refused, and 0 says that none is. Launches on the current stream.

    Raises
    ------
    KernelError
        An unknown configuration, one for another number of parts, or a GPU without tensor cores
        for it.
    """
    plan = _plan(problem, parts, config)
    *_, c, partial, d = problem.stacks
    lds = c.ld, partial.ld, d.ld
    scalars = np.float32(problem.alpha), np.float32(problem.beta)

    def run(pointers: Sequence[int]) -> None:
        *operands, at_c, at_p, at_d, counts = pointers
        addends = (at_c, lds[0], at_p, lds[1], at_d, lds[2])
        plan.launch(0, scalars, operands, addends, 0, counts)

    if problem.alpha == 0 or plan.slices == 1 or not can_be_added(problem):
        return run
    step, n = slice_step(problem.shape), problem.shape.n

    def products(pointers: Sequence[int], to: int) -> None:
        plan.launch(plan.length, _PLAIN, pointers[:4], (0, 0, 0, 0, to, n), step, pointers[7])

    return summed(products, lambda: run, problem, 4, plan.slices, UNLESS_REFUSED)


class _Plan(NamedTuple):
    """What sizes and configuration decide about a product."""

    kernel: Any
    threads: int
    shared_bytes: int
    sizes: tuple[int, int, int]  #: m, n and slabs
    tiles: int
    slices: int
    length: int  #: of a slice, in slabs
    multiprocessors: int

    def launch(
        self,
        step: int,
        scalars: tuple[Any, Any],
        operands: Sequence[int],
        addends: Sequence[int],
        apart: int,
        counts: int,
    ) -> None:
        """The product to D; or slices of `step` slabs to places that lie `apart` floats apart."""
        blocks = min(self.tiles * (self.slices if step else 1), self.multiprocessors)
        args = (*self.sizes, step, *scalars, *operands, *addends,
                apart, counts)  # fmt: skip
        self.kernel((blocks, 1, 1), (self.threads, 1, 1), args, shared_mem=self.shared_bytes)


def _plan(problem: Problem, parts: int, config: object) -> _Plan:
    (_, m, n, k), lower, ident = problem.shape, problem.lower, problem.device
    device = device_of(ident)
    products = 1 if parts == 1 else 3
    if config is None:
        config, _ = choose_split(m, n, k, products, device, lower)
    elif isinstance(config, str):
        config = split_config_named(config)
    if not isinstance(config, SplitConfig):
        raise KernelError(f"{config} is none of packed operands: pass a SplitConfig, or its name")
    if config.products != products:
        raise KernelError(f"{config} makes other products than operands of {parts} parts need")
    if not config.runs_on(device.limits):
        raise KernelError(
            f"{config} does not run on a GPU of compute capability "
            f"{device.limits.capability / 10}: leave the configuration out"
        )
    kernel = kernel_for(
        ident, config.file, config.entry, (*config.defines().items(), *LOWER * lower),
        shared_bytes=config.shared_bytes, specific=config.specific,
    )  # fmt: skip
    slices, length = slices_of(m, n, k, products, device, lower)
    plan = _Plan(
        kernel, config.threads, config.shared_bytes, (m, n, -(-k // SLAB)),
        config.tiles(m, n, lower), slices, length, device.multiprocessors,
    )  # fmt: skip
    logger.debug("k=%d %s: %s", k, config, plan)
    return plan
