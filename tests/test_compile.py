"""From kernel text to a loaded kernel: compiler, files, loading. No GPU: NVRTC needs none."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from multimm.errors import KernelError
from multimm.gpu.arch import limits_for
from multimm.gpu.emulated.configs import (
    BROAD_REGISTRY,
    SPLIT_REGISTRY,
)
from multimm.gpu.emulated.outliers import residual_defines
from multimm.gpu.emulated.pack import BLOCKS, held_on, pack_defines
from multimm.gpu.integers.tensor_cores import MMA_CONFIGS, WGMMA_CONFIGS
from multimm.gpu.residues.gemm import KERNELS
from multimm.gpu.runtime import file_cache, launch, nvrtc
from multimm.gpu.runtime import jit as compiling
from multimm.gpu.runtime.kernel_source import kernel_text

ADD = """#line 1 "common/add.cu"
extern "C" __global__ void add(float* x, float y) { x[threadIdx.x] += y; }
"""


class FakeNvrtc:
    """Compiles nothing, counts how often it is asked to."""

    def __init__(self, version=(13, 0), known=(75, 80, 86, 90, 100, 120)):
        self._version, self._known = version, known
        self.calls = 0

    def version(self):
        return self._version

    def architectures(self):
        return self._known

    def compile(self, text, options, *, ptx):
        self.calls += 1
        time.sleep(0.01)  # long enough for another thread to come in between
        return f"{self._version} {options} {text}".encode(), "a log"


@pytest.fixture
def fake(monkeypatch):
    compiler = FakeNvrtc()
    monkeypatch.setattr(nvrtc, "find", lambda: compiler)
    return compiler


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "kept"))
    file_cache._unwritable.cache_clear()
    return tmp_path / "kept"


def content(text="text", target="sm_90", name="name", options=()):
    with compiling.compiled_file(text, target, name, options) as path:
        return path.read_bytes()


WGMMA = [entry.config for entry in (*SPLIT_REGISTRY, *BROAD_REGISTRY) if entry.config.specific]
MMA = [entry.config for entry in SPLIT_REGISTRY if not entry.config.specific]


RESIDUES, LOWER_RESIDUES = (dict(x) for file, x, _ in KERNELS if file == "byte_mma.cu")
#: Products by wgmma: every configuration once. LOWER is more code in front of the same loops: it is
#: compiled where sums leave the fewest registers. Residues have the instruction of signed bytes.
OF_SPLIT = [
    *((config, {"LOWER": 1} if config == WGMMA[0] else {}) for config in WGMMA),
    (WGMMA_CONFIGS[0], {"INTEGER": 1, "LOWER": 1}),
    (WGMMA_CONFIGS[1], {"INTEGER": 1}),
]
OF_BYTES = [
    LOWER_RESIDUES,
    *(RESIDUES | {"INTEGER": 1, "SIGNED_A": a, "SIGNED_B": b} for a, b in ((0, 1), (1, 0))),
    LOWER_RESIDUES | {"INTEGER": 1, "SIGNED_A": 0, "SIGNED_B": 0},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "defines", "threads"),
    [
        *(("sgemm_split", config.defines() | more, config.threads) for config, more in OF_SPLIT),
        *(("byte_mma", defines, 384) for defines in OF_BYTES),
    ],
    ids=str,
)
def test_products_by_wgmma_never_spill_nor_wait_for_each_other(entry, defines, threads):
    made = compiling.compile_text(kernel_text(f"{entry}.cu", defines), "sm_90a")
    usage = made.usage[entry]
    assert usage.spilled == 0
    # At its start; later a third of the threads gives registers to the others.
    assert usage.registers <= 65_536 // threads
    # C75xx: warpgroup products that the compiler serialises, or register requests it ignores.
    assert "C75" not in made.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "target", "more"),
    [
        # Of those with registers to spare other chips, and LOWER with the most that it can meet.
        *((config, "sm_120" if config == MMA[3] else "sm_80", {}) for config in MMA),
        (MMA_CONFIGS[0], "sm_80", {"INTEGER": 1, "LOWER": 1}),
        (MMA_CONFIGS[1], "sm_120", {"INTEGER": 1}),
    ],
    ids=str,
)
def test_split_products_compile_for_gpus_without_wgmma(config, target, more):
    made = compiling.compile_text(
        kernel_text(f"{config.entry}.cu", config.defines() | more), target
    )
    usage = made.usage[config.entry]
    assert usage.spilled <= 64, "few numbers that the loops do not need"
    assert usage.registers <= 65_536 // config.threads


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "parts"), [(75, 2), (80, 1), (90, 2)])
def test_packing_and_what_reads_packed_operands_compile_without_spills(capability, parts):
    for file, defines in (
        ("split_pack.cu", pack_defines(parts, held_on(limits_for(capability)))),
        ("split_unpack.cu", [("PARTS", parts)]),
        ("split_residuals.cu", residual_defines(parts)),
    ):
        usage = compiling.compile_text(kernel_text(file, dict(defines)), f"sm_{capability}").usage
        for use in usage.values():
            assert use.spilled == 0
            assert use.shared <= 24 * 1024
        if file == "split_pack.cu":
            assert usage["split_pack"].registers <= 65_536 // 256 // BLOCKS
            assert usage["split_pack"].shared == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "signed", "target"),
    [(1, 0, "sm_80"), (1, 1, "sm_120"), (2, 0, "sm_90"), (2, 1, "sm_120")],
)
def test_packing_of_integers_compiles_without_spills(size, signed, target):
    text = kernel_text("integer_pack.cu", {"BYTES": size, "SIGNED": signed})
    assert compiling.compile_text(text, target).usage["integer_pack"].spilled == 0


def test_subnormals_are_kept():
    kept = compiling.compile_text(ADD, "compute_90")
    flushed = compiling.compile_text(ADD, "compute_90", ["--ftz=true"])
    assert b"add.f32" in kept.binary or b"add.rn.f32" in kept.binary
    assert b".ftz" not in kept.binary
    assert b".ftz" in flushed.binary
    assert kept.usage == {}


def test_errors_name_our_files_and_are_few():
    text = (
        ADD
        + '#line 7 "other.cuh"\n'
        + "".join(f"__device__ int x{i} = missing{i};\n" for i in range(9))
    )
    with pytest.raises(KernelError) as caught:
        compiling.compile_text(text, "sm_90")
    first, second, third, rest = str(caught.value).splitlines()
    assert first.startswith("NVRTC ")
    assert 'sm_90: other.cuh(7): error: identifier "missing0" is undefined' in first
    assert second.startswith("other.cuh(8): error")
    assert third.startswith("other.cuh(9): error")
    assert rest == "... and 6 more"
    with pytest.raises(KernelError, match="#error directive: must be defined"):
        compiling.compile_text("#error must be defined\n", "sm_90")


def test_without_a_writable_directory_it_works_and_says_so_once(fake, directory, caplog):
    directory.write_text("a file where the directory would be")
    with compiling.compiled_file("text", "sm_90", "name") as path:
        assert path.read_bytes()
    assert not path.exists()
    content("more")
    assert fake.calls == 2
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "set MULTIMM_CACHE_DIR" in record.getMessage()


def test_many_writers_leave_one_whole_file(fake, directory):
    start = threading.Barrier(8)

    def write(_):
        start.wait()
        return content("long " * 100_000)

    with ThreadPoolExecutor(8) as pool:
        contents = set(pool.map(write, range(8)))
    assert len(contents) == 1
    (path,) = directory.glob("kernels/*")  # and no temporary file is left
    assert path.read_bytes() in contents


def test_a_failed_write_leaves_nothing(directory, monkeypatch):
    target = directory / "file"
    assert file_cache.write(target, b"old")

    def broken(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", broken)
    assert not file_cache.write(target, b"new")
    assert [path.read_bytes() for path in directory.iterdir()] == [b"old"]


@pytest.fixture
def no_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc.find.cache_clear()
    yield
    nvrtc.find.cache_clear()


def test_without_any_compiler_the_error_says_what_to_install(no_bindings):
    with pytest.raises(KernelError, match=r"pip install .*\[cuda13\].* \(or cuda12\)"):
        compiling.compile_text("text", "sm_90")


class CUDADriverError(RuntimeError):
    pass


class Loaded:
    """A kernel, as CuPy gives it."""

    attributes = ()
    max_dynamic_shared_size_bytes = None

    def __init__(self, path, entry):
        self.path, self.entry = path, entry
        self.calls = []

    def __call__(self, grid, block, args, **options):
        self.calls.append((grid, block, args, options))


@pytest.fixture
def cupy(fake, monkeypatch):
    """A stand-in that loads what lies at a path; `loads` says which."""
    module = ModuleType("cupy")
    module.loads = []

    class RawModule:
        def __init__(self, path):
            with open(path, "rb") as file:
                module.loads.append(file.read())
            self.path = path

        def get_function(self, entry):
            if entry == "missing":
                raise CUDADriverError("CUDA_ERROR_NOT_FOUND")
            return Loaded(self.path, entry)

    class Device(contextlib.nullcontext):
        compute_capability = "90"

        def __init__(self, ident):
            super().__init__()

    module.RawModule = RawModule
    module.cuda = SimpleNamespace(
        Device=Device, driver=SimpleNamespace(CUDADriverError=CUDADriverError)
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    launch.kernel_for.cache_clear()
    yield module
    launch.kernel_for.cache_clear()


TRANSPOSE = ("transpose.cu", "transpose", (("WORD_BYTES", 4), ("WORDS", 1)))


def test_kernels_are_compiled_once_and_loaded_once_per_device(cupy, fake):
    first = launch.kernel_for(0, *TRANSPOSE)
    assert launch.kernel_for(0, *TRANSPOSE) is first
    assert launch.kernel_for(1, *TRANSPOSE) is not first
    assert fake.calls == 1
    assert len(cupy.loads) == 2
    assert b"#define WORD_BYTES 4" in cupy.loads[0]
    assert b"gpu-architecture=sm_90'" in cupy.loads[0]
    assert b"--ftz=false" in cupy.loads[0]


def test_what_the_driver_refuses_is_a_kernel_error(cupy):
    with pytest.raises(KernelError, match=r"does not load missing of .*transpose-sm_90-.*delete"):
        launch.kernel_for(0, "transpose.cu", "missing", TRANSPOSE[2])
