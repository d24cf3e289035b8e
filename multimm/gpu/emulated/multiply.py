"""Products of packed operands on the tensor cores: how their kernels are launched.

On Hopper kernels/sgemm_split.cu, on other GPUs from sm_80 on kernels/sgemm_split_mma.cu. What the
tiles cannot carry (values that are not finite, and others that the pack lists) is not looked at
here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm.errors import KernelError
from multimm.gpu.arch import IF_BROAD, LOWER, UNLESS_REFUSED, Device
from multimm.gpu.emulated.configs import (
    SLAB,
    SPLIT_REGISTRY,
    SplitConfig,
    choose_split,
    slices_of,
)
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import device_of, kernel_for
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt.configs import entry_named
from multimm.gpu.simt.split_k import can_be_added, slice_step, summed

logger = logging.getLogger(__name__)

_PLAIN = np.float32(1), np.float32(0)  # alpha and beta


def prepared(problem: Problem, products: int) -> Run:
    """Return what multiplies packed operands of a product's sizes.

    Made of 3 or 6 products, A @ B is accurate as with FP32 arithmetic: from k = 256 on
    componentwise within (k + 2) * 2**-24 of abs(A) @ abs(B). Of random data that is 24 * 2**-24 up
    to k = 2**17; of constant data, whose roundings have one sign, about 70 * 2**-24 from k = 8192
    on. Others are ``tf32`` products.

    Parameters
    ----------
    problem : Problem
        C, P and D are addressable, A and B are not looked at. Not empty. Without a configuration
        `configs.choose_split` decides; the bits of the result are the same.
    products : int
        See `configs.SplitConfig`.

    Returns
    -------
    callable
        Takes the addresses of the tiles and exponents of A and of B, of C, P and D (0 for what is
        not there), and of what packing has counted: nothing is computed for operands that need
        other kernels, and 0 says that they need this one. Launches on the current stream.

    Raises
    ------
    KernelError
        An unknown configuration, one of other products, or a GPU without tensor cores
        for it.
    """
    (_, m, n, k), lower = problem.shape, problem.lower
    device = device_of(problem.device)
    slices, length = cut = slices_of(m, n, k, products, device, lower)
    chosen = _config(problem, cut, products, device)
    kernel = kernel_for(
        problem.device, f"{chosen.entry}.cu", chosen.entry,
        (*chosen.defines().items(), *LOWER * lower),
        shared_bytes=chosen.shared_bytes, specific=chosen.specific,
    )  # fmt: skip
    length *= chosen.tiles_of_slab
    tiles, sizes = chosen.tiles(m, n, lower), (m, n, -(-k // SLAB) * chosen.tiles_of_slab)
    logger.debug("k=%d %s: %d tiles, %d slices of %d slabs", k, chosen, tiles, slices, length)
    ldc, ldp, ldd = (stack.ld for stack in problem.stacks[2:])
    scalars = np.float32(problem.alpha), np.float32(problem.beta)

    def launch(blocks: int, args: tuple[Any, ...]) -> None:
        grid = (min(blocks, device.multiprocessors), 1, 1)
        kernel(grid, (chosen.threads, 1, 1), args, shared_mem=chosen.shared_bytes)

    def run(pointers: Sequence[int]) -> None:
        a, ea, b, eb, c, p, d, counts = pointers
        operands = (a, ea, b, eb, c, ldc, p, ldp, d, ldd)
        launch(tiles, (*sizes, 0, *scalars, *operands, 0, counts))

    if problem.alpha == 0 or slices == 1 or not can_be_added(problem):
        return run
    step = slice_step(problem.shape)

    def of_slices(pointers: Sequence[int], to: int) -> None:
        operands = (*pointers[:4], 0, 0, 0, 0, to, n)
        launch(tiles * slices, (*sizes, length, *_PLAIN, *operands, step, pointers[7]))

    guard = IF_BROAD if chosen.broad else UNLESS_REFUSED
    return summed(of_slices, lambda: run, problem, 4, slices, guard)


def _config(problem: Problem, cut: tuple[int, int], products: int, device: Device) -> SplitConfig:
    """What was asked for, if it fits the operands and the GPU, or what should be fastest."""
    config = problem.config
    if config is None:
        config = choose_split(*problem.shape[1:3], cut, products, device, problem.lower)
    elif isinstance(config, str):
        config = entry_named(SPLIT_REGISTRY, config).config
    if not isinstance(config, SplitConfig):
        raise KernelError(f"{config} is none of packed operands: pass a SplitConfig, or its name")
    if config.products != products:
        raise KernelError(f"{config} makes other products than the {products} that are needed")
    if not config.runs_on(device.limits):
        raise KernelError(
            f"{config} does not run on a GPU of compute capability "
            f"{device.limits.capability / 10}: leave the configuration out"
        )
    return config
