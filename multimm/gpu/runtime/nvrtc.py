"""NVRTC, NVIDIA's run-time compiler, 12 or 13, which needs no GPU.

Kernel text goes in, machine code and the compiler's words come out; no files, no CuPy kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from multimm.errors import KernelError, how_to_install_for_gpus, one_line

logger = logging.getLogger(__name__)

Version = tuple[int, int]


class CompilationError(Exception):
    """The compiler refused a text; `str()` is its log."""


class Nvrtc:
    """NVRTC of the package cuda-bindings."""

    def __init__(self) -> None:
        from cuda.bindings import nvrtc

        self._nvrtc = nvrtc

    def version(self) -> Version:
        """Major and minor version of the library."""
        major, minor = self._call("nvrtcVersion")
        return major, minor

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, ascending."""
        return tuple(sorted(self._call("nvrtcGetSupportedArchs")))

    def compile(self, text: str, options: Sequence[str], *, ptx: bool) -> tuple[bytes, str]:
        """Machine code, or PTX, and the log; `CompilationError` for a text that it refuses."""
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


@functools.cache
def find() -> Nvrtc:
    """The compiler, loaded.

    Raises
    ------
    KernelError
        If there is none; it says what to install.
    """
    try:
        found = Nvrtc()
        logger.debug("NVRTC %d.%d", *found.version())
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelError(
            f"no CUDA run-time compiler was found ({one_line(error)[:200]}): "
            f"{how_to_install_for_gpus()}, or install the packages cuda-bindings and "
            "nvidia-cuda-nvrtc"
        ) from None
    return found
