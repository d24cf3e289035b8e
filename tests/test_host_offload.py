"""NumPy blocks on GPU workers: where they go up, what travels, and that NumPy blocks come back.

The workers here have no GPU: plans take them to have one, and each block that is brought to it
stays what it is. What moves them to a GPU and back is tested on one (`tests/gpu/test_host_gpu.py`).
"""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections import Counter
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import counting, counting_client, in_threads, received, scattered, soon
from dask.graph_manipulation import clone
from distributed import Client, wait
from killing import Record
from labels import block_tasks, tasks_of
from linked import at_rest, held_up, link, plan_for, plan_for_little
from repeated import others_slow
from small import integers

import multimm
from multimm.errors import ArrayTypeError
from multimm.failures import told
from multimm.graph.label import Kind
from multimm.graph.lowering.host_downloads import below_download
from multimm.graph.lowering.rechunk import upload_sub_blocks
from multimm.graph.tasks import host_offload
from multimm.graph.tasks.host_offload import on_device, upload
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.graph.tasks.worker_thread import beside_other_tasks
from multimm.io import open_array
from multimm.planning.cost import host_transfers
from multimm.planning.spec import H200

client = counting_client(4)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    plan_for(monkeypatch, H200)


def matrices(client, chunks_a=(64, 80), chunks_b=(100, 50), shape=(200, 240, 150)):
    """Two matrices of small integers, their chunks assigned in turn, and the arrays."""
    m, n, k = shape
    x, y = integers((m, k), 1), integers((k, n), 2)
    owners = [*range(4)] * 99
    chunks = [-(-size // edge) for array, edges in ((x, chunks_a), (y, chunks_b))
              for size, edge in zip(array.shape, edges, strict=True)]  # fmt: skip
    a = scattered(client, x, chunks_a, owners[: chunks[0] * chunks[1]])
    b = scattered(client, y, chunks_b, owners[1 : 1 + chunks[2] * chunks[3]])
    return x, y, a, b


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        pytest.param(chunks, options, marks=[pytest.mark.slow] * ((i + j) % 3 == 1))
        for j, options in enumerate([{}, {"blocks": 64, "slabs": 48}, {"blocks": 128, "p_k": 2}])
        for i, chunks in enumerate(
            [((64, 80), (100, 50)), ((200, 16), (16, 240)), ((8, 150), (150, 8))]
        )
    ],
)
def test_products_are_right_and_move_what_was_planned(client, chunks, options):
    x, y, a, b = matrices(client, *chunks)
    plan = multimm.plan(a, b, **options)
    c, moved = received(client, multimm.matmul(a, b, **options))
    assert moved <= plan.bytes_moved
    if plan.grid.workers == 4:  # one worker alone is chosen when it runs: who has the most of them
        assert moved == plan.bytes_moved
    np.testing.assert_array_equal(c.compute(), x @ y)


def test_each_block_goes_up_once_where_it_lies(client):
    x, y, a, b = matrices(client)
    c = multimm.matmul(a, b, blocks=64, slabs=48)
    for role, array, offset in (("a", a, 0), ("b", b, 1)):
        tasks = list(tasks_of(c, Kind.UPLOAD, role.upper()).values())
        assert len(tasks) == array.npartitions
        grid = tasks[0].place.grid
        for task in tasks:
            at = np.ravel_multi_index(task.key[1:], array.numblocks)
            rank = grid.rank(task.place.owner)
            assert (task.place.numbers or range(4))[rank] == (at + offset) % 4
    # Nothing else is given a block of the host's.
    own = {a.name, b.name}
    users = [
        task for task in block_tasks(c).values() if own & {key[0] for key in task.dependencies}
    ]
    assert users
    assert all(task.func is upload for task in users)
    np.testing.assert_array_equal(c.compute(), x @ y)


