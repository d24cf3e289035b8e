"""Products and arrays from files in the hands of Dask's graph tools: clone, bind and their like."""

from __future__ import annotations

import time

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
from by_plan import by_plan
from clusters import counting_client, scattered
from dask.graph_manipulation import bind, checkpoint, clone, wait_on
from labels import block_tasks, tasks_of
from linked import plan_for
from small import integers

import multimm
from multimm.graph.block_task import BlockTask
from multimm.graph.data_location import owners_of
from multimm.graph.label import Kind
from multimm.graph.lowering.host_downloads import below_download
from multimm.io import Output, open_array
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec

client = counting_client(4)

A, B = integers((60, 80), 1), integers((80, 40), 2)
STACK = integers((3, 60, 80), 3)


def lazy(x, chunks=20):
    return da.from_array(x, chunks=chunks)


def of_file(folder, x, name="x.npy"):
    np.save(folder / name, x)
    return open_array(folder / name, chunks=20)


def streamed(folder, workers=4):
    """A product that reads blocks of files k-tile by k-tile, each when it is needed."""
    a, b = of_file(folder, A, "a.npy"), of_file(folder, B, "b.npy")
    problem = Problem(MatrixSpec(A.shape), MatrixSpec(B.shape), rereadable=(True, True))
    memory = DeviceSpec("cpu", "cpu", 20_000, 50.0, 20.0)
    spec = ClusterSpec.homogeneous(memory, workers, LOCAL_TCP)
    plan = plan_matmul(problem, spec, options=Options(blocks=20, slabs=8, p_k=1))
    assert plan.layout.stream
    product = by_plan(plan, a, b)
    assert tasks_of(product, Kind.WAIT)
    return product


#: By name: what is computed of a folder, and the right result.
KINDS = {
    "planned": (lambda _: multimm.matmul(lazy(A), lazy(B)), A @ B),
    "in blocks": (lambda _: multimm.matmul(lazy(A), lazy(B), blocks=20, slabs=20), A @ B),
    "other blocks": (lambda _: multimm.matmul(lazy(A, 17), lazy(B), blocks=20, slabs=20), A @ B),
    "parts of k": (lambda _: multimm.matmul(lazy(A), lazy(B), blocks=20, slabs=20, p_k=2), A @ B),
    "one array twice": (lambda _: multimm.matmul(lazy(A).T, lazy(A), blocks=20), A.T @ A),
    "with C": (lambda _: multimm.gemm(2, lazy(A), lazy(B), 3, lazy(A @ B, 30)), 5 * (A @ B)),
    "transpose": (lambda _: multimm.transpose(lazy(A)), A.T),
    "stack": (lambda _: multimm.matmul(lazy(STACK), lazy(B), blocks=20, slabs=20), STACK @ B),
    "product of a product": (
        lambda _: multimm.matmul(multimm.matmul(lazy(A), lazy(B)), lazy(B.T), blocks=20, slabs=20),
        A @ B @ B.T,
    ),
    "memory": (lambda _: multimm.matmul(A, lazy(B)), A @ B),
    "file": (lambda folder: of_file(folder, A), A),
    "of files": (lambda folder: multimm.matmul(of_file(folder, A), lazy(B), blocks=20), A @ B),
    "streamed": (streamed, A @ B),
}
KINDS_OF_COPY = {
    "clone": clone,
    "bind": lambda c: bind(c, da.ones(3).sum()),
    "wait_on": wait_on,
    "bind above the operands": lambda c: bind(c, da.ones(3).sum(), assume_layers=False),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["threads", "distributed"])
def scheduler(request):
    """Plans are those for one process, or for the workers of a cluster."""
    if request.param == "distributed":
        client = request.getfixturevalue("client")
        with client.as_current(), dask.config.set(scheduler="distributed"):
            yield request.param
    else:
        with dask.config.set(scheduler=request.param):
            yield request.param


#: Every kind in every way, in this process and on workers by turns; `make test` runs a third.
COPIES = [
    pytest.param(
        kind,
        how,
        ("threads", "distributed")[(i + j) % 2],
        marks=[pytest.mark.slow] * ((i + j) % 3 > 0),
    )
    for i, kind in enumerate(KINDS)
    for j, how in enumerate(KINDS_OF_COPY)
]


@pytest.mark.parametrize(("kind", "how", "scheduler"), COPIES, indirect=["scheduler"])
def test_copies_compute_what_the_original_does(kind, how, scheduler, tmp_path):
    make, right = KINDS[kind]
    original = make(tmp_path)
    copy = KINDS_OF_COPY[how](original)
    assert copy.name != original.name
    copy.dask.validate()
    first, second = dask.compute(original, copy)
    np.testing.assert_array_equal(first, right)
    np.testing.assert_array_equal(second, right)


@kinds
def test_a_copy_shares_no_key_with_the_original(kind, tmp_path):
    original = KINDS[kind][0](tmp_path)
    assert not set(clone(original).dask) & set(original.dask)
    assert set(clone(original, seed=1).dask) == set(clone(original, seed=1).dask)
    tasks = clone(original).dask
    inside = {key for task in tasks.values() if isinstance(task, BlockTask) for key in named(task)}
    assert inside <= set(tasks)


def named(task):
    """What a task's place and its checks of shapes name."""
    return [
        *(key for key, _ in task.place.blocks),
        *(key for _, keys in task.sizes for key in keys),
    ]


