"""cuBLAS and cublasLt through ctypes: preallocated, on the caller's stream, ready for graphs.

CuPy refuses to call cuBLAS while a stream is captured, and has no cublasLt for float32. Matrices
are row-major here and column-major there: D' = op(B)' op(A)', with the same memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from multimm_benchmarks.cases import Case

Array = Any

WORKSPACE = 32 << 20  # bytes; what NVIDIA recommends for Hopper
_F32, _F16, _COMPUTE_32F = 0, 2, 68  # cudaDataType_t, cublasComputeType_t
#: What cublasGemmEx sums and multiplies in: float32, or TF32 products of float32 operands.
COMPUTE_32F, COMPUTE_TF32 = _COMPUTE_32F, 77
_DEFAULT_ALGORITHM = -1
#: Whatever makes cuBLAS compute float32 products otherwise than in float32.
OVERRIDES = (
    "NVIDIA_TF32_OVERRIDE", "CUPY_TF32", "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY", "CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK",
)  # fmt: skip


def check_environment() -> None:
    """Refuse to measure a peer that would not compute in float32.

    Raises
    ------
    RuntimeError
        Naming the variables to unset.
    """
    found = [name for name in OVERRIDES if os.environ.get(name, "0") not in ("", "0")]
    if found:
        raise RuntimeError(
            f"{', '.join(found)} set: cuBLAS would not compute in float32; unset them to compare"
        )


def library(name: str) -> ctypes.CDLL:
    """Load cuBLAS or cublasLt from wherever CuPy has it."""
    import cupy

    cupy.cuda.device.get_cublas_handle()  # loads cuBLAS, wherever CuPy found it
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        return ctypes.CDLL(f"lib{name}.so.{major}")
    except OSError:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)


def checked(status: int, what: str) -> None:
    """Raise RuntimeError unless a call's status is that of success."""
    if status:
        raise RuntimeError(f"{what} returned status {status}")