def test_the_result_is_numpy_and_a_product_of_it_takes_what_is_on_the_gpus(client):
    x, y, a, b = matrices(client)
    c = multimm.matmul(a, b, blocks=64)
    assert type(c._meta) is np.ndarray
    assert below_download(c) is not c
    (on_gpus,) = dask.optimize(below_download(c))
    assert not tasks_of(on_gpus, Kind.DOWNLOAD)
    assert below_download(a) is a
    d = multimm.matmul(c.T, c, blocks=64)
    (optimized,) = dask.optimize(d)
    assert len(tasks_of(optimized, Kind.UPLOAD)) == a.npartitions + b.npartitions
    names = Counter(key[0] for key in tasks_of(optimized))
    assert names[d.name] == d.npartitions
    assert names[c.name] == 0  # nothing of it comes back
    expected = x @ y
    np.testing.assert_array_equal(d.compute(), expected.T @ expected)
    assert "host       230 kB of C from there" in str(multimm.plan(c.T, c))
    # What was computed is NumPy's, and goes up again.
    wait(kept := c.persist())
    assert tasks_of(multimm.matmul(kept.T, kept, blocks=64), Kind.UPLOAD, "A")


def test_a_block_and_its_way_back_are_one_task_unless_another_product_needs_it(monkeypatch):
    link(monkeypatch)
    x, y = integers((120, 120), 1), integers((120, 120), 2)
    with in_threads(2) as cluster, Client(cluster) as client:
        cluster.scheduler.add_plugin(record := Record(cluster.scheduler))
        c = multimm.matmul(da.from_array(x, chunks=30), da.from_array(y, chunks=30), blocks=60)

        def made():
            """What tasks of c did, and how often."""
            own = {key: x for key, x in record.labels.items() if x.product in c.name}
            found = Counter(own[key].kind for key in record.made.elements() if key in own)
            record.made.clear()
            return found[Kind.MULTIPLY], found[Kind.DOWNLOAD]

        np.testing.assert_array_equal(c.compute(), x @ y)
        assert made() == (4, 0)
        d = multimm.matmul(c, c, blocks=60)
        for both in ([c, d], dask.optimize(c, d)):  # together, and each by itself
            soon(lambda: not cluster.scheduler.tasks)  # it keeps to what it was told of a key
            first, second = client.compute([*both])
            np.testing.assert_array_equal(first.result(), x @ y)
            np.testing.assert_array_equal(second.result(), (x @ y) @ (x @ y))
            assert made() == (4, 4)
            expected = second.result()
            first.release()
            second.release()
        np.testing.assert_array_equal(clone(d).compute(), expected)


@pytest.mark.parametrize(
    ("dtype", "options", "chunks"),
    others_slow(
        [
            *((dtype, {}, 16) for dtype in (">f8", ">i2", ">c8", ">f2")),
            *((">f4", options, chunks) for options in ({}, {"blocks": 16}, {"blocks": 20, "p_k": 2})
              for chunks in (16, -1)),  # a chunk that is all of it is no sub-block
        ],
        *((">i2", {}, 16), (">c8", {}, 16)),
        *((">f4", {"blocks": 20, "p_k": 2}, 16), (">f4", {"blocks": 16}, -1)),
    ),
)  # fmt: skip
def test_what_goes_up_is_in_the_byte_order_of_gpus(client, monkeypatch, dtype, options, chunks):
    sent = []
    link(monkeypatch, send=lambda block: sent.append(block.dtype) or np.copy(block))
    x = integers((40, 40), 3).astype(dtype)
    a = da.from_array(x, chunks=chunks)
    cases = [
        (multimm.matmul(a, a, **options), x @ x),
        (multimm.matmul(a.T, a, **options), x.T @ x),
        (multimm.gemm(1, a, a, 1, a, **options), x @ x + x),
    ]
    for c, expected in cases:
        result = c.compute()
        assert result.dtype == c.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    assert multimm.verify(a, a, cases[0][0])
    assert {*sent} >= {np.dtype(dtype).newbyteorder("=")}
    assert all(each.isnative for each in sent)


@pytest.mark.parametrize("options", [{}, {"blocks": 16}, {"blocks": 20, "p_k": 2}])
@pytest.mark.parametrize("role", ["a", "b", "both", "c"])
def test_blocks_that_turn_out_to_be_masked_are_refused(client, monkeypatch, role, options):
    link(monkeypatch)
    a = da.from_array(integers((40, 40), 3), chunks=16)
    masked = a.map_blocks(lambda x: np.ma.masked_less(x, 0), dtype=a.dtype, meta=a._meta)
    product = {
        "a": lambda: multimm.matmul(masked, a, **options),
        "b": lambda: multimm.matmul(a, masked, **options),
        "both": lambda: multimm.matmul(masked.T, masked, **options),
        "c": lambda: multimm.gemm(1, a, a, 1, masked, **options),
    }[role]()
    with pytest.raises(ArrayTypeError, match="MaskedArray"):
        product.compute()


