"""Every kernel is compiled for every family of chips, with no GPU; registers and spills are read
from the compiler's report. A missing compiler fails: pip install nvidia-cuda-nvrtc cuda-bindings.

Kernels of packed operands, and that subnormal numbers are kept: test_compile; of skinny products:
test_registry.
"""

from __future__ import annotations

import functools

import pytest

from multimm.errors import KernelError
from multimm.gpu.elementwise import batched_copy, complex_parts
from multimm.gpu.elementwise.reduce import CAPACITIES, AddConfig
from multimm.gpu.elementwise.transpose import TransposeConfig
from multimm.gpu.emulated import broad
from multimm.gpu.emulated.configs import SPLIT_REGISTRY
from multimm.gpu.residues.gemm import KERNELS
from multimm.gpu.runtime import nvrtc
from multimm.gpu.runtime.jit import compile_text
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import REGISTRY

pytestmark = pytest.mark.slow

# A few registers around the loop; one that spills inside it spills hundreds of bytes.
SPILLED_BYTES = 96


@functools.cache
def architectures() -> tuple[int, ...]:
    supported = nvrtc.find().architectures()
    oldest = [75] if 75 in supported else []
    return (*oldest, 80, 90, max(supported))


#: Which operands are stored transposed, and which are copied 16 bytes at a time.
PATHS = [
    {"TRANS_A": trans_a, "TRANS_B": trans_b, "WIDE_A": wide * trans_a,
     "WIDE_B": wide * (1 - trans_b)}
    for trans_a, trans_b, wide in ((0, 0, 1), (1, 1, 1), (1, 0, 1), (0, 1, 1), (1, 0, 0))
]  # fmt: skip
#: Every configuration once, each with another path, and the one that runs anywhere on more chips.
#: LOWER, both ways, is compiled with those that take the most registers of sm_90.
CASES = [
    (entry, 75 if entry.name == "portable" else 90,
     PATHS[i % len(PATHS)] | ({"LOWER": 1} if "quick" in entry.name else {}))
    for i, entry in enumerate(REGISTRY)
] + [(REGISTRY[-1], arch, PATHS[-1]) for arch in (80, 120)]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "arch", "path"), CASES, ids=lambda value: getattr(value, "name", str(value))
)
def test_gemm_fits_its_registers(entry, arch, path):
    if arch not in nvrtc.find().architectures():
        assert arch == 75  # a compiler after CUDA 13 may have dropped it
        return
    text = kernel_text("sgemm_ffma.cu", {**entry.config.defines(), **path})
    made = compile_text(text, f"sm_{arch}")
    assert made.binary[:4] == b"\x7fELF"
    (used,) = made.usage.values()
    assert used.registers <= entry.config.registers_per_thread
    assert used.spilled <= SPILLED_BYTES


#: Kernels without a loop over k: file, parameters, and how many entries it has. None has a frame:
#: pieces of copies are found where the launch keeps them.
VECTORS = [
    *(("transpose.cu", TransposeConfig(*words).defines(), 1)
      for words in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (4, 3))),
    ("transpose.cu", TransposeConfig(4, vector=4, slots=16).defines(), 1),
    ("transpose_skewed.cu",
     TransposeConfig(4, vector=4, slots=16, threads=128, skew=8).defines(), 1),
    *(("add_partials.cu", AddConfig(capacity, 4).defines(), 1) for capacity in CAPACITIES),
    ("copy_pieces.cu", dict(batched_copy.DEFINES), 1),
    ("complex_parts.cu", dict(complex_parts.DEFINES), 3),
    ("complex_mirror.cu", dict(complex_parts.MIRROR_DEFINES), 1),
]  # fmt: skip


#: What lies around products of residues, which run on sm_90a alone (test_compile).
RESIDUES = [
    (file, dict(defines), 2 if file == "residue_pack.cu" else 1)
    for file, defines, specific in KERNELS
    if not specific
]


