"""Operands that Dask reads or computes, beyond memory: chunks are made when they are needed."""

from __future__ import annotations

import itertools
from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from clusters import in_threads
from dask.graph_manipulation import bind, clone
from distributed import Client
from peaks import peak_of
from repeated import others_slow

import multimm
from multimm.errors import ShapeError
from multimm.planning.spec import ClusterSpec, DeviceSpec

#: A is m x k: 12.8 MB in float64, and B as large. C is 1.3 MB.
M, K, CHUNK = 400, 4000, 200
MEMORY = 9_000_000


class Counted:
    """A source that counts how often each part of it is read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, 2
        self.reads = Counter()

    def __getitem__(self, where):
        if all(at.stop for at in where):  # Dask looks at no elements for the kind of array
            self.reads[repr(where)] += 1
        return self.array[where].copy()


def small(budget, threads=2):
    """This process, with so little memory for blocks."""
    device = DeviceSpec("small", "cpu", int(budget / 0.6), 100.0, 10.0, False)
    return ClusterSpec.homogeneous(device, 1, threads=threads)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr("multimm.products.local", lambda gpu: small(MEMORY))


def from_zarr(x, tmp_path):
    path = f"{tmp_path}/{x.shape}.zarr"
    array = zarr.create_array(path, shape=x.shape, chunks=(CHUNK, CHUNK), dtype=x.dtype)
    array[:] = x
    return da.from_zarr(path)


def read(x, **options):
    """Each chunk a copy, as one of a file is."""
    return da.from_array(Counted(x), chunks=CHUNK, **options)


KINDS = {
    "from_zarr": (from_zarr, lambda x: x),
    "from_array": (lambda x, _: read(x), lambda x: x),
    "inline": (lambda x, _: read(x, inline_array=True), lambda x: x),
    "computed": (lambda x, _: read(x) * 2 - 1, lambda x: x * 2 - 1),
    "map_blocks": (lambda x, _: read(x).map_blocks(np.sqrt), np.sqrt),
    "less a row in memory": (lambda x, _: read(x) - x[0], lambda x: x - x[0]),
    "less a row of chunks": (
        lambda x, _: read(x) - da.from_array(x[0], chunks=CHUNK), lambda x: x - x[0]
    ),
    "joined": (
        lambda x, _: da.concatenate([read(x[:, :1000]), read(x[:, 1000:])], axis=1), lambda x: x
    ),
    "sliced": (lambda x, _: read(np.concatenate([x[:CHUNK], x]))[CHUNK:], lambda x: x),
    "a dtype that is not declared": (
        lambda x, _: read(x).map_blocks(np.float32, dtype="f8"), np.float32
    ),
    "transposed": (lambda x, _: read(x.T).map_blocks(np.array).T, lambda x: x),
}  # fmt: skip


@pytest.mark.alone
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "kind",
    others_slow(
        KINDS,
        *("from_zarr", "less a row in memory", "joined", "a dtype that is not declared"),
    ),
)
def test_operands_beyond_memory_take_no_more_of_it_than_dasks_product(kind, tmp_path):
    x, y = (np.random.default_rng(n).random(shape) for n, shape in enumerate(((M, K), (K, M))))
    make, of = KINDS[kind]
    a, b = make(x, tmp_path), make(y, tmp_path)
    exact = of(x).astype("f8") @ of(y).astype("f8")
    with dask.config.set(scheduler="threads", num_workers=2):
        product = multimm.matmul(a, b)
        np.testing.assert_allclose(product.compute(), exact)
        most = 1.5 * peak_of(a @ b)
        assert any(peak_of(product) < most for _ in range(3))


#: What Dask's tasks make once, whatever needs it.
ONCE = {
    "random": lambda y: da.random.default_rng(1).random(y.shape, chunks=CHUNK),
    "reshape": lambda y: read(y).reshape(K, M // 2, 2).reshape(K, M).rechunk(CHUNK),
}


@pytest.mark.alone
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("kind", "turned"),
    others_slow(itertools.product(ONCE, [False, True]), ("random", True)),
)
def test_an_operand_that_is_made_once_beside_one_that_is_read(kind, turned):
    x, y = (np.random.default_rng(n).random(shape) for n, shape in enumerate(((M, K), (K, M))))
    a, b = read(x), ONCE[kind](y)
    a, b = (b.T, a.T) if turned else (a, b)
    with dask.config.set(scheduler="threads", num_workers=2):
        product = multimm.matmul(a, b)
        np.testing.assert_allclose(product.compute(), a.compute() @ b.compute())
        most = max(1.5 * peak_of(a @ b), MEMORY)
        assert any(peak_of(product) < most for _ in range(3))


@pytest.mark.alone
@pytest.mark.usefixtures("little_memory")
def test_operands_that_are_made_once_are_held_for_their_products_alone():
    rng = da.random.default_rng(1)
    a, b = rng.random((M, K), chunks=CHUNK), rng.random((K, M), chunks=CHUNK)
    with dask.config.set(scheduler="threads", num_workers=2):
        product = multimm.matmul(a, b)
        np.testing.assert_allclose(product.compute(), a.compute() @ b.compute())
        assert any(peak_of(product) < MEMORY for _ in range(3))


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # by Dask's difference
@pytest.mark.parametrize(
    ("of", "turned"),
    others_slow(
        itertools.product(["differences", "a product", "a small product"], [False, True]),
        *(("differences", True), ("a product", False), ("a small product", False)),
    ),
)
def test_chunks_that_are_each_for_one_product_are_made_one_by_one(of, turned):
    """A kernel matrix by few columns: rows and columns of its chunks need something in common."""
    rng = da.random.default_rng(1)
    n = K // 2 if of == "a small product" else K
    x, w = rng.random((n, 8), chunks=(CHUNK, 8)), rng.random((n, 4), chunks=(CHUNK, 4))
    with dask.config.set(scheduler="threads", num_workers=2):
        s = x[:, :1] - x[:, 0] if of == "differences" else multimm.matmul(x, x.T, chunks="operands")
        kernel = np.exp(-(s**2))
        operands = (w.T, kernel) if turned else (kernel, w)
        product = multimm.matmul(*operands)
        np.testing.assert_allclose(product.compute(), np.matmul(*dask.compute(*operands)))
        share = 2 if of == "a small product" else 4
        assert any(peak_of(product) < kernel.nbytes / share for _ in range(3))
        if of == "differences":
            assert multimm.plan(*operands).peak_bytes < kernel.nbytes / 40


def counted(shape, seed=0):
    source = Counted(np.random.default_rng(seed).integers(-4, 5, shape).astype("f8"))
    return source, da.from_array(source, chunks=CHUNK)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("turned", [False, True])
def test_an_array_in_memory_beside_an_operand_beyond_it(turned):
    x, y = (np.random.default_rng(n).random(shape) for n, shape in enumerate(((M, K), (K, M))))
    b = read(y) + 1
    a, b, exact = (b.T, x.T, (y + 1).T @ x.T) if turned else (x, b, x @ (y + 1))
    with dask.config.set(scheduler="threads", num_workers=2):
        product = multimm.matmul(a, b)
        np.testing.assert_allclose(product.compute(), exact)
        assert min(peak_of(product) for _ in range(3)) < 0.8 * y.nbytes


@pytest.mark.usefixtures("little_memory")
def test_each_chunk_is_made_once_where_c_fits():
    (x, a), (y, b) = counted((M, K)), counted((K, M), 1)
    c = multimm.matmul(a, b).compute(scheduler="threads", num_workers=2)
    np.testing.assert_array_equal(c, x.array @ y.array)
    for source in (x, y):
        assert len(source.reads) == (M // CHUNK) * (K // CHUNK)
        assert {*source.reads.values()} == {1}


def test_chunks_are_made_again_where_c_does_not_fit_and_never_more_often_than_by_dask(monkeypatch):
    monkeypatch.setattr("multimm.products.local", lambda gpu: small(3_000_000, threads=1))
    (x, a), (y, b) = counted((1000, 1000)), counted((1000, 1000), 1)
    ours = multimm.matmul(a, b)
    np.testing.assert_array_equal(ours.compute(scheduler="sync"), x.array @ y.array)
    most = max(max(source.reads.values()) for source in (x, y))
    assert 1 < most <= 1000 // CHUNK


def test_chunks_are_made_again_beside_others_that_are_made_once(monkeypatch):
    monkeypatch.setattr("multimm.products.local", lambda gpu: small(3_000_000, threads=1))
    (x, a), b = counted((1000, 1000)), da.random.default_rng(1).random((1000, 1000), chunks=CHUNK)
    c = multimm.matmul(a, b).compute(scheduler="sync")
    np.testing.assert_allclose(c, x.array @ b.compute(scheduler="sync"))
    assert 1 < max(x.reads.values()) <= 1000 // CHUNK


@pytest.mark.parametrize("budget", [MEMORY, 3_000_000])
def test_chunks_that_dask_makes_once_are_made_once(budget, monkeypatch):
    monkeypatch.setattr("multimm.products.local", lambda gpu: small(budget, threads=1))
    made = Counter()

    def part(*at):
        made[at] += 1
        return np.random.default_rng().random((CHUNK, CHUNK))  # another one each time

    parts = [[dask.delayed(part)(i, j) for j in range(5)] for i in range(5)]
    a = da.block([[da.from_delayed(x, (CHUNK, CHUNK), "f8") for x in row] for row in parts])
    multimm.matmul(counted((1000, 1000))[1], a).compute(scheduler="sync")
    assert len(made) == 25
    assert {*made.values()} == {1}


@pytest.mark.parametrize("budget", [MEMORY, 3_000_000])
@pytest.mark.parametrize("product", [lambda x: (x.T, x), lambda x: (x.T, x + 1), lambda x: (x, x)])
def test_what_both_operands_are_made_of_is_made_once(product, budget, monkeypatch):
    monkeypatch.setattr("multimm.products.local", lambda gpu: small(budget, threads=1))
    made = Counter()

    def noise(block, block_id=None):
        made[block_id] += 1
        return np.random.default_rng().random(block.shape)  # another one each time

    x = counted((1000, 1000))[1].map_blocks(noise, dtype="f8", meta=np.empty((0, 0)))
    multimm.matmul(*product(x)).compute(scheduler="sync")
    assert len(made) == 25
    assert {*made.values()} == {1}


@pytest.mark.usefixtures("little_memory")
def test_a_gram_matrix_makes_each_chunk_once():
    x, a = counted((K, M))
    c = multimm.matmul(a.T, a).compute(scheduler="threads", num_workers=2)
    np.testing.assert_array_equal(c, x.array.T @ x.array)
    assert {*x.reads.values()} == {1}


#: What is left to Dask's tasks: each chunk is made once.
LEFT = {
    "needed by others": lambda a: a - a.mean(axis=0),
    "chunks of several sizes": lambda a: a.rechunk((M, (80, 120) * (K // 200))),
    "annotated": lambda a: annotated(a),
}


def annotated(a):
    with dask.annotate(retries=2):
        return a.map_blocks(np.array, dtype=a.dtype)


@pytest.mark.parametrize("kind", LEFT)
def test_what_other_chunks_are_needed_for_is_left_to_dask(kind, monkeypatch):
    monkeypatch.setattr("multimm.products.local", lambda gpu: small(40_000_000))
    (x, a), (_, b) = counted((M, K)), counted((K, M), 1)
    a = LEFT[kind](a)
    with dask.config.set({"optimization.fuse.active": False}):
        c = multimm.matmul(a, b)
        monkeypatch.setattr("multimm.products.local", lambda gpu: small(MEMORY))
        again = multimm.matmul(a, b)
        exact = c.compute(scheduler="sync")
        x.reads.clear()
        np.testing.assert_allclose(again.compute(scheduler="sync"), exact)
    assert {*x.reads.values()} == {1}


@pytest.mark.usefixtures("little_memory")
def test_copies_and_slices_of_such_a_product():
    (x, a), (y, b) = counted((M, K)), counted((K, M), 1)
    c, exact = multimm.matmul(a, b), x.array @ y.array
    np.testing.assert_array_equal(clone(c).compute(scheduler="sync"), exact)
    np.testing.assert_array_equal(bind(c, da.ones(3)).compute(scheduler="sync"), exact)
    x.reads.clear()
    np.testing.assert_array_equal(c[:CHUNK].compute(scheduler="sync"), exact[:CHUNK])
    assert sum(x.reads.values()) < (M // CHUNK) * (K // CHUNK)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("wrong", "error"), [(lambda x: 1 / 0, ZeroDivisionError),
                                              (lambda x: x[1:], ShapeError)])  # fmt: skip
def test_an_error_says_which_chunk_was_to_be_made(wrong, error):
    def change(x, block_id=None):
        return wrong(x) if block_id == (1, 7) else x

    a = counted((M, K))[1].map_blocks(change, dtype="f8", name="changed")
    with pytest.raises(error) as raised:
        multimm.matmul(a, counted((K, M))[1]).compute(scheduler="sync")
    assert any("('changed', 1, 7)" in note for note in raised.value.__notes__)


#: Nothing stops a worker that shares the memory of this process with all that was imported.
UNWATCHED = {f"distributed.worker.memory.{at}": False for at in ("target", "spill", "pause")}


@pytest.fixture(scope="module")
def client():
    with (
        dask.config.set(UNWATCHED),
        in_threads(2, 1, memory_limit="20MB") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "kind",
    others_slow(["a row", "an operand", "below an operand", "an argument"], "a row", "an argument"),
)
def test_what_is_in_memory_on_workers_is_given_to_what_makes_chunks(client, kind, tmp_path):
    x, y = (np.random.default_rng(n).random((1200, 1200)) for n in range(2))
    a, b = from_zarr(x, tmp_path / "a"), from_zarr(y, tmp_path / "b")
    with client.as_current():
        if kind == "a row":
            a, x = a - da.from_array(x[0], chunks=CHUNK).persist(), x - x[0]
        elif kind == "an argument":
            a, x = a.map_blocks(np.multiply, client.scatter(3.0), dtype="f8"), 3 * x
        else:
            b, y = (b.persist(), y) if kind == "an operand" else (b.persist() + 1, y + 1)
        np.testing.assert_allclose(multimm.matmul(a, b).compute(), x @ y)


@pytest.mark.parametrize("kind", ["A B", "X' X"])
def test_workers_do_not_spill_what_they_can_make_when_it_is_needed(client, kind, tmp_path):
    x, y = (np.random.default_rng(n).random((1200, 1200)) for n in range(2))
    a, b = from_zarr(x, tmp_path / "a") + 1, from_zarr(y, tmp_path / "b")
    if kind == "X' X":
        y, b = (x + 1).T, a.T
    with client.as_current():
        plan = multimm.plan(a, b)
        assert plan.bytes_spilled < 0.3 * x.nbytes  # of C, at most
        np.testing.assert_allclose(multimm.matmul(a, b).compute(), (x + 1) @ y)


@pytest.mark.usefixtures("little_memory")
def test_chunks_that_no_thread_could_make_beside_another_are_left_to_dask():
    a, b = (da.from_array(Counted(np.ones((4000, 4000))), chunks=2000) for _ in "ab")
    assert multimm.matmul(a, b)[0, 0].compute(scheduler="sync") == 4000


@pytest.mark.alone
@pytest.mark.usefixtures("little_memory")
@pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # by Dask's product
@pytest.mark.parametrize(
    "kind",
    others_slow(["in memory", "random", "read", "uneven", "x @ x.T"], "read", "uneven", "x @ x.T"),
)
def test_a_result_beyond_memory_that_is_used_at_once_stays_within_it(kind):
    """Or takes little more than Dask's: what takes a block of C away runs right behind it."""
    x, y = (np.random.default_rng(n).random(shape) for n, shape in enumerate(((M, K), (K, M))))
    x, y = x.T[:1600], y.T[:, :1600]
    if kind == "read":
        a, b = read(x), read(y)
    elif kind == "uneven":
        a, b = (
            da.from_array(z, chunks=tuple((120, 280) * (n // 400) for n in z.shape))
            .map_blocks(np.copy) for z in (x, y)
        )  # fmt: skip
    elif kind == "random":
        a, b = (da.random.default_rng(n).random(z.shape, chunks=CHUNK) for n, z in ((0, x), (1, y)))
    else:
        a, b = da.from_array(x, chunks=CHUNK), da.from_array(y, chunks=CHUNK)
    b = a.T if kind == "x @ x.T" else b
    product = multimm.matmul(a, b)
    with dask.config.set(scheduler="threads", num_workers=2):
        for use in (lambda c: da.argtopk(c, 3, axis=1), lambda c: c.max(axis=0)):
            most = max(1.5 * peak_of(use(a @ b)), MEMORY)
            assert any(peak_of(use(product)) < most for _ in range(3))
        if kind != "random":
            right = x @ (x.T if kind == "x @ x.T" else y)
            np.testing.assert_allclose(product.max(axis=0).compute(), right.max(axis=0))
            np.testing.assert_allclose(product[-5:, :3].compute(), right[-5:, :3])
