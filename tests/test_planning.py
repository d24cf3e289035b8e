"""Plans are values: every number here is worked out by hand or counted a second way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.display.units import human
from multimm.errors import DTypeError, MemoryBudgetError, OptionError
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import communication, memory, time
from multimm.planning.problem import Problem
from multimm.planning.spec import (
    H200,
    LOCAL_TCP,
    NVLINK,
    ClusterSpec,
    DeviceSpec,
    MatrixSpec,
)
from multimm.planning.tiling.grid import (
    Grid,
    merges,
    parts_of,
)

GB = 10**9
CPU = DeviceSpec("cpu", "cpu", 2 * GB, 50.0, 20.0)
H200X8 = ClusterSpec.homogeneous(H200, 8)


def square(size: int, **options: bool) -> Problem:
    return problem(size, size, size, **options)


def problem(m: int, k: int, n: int, rereadable: bool = False) -> Problem:
    return Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), rereadable=(rereadable, rereadable))


def pairwise_sum(addends: list[str]) -> str:
    """As `add_partials` adds."""
    while len(addends) > 1:
        pairs = [f"({x}+{y})" for x, y in zip(addends[::2], addends[1::2], strict=False)]
        addends = [*pairs, *addends[2 * len(pairs) :]]
    return addends[0]


@given(st.integers(1, 40), st.integers(0, 100), st.sampled_from([2, 4, 8, 16]))
def test_merges_add_every_part_once_whoever_keeps_the_sums_and_however_many_at_once(
    parts, turn, fan_in
):
    sums = {part: str(part) for part in range(parts)}
    owners = dict(enumerate(range(parts)))
    for merge in merges(parts, turn, fan_in):
        assert 2 <= len(merge.addends) <= fan_in
        assert sorted((merge.owner, *merge.senders)) == sorted(owners.pop(x) for x in merge.addends)
        owners[merge.addends[0]] = merge.owner
        sums[merge.addends[0]] = pairwise_sum([sums.pop(part) for part in merge.addends])
    assert sums == {0: pairwise_sum([str(part) for part in range(parts)])}


@pytest.mark.parametrize("fan_in", [2, 4])
def test_merges_spread_the_sums_over_the_parts(fan_in):
    last = Counter(merges(4, turn, fan_in)[-1].owner for turn in range(16))
    assert last == dict.fromkeys(range(4), 4)


def test_parts_are_contiguous_and_even():
    assert parts_of(7, 3) == (0, 0, 0, 1, 1, 2, 2)
    assert parts_of(2, 5) == (0, 1)


def test_volume_is_the_closed_form():
    # |A| = 3*5*4, |B| = 5*7*4, |C| = 3*7*4 bytes; distinct primes, so that no term can hide
    shape = problem(3, 5, 7)
    assert communication.volume(shape, Grid(11, 13, 17)) == 60 * 12 + 140 * 10 + 84 * 16


def test_bound_is_the_best_plane():
    assert communication.bound_2d(square(100), 4) == 40_000 * 2
    assert communication.bound_2d(problem(1000, 10, 10), 4) == 3 * 400  # 4 x 1: only B travels


def test_check_names_the_worst_worker_the_figure_the_limit_and_what_fits():
    small = DeviceSpec("tiny", "cpu", 100_000_000, 50.0, 20.0, spills=False)
    cluster = ClusterSpec((CPU, small), LOCAL_TCP, ("tcp://a:1", "tcp://b:2"))
    plan = plan_matmul(square(20_000), cluster)
    with pytest.raises(MemoryBudgetError, match=r"tcp://b:2 \(tiny\) would hold") as caught:
        plan.check()
    text = str(caught.value)
    assert human(plan.peak_bytes) in text
    assert human(plan.budget_bytes) in text
    assert "give each worker" in text


@pytest.mark.parametrize(("a", "b", "products"), [
    ("complex64", "complex64", 4), ("float32", "complex64", 2), ("complex64", "float16", 2),
])  # fmt: skip
def test_complex_products_on_tensor_cores_are_real_ones_in_time_and_memory(a, b, products):
    cluster = ClusterSpec.homogeneous(H200, 2)
    sides = {"a": MatrixSpec((16384, 16384), a), "b": MatrixSpec((16384, 16384), b)}
    sums = {"dtype": "complex64", "accumulate": "complex64"}
    problem = Problem(**sides, **sums, pack="float32")
    assert problem.real_products == products
    assert (problem.packable, problem.alone) == (False, True)
    real = replace(square(16384), pack="float32")
    assert problem.relative_cost == products * real.relative_cost
    rated = replace(H200, packed_gflops=(("float32", 2e5),))
    assert time.product_gflops(problem, rated) == 2e5 / products
    plan, plain = plan_matmul(problem, cluster), plan_matmul(replace(problem, pack=""), cluster)
    assert plan.seconds < plain.seconds * 0.6
    assert plan.layout.operands.packed == ()
    # Each product packs its blocks: of FP16 parts, and the real numbers that these are made of.
    written = {"a": 8 * (a == "complex64"), "b": 8 * products // 2 * (b == "complex64")}
    sides = max(plan.layout.row_sizes), max(plan.layout.n_blocks)
    least = max(plan.layout.k_tiles) * sum(
        side * (2 * size or 4) for side, size in zip(sides, written.values(), strict=True)
    )
    terms, _ = memory.held(plan.layout, cluster)
    assert terms["operands being packed"] >= least


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles_have_no_blas(dtype):
    name = str(np.dtype(dtype))
    if name not in ("float64", "complex128"):  # which they are on some systems
        assert replace(square(8), accumulate=name).relative_cost > 100


def test_specs_refuse_nonsense():
    with pytest.raises(OptionError, match="at least one worker"):
        ClusterSpec(())
    with pytest.raises(OptionError, match="kind 'tpu'"):
        DeviceSpec("x", "tpu", 1, 1.0, 1.0)
    with pytest.raises(OptionError, match="addresses"):
        ClusterSpec((CPU,), NVLINK, ("a", "b"))


def test_a_dtype_that_does_not_say_how_long_it_is():
    with pytest.raises(DTypeError, match=r"'f8' does not say.*float64.*itemsize"):
        MatrixSpec((10, 20), "f8")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_term_of_the_seconds_is_part_of_their_sum(kind):
    """One that is in none of the three groups would not count, and nobody would see."""
    square = MatrixSpec((8192, 8192))
    terms = plan_matmul(Problem(square, square), H200X8).time_terms
    groups = time.by_phase(kind)
    assert sorted(terms) == sorted(name for group in groups for name in group)


def test_a_cpu_takes_time_to_write_a_large_result_of_few_operations():
    workers = ClusterSpec.homogeneous(CPU, 2, LOCAL_TCP)
    large = plan_matmul(problem(20000, 10, 20000), workers)
    written = large.layout.problem.result_bytes / 2 / (CPU.copy_gbps * GB)
    operations = large.flops / (2 * CPU.gflops * GB)
    assert large.seconds > operations + 2 * written
