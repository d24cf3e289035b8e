"""Compiled kernels by device and parameters, and how they are launched over stacks.

Kernels come from `compile`, are loaded once per process and device, and run on the current
stream. They are never pickled: what travels is a configuration, and each process has its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from multimm.errors import KernelError
from multimm.gpu.arch import STATIC_SHARED_BYTES, Device, limits_for
from multimm.gpu.runtime.jit import LINE_INFO, compiled_file, target_for
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.strides import Axis, Stack, batch_strides, collapse
from multimm.shapes import Shape

logger = logging.getLogger(__name__)

Array = Any

MAX_GRID_Z = 65_535

# CuPy passes a Python int as 64 bits, which takes it less time than a NumPy scalar.
_MATRIX = (int, int, int)  # address of the first element, leading dimension, batch stride
#: The parameter types of products, in their order: m, n, k, k_step, alpha, beta, A, B, C, P, D.
GEMM_SIGNATURE = (*(int,) * 4, np.float32, np.float32, *_MATRIX * 5)
#: The parameter types of transpose, in their order.
TRANSPOSE_SIGNATURE = (int, int, *_MATRIX * 2)

_loading = threading.Lock()


@functools.cache
def device_of(device: int) -> Device:
    """Return what `simt.configs.choose` needs to know about a device."""
    import cupy

    chip = cupy.cuda.Device(device)
    return Device(
        limits_for(int(chip.compute_capability)), int(chip.attributes["MultiProcessorCount"])
    )


@functools.cache
def kernel_for(
    device: int,
    file: str,
    entry: str,
    defines: tuple[tuple[str, int], ...],
    *,
    shared_bytes: int = 0,
    specific: bool = False,
) -> Any:
    """Return a kernel, loaded on a device.

    Parameters
    ----------
    device : int
    file : str
        Of kernels/, such as ``"sgemm_ffma.cu"``.
    entry : str
        The kernel's name in it.
    defines : tuple of (str, int)
        Its compile-time parameters.
    shared_bytes : int, optional
        Dynamic shared memory that it will be launched with.
    specific : bool, optional
        Whether it uses instructions of one chip alone (sm_90a).

    Returns
    -------
    cupy.RawKernel
        Thread-safe to launch while `device` is current.

    Raises
    ------
    KernelError
        If it cannot be compiled for the device, or not be loaded.
    """
    import cupy

    logger.debug("kernel %s for device %d: %s", entry, device, dict(defines))
    chip = cupy.cuda.Device(device)
    with _loading, chip:  # threads wait for each other's compilation
        capability = int(chip.compute_capability)
        kernel = _loaded(kernel_text(file, dict(defines)), entry, file, capability, specific)
        if shared_bytes > STATIC_SHARED_BYTES:  # up to that, no permission is needed
            kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def _loaded(text: str, entry: str, file: str, capability: int, specific: bool) -> Any:
    """Load a text's kernel on the current device."""
    import cupy

    with compiled_file(*way_of(text, file, capability, specific=specific)) as path:
        try:
            kernel = cupy.RawModule(path=str(path)).get_function(entry)
            kernel.attributes  # noqa: B018  CuPy loads when it is asked for something
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelError(
                f"the driver does not load {entry} of {path}: {error}; delete the file if it is "
                "damaged, and update the driver if it is older than the compiler"
            ) from error
    return kernel


def way_of(
    text: str, file: str, capability: int, *, specific: bool
) -> tuple[str, str, str, tuple[str, ...]]:
    """How a text is compiled, as `jit.compiled_file` and `jit.stem_of` take it.

    Itself, its target, its name and options.
    """
    # A profiler shows source lines beside instructions with it.
    options = (LINE_INFO,) if os.environ.get("MULTIMM_LINE_INFO") else ()
    target = target_for(capability, specific=specific)
    return text, target, PurePosixPath(file).stem, options