#: Of each file the last takes the most registers, or as many: it is compiled for all chips.
LARGEST = {file: defines for file, defines, _ in VECTORS + RESIDUES}


@pytest.mark.parametrize(("file", "defines", "entries"), VECTORS + RESIDUES, ids=str)
def test_kernels_without_a_loop_over_k_compile_without_spills(file, defines, entries):
    every = (80, 90) if file.startswith("residue") else architectures()
    for arch in every if defines == LARGEST[file] else (90,):
        made = compile_text(kernel_text(file, defines), f"sm_{arch}")
        assert len(made.usage) == entries
        assert all(used.spilled == 0 and used.shared <= 49_152 for used in made.usage.values())
        assert made.log.count("0 bytes stack frame") == entries
        # A thread block has 1024 threads where rows lie across k.
        rows = made.usage.get("residue_rows")
        assert rows is None or rows.registers <= 65_536 // 1024


@pytest.mark.parametrize("precision", broad.BROAD_PARTS)
def test_blocks_that_pack_a_wide_range_run_at_one_time_without_spills(precision):
    text = kernel_text("broad_pack.cu", dict(broad.pack_defines(precision)))
    (used,) = compile_text(text, "sm_90").usage.values()
    assert used.registers * broad.BLOCKS * 256 <= 2**16
    assert used.spilled == 0


SPLIT, MMA = (
    next(x.config.defines() for x in SPLIT_REGISTRY if x.config.specific == specific)
    for specific in (True, False)
)
BYTES = next(dict(defines) for file, defines, _ in KERNELS if file == "byte_mma.cu")
ALL_OF_SPLIT = "PARTS, TILE_N, SLOTS, BAND and CAP must be defined"


@pytest.mark.parametrize(
    ("file", "defines", "target", "said"),
    [
        ("sgemm_ffma", {**REGISTRY[0].config.defines(), "TRANS_A": 0}, "sm_90", "must be defined"),
        ("sgemm_ffma", {**REGISTRY[-1].config.defines(), **PATHS[0], "BLOCK_K": 12}, "sm_90",
         r"sgemm_ffma\.cu\(\d+\).*whole sectors"),
        ("transpose", {"WORDS": 1}, "sm_90", "must be defined"),
        ("residue_rows", {}, "sm_90", "ALONG_K, PARTS and SINGLE must be defined"),
        ("residue_pack", {}, "sm_90", "ALONG_K, PARTS and SINGLE must be defined"),
        *(("byte_mma", {x: BYTES[x] for x in BYTES if x != name}, "sm_90a",
           "TILE_N, SLOTS and BAND must be defined") for name in BYTES),
        ("byte_mma", BYTES | {"TILE_N": 96}, "sm_90a", "B is packed in tiles of 64"),
        ("byte_mma", BYTES, "sm_90", "wgmma"),
        ("sgemm_split", {"PARTS": 2}, "sm_90a", ALL_OF_SPLIT),
        ("sgemm_split", SPLIT | {"SLOTS": 3}, "sm_90a",
         "a slab is copied while another one is multiplied"),
        ("sgemm_split", SPLIT | {"TILE_N": 96}, "sm_90a", "B is packed in tiles of 64 rows"),
        ("sgemm_split", SPLIT | {"PARTS": 3}, "sm_90a", "one product, or three"),
        ("sgemm_split", SPLIT | {"PARTS": 1, "TILE_N": 64, "INTEGER": 1}, "sm_90", "wgmma"),
        ("sgemm_split_mma", {"PARTS": 2}, "sm_80", ALL_OF_SPLIT),
        ("sgemm_split_mma", MMA | {"SLOTS": 1}, "sm_80",
         "a stage is copied while another one is multiplied"),
        ("sgemm_split_mma", MMA | {"TILE_N": 192}, "sm_80", "B is copied by pairs of packed tiles"),
    ],
)  # fmt: skip
def test_rules_hold_in_the_kernel_too(file, defines, target, said):
    with pytest.raises(KernelError, match=said):
        compile_text(kernel_text(f"{file}.cu", defines), target)
