"""The chunks of results: regular, as Dask's own product has them, or of given sizes."""

from __future__ import annotations

import math

import dask
import dask.array as da
import numpy as np
import pytest
import xarray
from clusters import counting, received
from distributed import wait
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from repeated import here_and_on_workers
from small import integers

import multimm
from multimm.errors import OptionError
from multimm.planning.spec import H200, ClusterSpec, DeviceSpec, MatrixSpec
from multimm.planning.tiling.result_chunks import chunks_of, counted, senders

CPU = DeviceSpec("CPU", "cpu", 8 * 10**9, 30.0, 10.0)


#: Dask's own products of these small chunks.
pytestmark = pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning")


def is_regular(chunks):
    """As Zarr wants them."""
    return all(len({*sizes[:-1]}) <= 1 and sizes[-1] <= sizes[0] for sizes in chunks)


#: Of workers: of these `make test` runs what is like them.
ALIKE = (
    *("a row", "a column", "a long one", "one chunk", "many dimensions"),
    *("nothing", "tiny chunks"),
)


@pytest.fixture(scope="module", params=[0, 3], ids="{} workers".format)
def client(request):
    if not request.param:
        yield None
        return
    with counting(request.param) as client:
        yield client


ARRAYS = {
    "matrices": ((60, 40), (7, 16), (40, 36), (9, 5)),
    "one chunk": ((60, 40), -1, (40, 36), -1),
    "a tall one": ((200, 6), (31, 6), (6, 5), -1),
    "a long one": ((6, 200), (6, 31), (200, 5), (40, 2)),
    "irregular": ((60, 40), ((31, 28, 1), (40,)), (40, 36), ((13, 27), (3, 30, 3))),
    "stacks": ((5, 12, 8), (2, 5, 8), (5, 8, 6), (3, 8, 4)),
    "broadcast": ((5, 12, 8), (2, 5, 8), (8, 6), (8, 4)),
    "many dimensions": ((1, 4, 12, 8), (1, 3, 5, 8), (3, 1, 8, 6), (2, 1, 3, 4)),
    "a row": ((40,), 7, (40, 36), (9, 5)),
    "a column": ((60, 40), (7, 16), (40,), 9),
    "vectors": ((40,), 7, (40,), 9),
    "nothing": ((0, 40), (5, 16), (40, 36), (9, 5)),
    "no terms": ((60, 0), (7, 16), (0, 36), (9, 5)),
    "tiny chunks": ((16, 40), (1, 40), (40, 12), (40, 1)),
}


def operands(name):
    shape_a, chunks_a, shape_b, chunks_b = ARRAYS[name]
    x, y = integers(shape_a, 1, "float64"), integers(shape_b, 2, "float64")
    return x, y, da.from_array(x, chunks=chunks_a), da.from_array(y, chunks=chunks_b)


@here_and_on_workers("client", ARRAYS, ALIKE)
def test_results_have_the_chunks_that_were_asked_for(client, name):
    x, y, a, b = operands(name)
    own = da.matmul(a, b)
    made = []
    for chunks, wanted in {"operands": own.chunks, "auto": None, 7: own.rechunk(7).chunks}.items():
        c = multimm.matmul(a, b, chunks=chunks)
        assert is_regular(c.chunks) if wanted is None else c.chunks == wanted
        planned = multimm.plan(a, b, chunks=chunks).chunks
        squeezed = [*planned[:-2]]
        squeezed += [planned[-2]] * (x.ndim > 1) + [planned[-1]] * (y.ndim > 1)
        assert tuple(squeezed) == c.chunks
        made.append(c)
    for found in dask.compute(*made):
        np.testing.assert_array_equal(found, x @ y)


def shapes(most):
    return st.lists(st.integers(0, 9), min_size=1, max_size=most).map(tuple)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shapes(6), shapes(3), shapes(6), st.sampled_from(["auto", "operands", 4, (1, -1)]))
@example((2,), (0, 1), (1, 0), "operands")
@example((0, 1), (3,), (0, 1), "operands")
def test_any_chunks_give_the_same_numbers_and_the_chunks_asked_for(rows, ks, columns, chunks):
    x = integers((sum(rows), sum(ks)), 1, "float64")
    y = integers((sum(ks), sum(columns)), 2, "float64")
    a, b = da.from_array(x, chunks=(rows, ks)), da.from_array(y, chunks=(ks[::-1], columns))
    c = multimm.matmul(a, b, chunks=chunks, blocks=5, slabs=4)
    if chunks == "operands":
        assert c.chunks == (rows, columns)
    elif chunks == "auto":
        assert is_regular(c.chunks)
    else:
        assert c.chunks == da.empty(c.shape, chunks=chunks).chunks
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


@given(
    st.integers(1, 30000), st.integers(1, 30000), st.integers(1, 7000), st.integers(1, 7000),
    st.integers(1, 9), st.sampled_from([CPU, H200]), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=15)
