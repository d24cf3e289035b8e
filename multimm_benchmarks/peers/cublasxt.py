"""cuBLASXt: operands and result in the host's memory, tiles sent to one or more GPUs."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from typing import Any, ClassVar

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.cublas import check_environment, checked, library
from multimm_benchmarks.peers.base import Array, Machine
from multimm_benchmarks.peers.numpy_matmul import NumpyMatmul
from multimm_benchmarks.sweep_cases import Product

#: Edge of the tiles that travel: of 2048 and 8192 the faster at 32768 on an H200.
BLOCK = 8192
_PINNED = 1  # CUBLASXT_PINNING_ENABLED


class CublasXt(NumpyMatmul):
    """The library that NVIDIA has for products larger than a GPU's memory."""

    promises: ClassVar[tuple[str, ...]] = ("float32",)
    needs: ClassVar = {"gpu": ("cupy",)}
    family = "cublasxt"
    imported_ahead = ("cupy",)
    ready_s, case_s = 1.5, 1.5
    longest = 5.0  # operands and result pass through the host's links: 4.4 to 6.6 on H200s
    runs_on = None
    spreads = True
    warms_up = True  # contexts on all GPUs

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._handle = c_void_p()
        self._library: Any = None

    @classmethod
    def too_large(cls, product: Product, machine: Machine) -> str:
        # Pinned and pageable memory are the host's.
        return cls.beyond_host(product, machine)

    @property
    def config(self) -> str:
        return (
            f"cublasXtSgemm, operands and result in host memory (pinned by the call), tiles of "
            f"{BLOCK}, {self.machine.workers} GPUs"
        )

    def multiply(self, operands: tuple[Array, Array], precision: Precision) -> Array:
        import numpy as np

        if self._library is None:
            self._open()
        a, b = operands
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
        # Row-major here and column-major there: D' = B' A', with the same memory.
        arguments = sgemm_arguments(self._handle, a, b, out)
        checked(self._library.cublasXtSgemm(*arguments), "cublasXtSgemm")
        return out

    def _open(self) -> None:
        check_environment()
        self._library = library("cublas")
        checked(self._library.cublasXtCreate(byref(self._handle)), "cublasXtCreate")
        devices = (c_int * self.machine.workers)(*range(self.machine.workers))
        count = c_int(self.machine.workers)
        select = self._library.cublasXtDeviceSelect(self._handle, count, devices)
        checked(select, "cublasXtDeviceSelect")
        checked(self._library.cublasXtSetBlockDim(self._handle, c_int(BLOCK)), "block")
        checked(self._library.cublasXtSetPinningMemMode(self._handle, c_int(_PINNED)), "pinning")


def sgemm_arguments(handle: c_void_p, a: Array, b: Array, out: Array) -> list[Any]:
    """Return what cublasXtSgemm is given for out = a @ b; `a` may be a transposed view."""
    trans_a = not a.flags.c_contiguous
    stored = a.T if trans_a else a
    (m, k), n = a.shape, b.shape[1]
    one, zero = c_float(1), c_float(0)
    arguments: list[Any] = [handle, c_int(0), c_int(trans_a)]
    arguments += [c_size_t(n), c_size_t(m), c_size_t(k), byref(one)]
    arguments += [_pointer(b), c_size_t(b.shape[1]), _pointer(stored), c_size_t(stored.shape[1])]
    return [*arguments, byref(zero), _pointer(out), c_size_t(n)]


def _pointer(x: Array) -> c_void_p:
    return ctypes.cast(x.ctypes.data, c_void_p)
