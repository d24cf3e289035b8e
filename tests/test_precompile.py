"""What is compiled before the first product, with NumPy in place of a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import KernelError
from multimm.gpu import precompile
from multimm.gpu.arch import IF_REFUSED, LOWER, limits_for
from multimm.gpu.elementwise.reduce import CAPACITIES
from multimm.gpu.emulated.configs import choose_split, slices_of
from multimm.gpu.simt.configs import INSTEAD, Device, choose, slices_of_k
from multimm.gpu.simt.load_paths import alike, load_paths
from multimm.gpu.strides import GemmSizes, Stack
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
    monkeypatch.setattr(warmup, "threads_beside_a_gpu", lambda most: 3)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(warmup, "SIDE", 24)
    monkeypatch.setattr(warmup, "K", 16)
    monkeypatch.setattr(warmup, "TALL_SIDE", 8)
    monkeypatch.setattr(warmup, "TALL_K", 64)
    seen = []

    def recorded(name):
        task = getattr(warmup, name)

        def run(*blocks, **options):
            step, verb = options.get("step"), options.get("verb")
            called = verb.__name__ if verb else name
            seen.append((called, len(blocks), step.precision if step else ""))
            return task(*blocks, **options)

        monkeypatch.setattr(warmup, name, run)

    for name in ("multiply", "pack", "add", "transpose", "join"):
        recorded(name)
    for name in ("upload", "download"):  # whose GPU a process remembers
        monkeypatch.setattr(warmup, name, lambda block, name=name: seen.append((name, 1, "")))
    return seen


@pytest.mark.parametrize(("capability", "precisions"), [(75, ["ieee"]), (90, ["float32", "tf32"])])
def test_every_kind_of_task_runs_in_what_is_computed(calls, capability, precisions):
    sys.modules["cupy"].cuda.Device = lambda: SimpleNamespace(compute_capability=str(capability))
    warmup.run_tasks()
    assert {precision for *_, precision in calls if precision} == {*precisions}
    for precision in precisions:
        assert ("multiply", 2, precision) in calls
        assert ("multiply", 3, precision) in calls
        assert (("pack", 1, precision) in calls) == (precision != "ieee")
        # Of a block as it is, of a tall one, and of a packed one.
        halves = calls.count(("link_diagonal", 2, precision))
        assert halves == (2 if precision == "ieee" else 3)
        assert calls.count(("link_diagonal", 1, precision)) == 1
    kinds = {"multiply", "link_diagonal", "add", "transpose", "join"}
    kinds |= {"pack"} if precisions != ["ieee"] else set()
    assert {name for name, *_ in calls} == kinds
    assert {parts for name, parts, _ in calls if name == "add"} == set(CAPACITIES)
    del calls[:]
    warmup.copy_both_ways()
    assert [name for name, *_ in calls] == ["upload", "download"]


def test_a_worker_compiles_what_is_absent_on_its_share_of_the_cores(calls, monkeypatch):
    for absent in ([], ["kernel"]):
        monkeypatch.setattr(warmup, "absent", lambda capability, absent=absent: absent)
        assert warmup.are_compiled() == (not absent)
    warmup.compile_kernels()
    assert calls == [("files", 80, 3)]


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
    sizes, device = GemmSizes(*shape), Device(limits_for(90), 132)
    config = choose(sizes, device, slices_of_k(sizes, device), INSTEAD)
    defines = {**config.defines(), **loads, **dict(IF_REFUSED)}
    assert defines in [dict(job.defines) for job in precompile.wanted(90)]


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("products", [1, 3])
@given(st.integers(1, 40000), st.integers(1, 40000), st.integers(1, 10**6))
def test_every_kernel_of_packed_operands_is_compiled(lower, products, m, n, k):
    n, device = m if lower else n, Device(limits_for(90), 132)
    cut = slices_of(m, n, k, products, device, lower)
    config = choose_split(m, n, cut, products, device, lower)
    defines = {**config.defines(), **dict(LOWER * lower)}
    assert defines in [dict(job.defines) for job in precompile.wanted(90) if job.specific]


def test_where_nothing_can_be_kept_nothing_is_compiled(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(precompile, "Compilation", None)
    precompile.compile_files(90, 2)


def test_processes_compile_everything_that_is_absent(monkeypatch, tmp_path):
    """Here two small kernels are all that is wanted."""
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "not" / "yet"))
    small = ("transpose.cu", "complex_mirror.cu")
    jobs = [job for job in precompile.wanted(90) if job.file in small]
    assert len(jobs) == 2
    monkeypatch.setattr(precompile, "wanted", lambda capability: iter(jobs))
    monkeypatch.setattr(precompile.os, "nice", lambda more: None)
    precompile.compile_absent(90, 2)
    assert precompile.absent(90) == []
    monkeypatch.setattr(precompile, "Compilation", None)
    precompile.compile_files(90, 2)


def test_a_compilation_with_nothing_to_do_ends_well(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "file"))
    with precompile.Compilation(90, 1) as compilation:
        compilation.wait()
    assert compilation.is_over()


def test_what_does_not_compile_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path))
    with (
        precompile.Compilation(5, 1) as compilation,
        pytest.raises(KernelError, match="5 needs another one"),
    ):
        compilation.wait()
    assert compilation.is_over()


def test_processes_end_with_the_context(monkeypatch, tmp_path):
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path))
    with precompile.Compilation(90, 2) as compilation:
        assert not compilation.is_over()
    assert compilation.is_over()
