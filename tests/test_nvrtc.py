"""Every kernel is compiled for every family of chips, with no GPU; registers and spills are read
from the compiler's report. A missing compiler fails: pip install nvidia-cuda-nvrtc cuda-bindings.
"""

from __future__ import annotations

import functools
import re

import pytest
from cuda.bindings import nvrtc

from multimm.gpu.elementwise import batched_copy, complex_parts
from multimm.gpu.elementwise.reduce import CAPACITIES, AddConfig
from multimm.gpu.elementwise.transpose import TransposeConfig
from multimm.gpu.emulated import broad
from multimm.gpu.runtime.jit import OPTIONS
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import REGISTRY

pytestmark = pytest.mark.slow

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
    found["shared"] = found["shared"] or ["0"]  # not mentioned where there is none
    assert all(len(values) == 1 for values in found.values()), report
    return {what: int(values[0]) for what, values in found.items()}


#: Which operands are stored transposed, and which are copied 16 bytes at a time.
PATHS = [
    {"TRANS_A": trans_a, "TRANS_B": trans_b, "WIDE_A": wide * trans_a,
     "WIDE_B": wide * (1 - trans_b)}
    for trans_a, trans_b, wide in ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (1, 0, 0))
]  # fmt: skip
CASES = [
    (entry, 90, PATHS[0]) for entry in REGISTRY
] + [
    (REGISTRY[-1], 90, path) for path in PATHS[1:]
] + [
    (REGISTRY[i], arch, PATHS[i % len(PATHS)]) for i, arch in ((-2, 75), (-1, 80), (-1, 120))
] + [
    (REGISTRY[0], 90, {**path, "LOWER": 1}) for path in PATHS[1:3]  # both ways
]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "arch", "path"), CASES, ids=lambda value: getattr(value, "name", str(value))
)
def test_gemm_fits_its_registers(entry, arch, path):
    if arch not in checked(nvrtc.nvrtcGetSupportedArchs()):
        assert arch == 75  # a compiler after CUDA 13 may have dropped it
        return
    text = kernel_text("sgemm_ffma.cu", {**entry.config.defines(), **path})
    report, cubin = compile_text(text, f"sm_{arch}", "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF"
    used = usage(report)
    assert used["registers"] <= entry.config.registers_per_thread
    assert used["spilled"] <= SPILLED_BYTES


@pytest.mark.parametrize("words", [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (4, 3)], ids=str)
def test_transpose_compiles(words):
    config = TransposeConfig(*words)
    for arch in architectures():
        text = kernel_text("transpose.cu", config.defines())
        report, _ = compile_text(text, f"sm_{arch}", "--ptxas-options=-v")
        used = usage(report)
        assert used["spilled"] == 0
        assert used["shared"] <= 49_152


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        ("transpose.cu", TransposeConfig(4, vector=4, slots=16)),
        ("transpose_skewed.cu", TransposeConfig(4, vector=4, slots=16, threads=128, skew=8)),
        *(("add_partials.cu", AddConfig(4, capacity, 4)) for capacity in CAPACITIES),
        ("add_partials.cu", AddConfig(8, 2, 2)),
    ],
    ids=str,
)
def test_vector_kernels_compile_without_spills(kernel, config):
    for arch in architectures():
        text = kernel_text(kernel, config.defines())
        report, _ = compile_text(text, f"sm_{arch}", "--ptxas-options=-v")
        assert usage(report)["spilled"] == 0


def test_pieces_are_found_where_the_launch_keeps_them():
    """Without a copy of the table in each thread's own memory."""
    for arch in architectures():
        text = kernel_text("copy_pieces.cu", dict(batched_copy.DEFINES))
        report, _ = compile_text(text, f"sm_{arch}", "--ptxas-options=-v")
        assert usage(report)["spilled"] == 0
        assert "0 bytes stack frame" in report


@pytest.mark.parametrize("precision", broad.BROAD_PARTS)
def test_blocks_that_pack_a_wide_range_run_at_one_time_without_spills(precision):
    text = kernel_text("broad_pack.cu", dict(broad.pack_defines(precision)))
    report, _ = compile_text(text, "sm_90", "--ptxas-options=-v")
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    assert registers * broad.BLOCKS * 256 <= 2**16
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}


@pytest.mark.parametrize(
    ("kernel", "defines", "entries"),
    [
        ("complex_parts.cu", complex_parts.DEFINES, 3),
        ("complex_mirror.cu", complex_parts.MIRROR_DEFINES, 1),
    ],
)
def test_what_writes_complex_numbers_as_real_ones_compiles_without_spills(kernel, defines, entries):
    for arch in architectures():
        text = kernel_text(kernel, dict(defines))
        report, _ = compile_text(text, f"sm_{arch}", "--ptxas-options=-v")
        assert report.count("Function properties") == entries
        assert report.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill") == entries


def test_subnormals_are_kept():
    """With the options that kernels are compiled with; -ftz=true would change the products."""
    text = kernel_text("sgemm_ffma.cu", {**REGISTRY[-1].config.defines(), **PATHS[0]})
    _, kept = compile_text(text, "compute_90", *(o for o in OPTIONS if not o.startswith("--std")))
    assert b"fma.rn.f32" in kept
    assert b".ftz" not in kept
    _, flushed = compile_text(text, "compute_90", "--ftz=true")
    assert b"mul.rn.ftz.f32" in flushed


def test_a_missing_define_is_an_error():
    for name, defines in (
        ("sgemm_ffma.cu", {**REGISTRY[0].config.defines(), "TRANS_A": 0}),
        ("transpose.cu", {"WORDS": 1}),
    ):
        with pytest.raises(AssertionError, match="must be defined"):
            compile_text(kernel_text(name, defines), "sm_90")


def test_rules_hold_in_the_kernel_too():
    defines = {**REGISTRY[-1].config.defines(), **PATHS[0], "BLOCK_K": 12}
    with pytest.raises(AssertionError, match=r"sgemm_ffma\.cu\(\d+\).*whole sectors"):
        compile_text(kernel_text("sgemm_ffma.cu", defines), "sm_90")