def test_what_gpus_do_not_have_stays(client):
    x = integers((40, 30), 3).astype("longdouble")
    a = da.from_array(x, chunks=16)
    c = multimm.matmul(a, x.T)
    assert not tasks_of(c, Kind.UPLOAD)
    assert "host" not in str(multimm.plan(a, a.T))
    np.testing.assert_array_equal(c.compute(), x @ x.T)


def test_a_stack_a_symmetric_product_and_an_addend(client):
    x, y = integers((3, 40, 30), 5), integers((30, 20), 6)
    c = multimm.matmul(da.from_array(x, chunks=(1, 16, 30)), da.from_array(y, chunks=30))
    np.testing.assert_array_equal(c.compute(), x @ y)
    a = da.from_array(x[0], chunks=10)
    symmetric = multimm.matmul(a.T, a, blocks=20)
    assert len(tasks_of(symmetric, Kind.UPLOAD, "A")) == 12
    assert not tasks_of(symmetric, Kind.UPLOAD, "B")
    square = da.from_array(x[0, :30], chunks=10)
    both = multimm.matmul(square, square, blocks=20)
    assert len(tasks_of(both, Kind.UPLOAD, "A")) == 9
    assert not tasks_of(both, Kind.UPLOAD, "B")
    np.testing.assert_array_equal(both.compute(), x[0, :30] @ x[0, :30])
    np.testing.assert_array_equal(symmetric.compute(), x[0].T @ x[0])
    d = multimm.gemm(2.0, a, y, 3.0, da.from_array(x[0] @ y, chunks=8), blocks=16)
    assert len(tasks_of(d, Kind.UPLOAD, "C")) == 15
    np.testing.assert_array_equal(d.compute(), 5 * (x[0] @ y))
    v = multimm.matmul(a, da.from_array(y[:, 0], chunks=10))
    np.testing.assert_array_equal(v.compute(), x[0] @ y[:, 0])