def by_value(table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array as a struct that a launch carries: no table in device memory, nothing to copy."""
    return table.reshape(-1).view(np.dtype((np.void, table.nbytes)))


def batch_axes(batch: Shape, prepared: Sequence[tuple[Array, Stack]]) -> list[Axis]:
    """Return the axes of a stack of products, the longest last: that one goes into the grid."""
    if not batch:
        return [Axis(1, (0,) * len(prepared))]
    strides = [
        (0,) * len(batch) if x is None else batch_strides(stack, x.shape, batch)
        for x, stack in prepared
    ]
    axes = sorted(collapse(batch, strides), key=lambda axis: axis.size)
    return axes or [Axis(1, (0,) * len(prepared))]


class _Call(NamedTuple):
    """One launch: its grid, its arguments but for addresses, and where each operand starts."""

    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launches:
    """A kernel's launches with all decided but the operands' addresses: cheap to repeat.

    Everything in it depends on shapes, strides and scalars only, so that a caller may keep it
    for the next product of the same kind.
    """

    kernel: Any
    block: tuple[int, int, int]
    shared_bytes: int
    addresses: tuple[int, ...]  #: positions of the operands' addresses among the arguments
    calls: tuple[_Call, ...]

    def __call__(self, pointers: Sequence[int]) -> None:
        """Launch on the current stream; 0 is the address of an operand that is not there."""
        for grid, fixed, offsets in self.calls:
            args = list(fixed)
            for position, pointer, offset in zip(self.addresses, pointers, offsets, strict=True):
                args[position] = pointer + offset
            self.kernel(grid, self.block, tuple(args), shared_mem=self.shared_bytes)


def prepare(
    kernel: Any,
    tiles: int,
    threads: int,
    head: Sequence[float],
    stacks: Sequence[Stack],
    axes: Sequence[Axis],
    signature: Sequence[type] = GEMM_SIGNATURE,
    itemsize: int = 4,
    shared_bytes: int = 0,
    guarded: bool = False,
) -> Launches:
    """Decide one launch per matrix of the outer axes, the longest axis along the grid's z.

    Parameters
    ----------
    kernel : cupy.RawKernel
    tiles, threads : int
        Thread blocks per matrix, and threads in each.
    head : sequence of int or float
        The arguments before the operands.
    stacks : sequence of Stack
        The operands; their pointers are not looked at.
    axes : sequence of Axis
        Of `batch_axes`.
    signature : sequence of types, optional
        Of every argument: int for 64 bits, or a NumPy scalar type. Default: a product's.
    itemsize : int, optional
        Bytes of an element.
    shared_bytes : int, optional
        Dynamic shared memory.
    guarded : bool, optional
        Whether the kernel was compiled with a guard. What is returned then takes the address of
        what packing has counted as well, last.
    """
    addresses = tuple(range(len(head), len(head) + len(_MATRIX) * len(stacks), len(_MATRIX)))
    guard: tuple[int, ...] = (0,) if guarded else ()
    if guarded:
        addresses += (len(signature),)
    *outer, (depth, steps) = axes
    calls = []
    for index in itertools.product(*(range(size) for size, _ in outer)):
        starts = [
            sum(i * strides[operand] for i, (_, strides) in zip(index, outer, strict=True))
            for operand in range(len(stacks))
        ]
        for first in range(0, depth, MAX_GRID_Z):
            values = list(head)
            for stack, step in zip(stacks, steps, strict=True):
                values += [0, stack.ld, step]
            args = tuple(kind(value) for kind, value in zip(signature, values, strict=True)) + guard
            offsets = (
                tuple(
                    (start + first * step) * itemsize
                    for start, step in zip(starts, steps, strict=True)
                )
                + guard
            )
            grid = (tiles, 1, min(depth - first, MAX_GRID_Z))
            logger.debug("launch grid=%s block=%d sizes=%s", grid, threads, head)
            calls.append(_Call(grid, args, offsets))
    return Launches(kernel, (threads, 1, 1), shared_bytes, addresses, tuple(calls))
