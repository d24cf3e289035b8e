"""The kernels that most products launch, compiled to files by many threads at once.

One by one, as products ask for them, they take up to three seconds each on the first day of a
machine, before the first task and in the middle of products of other kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

from multimm.gpu.arch import (
    IF_BROAD,
    IF_REFUSED,
    LOWER,
    UNLESS_REFUSED,
    ArchLimits,
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
    SplitEntry,
    entries_for,
    held_on,
    pack_defines,
    precisions_that_pay,
    residual_defines,
)
from multimm.gpu.runtime import file_cache
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.runtime.launch import file_for
from multimm.gpu.simt.configs import INSTEAD, REGISTRY, entry_named
from multimm.gpu.simt.load_paths import alike, widest

#: Configurations of large blocks in plain FP32, and of symmetric products of tall ones.
LARGE, TALL = ("large", "turned", "quick", "quick_turned"), ("wide",)
#: Of a GPU that is asked about: it decides nothing here, large products fill any number of them.
_MULTIPROCESSORS = 132
_BOTH = (False, True)
#: Rows and columns of a block that is turned; any large ones.
_LARGE_SIDE = 8192


class Wanted(NamedTuple):
    """A kernel to be."""

    file: str
    defines: tuple[tuple[str, int], ...]
    specific: bool = False


def wanted(capability: int) -> Iterator[Wanted]:
    """What is worth compiling for a GPU: of packed operands, for precisions that they pay for."""
    paying = precisions_that_pay(capability, _MULTIPROCESSORS)
    turns = [widest(*trans) for trans in product(_BOTH, _BOTH)]
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
        defines = (*sum_config(4, parts, 16).defines().items(), *guard)
        yield Wanted("add_partials.cu", defines)


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
    """Packing, products on tensor cores, and what stands in for them."""
    entries = [x for precision in paying for x in entries_for(limits, PRODUCTS[precision])]
    entries += _broad(limits, paying)
    for config, lower in product((entry.config for entry in entries), ((), LOWER)):
        yield Wanted(f"{config.entry}.cu", (*config.defines().items(), *lower), config.specific)
    narrow = [loads | {"WIDE_A": 0, "WIDE_B": 0} for loads in turns]
    paths = dict.fromkeys(tuple(alike(loads).items()) for loads in (*turns, *narrow))
    for name, path in product(INSTEAD, paths):
        defines = (*entry_named(REGISTRY, name).config.defines().items(), *path, *IF_REFUSED)
        yield Wanted("sgemm_ffma.cu", defines)
    for parts in (PARTS[precision] for precision in paying):
        yield Wanted("split_pack.cu", pack_defines(parts, held_on(limits)))
        yield Wanted("split_residuals.cu", residual_defines(parts))
    if _broad(limits, paying):
        yield from (Wanted("broad_pack.cu", broad.pack_defines(precision)) for precision in paying)


def _broad(limits: ArchLimits, paying: Sequence[str]) -> list[SplitEntry]:
    """Products of data of a wide range."""
    return [x for precision in paying for x in entries_for(limits, BROAD_PRODUCTS[precision])]


def compile_files(capability: int, threads: int, rank: int = 0, ranks: int = 1) -> None:
    """Compile what is not in the cache yet; do nothing where nothing can be kept.

    Parameters
    ----------
    capability : int
        Compute capability, 90 for sm_90.
    threads : int
        How many of this process compile at a time.
    rank, ranks : int, optional
        This one among the processes that do the same in one cache: each begins elsewhere, and
        finds what others have compiled meanwhile.

    Raises
    ------
    KernelError
        A kernel does not compile.
    """
    if file_cache.obstacle():
        return
    jobs = list(wanted(capability))
    first = rank * len(jobs) // ranks
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: _compile(job, capability), jobs[first:] + jobs[:first]))


def _compile(job: Wanted, capability: int) -> None:
    text = kernel_text(job.file, dict(job.defines))
    with file_for(text, job.file, capability, specific=job.specific):
        pass