@pytest.mark.parametrize(("made", "message"), [
    (lambda block: None, "None, its array says float32"),
    (lambda block: block[:5], "has shape"),
    (lambda block: block + 0j, "cannot hold"),
])  # fmt: skip
def test_wrong_blocks_are_named(client, made, message):
    x = da.from_array(integers((40, 40), 8), chunks=20)
    wrong = x.map_blocks(made, dtype="float32", meta=x._meta)
    with pytest.raises(multimm.errors.MultimmError, match=message) as caught:
        multimm.matmul(wrong, x, blocks=20).compute()
    assert wrong.name in "".join([*map(str, caught.value.args), *caught.value.__notes__])
    assert "of A on its way to a GPU, from" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("workers", "symmetric"),
    others_slow([(1, False), (1, True), (4, False)], (1, True), (4, False)),
)
def test_operands_larger_than_the_gpus_stay_in_host_memory(monkeypatch, workers, symmetric):
    """Their blocks go up k-tile by k-tile, in every row panel, no more than there is room for."""
    # Sums of blocks, k-tiles in flight: a third of what both operands and the result take.
    (m, k, n), memory = {1: ((1100, 900, 1000), 6e6), 4: ((1500, 1300, 1400), 4e6)}[workers]
    plan_for_little(monkeypatch, int(memory))
    for name in ("UPLOAD_S", "CHUNK_S", "COPIED_S"):  # of blocks of a few kB
        monkeypatch.setattr(host_transfers, name, 0.0)
    with counting(workers) as client:
        x = integers((m, k), 13)
        a = scattered(client, x, (m // 4 + 25, k // 4 + 25), [at % workers for at in range(16)])
        y = x.T if symmetric else integers((k, n), 14)
        b = a.T if symmetric else da.from_array(y, chunks=250)
        fixed = {"precision": "ieee", "blocks": 200, "slabs": 200}
        plan = multimm.plan(a, b, **fixed)
        assert plan.layout.stream
        assert plan.peak_bytes <= plan.budget_bytes
        assert "blocks taken from host memory when they" in " ".join(str(plan).split())
        c = multimm.matmul(a, b, **fixed)
        assert not tasks_of(c, Kind.UPLOAD)
        assert tasks_of(c, Kind.READ)
        assert tasks_of(c, Kind.WAIT)
        c, moved = received(client, c)
        assert moved <= 1.4 * plan.bytes_moved
        np.testing.assert_array_equal(c.compute(), x @ y)


def test_products_wait_for_a_link_that_is_slower(monkeypatch):
    """No more blocks of C wait for it than the plan has memory for."""
    opened = held_up(monkeypatch)
    plan_for_little(monkeypatch)
    for name in ("UPLOAD_S", "CHUNK_S", "COPIED_S"):
        monkeypatch.setattr(host_transfers, name, 0.0)
    x, y = integers((800, 1200), 5), integers((1200, 800), 6)
    fixed = {"precision": "ieee", "blocks": 200, "slabs": 200}
    with in_threads(1) as cluster, Client(cluster):
        a, b = (da.from_array(z, chunks=300).persist() for z in (x, y))
        wait([a, b])
        layout = multimm.plan(a, b, **fixed).layout
        row_panel = layout.work.count // layout.row_panels
        assert (layout.stream, layout.row_panels, row_panel) == (True, 4, 4)
        lazy = multimm.matmul(a, b, **fixed)
        last = len(layout.k_tiles) - 1
        multiplied = tasks_of(lazy, Kind.MULTIPLY).items()
        finished = {key for key, task in multiplied if task.label.k_tiles[-1] == last}
        c = lazy.persist()
        (worker,) = cluster.workers.values()

        def done():
            return len(finished.intersection([*worker.data]))

        def runs(kind):
            return any(ts.key in tasks_of(lazy, kind) for ts in [*worker.state.executing])

        soon(lambda: done() > 1 and runs(Kind.DOWNLOAD))
        time.sleep(0.2)  # in which others would run, if they could
        assert runs(Kind.DOWNLOAD)
        assert done() <= 2 * row_panel
        opened.set()
        np.testing.assert_array_equal(c.compute(), x @ y)


@pytest.mark.parametrize("bring", [upload_sub_blocks, partial(on_device, SubBlocks.copied)])
def test_sub_blocks_are_let_go_when_they_are_joined(monkeypatch, bring):
    """At once, and not when garbage is collected some day."""
    there = []

    def send(block):
        sent = block.copy()
        there.append(weakref.ref(sent))
        return sent

    link(monkeypatch, send)
    monkeypatch.setattr(host_offload, "to_numpy", np.copy)
    x, halves = integers((6, 4), 7), ((slice(0, 3), slice(0, 4)), (slice(3, 6), slice(0, 4)))
    blocks = [x[cut].copy() for cut in halves]
    parts = SubBlocks(blocks, tuple((halves[0], to) for to in halves), ((3, 4),) * 2, (6, 4))
    gc.disable()
    try:
        np.testing.assert_array_equal(bring(parts), x)
        assert len(there) == 2
        assert all(sent() is None for sent in there)
    finally:
        gc.enable()


def test_others_run_beside_a_task_that_waits_for_the_link():
    """Also twice within one task."""
    with in_threads(1) as cluster, Client(cluster) as client:
        LET_GO.clear()
        waits = client.submit(_beside, pure=False)
        assert client.submit(sum, [1, 2], pure=False).result(timeout=20) == 3
        assert not waits.done()
        LET_GO.set()
        assert waits.result(timeout=20) == 2
    with beside_other_tasks(host_offload._waiting):  # nothing to give way to here
        pass


LET_GO = threading.Event()


def _beside():
    for _ in range(2):
        with beside_other_tasks(host_offload._waiting):
            LET_GO.wait(20)
    return 2


TURN = threading.Lock()


def _alone(block):
    assert TURN.acquire(blocking=False), "two of these ran at a time"
    time.sleep(0.02)
    TURN.release()
    return block


def test_what_follows_a_block_that_comes_back_has_the_worker_s_thread(monkeypatch):
    """It is not made one task with what gave that up."""
    link(monkeypatch)
    x = integers((120, 120), 3)
    with in_threads(1, memory_limit=0) as cluster, Client(cluster):
        c = multimm.matmul(da.from_array(x, chunks=30), x, blocks=30)
        np.testing.assert_array_equal(c.map_blocks(_alone, meta=c._meta).compute(), x @ x)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("send", r"chunk \(., .\) of [AB] on its way to a GPU, from \('.*', ., .\), failed on inp"),
        ("fetch", r"block \(., .\) of C on its way to host memory failed on inproc:"),
    ],
    ids=["up", "back"],
)
def test_a_copy_that_fails_names_its_block(monkeypatch, way, said):
    """And leaves nothing behind: no thread of a worker's, and nothing that others wait for."""
    full = threading.Event()
    full.set()

    def fails(block):
        if full.is_set():
            raise MemoryError("no room")
        return block.copy()

    link(monkeypatch, **{way: fails})
    x, y = integers((120, 120), 3), integers((120, 120), 4)
    with in_threads(2, memory_limit=0, silence_logs=50) as cluster, Client(cluster):
        c = multimm.matmul(da.from_array(x, chunks=30), y, blocks=30)
        with pytest.raises(MemoryError, match="no room") as caught:
            c.compute()
        assert re.match(said, told(caught.value)), told(caught.value)
        soon(lambda: at_rest(cluster))
        full.clear()
        d = multimm.matmul(da.from_array(y, chunks=30), x, blocks=30)
        np.testing.assert_array_equal(d.compute(), y @ x)