def test_planned_chunks_are_regular(m, n, tall, wide, workers, device, laid):
    """Of squares and others in chunks of any size, wherever these lie."""
    a = MatrixSpec((m, n), chunks=da.empty((m, n), chunks=(max(tall, m // 5), n)).chunks)
    b = MatrixSpec((n, m), chunks=da.empty((n, m), chunks=(n, max(wide, m // 5))).chunks)
    if laid:
        a, b = (
            MatrixSpec(x.shape, chunks=x.chunks, owners=tuple(i % workers for i in range(x.blocks)))
            for x in (a, b)
        )
    plan = multimm.plan(a, b, cluster=ClusterSpec.homogeneous(device, workers))
    assert is_regular(plan.chunks)
    assert tuple(map(sum, plan.chunks)) == (m, m)


def test_slices_of_blocks_stay_with_their_workers(client):
    """What serves many chunks is multiplied once, and no chunk travels."""
    if client is None:
        pytest.skip("nothing travels without workers")
    x = integers((96, 24), 4)
    a = client.persist(da.from_array(x, chunks=(4, 24)))
    wait(a)
    fixed = {"blocks": (24, 96), "slabs": 24}
    whole, plan = (multimm.plan(a, x.T, **fixed, chunks=chunks) for chunks in ("auto", "operands"))
    assert (whole.layout.work.count, plan.layout.work.count, plan.bytes_joined) == (4, 4, 0)
    c = multimm.matmul(a, x.T, **fixed, chunks="operands")
    assert c.chunks == ((4,) * 24, (96,))
    c, moved = received(client, c)
    assert moved <= whole.bytes_moved + x.nbytes  # which comes from here, to the first who asks
    np.testing.assert_array_equal(c.compute(), x @ x.T)


cut_twice = st.integers(0, 12).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(0, size), max_size=4)] * 2).map(
        lambda both: [tuple(np.diff([0, *sorted(ends), size]).tolist()) for ends in both]
    )
)


@given(axes=st.lists(cut_twice, min_size=1, max_size=3), workers=st.integers(1, 4), data=st.data())
def test_what_hands_chunks_out_is_what_plans_count(axes, workers, data):
    """Each chunk is made by who has most of it; what others have of it, cut out, travels there."""
    chunks, blocks = zip(*axes, strict=True)
    count = math.prod(map(len, blocks))
    owners = tuple(data.draw(st.lists(st.integers(0, 2 * workers), min_size=count, max_size=count)))
    tasks = moved = 0
    for chunk in chunks_of(chunks, blocks, owners):
        tasks += 1 + len(senders(chunk.parts, chunk.owner))
        for rank, parts in chunk.parts.items():
            if rank % workers != chunk.owner % workers:
                moved += sum(math.prod(part.shape) for part in parts)
    assert counted(chunks, blocks, owners, workers) == (tasks, moved)


def test_chunks_have_memory_of_their_own():
    """Else one that is kept would keep all of its block, of which Dask counts only the chunk."""
    x = integers((40, 40), 5, "float64")
    c = multimm.matmul(da.from_array(x, chunks=10), x, chunks=(10, 10))
    for chunk in dask.compute(*c.to_delayed().ravel(), scheduler="sync"):
        assert chunk.base is None
        assert chunk.flags.c_contiguous


@pytest.mark.parametrize("chunks", ["planned", "", 0, -2, 2.5, (1, 2, 3), ((3,), (36,)), None,
                                    True, ((-1, 61), (36,)), ((float("nan"),), (36,)), {2: 5},
                                    {"x": 5}])  # fmt: skip
def test_other_chunks_are_refused_in_one_line(chunks):
    x, y, a, b = operands("matrices")
    for call in (
        lambda: multimm.matmul(a, b, chunks=chunks),
        lambda: multimm.matmul(x, y, chunks=chunks),
        lambda: multimm.gemm(1, a, b, chunks=chunks),
        lambda: multimm.plan(a, b, chunks=chunks),
    ):
        with pytest.raises(OptionError, match="'operands'") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chunks", [{-1: 7}, {1: 7, 0: None}, np.array([60, 7])], ids=str)
def test_axes_are_named_as_dask_names_them(chunks):
    _, _, a, b = operands("matrices")
    assert multimm.matmul(a, b, chunks=chunks).chunks == ((60,), (7, 7, 7, 7, 7, 1))


def test_too_many_chunks_are_refused_before_they_are_listed():
    endless = da.ones((10**12, 1), chunks=10**11)
    with pytest.raises(OptionError, match="give larger ones"):
        multimm.matmul(endless, np.ones((1, 1)), chunks=1)
    with pytest.raises(OptionError, match="give larger ones"):
        multimm.matmul(endless, np.ones((1, 1)), chunks={0: 1})


def test_zarr_and_xarray_store_what_is_multiplied(client, tmp_path):
    x = integers((500, 500), 6)
    a = da.from_array(x, chunks=103)
    for blocks in (None, (200, 300)):
        c = multimm.matmul(a, a, blocks=blocks, p_k=1)
        path = tmp_path / f"{blocks}.zarr"
        c.to_zarr(str(path))
        np.testing.assert_array_equal(da.from_zarr(str(path)).compute(), x @ x)
        named = xarray.DataArray(c, dims=("i", "j"), name="c").to_dataset()
        named.to_zarr(str(tmp_path / f"x{blocks}.zarr"), consolidated=False)
    months = da.from_array(x, chunks=((310, 130, 60), 500))
    stored = multimm.matmul(months, a)
    assert is_regular(stored.chunks)
    stored.to_zarr(str(tmp_path / "months.zarr"))
