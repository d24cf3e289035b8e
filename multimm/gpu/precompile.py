"""The kernels that most products launch, compiled to files by many processes at once.

One by one, as products ask for them, they take up to five seconds each on the first day of a
machine, before the first task and in the middle of products of other kinds. Processes, because
NVRTC lets the threads of one wait for each other. They need no GPU: they work while workers start.
NVRTC keeps what it has compiled as well (`CUDA_CACHE_PATH`), from 12.9 on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from multimm.errors import KernelError, cause
from multimm.gpu.arch import (
    IF_BROAD,
    IF_REFUSED,
    LOWER,
    UNLESS_REFUSED,
    ArchLimits,
    Device,
    Guard,
    limits_for,
)
from multimm.gpu.elementwise import complex_parts
from multimm.gpu.elementwise.batched_copy import DEFINES
from multimm.gpu.elementwise.reduce import CAPACITIES
from multimm.gpu.elementwise.reduce import config_for as sum_config
from multimm.gpu.elementwise.transpose import config_for as transpose_config
from multimm.gpu.emulated import broad
from multimm.gpu.emulated.configs import (
    BROAD_PRODUCTS,
    PARTS,
    PRODUCTS,
    WGMMA,
    SplitEntry,
    entries_for,
    precisions_that_pay,
)
from multimm.gpu.emulated.outliers import residual_defines
from multimm.gpu.emulated.pack import held_on, pack_defines
from multimm.gpu.kernel_selection import SINGLE, Precision
from multimm.gpu.residues.gemm import KERNELS as RESIDUE_KERNELS
from multimm.gpu.runtime import file_cache
from multimm.gpu.runtime.jit import compiled_file, kept_stems, stem_of
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.runtime.launch import way_of
from multimm.gpu.simt.configs import INSTEAD, REGISTRY, choose, entry_named
from multimm.gpu.simt.load_paths import alike, widest
from multimm.gpu.strides import GemmSizes
from multimm.gpu.transfer.loops import loops

#: Configurations of large blocks in plain FP32, and of symmetric products of tall ones.
LARGE, TALL = ("large", "turned", "quick", "quick_turned"), ("wide",)
#: Of a GPU that is asked about: it decides nothing here, large products fill any number of them.
_MULTIPROCESSORS = 132
_BOTH = (False, True)
#: Processes of a compilation: one takes 200 MB of memory.
MOST_PROCESSES = 32
#: What else starts meanwhile has the cores first.
NICE = 10
#: Rows and columns of a large block.
_LARGE_SIDE = 8192


class Wanted(NamedTuple):
    """A kernel to be."""

    file: str
    defines: tuple[tuple[str, int], ...]
    specific: bool = False


def precisions(capability: int) -> list[Precision]:
    """Those that operands are packed for, and "ieee" only where "float32" is computed so.

    Its kernels take as long to compile as all others.
    """
    paying = precisions_that_pay(capability, _MULTIPROCESSORS)
    return [x for x in SINGLE if x in paying or (x == "ieee" and "float32" not in paying)]


def wanted(capability: int) -> Iterator[Wanted]:
    """What is worth compiling for a GPU, for its `precisions`."""
    paying = precisions_that_pay(capability, _MULTIPROCESSORS)
    turns = [widest(*trans) for trans in product(_BOTH, _BOTH)]
    if "ieee" in precisions(capability):
        yield from _plain(turns)
    if paying:
        yield from _packed(limits_for(capability), paying, turns)
    # What takes some tenths of a second each comes last.
    yield Wanted("copy_pieces.cu", DEFINES)
    if paying:
        yield Wanted("complex_parts.cu", complex_parts.DEFINES)
        yield Wanted("complex_mirror.cu", complex_parts.MIRROR_DEFINES)
    turn = transpose_config(4, 16, _LARGE_SIDE, _LARGE_SIDE)
    yield Wanted(f"{turn.entry}.cu", tuple(turn.defines().items()))
    guards: tuple[Guard, ...] = ((), UNLESS_REFUSED, IF_REFUSED) if paying else ((),)
    if _broad(limits_for(capability), paying):
        guards += (IF_BROAD,)
    for parts, guard in product(CAPACITIES, guards):
        defines = (*sum_config(parts, 16).defines().items(), *guard)
        yield Wanted("add_partials.cu", defines)


def _measured(limits: ArchLimits) -> Wanted:
    """The one kernel of plain FP32 whose rate the first start measures."""
    sizes = GemmSizes(_LARGE_SIDE, _LARGE_SIDE, _LARGE_SIDE)
    config = choose(sizes, Device(limits, _MULTIPROCESSORS), 1)
    return Wanted("sgemm_ffma.cu", (*config.defines().items(), *widest(False, False).items()))


def _plain(turns: Sequence[dict[str, int]]) -> Iterator[Wanted]:
    """Products in plain FP32."""
    for name, loads in product((*LARGE, *TALL), turns):
        defines = (*entry_named(REGISTRY, name).config.defines().items(), *loads.items())
        if name in LARGE:
            yield Wanted("sgemm_ffma.cu", defines)
        if loads["TRANS_A"] != loads["TRANS_B"]:  # of a' a and a a'
            yield Wanted("sgemm_ffma.cu", (*defines, *LOWER))


def _packed(
    limits: ArchLimits, paying: Sequence[str], turns: Sequence[dict[str, int]]
) -> Iterator[Wanted]:
    """Products on tensor cores, packing, and what stands in for them: longest first.

    A process that began with a long one last would be waited for alone.
    """
    entries = [x for precision in paying for x in entries_for(limits, PRODUCTS[precision])]
    entries += _broad(limits, paying)
    configs = sorted((entry.config for entry in entries), key=lambda config: -config.tile_n)
    for config, lower in product(configs, (LOWER, ())):
        yield Wanted(f"{config.entry}.cu", (*config.defines().items(), *lower), config.specific)
    for parts in (PARTS[precision] for precision in paying):
        yield Wanted("split_pack.cu", pack_defines(parts, held_on(limits)))
    yield _measured(limits)
    narrow = [loads | {"WIDE_A": 0, "WIDE_B": 0} for loads in turns]
    paths = dict.fromkeys(tuple(alike(loads).items()) for loads in (*turns, *narrow))
    for name, path in product(INSTEAD, paths):
        defines = (*entry_named(REGISTRY, name).config.defines().items(), *path, *IF_REFUSED)
        yield Wanted("sgemm_ffma.cu", defines)
    for parts in (PARTS[precision] for precision in paying):
        yield Wanted("split_residuals.cu", residual_defines(parts))
    if limits.capability == WGMMA:
        yield from (Wanted(*kernel) for kernel in RESIDUE_KERNELS)
    if _broad(limits, paying):
        yield from (Wanted("broad_pack.cu", broad.pack_defines(precision)) for precision in paying)


def _broad(limits: ArchLimits, paying: Sequence[str]) -> list[SplitEntry]:
    """Products of data of a wide range."""
    return [x for precision in paying for x in entries_for(limits, BROAD_PRODUCTS[precision])]


class Compilation:
    """A process, with more below it, that compiles what is not in the cache yet.

    Nothing is compiled where nothing can be kept. To leave the context ends what still runs.

    Parameters
    ----------
    capability : int
        Compute capability, 90 for sm_90.
    processes : int
        How many compile at a time, at most.
    """

    def __init__(self, capability: int, processes: int) -> None:
        self.capability = capability
        asked = json.dumps([sys.path, capability, processes])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, asked],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that all of them can be ended, and no Ctrl-C is printed
        )

    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait for the end.

        Raises
        ------
        KernelError
            A kernel does not compile.
        """
        said, _ = self._process.communicate()
        if self._process.returncode:
            raise KernelError(said.strip().rpartition("\n")[2] or "the compiler's process ended")

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_over():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


