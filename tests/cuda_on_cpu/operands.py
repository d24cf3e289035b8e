"""Matrices as kernels meet them: padded, unaligned, in memory that shows every stray access."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuda_on_cpu.program import Buffer, Pointer

#: What no kernel may write over. A NaN with a pattern of its own: reading it shows, too.
_CANARY = {4: 0x7FC0BEEF, 8: 0x7FF80000BEEFBEEF}


@dataclass
class Operand:
    """A stack of matrices inside a 1-D buffer that ends with its last element."""

    memory: np.ndarray
    shape: tuple[int, int, int]  #: batch, rows, cols
    offset: int  #: elements in front of the first
    ld: int
    stride: int  #: elements from one matrix to the next; 0 repeats one

    @property
    def view(self) -> np.ndarray:
        """The matrices, (batch, rows, cols)."""
        strides = tuple(step * self.memory.itemsize for step in (self.stride, self.ld, 1))
        return np.lib.stride_tricks.as_strided(self.memory[self.offset :], self.shape, strides)

    def arguments(self, buffer: int) -> tuple[Pointer, int, int]:
        """Pointer, leading dimension and batch stride, as every kernel takes them."""
        return Pointer(buffer, self.offset * self.memory.itemsize), self.ld, self.stride

    def holding(self, values: np.ndarray) -> Operand:
        """The same place with these values in it."""
        copy = Operand(self.memory.copy(), self.shape, self.offset, self.ld, self.stride)
        if copy.view.size:
            copy.view[...] = values
        return copy

    @property
    def buffer(self) -> Buffer:
        """As a launch takes it."""
        return Buffer.of(self.memory)


@dataclass
class Far:
    """One matrix with rows so far apart that offsets need 64 bits; only they take memory."""

    values: np.ndarray  #: rows, cols
    ld: int

    @property
    def view(self) -> np.ndarray:
        """The matrix as a stack of one."""
        return self.values[None]

    def arguments(self, buffer: int) -> tuple[Pointer, int, int]:
        """Pointer, leading dimension and batch stride."""
        return Pointer(buffer), self.ld, 0

    def holding(self, values: np.ndarray) -> Far:
        """The same place with these values in it."""
        return Far(np.array(values[0], self.values.dtype), self.ld)

    @property
    def buffer(self) -> Buffer:
        """As a launch takes it."""
        row_bytes = self.ld * self.values.itemsize
        spans = {row * row_bytes: np.ascontiguousarray(x) for row, x in enumerate(self.values)}
        return Buffer(row_bytes * len(self.values), spans)


def placed(shape: tuple[int, int, int], dtype: str, *, extra: int = 0, offset: int = 0,
           gap: int = 0, repeat: bool = False) -> Operand:  # fmt: skip
    """Room for matrices: `extra` columns, `offset` elements in front, `gap` between matrices.

    `repeat`: one matrix for the whole batch. All of it holds canaries.
    """
    batch, rows, cols = shape
    ld = cols + extra
    stride = 0 if repeat else rows * ld + gap
    last = stride * (batch - 1) + ld * (rows - 1) + cols if min(shape) else 0
    item = np.dtype(dtype).itemsize
    pattern = np.frombuffer(_CANARY.get(item, 0xA5).to_bytes(item, "little"), "u1")
    return Operand(pattern.view(dtype).repeat(offset + last), shape, offset, ld, stride)


def difference(expected: np.ndarray, found: np.ndarray) -> str:
    """Where two buffers differ; empty if nowhere. What is not a number must have the same bits."""
    same = (expected.view("u1") == found.view("u1")).reshape(-1, expected.itemsize).all(axis=1)
    if expected.dtype.kind == "f":
        same |= expected == found  # the two zeros
    wrong = np.flatnonzero(~same)
    if not wrong.size:
        return ""
    at = wrong[0]
    return f"{wrong.size} wrong, first at element {at}: {found[at]} for {expected[at]}"