# Small products: one task brings their blocks there and back ----------------------------


@pytest.fixture
def gone(monkeypatch):
    """Blocks that were sent to a GPU, and that were fetched from one."""
    sent, fetched = [], []
    link(monkeypatch, send=lambda block: sent.append(block.shape) or np.copy(block))
    monkeypatch.setattr(
        host_offload, "to_numpy", lambda block: fetched.append(block.shape) or block
    )
    return sent, fetched


def blocks_of(*arrays):
    return sorted(
        shape for x in arrays for shape in (x.blocks[i].shape for i in np.ndindex(*x.numblocks))
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex64", "float16", "bool"])
@pytest.mark.parametrize("chunks", [-1, 16])
def test_each_block_goes_up_once_and_the_result_comes_back_once(client, gone, dtype, chunks):
    x, y = integers((40, 30), 3).astype(dtype), integers((30, 20), 4).astype(dtype)
    a, b = (da.from_array(z, chunks=chunks) for z in (x, y))
    c = multimm.matmul(a, b)
    assert multimm.plan(a, b).layout.problem.in_one
    assert len(tasks_of(c)) == 1
    assert type(c._meta) is np.ndarray
    np.testing.assert_array_equal(c.compute(), x @ y)
    sent, fetched = gone
    assert sorted(sent) == blocks_of(a, b)
    assert fetched == [(40, 20)]


@pytest.mark.parametrize("chunks", [-1, 16])
def test_transposes_symmetric_products_addends_stacks_and_vectors(client, gone, chunks):
    x, y = integers((40, 30), 5), integers((40, 20), 6)
    a, b = (da.from_array(z, chunks=chunks) for z in (x, y))
    c = da.from_array(x.T @ y, chunks=chunks)
    stack = integers((3, 20, 30), 7)
    cases = [
        (multimm.matmul(a.T, b), x.T @ y),
        (multimm.matmul(a.T, a), x.T @ x),
        (multimm.gemm(2.0, a, b, 3.0, c, trans_a=True), 5 * (x.T @ y)),
        (multimm.matmul(da.from_array(stack, chunks=chunks), a.T), stack @ x.T),
        (multimm.matmul(a, da.from_array(x[0], chunks=chunks)), x @ x[0]),
    ]
    for found, expected in cases:
        assert len(tasks_of(found)) == 1
        np.testing.assert_array_equal(found.compute(), expected)
    assert len(gone[1]) == len(cases)


def test_files(client, gone, tmp_path):
    x = integers((64, 48), 12)
    np.save(tmp_path / "x.npy", x)
    a = open_array(tmp_path / "x.npy", chunks=16)
    np.testing.assert_array_equal(multimm.matmul(a.T, a).compute(), x.T @ x)
    assert gone == ([(64, 48)], [(48, 48)])