#: The same modules as in this process, and not the script that it runs.
_PROGRAM = """\
import json, sys
sys.path[:], *asked = json.loads(sys.argv[1])
from multimm.gpu.precompile import compile_absent
compile_absent(*asked)
"""


def compile_files(capability: int, processes: int) -> None:
    """Have a `Compilation` compile what is not in the cache yet, and wait for it."""
    if absent(capability):
        with Compilation(capability, processes) as compilation:
            compilation.wait()


def absent(capability: int) -> list[Wanted]:
    """What `wanted` asks for and the cache does not hold; nothing if nothing can be kept there."""
    if file_cache.obstacle():
        return []
    kept = kept_stems()
    return [job for job in wanted(capability) if stem_of(*_way(job, capability)) not in kept]


def compile_absent(capability: int, processes: int) -> None:
    """The program of a `Compilation`; prints what went wrong last."""
    os.nice(NICE)
    try:
        jobs = absent(capability)
        count = max(1, min(processes, MOST_PROCESSES, len(jobs)))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, spawn) as pool:
            compiling = pool.map(_compile, jobs, [capability] * len(jobs))
            if jobs:  # nothing is there yet: likely not even what copies host memory
                with suppress(ImportError, OSError):
                    loops()
            list(compiling)
    except Exception as error:
        raise SystemExit(cause(error)) from None


def _compile(job: Wanted, capability: int) -> None:
    with compiled_file(*_way(job, capability)):
        pass


def _way(job: Wanted, capability: int) -> tuple[str, str, str, tuple[str, ...]]:
    text = kernel_text(job.file, dict(job.defines))
    return way_of(text, job.file, capability, specific=job.specific)
