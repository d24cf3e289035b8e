"""A module named cupy, made of NumPy arrays, and kernels that do on it what the CUDA kernels do.

They take the very arguments of a launch: addresses, leading dimensions, batch strides. So what
decides and launches is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest

from multimm.gpu.runtime import launch, launch_cache

LAYOUTS = ("C", "F", "wide rows", "wide columns", "every second", "reversed")


class GPUArray(np.ndarray):
    """A NumPy array with the attributes that set a CuPy array apart."""

    __module__ = "cupy"
    device_id = 0

    @property
    def device(self):
        return Device(self.device_id)

    @property
    def data(self):
        pointer = self.__array_interface__["data"][0]
        return SimpleNamespace(ptr=pointer, device_id=self.device_id)


class Device(contextlib.nullcontext):
    compute_capability = "90"
    attributes = {"MultiProcessorCount": 132}  # noqa: RUF012

    def __init__(self, ident):
        super().__init__()
        self.id = ident


def gpu(values: np.ndarray, extra: int = 0, offset: int = 0, aligned: int = 64) -> GPUArray:
    """Values in memory of their own: `extra` elements behind each row, `offset` before the first.

    The first element without an offset lies at a multiple of `aligned` bytes; the rest is noise.
    """
    *batch, rows, cols = values.shape if values.ndim > 1 else np.atleast_2d(values).shape
    size, item = offset + int(np.prod(batch, dtype=int)) * rows * (cols + extra), values.itemsize
    raw = np.full(size * item + aligned, 0x7F, "u1")
    start = -raw.__array_interface__["data"][0] % aligned + offset * item
    whole = raw[start : start + (size - offset) * item].view(values.dtype)
    view = whole.reshape(*batch, rows, cols + extra)[..., :cols]
    view[...] = values
    return view.view(GPUArray)


def laid_out(values: np.ndarray, layout: str) -> GPUArray:
    """The same values with other strides."""
    if layout == "C":
        return gpu(values)
    if layout == "F":
        return gpu(values.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "wide rows":
        return gpu(values, extra=3, offset=1)
    if layout == "wide columns":
        return gpu(values.swapaxes(-1, -2), extra=5).swapaxes(-1, -2)
    step = 2 if layout == "every second" else -1
    doubled = np.repeat(values, abs(step), axis=-1)
    return gpu(doubled[..., ::step][..., :: abs(step)] if step < 0 else doubled)[..., ::step]


def memory(pointer: int, shape: tuple[int, ...], steps: tuple[int, ...], kind: str) -> np.ndarray:
    """The elements at an address, as a kernel would walk them; steps count elements."""
    if 0 in shape:
        return np.zeros(shape, kind)
    item = np.dtype(kind).itemsize
    size = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
    flat = np.frombuffer((ctypes.c_char * (size * item)).from_address(int(pointer)), kind)
    strides = tuple(int(step) * item for step in steps)
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def below(m: int, n: int, height: int, width: int) -> np.ndarray:
    """Where the tiles are that reach the diagonal of an m x n matrix."""
    return np.arange(n) // width * width < np.arange(m)[:, None] // height * height + height


class Kernel:
    """What kernels/transpose*.cu, add_partials.cu, copy_pieces.cu, complex_*.cu do, in NumPy."""

    launches: list

    def __init__(self, text: str, name: str):
        text = text.partition("#line")[0]  # what follows has defaults for editors
        self.defines = {k: int(v) for k, v in re.findall(r"^#define (\w+) (\d+)$", text, re.M)}
        self.name = name

    def __call__(self, grid, block, args, shared_mem=0):
        assert shared_mem == 0
        Kernel.launches.append((self, grid, block, args))
        assert block == (self.defines["THREADS"], 1, 1)
        assert 1 <= grid[0] < 2**31
        assert grid[1] == 1
        assert 1 <= grid[2] <= 65535
        for z in range(grid[2]):
            getattr(self, self.name)(z, grid[0], *args)

    def transpose(self, z, tiles, rows, cols, *operands, skew=0):
        d = self.defines
        size, tile = d["WORD_BYTES"] * d["WORDS"], d["SLOTS"] * d["VECTOR"]
        slot = d["WORD_BYTES"] * (1 if skew else d["VECTOR"])
        assert tiles == -(-(rows + max(skew - 1, 0)) // (tile - skew)) * -(-cols // tile)
        views = []
        for (pointer, ld, stride), (height, width) in zip(
            (operands[:3], operands[3:]), ((rows, cols), (cols, rows)), strict=True
        ):
            first = int(pointer) + z * int(stride) * size
            assert first % slot == 0
            assert height == 1 or ld * size % slot == 0
            views.append(memory(first, (int(height), int(width)), (ld, 1), f"V{size}"))
        views[1][...] = views[0].T

    def transpose_skewed(self, z, tiles, *args):
        self.transpose(z, tiles, *args, skew=self.defines["SKEW"])

    def add_partials(self, z, blocks, cols, alpha, beta, count, parts, c, d):
        kind = {4: "f4", 8: "f8"}[self.defines["ELEMENT_BYTES"]]
        assert alpha.dtype == beta.dtype == kind
        span = self.defines["THREADS"] * self.defines["VECTOR"] * self.defines["UNROLL"]
        rows, rest = divmod(blocks, -(-int(cols) // span))
        assert rest == 0
        aligned = self.defines["VECTOR"] * np.dtype(kind).itemsize

        def at(matrix):
            pointer, ld, stride = (int(value) for value in matrix)
            first = pointer + z * stride * np.dtype(kind).itemsize
            assert first % aligned == 0
            assert rows == 1 or ld * np.dtype(kind).itemsize % aligned == 0
            return memory(first, (rows, int(cols)), (ld, 1), kind)

        parts = np.frombuffer(parts.tobytes(), np.uint64).reshape(-1, 3)
        assert len(parts) == self.defines["CAPACITY"] >= count > 0
        assert not parts[count:].any()
        total = None
        if alpha != 0:
            sums = [at(part) for part in parts[:count]]
            while len(sums) > 1:
                pairs = [x + y for x, y in zip(sums[::2], sums[1::2], strict=False)]
                sums = pairs + sums[2 * len(pairs) :]
            total = alpha * sums[0]
        if beta != 0:
            addend = beta * at(np.frombuffer(c.tobytes(), np.uint64))
            total = addend if total is None else total + addend
        at(np.frombuffer(d.tobytes(), np.uint64))[...] = 0 if total is None else total

    def copy_pieces(self, z, blocks, count, table):
        table = np.frombuffer(table.tobytes(), np.int64).reshape(-1, 8)
        assert z == 0
        assert len(table) == self.defines["CAPACITY"] >= count > 0
        assert not table[count:].any()
        begins = 0
        for source, target, source_pitch, target_pitch, cols, words, size, first in table[:count]:
            assert size in (1, 2, 4, 8, 16)
            assert first == begins
            begins += -(-words // (self.defines["THREADS"] * self.defines["UNROLL"]))
            rows, rest = divmod(words, cols)
            assert (rest, words > 0) == (0, True)
            places = ((target, target_pitch), (source, source_pitch))
            assert not any(value % size for place in places for value in place)
            views = [
                _rows(int(at), int(rows), int(cols * size), int(pitch)) for at, pitch in places
            ]
            views[0][...] = views[1]
        assert begins == blocks

    def expand_complex(self, z, blocks, rows, cols, x, ldx, s01, s10, s11, y):
        values, room = self._pairs(blocks, rows, cols, x, ldx), _floats(y, (rows, 2, cols, 2))
        room[:, 0, :, 0], room[:, 0, :, 1] = values.real, s01 * values.imag
        room[:, 1, :, 0], room[:, 1, :, 1] = s10 * values.imag, s11 * values.real

    def split_complex(self, z, blocks, rows, cols, x, ldx, sign, y):
        values, room = self._pairs(blocks, rows, cols, x, ldx), _floats(y, (rows, 2, cols))
        room[:, 0], room[:, 1] = values.real, sign * values.imag

    def join_complex(self, z, blocks, rows, cols, y, sign, alpha, p, ldp, d, ldd):
        parts, room = _floats(y, (rows, 2, cols)), self._pairs(blocks, rows, cols, d, ldd)
        added = self._pairs(blocks, rows, cols, p, ldp) if p else np.complex64(0)
        room.real = alpha * (parts[:, 0] + added.real)
        room.imag = alpha * (sign * parts[:, 1] + added.imag)

    def mirror_complex(self, z, blocks, n, re, s, sign, alpha, p, ldp, d, ldd):
        tiles = -(-n // self.defines["TILE"])
        assert blocks == -(-tiles // 2) * (tiles + 1)
        room, s, below = (
            memory(d, (n, n), (ldd, 1), "c8"),
            _floats(s, (n, n)),
            np.tri(n, dtype=bool),
        )
        h = np.empty((n, n), "c8")
        h.real, h.imag = _floats(re, (n, n)), s + sign * s.T
        h.real[~below] = 0
        if p:
            h += memory(p, (n, n), (ldp, 1), "c8")
        room.real = alpha * np.where(below, h.real, h.real.T)
        room.imag = alpha * np.where(below, h.imag, sign * h.imag.T)

    def _pairs(self, blocks, rows, cols, pointer, ld):
        assert pointer % 8 == 0
        assert blocks == -(-rows * cols // (self.defines["THREADS"] * self.defines["UNROLL"]))
        return memory(pointer, (rows, cols), (ld, 1), "c8")


def _floats(pointer: int, shape: tuple[int, ...]) -> np.ndarray:
    """Contiguous ones at an address."""
    return memory(pointer, (int(np.prod(shape)),), (1,), "f4").reshape(shape)


def _rows(pointer: int, rows: int, width: int, pitch: int) -> np.ndarray:
    """Bytes that lie in rows, in any order."""
    low = min(0, (rows - 1) * pitch)
    view = memory(pointer + low, (rows, width), (abs(pitch), 1), "u1")
    return view[::-1] if pitch < 0 else view


def fake_cupy() -> ModuleType:
    """What the launchers use of CuPy."""
    module = ModuleType("cupy")
    module.empty = lambda shape, dtype: gpu(np.full(shape, 0x55, dtype)).reshape(shape)
    module.ascontiguousarray = lambda x: gpu(np.asarray(x)).reshape(x.shape)
    module.copyto = np.copyto
    module.ndarray = GPUArray
    module.cuda = SimpleNamespace(
        Device=Device,
        get_current_stream=lambda: SimpleNamespace(ptr=0),
        runtime=SimpleNamespace(
            getDevice=lambda: GPUArray.device_id, streamIsCapturing=lambda stream: False
        ),
    )
    return module


def no_memory(*_: object) -> NoReturn:
    """In the place of a `workspace`: as RMM has it; CuPy's error is a kind of this one."""
    raise MemoryError


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """For as long as this lasts; the cache of kernels forgets it after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake_cupy())
        patch.setattr(launch, "_loaded", lambda text, entry, *_: Kernel(text, entry))
        launch.kernel_for.cache_clear()
        launch_cache.forget()
        Kernel.launches = []
        yield
    launch_cache.forget()
    launch.kernel_for.cache_clear()
