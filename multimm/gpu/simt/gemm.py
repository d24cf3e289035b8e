"""Products with FP32 fused multiply-adds: which kernel in which configuration, and its launches."""

from __future__ import annotations

import functools

from multimm.errors import KernelError
from multimm.gpu.arch import IF_REFUSED, LOWER, Device, tiles_of
from multimm.gpu.problem import Problem
from multimm.gpu.runtime.launch import (
    batch_axes,
    device_of,
    kernel_for,
    prepare,
)
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt import thin
from multimm.gpu.simt.configs import (
    INSTEAD,
    REGISTRY,
    TileConfig,
    choose,
    entry_named,
    slice_length,
    slices_of_k,
)
from multimm.gpu.simt.load_paths import alike, load_paths, sizes_of
from multimm.gpu.simt.split_k import can_be_added, in_slices
from multimm.gpu.strides import GemmSizes


def prepared(problem: Problem, if_refused: bool = False) -> Run:
    """Return what computes products like this one.

    Parameters
    ----------
    problem : Problem
        Addressable, and not empty. With a configuration sgemm_ffma runs. Without one skinny
        products have kernels of their own, and for others `configs.choose` decides.
    if_refused : bool, optional
        Whether the product is needed only if packing refuses an operand. Then all of D is computed
        by sgemm_ffma, and what is returned takes the address of what packing has counted as well.

    Returns
    -------
    callable
        Takes the addresses of A, B, C, P and D, and launches on the current stream.
    """
    device = device_of(problem.device)
    axes = batch_axes(problem.shape.batch, [*zip(problem.arrays, problem.stacks, strict=True)])
    loads = load_paths(problem.trans, problem.stacks, axes)
    sizes = sizes_of(problem.shape, loads, problem.lower and not if_refused)
    default = problem.config is None and not if_refused
    if default and (way := thin.way_for(sizes, device)) is not None:
        return thin.prepared(way, problem, axes, loads)
    slices = slices_of_k(sizes, device)
    if if_refused:
        tile = choose(sizes, device, slices, INSTEAD)
        loads, guard = alike(loads), IF_REFUSED  # the fewest kernels
    else:
        tile, guard = _tile(problem.config, sizes, device, slices), ()
    kernel = kernel_for(
        problem.device, "sgemm_ffma.cu", "sgemm_ffma",
        (*tile.defines().items(), *loads.items(), *guard, *LOWER * sizes.lower),
        shared_bytes=tile.shared_bytes,
    )  # fmt: skip
    tiles = tiles_of(sizes.m, sizes.n, tile.block_m, tile.block_n, sizes.lower)
    launches = functools.partial(
        prepare, kernel, tiles, tile.threads, shared_bytes=tile.shared_bytes, guarded=if_refused
    )
    if if_refused and 2 * tiles > device.multiprocessors:
        slices = 1  # seldom needed: not worth the launch of a sum
    if slices > 1 and problem.alpha != 0 and can_be_added(problem):
        return in_slices(launches, problem, slices, slice_length(sizes.k, slices), loads, guard)
    return launches(problem.head, problem.stacks, axes)


def _tile(config: object, sizes: GemmSizes, device: Device, slices: int) -> TileConfig:
    """What was asked for, or what should be fastest."""
    if isinstance(config, str):
        config = entry_named(REGISTRY, config).config
    if config is None:
        config = choose(sizes, device, slices)
    if not isinstance(config, TileConfig):
        raise KernelError(f"{config} is none of sgemm_ffma: pass a TileConfig, or its name")
    return config
