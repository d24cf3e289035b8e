"""What computes: the GPUs of this host, and the rates of a GPU or of CPU cores.

Finding GPUs goes through NVML and never creates a CUDA context.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from multimm.errors import how_to_install, printable
from multimm.gpu.emulated.configs import WGMMA, mma_gflops, precisions_that_pay
from multimm.planning.devices import H200, DeviceSpec
from multimm.planning.problem import BY_RESIDUES

#: Sustained float32 GFLOP/s of one CPU core in a block product; arbitrary (a core with
#: 256-bit fused multiply-adds peaks at some 100, shared clocks and memory take their part).
CPU_CORE_GFLOPS = 30.0
#: GB/s at which one CPU worker reads plus writes its memory; arbitrary.
CPU_COPY_GBPS = 10.0
#: Of the limit at which a nanny ends a CPU worker, what its process holds for itself: 88 MB as
#: started, 91 after a first small product, 98 with Zarr and 110 with h5py as well (Python 3.11,
#: distributed 2026.8, Linux).
PROCESS_BYTES = 110_000_000
#: Share of the peak rate that our float32 kernel sustains: 53.5 of 66.9 TFLOP/s, measured on
#: an H200 at its 700 W cap.
SUSTAINED_FLOPS = 0.80
#: Share of the peak memory rate that a device copy reaches: 4177 of 4917 GB/s, measured on
#: the same H200.
SUSTAINED_COPY = 0.85
#: Compute capabilities whose multiprocessors have 64 float32 lanes; the others have 128.
NARROW_MULTIPROCESSORS = ((6, 0), (7, 0), (7, 2), (7, 5), (8, 0))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host."""

    ident: str  #: what ``CUDA_VISIBLE_DEVICES`` calls it: NVML's index, or a UUID
    name: str
    memory_bytes: int  #: all of its memory
    capability: int = 0  #: compute capability, 90 for sm_90; 0 where NVML does not say


@contextmanager
def nvml() -> Iterator[Any]:
    """The `pynvml` module, initialised; None where there is no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, in the order of ``CUDA_VISIBLE_DEVICES``."""
    with nvml() as module:
        if module is None:
            return ()
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = []
        for ident in visible_idents(mask, module.nvmlDeviceGetCount()):
            try:
                found.append(_gpu(module, ident))
            except module.NVMLError:  # a UUID of another host, or of yesterday
                break
        return tuple(found)


def visible_idents(mask: str | None, count: int) -> list[str]:
    """Which of `count` GPUs a value of ``CUDA_VISIBLE_DEVICES`` leaves visible.

    CUDA reads the list up to the first entry that names no GPU, so ``""`` and ``"-1"``
    hide all of them.

    Examples
    --------
    >>> visible_idents(None, 2), visible_idents("1,0", 2), visible_idents("0,-1,1", 2)
    (['0', '1'], ['1', '0'], ['0'])
    """
    if mask is None:
        return [str(index) for index in range(count)]

    def is_known(entry: str) -> bool:
        return entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < count)

    return list(takewhile(is_known, map(str.strip, mask.split(","))))


def _gpu(module: Any, ident: str) -> Gpu:
    handle = nvml_handle(module, ident)
    memory = int(module.nvmlDeviceGetMemoryInfo(handle).total)
    try:
        major, minor = module.nvmlDeviceGetCudaComputeCapability(handle)
    except module.NVMLError:
        major = minor = 0
    return Gpu(ident, str(module.nvmlDeviceGetName(handle)), memory, 10 * major + minor)


def free_bytes(gpu: Gpu) -> int | None:
    """Bytes of a GPU's memory that no process has taken; None where NVML does not say."""
    with nvml() as module:
        if module is None:
            return None
        try:
            return int(module.nvmlDeviceGetMemoryInfo(nvml_handle(module, gpu.ident)).free)
        except module.NVMLError:
            return None


def nvml_handle(module: Any, ident: str) -> Any:
    """NVML's handle of a GPU that ``CUDA_VISIBLE_DEVICES`` calls so."""
    if ident.isdigit():
        return module.nvmlDeviceGetHandleByIndex(int(ident))
    return module.nvmlDeviceGetHandleByUUID(ident)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver of this host runs, such as (13, 0)."""
    with nvml() as module:
        if module is None:
            return None
        version = int(module.nvmlSystemGetCudaDriverVersion_v2())
        return version // 1000, version % 1000 // 10


def driver_version() -> str:
    """The version of this host's NVIDIA driver, such as "580.95"; empty where there is none."""
    with nvml() as module:
        return "" if module is None else str(module.nvmlSystemGetDriverVersion())


def install_command(cuda: tuple[int, int] | None) -> str:
    """What to type to get the GPU packages that fit the driver's CUDA version."""
    extra = "cuda12" if cuda is not None and cuda[0] < 13 else "cuda13"
    return how_to_install(extra)


@functools.cache
def cpu_name() -> str:
    """What this host's processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "cpu"


def cpu_device(
    memory_bytes: int, cores: int, *, name: str = "", spills: bool, process_bytes: int = 0
) -> DeviceSpec:
    """The spec of a CPU worker with a share of memory and of the cores.

    `name` is the processor's; by default this host's.
    """
    name = printable(name or cpu_name())
    gflops = CPU_CORE_GFLOPS * max(1, cores)
    return DeviceSpec(
        name, "cpu", memory_bytes, gflops, CPU_COPY_GBPS, spills, process_bytes=process_bytes
    )


def current_gpu(*, spills: bool) -> DeviceSpec:
    """The spec of this process's current CUDA device (imports CuPy)."""
    import cupy

    runtime = cupy.cuda.runtime
    device = runtime.getDevice()
    properties = runtime.getDeviceProperties(device)

    # Numbers of cudaDeviceAttr; the fields of cudaDeviceProp for clocks are gone in CUDA 13.
    def attribute(number: int) -> int:
        return int(runtime.deviceGetAttribute(number, device))

    return gpu_device(
        properties["name"].decode(),
        int(properties["totalGlobalMem"]),
        capability=(attribute(75), attribute(76)),
        multiprocessors=attribute(16),
        clock_khz=attribute(13),
        memory_khz=attribute(36),
        bus_bits=attribute(37),
        spills=spills,
    )


def gpu_device(
    name: str,
    memory_bytes: int,
    *,
    capability: tuple[int, int],
    multiprocessors: int,
    clock_khz: int,
    memory_khz: int,
    bus_bits: int,
    spills: bool,
) -> DeviceSpec:
    """The spec of a GPU: measured rates where we have them, else a share of the peaks."""
    number = 10 * capability[0] + capability[1]
    packs = precisions_that_pay(number, multiprocessors) + (BY_RESIDUES,) * (number == WGMMA)
    if name == H200.name:
        return DeviceSpec(name, "gpu", memory_bytes, H200.gflops, H200.copy_gbps, spills, packs)
    lanes = 64 if capability in NARROW_MULTIPROCESSORS else 128
    # A fused multiply-add is 2 flops; memory transfers twice per clock; kHz * 1e-6 = GHz.
    peak_gflops = 2 * lanes * multiprocessors * clock_khz * 1e-6
    peak_gbps = 2 * bus_bits / 8 * memory_khz * 1e-6
    return DeviceSpec(
        name,
        "gpu",
        memory_bytes,
        # Integrated chips report no memory clock: 1 keeps the value legal.
        max(1.0, SUSTAINED_FLOPS * peak_gflops),
        max(1.0, SUSTAINED_COPY * peak_gbps),
        spills,
        packs,
        mma_gflops(number, multiprocessors, clock_khz * 1e3),
    )
