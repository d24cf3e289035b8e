"""NVRTC, NVIDIA's run-time compiler, through whichever Python package brings it.

cuda.bindings comes with every GPU installation of multimm and needs no GPU; CuPy has a binding
of its own, to which we fall back. Both serve NVRTC 12 and 13. Kernel text goes in, machine code
and the compiler's words come out; no files, no CuPy kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from multimm.errors import KernelError

logger = logging.getLogger(__name__)

Version = tuple[int, int]


class CompilationError(Exception):
    """The compiler refused a text; `str()` is its log."""


class Nvrtc(Protocol):
    """What both bindings offer here."""

    def version(self) -> Version:
        """Major and minor version of the library."""

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, ascending."""

    def compile(self, text: str, options: Sequence[str], *, ptx: bool) -> tuple[bytes, str]:
        """Machine code, or PTX, and the log.

        Raises
        ------
        CompilationError
        """


class CudaBindings:
    """NVRTC of the package cuda-bindings."""

    def __init__(self) -> None:
        self._nvrtc = _cuda_bindings()

    def version(self) -> Version:
        """Major and minor version of the library."""
        major, minor = self._call("nvrtcVersion")
        return major, minor

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, ascending."""
        return tuple(sorted(self._call("nvrtcGetSupportedArchs")))

    def compile(self, text: str, options: Sequence[str], *, ptx: bool) -> tuple[bytes, str]:
        """Machine code, or PTX, and the log."""
        program = self._call("nvrtcCreateProgram", text.encode(), b"kernel.cu", 0, [], [])
        try:
            encoded = [option.encode() for option in options]
            status, *_ = self._nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._filled("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise CompilationError(log or str(status))
            return self._filled("nvrtcGetPTX" if ptx else "nvrtcGetCUBIN", program), log
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)

    def _filled(self, name: str, program: Any) -> bytes:
        buffer = bytearray(self._call(f"{name}Size", program))
        self._call(name, program, buffer)
        return bytes(buffer)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._nvrtc, name)(*args)
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{name} of NVRTC failed: {status}")
        return values[0] if len(values) == 1 else tuple(values)


class CupyBinding:
    """NVRTC as CuPy binds it."""

    def __init__(self) -> None:
        self._nvrtc = _cupy()

    def version(self) -> Version:
        """Major and minor version of the library."""
        major, minor = self._nvrtc.getVersion()
        return major, minor

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, ascending."""
        return tuple(sorted(self._nvrtc.getSupportedArchs()))

    def compile(self, text: str, options: Sequence[str], *, ptx: bool) -> tuple[bytes, str]:
        """Machine code, or PTX, and the log."""
        program = self._nvrtc.createProgram(text, "kernel.cu", (), ())
        try:
            try:
                self._nvrtc.compileProgram(program, tuple(options))
            except self._nvrtc.NVRTCError as error:
                log = self._nvrtc.getProgramLog(program)
                raise CompilationError(log or str(error)) from None
            fetch = self._nvrtc.getPTX if ptx else self._nvrtc.getCUBIN
            # CuPy drops the last byte of either, as if both were C strings.
            return bytes(fetch(program)) + b"\0", self._nvrtc.getProgramLog(program)
        finally:
            self._nvrtc.destroyProgram(program)


def _cuda_bindings() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _cupy() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc


@functools.cache
def find() -> Nvrtc:
    """The first binding whose library loads.

    Raises
    ------
    KernelError
        If there is none; it says what to install.
    """
    reasons = []
    for binding in (CudaBindings, CupyBinding):
        try:
            found: Nvrtc = binding()
            version = found.version()
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{binding.__name__}: {' '.join(str(error).split())[:200]}")
            continue
        logger.debug("NVRTC %d.%d through %s", *version, binding.__name__)
        return found
    raise KernelError(
        f"no CUDA run-time compiler was found ({'; '.join(reasons)}): install multimm[cuda13] or "
        "multimm[cuda12], or the packages cuda-bindings and nvidia-cuda-nvrtc"
    )