@kinds
def test_nothing_of_a_bound_copy_runs_before_what_it_waits_for(kind, tmp_path, monkeypatch):
    done = []

    def late():
        time.sleep(0.05)
        done.append("parent")

    def reads(matrix, index, gpu=False):
        done.append("read")
        return read(matrix, index, gpu)

    from multimm.files import graph

    read = graph.read_block
    monkeypatch.setattr(graph, "read_block", reads)
    original = KINDS[kind][0](tmp_path)
    copy = bind(original, dask.delayed(late)())
    with dask.config.set(scheduler="threads"):
        np.testing.assert_array_equal(copy.compute(), KINDS[kind][1])
    assert done[0] == "parent"
    assert ("file" in kind or kind == "streamed") == ("read" in done)


def test_a_product_of_a_bound_file_waits_as_the_file_does(tmp_path):
    done = []
    bound = bind(of_file(tmp_path, A), dask.delayed(lambda: done.append("parent"))())
    np.testing.assert_array_equal(multimm.matmul(bound, lazy(B)).compute(scheduler="sync"), A @ B)
    assert done == ["parent"]


def test_a_product_reads_files_as_their_annotations_say(tmp_path):
    """Those of retries, say, and of the workers that see the file."""
    with dask.annotate(retries=3, workers="alice"):
        a = of_file(tmp_path, A)
        inside = multimm.matmul(a, lazy(B), blocks=20, slabs=20)
    outside = multimm.matmul(a, lazy(B), blocks=20, slabs=20)
    said = {"retries": 3, "workers": ["alice"]}
    assert outside.dask.layers[a.name].annotations == said
    assert a.name not in inside.dask.layers
    assert inside.dask.layers[inside.name].annotations == said
    for c in (inside, outside):
        np.testing.assert_array_equal(c.compute(scheduler="sync"), A @ B)


def test_a_slice_of_a_streamed_product_needs_the_tasks_of_its_blocks(tmp_path):
    """Barriers order its tasks; what they wait for of other blocks is no operand."""
    product = streamed(tmp_path)
    part = product.blocks[-1, -1]
    needed = dask.optimize(part)[0].dask.values()
    multiplied = [x for x in needed if getattr(x, "label", None) and x.label.kind is Kind.MULTIPLY]
    assert len(multiplied) == 10  # of its k-tiles
    np.testing.assert_array_equal(part.compute(scheduler="sync"), (A @ B)[-20:, -20:])


def test_what_is_omitted_is_shared():
    made = []

    def count(block):
        made.append(block.shape)
        return block

    a = lazy(A).map_blocks(count, meta=np.empty((0, 0), "f4"))
    product = multimm.matmul(a, lazy(B), blocks=20, slabs=20)
    copies = clone(product, omit=a), bind(product, da.ones(3).sum(), omit=a)
    assert set(a.dask) <= set(copies[0].dask)
    for result in dask.compute(product, *copies, scheduler="synchronous"):
        np.testing.assert_array_equal(result, A @ B)
    assert len(made) == a.npartitions


#: Every kind, in this process or on workers; `make test` runs half of each.
by_turns = pytest.mark.parametrize(
    ("kind", "scheduler"),
    [
        pytest.param(
            kind,
            ("threads", "distributed")[i % 2],
            marks=[pytest.mark.slow] * (i % 4 in (1, 2)),
        )
        for i, kind in enumerate(KINDS)
    ],
    indirect=["scheduler"],
)


@by_turns
def test_checkpoints_and_saved_arrays(kind, scheduler, tmp_path):
    make, right = KINDS[kind]
    assert checkpoint(make(tmp_path)).compute() is None
    with Output(tmp_path / "c.npy") as output:
        flags = clone(output.store(make(tmp_path)))
        assert flags.compute().all()
        output.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), right)


@by_turns
def test_optimized_pickled_and_persisted_copies(kind, scheduler, tmp_path):
    make, right = KINDS[kind]
    copy = clone(make(tmp_path))
    for other in (
        dask.optimize(copy)[0],
        cloudpickle.loads(cloudpickle.dumps(copy)),
        copy.persist(),
        copy[:20],
    ):
        rows = len(other)
        np.testing.assert_array_equal(other.compute(), right[:rows])


@pytest.mark.parametrize("how", ["clone", "bind"])
def test_a_copy_lies_and_moves_as_the_original_does(client, how):
    a = scattered(client, A, 15, range(4))
    original = multimm.matmul(a, lazy(B), blocks=20, slabs=20)
    copy = KINDS_OF_COPY[how](original)
    assert owners_of(original, 4)
    assert owners_of(copy, 4) == owners_of(original, 4)
    tokens = {task.label.product for task in block_tasks(copy).values()}
    assert len(tokens) == 1  # a product of its own, as a whole
    np.testing.assert_array_equal(copy.compute(), A @ B)


def test_blocks_that_come_back_from_gpus_are_copied_with_what_is_below(client, monkeypatch):
    plan_for(monkeypatch, H200)
    a = scattered(client, A, 15, range(4))
    original = multimm.matmul(a, lazy(B), blocks=20, slabs=20)
    assert below_download(original) is not original
    copy = clone(original)
    assert below_download(copy) is not copy
    twice = multimm.matmul(copy, lazy(B.T), blocks=20, slabs=20)
    np.testing.assert_array_equal(twice.compute(), A @ B @ B.T)
    np.testing.assert_array_equal(bind(original, da.ones(3).sum()).compute(), A @ B)
