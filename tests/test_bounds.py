"""What nobody can compute is refused at once, and what is empty is planned."""

from __future__ import annotations

import math
import re
import time

import dask.array as da
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import multimm
from multimm.cli import main
from multimm.cluster.inspect.devices import cpu_device
from multimm.errors import MemoryBudgetError, MultimmError, OptionError
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, MatrixSpec
from multimm.planning.tiling.grid import regular


@pytest.mark.parametrize(
    ("shapes", "options", "error"),
    [
        (((3000, 3000), (3000, 3000)), {"p_k": 2**40}, OptionError),
        (((3000, 3000), (3000, 3000)), {"blocks": 1}, MemoryBudgetError),
        (((3000, 3000), (3000, 3000)), {"blocks": 10, "slabs": 1}, MemoryBudgetError),
        (((1, 100), (100, 99_999_999_999)), {}, MemoryBudgetError),
        (((10**12, 10**12), (10**12, 10**12)), {}, MemoryBudgetError),
    ],
)
def test_the_absurd_is_refused_within_a_second(shapes, options, error):
    begun = time.thread_time()
    with pytest.raises(error) as caught:
        multimm.plan(*map(MatrixSpec, shapes), **options)
    assert time.thread_time() - begun < 1
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_would_do_is_found_in_seconds_where_many_chunks_meet_many_blocks():
    """Twenty plans are made for it, each of which looked at each place: half a minute."""
    m, pairs, threes = 3_277_259_541, regular(100, 2), regular(100, 3)
    a = MatrixSpec((m, 100), "float64", chunks=(regular(m, 66_882_848), pairs), hosted=True)
    b = MatrixSpec((100, 100), "float64", chunks=(threes, threes), hosted=True)
    options = {"blocks": 10**11, "slabs": 113, "p_k": 4096, "chunks": "operands"}
    plan = multimm.plan(a, b, cluster=ClusterSpec.homogeneous(H200, 63, LOCAL_TCP, 2), **options)
    begun = time.thread_time()
    with pytest.raises(MemoryBudgetError, match="leave out blocks="):
        plan.check()
    assert time.thread_time() - begun < 5


def test_a_hundred_thousand_chunks_are_planned_for_in_seconds():
    """What does for a few thousand, such as each chunk compared with each, took half a minute."""
    rows, cluster = 10**6, ClusterSpec.homogeneous(cpu_device(2**35, 2, spills=False), 1, LOCAL_TCP)
    a = MatrixSpec((rows, 20), "float64", chunks=(regular(rows, 10), (20,)))
    begun = time.thread_time()
    multimm.plan(a, MatrixSpec((20, 3), "float64"), cluster=cluster)
    assert time.thread_time() - begun < 8


@pytest.mark.slow
def test_a_million_chunks_that_are_asked_for_are_refused_in_seconds():
    """Other blocks, and more workers, were tried for what none of them changes: half a minute."""
    n = 10**6
    a, b = MatrixSpec((1, n), "complex128"), MatrixSpec((n, n), "complex128")
    cluster = ClusterSpec.homogeneous(cpu_device(2**34, 1, spills=False), 38, LOCAL_TCP)
    begun = time.thread_time()
    with pytest.raises(MemoryBudgetError, match="larger blocks or chunks"):
        multimm.plan(a, b, cluster=cluster, chunks=1).check()
    assert time.thread_time() - begun < 8


@pytest.mark.parametrize(
    "words",
    [
        ("1x100", "100x99999999999"),
        ("99999x99999", "99999x99999", "--chunks", "1"),
        ("10x10", "10x10", "--gpus", "10000000000"),
    ],
)
def test_the_command_refuses_the_absurd_in_one_line(words):
    begun = time.thread_time()
    run = CliRunner().invoke(main, ["plan", *words])
    assert time.thread_time() - begun < 1
    assert run.exit_code == 2
    assert len(run.stderr.splitlines()) == 1
    assert "nan" not in run.stdout


#: Sizes of any order, the small ones often.
sizes = st.one_of(
    st.integers(0, 3), st.floats(0, 6).map(lambda x: int(10**x)), st.integers(0, 10**12)
)
edges = st.none() | st.integers(1, 10**13)


@st.composite
def clusters(draw):
    workers, threads = draw(st.integers(1, 64)), draw(st.sampled_from([1, 2, 64]))
    device = H200
    if draw(st.booleans()):
        memory = int(10 ** draw(st.floats(5, 13)))
        device = cpu_device(memory, draw(st.sampled_from([1, 16])), spills=draw(st.booleans()))
    return ClusterSpec.homogeneous(device, workers, LOCAL_TCP, threads)


@st.composite
def matrices(draw, *shape):
    chunks = [regular(size, max(1, -(-size // draw(st.integers(1, 50))))) for size in shape]
    dtype = draw(st.sampled_from(["float32", "float64", "bool", "complex128"]))
    return MatrixSpec(shape, dtype, chunks=tuple(chunks), hosted=draw(st.booleans()))


@given(data=st.data(), m=sizes, k=sizes, n=sizes, cluster=clusters())
@settings(max_examples=settings.default.max_examples // 3)
def test_whatever_is_asked_for_is_planned_or_refused_in_one_line(data, m, k, n, cluster):
    a, b = data.draw(matrices(m, k)), data.draw(matrices(k, n))
    options = {
        "blocks": data.draw(edges),
        "slabs": data.draw(edges),
        "p_k": data.draw(st.sampled_from([None, None, 1, 3, 4096, 2**40])),
        "chunks": data.draw(st.sampled_from(["auto", "operands", 1000, 1])),
        "precision": data.draw(st.sampled_from(["float32", "ieee", "tf32"])),
    }
    said = ""
    try:
        plan = multimm.plan(a, b, cluster=cluster, **options)
        figures = plan.seconds, plan.bytes_moved, plan.peak_bytes, plan.tasks, plan.bytes_spilled
        assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
        assert not re.search(r"(^|[ (])-\d|\bnan\b|\binf\b", str(plan))
        plan.check()
    except MultimmError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("m", "k", "n"), [(0, 7, 10**9), (10**9, 7, 0), (0, 10**9, 7), (0, 0, 10**9)]
)
def test_what_has_no_elements_beside_a_long_side_is_planned(m, k, n):
    """A selection that nothing has met, times many columns."""
    assert multimm.plan(MatrixSpec((m, k)), MatrixSpec((k, n))).flops == 0
    a, b = (da.zeros(shape, chunks=10**6) for shape in ((m, k), (k, n)))
    assert multimm.matmul(a, b).shape == (m, n)


def test_a_product_refuses_what_its_plan_does():
    x = da.ones((3000, 3000), chunks=1000)
    for options in ({"p_k": 2**40}, {"blocks": 1}):
        with pytest.raises((OptionError, MemoryBudgetError)):
            multimm.matmul(x, x, **options)
