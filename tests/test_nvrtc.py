"""Every kernel is compiled for every family of chips, with no GPU; registers and spills are read
from the compiler's report. A missing compiler fails: pip install nvidia-cuda-nvrtc cuda-bindings.
"""

from __future__ import annotations

import functools
import itertools
import re

import pytest
from cuda.bindings import nvrtc

from multimm.gpu.registry import REGISTRY
from multimm.gpu.source import kernel_text
from multimm.gpu.tiles import TransposeConfig

# A few registers around the loop; one that spills inside it spills hundreds of bytes.
SPILLED_BYTES = 96


def checked(answer):
    status, *values = answer
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return values[0] if values else None


@functools.cache
def architectures() -> tuple[int, ...]:
    supported = checked(nvrtc.nvrtcGetSupportedArchs())
    oldest = [75] if 75 in supported else []
    return (*oldest, 80, 90, max(supported))


def compile_text(text: str, target: str, *options: str) -> tuple[str, bytes]:
    """Return the compiler's report and the PTX or cubin; what it refuses fails with its words."""
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    arguments = [f"--gpu-architecture={target}", "--std=c++17", *options]
    encoded = [argument.encode() for argument in arguments]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    report = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, report))
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, report.decode()
    if target.startswith("sm_"):
        binary = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, binary))
    else:
        binary = bytearray(checked(nvrtc.nvrtcGetPTXSize(program)))
        checked(nvrtc.nvrtcGetPTX(program, binary))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return report.decode(), bytes(binary)


def usage(report: str) -> dict[str, int]:
    """Registers, spilled bytes and shared bytes of the one kernel in a report."""
    patterns = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores",
                "shared": r"(\d+) bytes smem"}  # fmt: skip
    found = {what: re.findall(pattern, report) for what, pattern in patterns.items()}
    assert all(len(values) == 1 for values in found.values()), report
    return {what: int(values[0]) for what, values in found.items()}


@pytest.mark.parametrize("entry", REGISTRY, ids=lambda entry: entry.name)
@pytest.mark.parametrize("family", range(4), ids=["sm_75", "sm_80", "sm_90", "newest"])
def test_gemm_fits_its_registers(entry, family):
    if len(architectures()) < 4 and family == 0:
        # CUDA 13 still compiles for sm_75; a later one that does not leaves three families.
        assert 75 not in checked(nvrtc.nvrtcGetSupportedArchs())
        return
    arch = architectures()[family - 4]
    # The ways to store the operands differ in their loads only: each family gets another one,
    # and the configuration of large products all four for the chip it is meant for.
    ways = list(itertools.product((0, 1), repeat=2))
    for trans_a, trans_b in ways if (entry.name, arch) == ("large", 90) else [ways[family]]:
        defines = {**entry.config.defines(), "TRANS_A": trans_a, "TRANS_B": trans_b}
        report, cubin = compile_text(
            kernel_text("sgemm_tiled.cu", defines), f"sm_{arch}", "--ptxas-options=-v"
        )
        assert cubin[:4] == b"\x7fELF"
        used = usage(report)
        assert used["registers"] <= entry.config.registers_per_thread
        assert used["spilled"] <= SPILLED_BYTES
        # Newer chips reserve 1024 bytes for the driver, and say so here.
        assert used["shared"] - entry.config.shared_bytes in (0, 1024)


@pytest.mark.parametrize("words", [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (4, 3)], ids=str)
def test_transpose_compiles(words):
    config = TransposeConfig(*words)
    for arch in architectures():
        text = kernel_text("transpose.cu", config.defines())
        report, _ = compile_text(text, f"sm_{arch}", "--ptxas-options=-v")
        used = usage(report)
        assert used["spilled"] == 0
        assert used["shared"] - config.shared_bytes in (0, 1024)


def test_no_option_flushes_subnormals():
    """CuPy compiles with -ftz=true; the arithmetic must not notice."""
    defines = {**REGISTRY[-1].config.defines(), "TRANS_A": 0, "TRANS_B": 0}
    text = kernel_text("sgemm_tiled.cu", defines)
    _, ptx = compile_text(text, "compute_90", "-ftz=true")
    assert b"fma.rn.f32" in ptx
    assert b".ftz" not in ptx


def test_a_missing_define_is_an_error():
    for name, defines in (
        ("sgemm_tiled.cu", {**REGISTRY[0].config.defines(), "TRANS_A": 0}),
        ("transpose.cu", {"WORDS": 1}),
    ):
        with pytest.raises(AssertionError, match="must be defined"):
            compile_text(kernel_text(name, defines), "sm_90")


def test_rules_hold_in_the_kernel_too():
    defines = {**REGISTRY[0].config.defines(), "BLOCK_K": 12, "TRANS_A": 0, "TRANS_B": 0}
    with pytest.raises(AssertionError, match=r"sgemm_tiled\.cu\(\d+\).*whole sectors"):
        compile_text(kernel_text("sgemm_tiled.cu", defines), "sm_90")
