"""What is compiled before the first product, with NumPy in place of a GPU."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_reference import pack_reference

from multimm.errors import KernelError
from multimm.gpu.arch import IF_REFUSED, LOWER, limits_for
from multimm.gpu.elementwise.reduce import CAPACITIES
from multimm.gpu.emulated.configs import choose_split, precisions_that_pay
from multimm.gpu.simt.configs import INSTEAD, Device, choose
from multimm.gpu.simt.load_paths import alike, load_paths
from multimm.gpu.strides import GemmSizes, Stack
from multimm.gpu.tuning import precompile
from multimm.graph import warmup


@pytest.fixture
def calls(monkeypatch):
    """Names and precisions of the tasks that ran."""
    module = ModuleType("cupy")
    module.ones = np.ones
    stream = SimpleNamespace(synchronize=lambda: None)
    device = SimpleNamespace(compute_capability="80")
    module.cuda = SimpleNamespace(get_current_stream=lambda: stream, Device=lambda: device)
    monkeypatch.setattr(warmup, "compile_files", lambda *share: seen.append(("files", *share)))
    monkeypatch.setattr(warmup, "CPU_COUNT", 12)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(warmup, "SIDE", 24)
    monkeypatch.setattr(warmup, "K", 16)
    monkeypatch.setattr(warmup, "TALL_SIDE", 8)
    monkeypatch.setattr(warmup, "TALL_K", 64)
    seen = []

    def recorded(name):
        task = getattr(warmup, name)

        def run(*blocks, **options):
            step = options.get("step")
            seen.append((name, len(blocks), step.precision if step else ""))
            return task(*blocks, **options)

        monkeypatch.setattr(warmup, name, run)

    for name in ("multiply", "multiply_diagonal", "pack", "add", "transpose", "join"):
        recorded(name)
    for name in ("upload", "download"):  # whose GPU a process remembers
        monkeypatch.setattr(warmup, name, lambda block, name=name: seen.append((name, 1, "")))
    return seen


def test_every_kind_of_task_runs_in_every_precision(calls):
    warmup.compile_kernels(1, 4)
    assert calls.pop(0) == ("files", 80, 3, 1, 4)  # a worker's share of the cores
    for precision in warmup.PRECISIONS:
        assert ("multiply", 2, precision) in calls
        assert ("multiply", 3, precision) in calls
        assert (("pack", 1, precision) in calls) == (precision != "ieee")
        # Of a block as it is, of a tall one, and of a packed one.
        halves = calls.count(("multiply_diagonal", 2, precision))
        assert halves == (2 if precision == "ieee" else 3)
        assert calls.count(("multiply_diagonal", 1, precision)) == 1
    kinds = {"multiply", "multiply_diagonal", "pack", "add", "transpose", "join"}
    kinds |= {"upload", "download"}
    assert {name for name, *_ in calls} == kinds
    assert {parts for name, parts, _ in calls if name == "add"} == set(CAPACITIES)


def test_the_operands_have_elements_that_packed_parts_do_not_carry():
    x = warmup._operand(np, (64, 128))
    for operand in (x, x.T):
        assert pack_reference(operand).uncarried == 1


def test_the_blocks_are_large_enough_for_the_kernels_of_large_blocks():
    device = Device(limits_for(90), 132)
    small, large = (warmup.SIDE, warmup.SIDE, warmup.K), (16384, 16384, 8192)
    assert choose(GemmSizes(*small), device)[0] == choose(GemmSizes(*large), device)[0]
    for products in (1, 3):
        assert (
            choose_split(*small, products, device)[0] == choose_split(*large, products, device)[0]
        )


# ------------------------------------------------------------------- to files


@st.composite
def stacks(draw):
    """A matrix somewhere in memory, as it is addressed."""
    ld, cols = draw(st.integers(1, 99)), draw(st.integers(1, 99))
    return Stack(draw(st.sampled_from([0, 4, 256])), 7, cols, ld, draw(st.booleans()), ())


@given(
    st.tuples(stacks(), stacks()),
    st.tuples(st.booleans(), st.booleans()),
    st.tuples(*[st.integers(1, 40000)] * 3),
)
def test_what_stands_in_for_packed_operands_is_compiled_whatever_they_are(pair, trans, shape):
    loads = alike(load_paths(trans, pair, ()))
    config, _ = choose(GemmSizes(*shape), Device(limits_for(90), 132), INSTEAD)
    defines = {**config.defines(), **loads, **dict(IF_REFUSED)}
    assert defines in [dict(job.defines) for job in precompile.wanted(90)]


@pytest.mark.parametrize("wide", [(True, True), (True, False), (False, True), (False, False)])
def test_both_operands_are_copied_alike_in_its_place(wide):
    a, b = (Stack(256 if fits else 4, 8, 8, 8, False, ()) for fits in wide)
    loads = alike(load_paths((True, False), (a, b), ()))
    assert (loads["WIDE_A"], loads["WIDE_B"]) == (all(wide), all(wide))


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("products", [1, 3])
@given(st.integers(1, 40000), st.integers(1, 40000), st.integers(1, 10**6))
def test_every_kernel_of_packed_operands_is_compiled(lower, products, m, n, k):
    config, _ = choose_split(m, m if lower else n, k, products, Device(limits_for(90), 132), lower)
    defines = {**config.defines(), **dict(LOWER * lower)}
    assert defines in [dict(job.defines) for job in precompile.wanted(90) if job.specific]


def stand_ins(jobs):
    """How many kernels of products are for operands that are refused."""
    return sum(job.file == "sgemm_ffma.cu" and "GUARDED" in dict(job.defines) for job in jobs)


def test_older_gpus_need_plain_kernels_alone():
    jobs = list(precompile.wanted(75))
    assert jobs
    assert not any(job.specific or "GUARDED" in dict(job.defines) for job in jobs)


def test_gpus_without_wgmma_need_the_kernels_that_do_without():
    jobs = list(precompile.wanted(80))
    assert not any(job.specific for job in jobs)
    assert sum(job.file == "sgemm_split_mma.cu" for job in jobs) == 8  # wide or not, lower or not
    assert stand_ins(jobs) == 14


@pytest.mark.parametrize("capability", [86, 89, 120])
def test_where_tensor_cores_pay_for_tf32_alone_so_much_is_compiled(capability):
    jobs = list(precompile.wanted(capability))
    split = [dict(job.defines) for job in jobs if job.file == "sgemm_split_mma.cu"]
    assert [defines["PARTS"] for defines in split] == [1] * 4
    assert stand_ins(jobs) == 14  # operands may be refused


@given(st.sampled_from([75, 80, 86, 87, 89, 90, 100, 120]), st.integers(1, 300))
def test_what_pays_does_not_depend_on_how_many_multiprocessors_there_are(capability, count):
    packs = precisions_that_pay(capability, count)
    made = {dict(job.defines).get("PARTS") for job in precompile.wanted(capability)} - {None}
    assert made == {{"float32": 2, "tf32": 1}[precision] for precision in packs}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiles nothing, and notes what should be; in order, with one thread."""
    found = []

    @contextmanager
    def file_for(text, file, capability, *, specific):
        assert capability == 90
        found.append((text, specific))
        yield tmp_path / "file"

    monkeypatch.setattr(precompile, "file_for", file_for)
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "not" / "yet"))
    return found


def test_each_process_begins_elsewhere_and_compiles_everything(compiled):
    precompile.compile_files(90, 1)
    alone = compiled.copy()
    assert len(set(alone)) == len(alone) == len(list(precompile.wanted(90)))
    compiled.clear()
    precompile.compile_files(90, 1, rank=1, ranks=2)
    half = len(alone) // 2
    assert compiled == alone[half:] + alone[:half]


def test_where_nothing_can_be_kept_nothing_is_compiled_for_it(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    precompile.compile_files(90, 1)
    assert compiled == []


def test_what_does_not_compile_is_said(compiled, monkeypatch):
    def refuse(*args, **kwargs):
        raise KernelError("no compiler")

    monkeypatch.setattr(precompile, "file_for", refuse)
    with pytest.raises(KernelError, match="no compiler"):
        precompile.compile_files(90, 2)
