"""Every plain CUDA kernel, built by the host compiler and run on the CPU, to the last bit.

tests/cuda_on_cpu/ has how. A missing compiler fails: apt-get install g++.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources

import pytest
from cuda_on_cpu.compiler import compiler
from cuda_on_cpu.kernels import ALIKE, NOT_PLAIN, SHIPPED, TABLE, Variant
from cuda_on_cpu.program import KernelFault, Program

from multimm.errors import KernelError

pytestmark = pytest.mark.slow

FILES = sorted({variant.file for variant in TABLE})


def shares(variant: Variant) -> bool:
    """Whether the threads of a block work together."""
    with suppress(KernelError):  # a file that is gone fails below, by its name
        return re.search("__shared__|__sync", variant.text) is not None
    return True


@pytest.fixture(scope="module", autouse=True)
def builds(request):
    """What the selected tests need is compiled in the background while the first of them run."""
    compiler()
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    for parameters in (callspec.params for callspec in selected if callspec is not None):
        if isinstance(parameters.get("variant"), Variant):
            parameters["variant"].program()
        for variant in TABLE:
            if parameters.get("file") == variant.file:
                variant.program(races=True)


def assert_right(variant: Variant, program: Program, without: int = -1) -> frozenset[int]:
    """Run all cases of a kernel; return the barriers, waits and commits that were reached."""
    outcome = program.run([case.launch for case in variant.cases], without)
    wrong = [case.wrong(found) for case, found in zip(variant.cases, outcome.buffers, strict=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))
    return outcome.reached


@pytest.mark.parametrize("variant", TABLE + ALIKE + SHIPPED, ids=str)
def test_kernel_is_exact_and_keeps_to_its_memory(variant):
    assert_right(variant, variant.program().result())


def survives(variant: Variant, site: int) -> bool:
    """Whether all cases come out right, and without a race, though something is left out."""
    try:
        assert_right(variant, variant.program(races=True).result(), without=site)
    except (KernelFault, AssertionError):
        return False
    return True


@pytest.mark.parametrize("file", sorted({x.file for x in TABLE if shares(x)}))
def test_no_race_and_every_barrier_wait_and_commit_is_needed(file):
    mutants, places, reached = [], set(), set()
    for variant in (variant for variant in TABLE if variant.file == file):
        program = variant.program(races=True).result()
        found = assert_right(variant, program)
        places |= {site.place for site in program.host.sites}
        reached |= {site.place for site in program.host.sites if site.number in found}
        mutants += [
            (variant, site) for site in program.host.sites
            if site.number in found and (variant.arch >= 800 or not site.of_copies)
        ]  # fmt: skip
    assert places == reached, f"no case comes to {places - reached}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        alive = list(pool.map(lambda mutant: survives(mutant[0], mutant[1].number), mutants))
    missed = [
        f"{variant}: nothing fails without {site.place}"
        for (variant, site), survived in zip(mutants, alive, strict=True)
        if survived
    ]
    assert not missed, "\n".join(missed)


def test_every_kernel_is_in_the_call_table():
    root = resources.files("multimm.gpu").joinpath("cuda")
    present = {path.name for path in root.iterdir() if path.name.endswith(".cu")}
    ladder = root.joinpath("ladder")
    if ladder.is_dir():
        present |= {f"ladder/{path.name}" for path in ladder.iterdir()}
    missing = present - set(FILES) - NOT_PLAIN
    assert not missing, f"add a line to TABLE in tests/cuda_on_cpu/kernels.py for {sorted(missing)}"
