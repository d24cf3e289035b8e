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
from cuda_on_cpu.integers import byte_tiles, integer_tiles, unpacked_bytes
from cuda_on_cpu.products import below
from pack_reference import (
    Split,
    broad_parts,
    broad_tiles,
    joined,
    pack_reference,
    swizzled,
)

from multimm.gpu.arch import tiles_of
from multimm.gpu.emulated.pack import PATIENCE, pack_shared_bytes
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

    def get(self, stream: object = None, out: np.ndarray | None = None) -> np.ndarray:
        """On the host."""
        if out is None:
            return np.array(self)
        out[...] = self
        return out


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


#: Threads of a block of kernels that have no parameter for it.
THREADS = {
    "sgemm_outer": 256, "split_pack": 256, "split_residuals": 256, "broad_pack": 256,
    "unpack": 256, "put_residuals": 256, "integer_pack": 256, "sgemm_split": 384,
    "sgemm_split_mma": 256, "byte_pack": 256, "byte_mma": 384,
}  # fmt: skip

#: Kernels that always look at what packing has counted.
LOOKING = ("sgemm_split", "sgemm_split_mma", "split_residuals", "broad_pack")


class Kernel:
    """What each of kernels/*.cu does, in NumPy, from the arguments of a launch.

    Kernels that look at what packing has counted do nothing where others are to compute.
    """

    launches: list
    #: Names of what was launched; with an exclamation mark, of what computed something.
    ran: list
    #: By the address of its tiles, an operand that broad_pack.cu has packed.
    broad: dict

    def __init__(self, text: str, name: str):
        text = text.partition("#line")[0]  # what follows has defaults for editors
        self.defines = {k: int(v) for k, v in re.findall(r"^#define (\w+) (\d+)$", text, re.M)}
        self.name = name
        self.max_dynamic_shared_size_bytes = 0

    @classmethod
    def forget(cls) -> None:
        """Nothing has run yet."""
        cls.launches, cls.ran, cls.broad = [], [], {}

    @property
    def threads(self) -> int:
        """Threads of a block."""
        d = self.defines
        if self.name == "sgemm_ffma":
            return d["BLOCK_M"] // d["THREAD_M"] * (d["BLOCK_N"] // d["THREAD_N"])
        return 32 * d["WARPS"] if "WARPS" in d else d.get("THREADS") or THREADS[self.name]

    def __call__(self, grid, block, args, shared_mem=0):
        assert max(shared_mem, 48 << 10) == max(self.max_dynamic_shared_size_bytes, 48 << 10)
        Kernel.launches.append((self, grid, block, args))
        assert block == (self.threads, 1, 1)
        assert 1 <= grid[0] < 2**31
        assert grid[1] == 1
        assert 1 <= grid[2] <= 65535
        name = self.name + "_broad" * ("BROAD" in self.defines)
        Kernel.ran.append(name)
        if "REFUSED" in self.defines or self.name in LOOKING:
            if not self.needed(args[-1 - 2 * self.integer]):
                return
            Kernel.ran[-1] += " !"
        args = args[:-1] if "REFUSED" in self.defines else args
        for z in range(grid[2]):
            getattr(self, self.name)(z, grid[0], *args)

    @property
    def integer(self) -> bool:
        """Whether integers are multiplied."""
        return "INTEGER" in self.defines

    def needed(self, counts: int) -> bool:
        """Whether the kernel computes, by what packing has counted."""
        d = self.defines
        way = d.get("REFUSED", 2 if "BROAD" in d else 0)
        if not counts:
            return way == 0
        found = memory(counts, (6,), (1,), "u8").tolist()
        odd = bool(found[0] or found[2])
        refused = odd or max(found[1], found[3]) > d.get("GUARDED", d.get("CAP"))
        if self.name == "broad_pack":
            return refused and not odd
        broad = refused and not odd and found[4:] == [1, 0]
        return (not refused, refused and not broad, broad)[way]

    # Products on the FP32 units

    def sgemm_ffma(self, z, blocks, m, n, k, k_step, alpha, beta, *operands):
        d = self.defines

        def at(operand, height, width):
            pointer, ld, stride = (int(x) for x in operands[3 * operand : 3 * operand + 3])
            cells = self.wide(operand)
            assert not any(x % cells for x in (pointer // 4, ld, stride, width))
            assert pointer % (4 * cells) == 0
            return memory(pointer + z * stride * 4, (height, width), (ld, 1), "f4")

        k = min(k_step, k - z * k_step) if k_step else k
        total = np.zeros((m, n))
        if alpha != 0:
            a = at(0, k, m).T if d["TRANS_A"] else at(0, m, k)
            b = at(1, n, k).T if d["TRANS_B"] else at(1, k, n)
            total = a.astype("f8") @ b.astype("f8")
        _finish(total, alpha, beta, *(at(i, m, n) if operands[3 * i] else None for i in (2, 3, 4)))

    def wide(self, operand):
        """Elements that are read at once."""
        d, name = self.defines, "ABCPD"[operand]
        if self.name != "sgemm_ffma":
            return d["CELLS"] if d.get("WIDE") and name == "AB"[d["TURNED"]] else 1
        return 4 if operand < 2 and d[f"WIDE_{name}"] else 1

    def sgemm_outer(self, z, blocks, m, n, k, *args):
        assert k <= self.defines["THIN"]
        assert blocks == -(-m // self.defines["BLOCK_ROWS"]) * -(-n // 121)
        self.sgemm_ffma(z, blocks, m, n, k, *args)

    def sgemm_dot(self, z, blocks, m, n, *args):
        d = self.defines
        side, few = (n, m) if d["TURNED"] else (m, n)
        span = d["WIDTH"] if "WIDTH" in d else d["WARPS"] // d["WARPS_K"] * d["ROWS"]
        assert few <= d["COLS"]
        assert blocks == -(-side // span)
        along_k = d["TRANS_B"] if d["TURNED"] else not d["TRANS_A"]
        assert self.name == ("sgemm_dot" if along_k else "sgemm_axpy")
        self.sgemm_ffma(z, blocks, m, n, *args)

    sgemm_axpy = sgemm_dot

    # Products on the tensor cores

    def sgemm_split(self, z, blocks, m, n, slabs, step, alpha, beta, a, ea, b, eb, c, ldc, p, ldp,
                    d, ldd, apart, counts, promote=0, as_float=0):  # fmt: skip
        slices = -(-slabs // step) if step else 1
        tile_n = self.defines["TILE_N"]
        lower = "LOWER" in self.defines
        assert blocks == min(tiles_of(m, n, 128, tile_n, lower) * slices, 132)
        kind = "i4" if self.integer else "f4"
        made = below(m, n, 128, tile_n) if lower else True
        sides = ((a, ea, m), (b, eb, n)) if alpha != 0 else ()
        left_right = [self.operand(*side, slabs) for side in sides]
        for i in range(slices):
            first, last = (i * step, min(slabs, (i + 1) * step)) if step else (0, slabs)
            total = np.zeros((m, n))
            if left_right:
                total += self.multiplied(*left_right, first, last, promote)
            addends = (memory(at, (m, n), (ld, 1), kind) if at else None
                       for at, ld in ((c, ldc), (p, ldp)))  # fmt: skip
            to = memory(d + i * apart * 4, (m, n), (ldd, 1), "f4" if as_float else kind)
            _finish(total, alpha, beta, *addends, to, made, wraps=self.integer)

    sgemm_split_mma = sgemm_split

    def multiplied(self, left, right, first, last, promote):
        """Sums of slabs; of integers such as the tensor cores hold."""
        if "BROAD" in self.defines:
            return left @ right.T
        if not self.integer:
            part = slice(first * 64, last * 64)
            return left[:, part] @ right[:, part].T
        total = 0
        for at in range(first, last, promote):
            part = slice(at * 64, min(last, at + promote) * 64)
            assert (np.abs(left[:, part]) @ np.abs(right[:, part]).T).max() <= 2**24
            total = total + left[:, part] @ right[:, part].T
        return total

    def operand(self, tiles, exponents, rows, slabs):
        """Rows along k of what was packed, as float64."""
        if "BROAD" in self.defines:
            given = Kernel.broad[tiles]  # what lies there now
            assert slabs == -(-given.shape[1] // 64) * (1 if self.defines["PARTS"] == 3 else 2)
            return given.astype("f8")
        if not self.integer:
            return self.carried(rows, slabs * 64, tiles, exponents).astype("f8")
        height = -(-rows // 128) * 128
        flat = memory(tiles, (height * slabs * 64,), (1,), "f2")
        flat = swizzled(flat.reshape(height // 64, slabs, 64, 64))
        return flat.transpose(0, 2, 1, 3).reshape(height, -1)[:rows].astype("f8")

    def carried(self, rows, k, tiles, exponents):
        """Rows along k that FP16 parts stand for."""
        height, parts = -(-rows // 128) * 128, self.defines["PARTS"]
        shape = (height // 64, -(-k // 64), parts, 64, 64)
        flat = memory(tiles, (int(np.prod(shape)),), (1,), "f2").reshape(shape)
        plain = swizzled(flat).transpose(2, 0, 3, 1, 4).reshape(parts, height, -1)[:, :rows, :k]
        low = plain[1] if parts == 2 else np.zeros_like(plain[0])
        exponents = memory(exponents, (height,), (1,), "i4")[:rows]
        return joined(Split(plain[0], low, exponents, np.zeros(low.shape, "f4"), 0))

    def split_residuals(self, z, blocks, m, n, k, alpha, *rest):
        counts = rest[-1] and memory(rest[-1], (4,), (1,), "u8")
        sides = []
        for i, rows in ((0, m), (1, n)):
            tiles, exponents, known, places, values = rest[5 * i : 5 * i + 5]
            lists = self.listed(int(counts[2 * i + 1] if rest[-1] else known), places, values)
            apart = np.zeros((rows, k))
            apart[lists[:2]] = lists[2]
            sides.append((self.carried(rows, k, tiles, exponents).astype("f8"), apart))
        (a, r), (b, s) = sides
        memory(rest[10], (m, n), (rest[11], 1), "f4")[...] += alpha * (r @ (b + s).T + a @ s.T)

    @staticmethod
    def listed(count, places, values):
        """Rows, places along k and values of elements that were listed."""
        rows, ks = np.divmod(memory(places, (count,), (1,), "u8"), np.uint64(2**32))
        return rows.astype(int), ks.astype(int), memory(values, (count,), (1,), "f4")

    # Packing

    def split_pack(self, z, tasks, struct, stage, patience, exact):
        assert stage in range(3)
        assert exact in range(2)
        assert patience == PATIENCE
        assert self.max_dynamic_shared_size_bytes == pack_shared_bytes(self.defines["HELD"])
        for members in np.frombuffer(struct.tobytes(), np.uint64).reshape(2, -1):
            tasks -= self.pack_one(stage, *map(int, members)) if members.any() else 0
        assert tasks == 0

    def pack_one(self, stage, x, ld, rows, k, along_k, wide, run, tiles, exponents, maxima, arrived,
                 flags, residual_at, residuals):  # fmt: skip
        slabs, panels = -(-k // 64), -(-rows // 128) * 2
        blocks = -(-slabs // run)
        if not slabs * panels:
            return 0
        assert all(address % 8 == 0 for address in (flags, residual_at))
        lines, width = (rows, k) if along_k else (k, rows)
        assert not wide or (x % 16 == 0 and (lines == 1 or ld % 4 == 0))
        given = memory(x, (lines, width), (ld, 1), "f4")
        result = pack_reference(given if along_k else given.T, self.defines["PARTS"])
        left = memory(maxima, (panels * 64,), (1,), "u4")
        assert not memory(arrived, (panels * 64,), (1,), "u4").any()
        assert left.any() == (stage == 2)
        left[...] = 1
        if stage == 1:
            return panels * blocks
        for at, values in ((tiles, result.tiles), (exponents, result.exponents)):
            memory(at, (values.size,), (1,), values.dtype)[...] = values.reshape(-1)
        counts = memory(flags, (2,), (1,), "u8")
        assert not counts.any()
        counts[...] = result.nonfinite, result.uncarried
        order = np.random.default_rng(0).permutation(result.uncarried)[: self.defines["CAP"]]
        if len(order):
            listed = result.residuals[order]
            keys = listed["row"].astype("u8") * 2**32 + listed["k"].astype("u8")
            memory(residual_at, (len(order),), (1,), "u8")[...] = keys
            memory(residuals, (len(order),), (1,), "f4")[...] = listed["value"]
        return panels * blocks

    def unpack(self, z, blocks, rows, k, tiles, exponents, y):
        assert blocks == -(-rows // 128) * 2 * -(-k // 64)
        memory(y, (rows, k), (k, 1), "f4")[...] = self.carried(rows, k, tiles, exponents)

    def put_residuals(self, z, blocks, count, k, places, values, y):
        rows, ks, listed = self.listed(count, places, values)
        memory(y, (int(rows.max()) + 1, k), (k, 1), "f4")[rows, ks] = listed

    def broad_pack(self, z, blocks, operands, counts):
        members, counts = np.frombuffer(operands.tobytes(), "u8"), memory(counts, (6,), (1,), "u8")
        for x, ld, rows, k, along_k, _, tiles, exponents in members.reshape(2, 8).tolist():
            if not x:
                continue
            given = memory(x, (rows, k) if along_k else (k, rows), (ld, 1), "f4")
            given, e = (given if along_k else given.T), memory(exponents, (rows,), (1,), "i4")
            made = broad_tiles(given, e, self.defines["PARTS"])
            assert made.nbytes <= exponents - tiles, "exponents lie behind tiles"
            memory(tiles, made.shape, tuple(s // 2 for s in made.strides), "u2")[...] = made
            Kernel.broad[tiles] = given.copy()
            counts[5] += bool((broad_parts(given, 3, e)[0].sum(axis=0) == 0)[given != 0].any())
        counts[4] = 1

    def integer_pack(self, z, blocks, pointer, ld, rows, k, along_k, wide, tiles):
        kind = f"{'i' if self.defines['SIGNED'] else 'u'}{self.defines['BYTES']}"
        lines = rows if along_k else k
        aligned = pointer % (4 * np.dtype(kind).itemsize) == 0 and (lines == 1 or ld % 4 == 0)
        assert aligned or not wide
        steps = (ld, 1) if along_k else (1, ld)
        packed = integer_tiles(memory(pointer, (rows, k), steps, kind))
        assert blocks == packed.size // 64**2
        memory(tiles, packed.shape, (1,), "f2")[...] = packed

    # Products of bytes

    def byte_pack(self, z, blocks, pointer, ld, rows, k, along_k, wide, slabs, tiles):
        lines = rows if along_k else k
        assert not wide or (pointer % 4 == 0 and (lines == 1 or ld % 4 == 0))
        given = memory(pointer, (rows, k), (ld, 1) if along_k else (1, ld), "u1")
        slices = blocks // (-(-rows // 128) * 2 * slabs)
        packed = byte_tiles(given, slices, slabs)
        assert blocks * 64 * 128 == packed.size
        memory(tiles, packed.shape, (1,), "u1")[...] = packed

    def byte_mma(self, z, blocks, m, n, slabs, slices, a, b, p, d, as_float):
        assert self.integer
        lower = "LOWER" in self.defines
        assert blocks == min(tiles_of(m, n, 128, 256, lower) * slices, 132)
        made = below(m, n, 128, 256) if lower else True
        left, right = (
            unpacked_bytes(memory(at, (slices * -(-rows // 128) * 128 * slabs * 128,), (1,), kind),
                           slices, slabs)[:, :rows].astype("f8")
            for at, rows, kind in ((a, m, self.kind("A")), (b, n, self.kind("B")))
        )  # fmt: skip
        for i in range(slices):
            given = memory(p, (m, n), (n, 1), "i4") if p else None
            to = memory(d + 4 * i * m * n, (m, n), (n, 1), "f4" if as_float else "i4")
            _finish(left[i] @ right[i].T, 1, 0, None, given, to, made, wraps=True)

    def kind(self, side):
        """What the bytes of an operand are."""
        return "i1" if self.defines[f"SIGNED_{side}"] else "u1"

    # What moves or adds elements

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
        assert alpha.dtype == beta.dtype == np.float32
        span = self.defines["THREADS"] * self.defines["VECTOR"] * self.defines["UNROLL"]
        rows, rest = divmod(blocks, -(-int(cols) // span))
        assert rest == 0
        aligned = self.defines["VECTOR"] * 4

        def at(matrix):
            pointer, ld, stride = (int(value) for value in matrix)
            first = pointer + z * stride * 4
            assert first % aligned == 0
            assert rows == 1 or ld * 4 % aligned == 0
            return memory(first, (rows, int(cols)), (ld, 1), "f4")

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


def _finish(total, alpha, beta, c, p, d, made=True, *, wraps=False):
    """D = alpha * (sums + P) + beta * C, where it is computed."""
    if alpha != 0 and p is not None:
        total = total + p
    total = alpha * total
    if beta != 0 and c is not None:
        total = total + beta * c
    if wraps:
        total = total.astype("i8").astype("i4")
    np.copyto(d, total.astype(d.dtype), where=made)


def _floats(pointer: int, shape: tuple[int, ...]) -> np.ndarray:
    """Contiguous ones at an address."""
    return memory(pointer, (int(np.prod(shape)),), (1,), "f4").reshape(shape)


def _rows(pointer: int, rows: int, width: int, pitch: int) -> np.ndarray:
    """Bytes that lie in rows, in any order."""
    low = min(0, (rows - 1) * pitch)
    view = memory(pointer + low, (rows, width), (abs(pitch), 1), "u1")
    return view[::-1] if pitch < 0 else view


class Stream(contextlib.nullcontext):
    """The current one."""

    ptr = 0


def fake_cupy() -> ModuleType:
    """What the launchers use of CuPy."""
    module = ModuleType("cupy")
    module.empty = lambda shape, dtype: gpu(np.full(shape, 0x55, dtype)).reshape(shape)
    module.zeros = lambda shape, dtype: gpu(np.zeros(shape, dtype)).reshape(shape)
    module.ascontiguousarray = lambda x: gpu(np.asarray(x)).reshape(x.shape)
    module.array = lambda x, order, copy: np.array(x, order=order, copy=copy).view(GPUArray)
    module.asnumpy = lambda x: np.array(x)
    module.broadcast_to = lambda x, shape: np.broadcast_to(x, shape, subok=True)
    for name in ("add", "copyto", "matmul", "tri", "where"):
        setattr(module, name, getattr(np, name))
    module.ndarray = GPUArray
    module.cuda = SimpleNamespace(
        Device=Device,
        get_current_stream=Stream,
        runtime=SimpleNamespace(
            getDevice=lambda: GPUArray.device_id,
            streamIsCapturing=lambda stream: False,
            memsetAsync=lambda at, value, size, _: ctypes.memset(at, value, size),
            memcpyAsync=lambda to, at, size, *_: ctypes.memmove(to, at, size),
        ),
    )
    return module


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """A graph is captured, the pool empty: `Kernel.ran` has what the graph takes and frees."""
    held: list[GPUArray] = []
    cupy, cuda = sys.modules["cupy"], sys.modules["cupy"].cuda

    def allocate(size: int, stream: int) -> int:
        held.append(gpu(np.full(size, 0x55, "u1")).reshape(-1))
        Kernel.ran.append(f"take {len(held)}")
        return held[-1].data.ptr

    def free(address: int, stream: int) -> None:
        Kernel.ran.append(f"free {1 + [x.data.ptr for x in held].index(address)}")

    def array(shape: tuple[int, ...], dtype: str, memptr: int) -> GPUArray:
        return memory(memptr, (int(np.prod(shape)),), (1,), dtype).reshape(shape).view(GPUArray)

    with pytest.MonkeyPatch.context() as patch:
        for holder, name, value in (
            (cuda.runtime, "streamIsCapturing", lambda stream: True),
            (cuda.runtime, "mallocAsync", allocate),
            (cuda.runtime, "freeAsync", free),
            (cuda, "UnownedMemory", lambda address, *_: address),
            (cuda, "MemoryPointer", lambda address, _: address),
            (cupy, "ndarray", array),
            (cupy, "empty", None),
        ):
            patch.setattr(holder, name, value, raising=False)
        yield


def no_memory(*_: object) -> NoReturn:
    """In the place of a `workspace`: as RMM has it; CuPy's error is a kind of this one."""
    raise MemoryError


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """For as long as this lasts; the cache of kernels forgets it after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake_cupy())
        patch.setattr(launch, "_loaded", lambda text, entry, *_: Kernel(text, entry))
        forget()
        yield
    forget()


def forget() -> None:
    """Nothing is known of this device, nor of calls, and nothing has run."""
    launch_cache.forget()
    launch.kernel_for.cache_clear()
    launch.device_of.cache_clear()
    Kernel.forget()