def _leading(x: Array) -> int:
    return max(int(x.strides[-2] // x.itemsize), int(x.shape[-1]), 1)


def _step(x: Array) -> int:
    """Distance of neighbours in a matrix of one row or one column."""
    return _leading(x) if x.shape[-1] == 1 else 1


def _stride(x: Array) -> int:
    return int(x.strides[0] // x.itemsize) if x.ndim == 3 else 0


class Cublas:
    """One handle of each library on one stream."""

    def __init__(self, stream: Any) -> None:
        import cupy

        check_environment()
        self._stream = c_void_p(stream.ptr)
        self._workspace = cupy.empty(WORKSPACE, cupy.uint8)
        self._blas, self._lt = library("cublas"), library("cublasLt")
        self._handle, self._lt_handle = c_void_p(), c_void_p()
        self._call("cublasCreate_v2", byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, self._stream)
        space = c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, space, c_size_t(WORKSPACE))
        checked(self._lt.cublasLtCreate(byref(self._lt_handle)), "cublasLtCreate")

    @property
    def version(self) -> int:
        """As cuBLAS counts: 130100 is 13.1.0."""
        number = c_int()
        self._call("cublasGetVersion_v2", self._handle, byref(number))
        version: int = number.value
        return version

    def _call(self, name: str, *arguments: Any) -> None:
        checked(getattr(self._blas, name)(*arguments), name)

    def sgemm(self, case: Case, a: Array, b: Array, out: Array) -> Callable[[], None]:
        """Return a call of cublasSgemm, or of cublasSgemmStridedBatched."""
        one, zero = c_float(1), c_float(0)
        entry = self._blas.cublasSgemmStridedBatched if case.batch else self._blas.cublasSgemm_v2
        arguments: list[Any] = [self._handle, c_int(case.trans_b), c_int(case.trans_a)]
        arguments += [c_int(case.n), c_int(case.m), c_int(case.k), byref(one)]
        for x, scale in ((b, None), (a, zero), (out, None)):
            arguments += [c_void_p(x.data.ptr), c_int(_leading(x))]
            arguments += [ctypes.c_longlong(_stride(x))] if case.batch else []
            arguments += [byref(scale)] if scale is not None else []
        arguments += [c_int(case.batch)] if case.batch else []
        keep = (one, zero, a, b, out)

        def call(_: Any = keep) -> None:
            checked(entry(*arguments), "cublasSgemm")

        return call

    def gemm_ex(
        self, case: Case, a: Array, b: Array, out: Array, compute: int = COMPUTE_32F
    ) -> Callable[[], None]:
        """Return a call of cublasGemmEx on float32 or float16 operands, `out` being float32.

        Raises
        ------
        RuntimeError
            If the environment forbids TF32.
        """
        if compute == COMPUTE_TF32 and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
            raise RuntimeError("NVIDIA_TF32_OVERRIDE is 0: cuBLAS would not compute in TF32")
        assert not case.batch, "one product at a time"
        one, zero = c_float(1), c_float(0)
        arguments: list[Any] = [self._handle, c_int(case.trans_b), c_int(case.trans_a)]
        arguments += [c_int(case.n), c_int(case.m), c_int(case.k), byref(one)]
        for x, scale in ((b, None), (a, zero), (out, None)):
            kind = _F16 if x.itemsize == 2 else _F32
            arguments += [c_void_p(x.data.ptr), c_int(kind), c_int(_leading(x))]
            arguments += [byref(scale)] if scale is not None else []
        arguments += [c_int(compute), c_int(_DEFAULT_ALGORITHM)]
        entry, keep = self._blas.cublasGemmEx, (one, zero, a, b, out)

        def call(_: Any = keep) -> None:
            checked(entry(*arguments), "cublasGemmEx")

        return call

    def sgemv(self, case: Case, a: Array, b: Array, out: Array) -> Callable[[], None] | None:
        """Return a call of cublasSgemv; None where no operand is a vector."""
        if case.batch or 1 not in (case.m, case.n):
            return None
        # A row of D is op(B)' times a row of op(A).
        column = case.n == 1
        matrix, vector = (a, b) if column else (b, a)
        flipped = case.trans_a if column else not case.trans_b
        one, zero = c_float(1), c_float(0)
        arguments: list[Any] = [self._handle, c_int(not flipped), c_int(matrix.shape[-1])]
        arguments += [c_int(matrix.shape[-2]), byref(one), c_void_p(matrix.data.ptr)]
        arguments += [c_int(_leading(matrix)), c_void_p(vector.data.ptr), c_int(_step(vector))]
        arguments += [byref(zero), c_void_p(out.data.ptr), c_int(_step(out))]
        entry, keep = self._blas.cublasSgemv_v2, (one, zero, a, b, out)

        def call(_: Any = keep) -> None:
            checked(entry(*arguments), "cublasSgemv")

        return call

    def lt(self, case: Case, a: Array, b: Array, out: Array) -> Callable[[], None] | None:
        """Return a call of cublasLtMatmul with its first choice; None where it has none."""
        lt, one, zero = self._lt, c_float(1), c_float(0)
        operation = c_void_p()
        checked(lt.cublasLtMatmulDescCreate(byref(operation), _COMPUTE_32F, _F32), "Lt operation")
        for attribute, flag in ((3, case.trans_b), (4, case.trans_a)):  # TRANSA, TRANSB
            self._set("MatmulDesc", operation, attribute, c_int32(flag))
        layouts = [self._layout(x, case.batch) for x in (b, a, out)]
        algorithm = self._algorithm(operation, layouts, (b, a, out))
        if algorithm is None:
            return None
        pointers = [c_void_p(x.data.ptr) for x in (b, a, out)]
        arguments = [
            self._lt_handle, operation, byref(one), pointers[0], layouts[0], pointers[1],
            layouts[1], byref(zero), pointers[2], layouts[2], pointers[2], layouts[2],
            byref(algorithm), c_void_p(self._workspace.data.ptr), c_size_t(WORKSPACE),
            self._stream,
        ]  # fmt: skip
        keep = (one, zero, a, b, out)

        def call(_: Any = keep) -> None:
            checked(lt.cublasLtMatmul(*arguments), "cublasLtMatmul")

        return call

    def _set(self, kind: str, handle: Any, attribute: int, value: Any) -> None:
        entry = getattr(self._lt, f"cublasLt{kind}SetAttribute")
        checked(entry(handle, attribute, byref(value), c_size_t(ctypes.sizeof(value))), kind)

    def _layout(self, x: Array, batch: int) -> c_void_p:
        layout = c_void_p()
        rows, columns = c_uint64(x.shape[-1]), c_uint64(x.shape[-2])  # as column-major
        entry = self._lt.cublasLtMatrixLayoutCreate
        checked(entry(byref(layout), _F32, rows, columns, c_int64(_leading(x))), "Lt layout")
        if batch:  # BATCH_COUNT, STRIDED_BATCH_OFFSET
            self._set("MatrixLayout", layout, 5, c_int32(batch))
            self._set("MatrixLayout", layout, 6, c_int64(_stride(x)))
        return layout

    def _algorithm(self, operation: Any, layouts: list[Any], operands: tuple[Array, ...]) -> Any:
        """Return the first choice of cublasLt's heuristic, as the struct that it writes."""
        preference = c_void_p()
        checked(self._lt.cublasLtMatmulPreferenceCreate(byref(preference)), "Lt preference")
        self._set("MatmulPreference", preference, 1, c_uint64(WORKSPACE))
        for attribute, x in zip((5, 6, 7, 8), (*operands, operands[-1]), strict=True):
            alignment = c_uint32(min(256, x.data.ptr & -x.data.ptr))  # MIN_ALIGNMENT_A .. D
            self._set("MatmulPreference", preference, attribute, alignment)
        result = (c_uint64 * 12)()  # cublasLtMatmulHeuristicResult_t: the algorithm comes first
        found = c_int()
        entry = self._lt.cublasLtMatmulAlgoGetHeuristic
        status = entry(self._lt_handle, operation, *layouts, layouts[2], preference, 1, result,
                       byref(found))  # fmt: skip
        return result if status == 0 and found.value else None
