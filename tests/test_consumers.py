"""What uses C: slices compute what they need, and consumers of blocks come right behind these."""

from __future__ import annotations

from itertools import cycle

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, get_client
from distributed.diagnostics.plugin import SchedulerPlugin
from peaks import peak_and_value, peak_of
from repeated import others_slow

import multimm
from multimm.planning.spec import ClusterSpec, DeviceSpec

SIZE, BLOCK = 48, 8


def integers(seed, shape=(SIZE, SIZE), chunks=BLOCK):
    x = np.random.default_rng(seed).integers(-4, 5, shape).astype("f8")
    return x, da.from_array(x, chunks=chunks, inline_array=True)


def tasks_of(array):
    return len(dict(dask.optimize(array)[0].__dask_graph__()))


# ------------------------------------------------------------------- slices


@pytest.fixture
def little_memory(monkeypatch):
    """A process that holds a tenth of the products below: they go in row panels."""
    device = DeviceSpec("small", "cpu", 3 * 10**5, 100.0, 10.0, False)
    monkeypatch.setattr(
        "multimm.products.local", lambda gpu: ClusterSpec.homogeneous(device, 1, threads=1)
    )


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", others_slow(["product", "symmetric", "file"], "symmetric", "file"))
def test_a_slice_of_a_product_in_row_panels_needs_the_tasks_of_its_blocks(kind, tmp_path):
    n = 400
    x, a = integers(1, (n, 40), (20, 40))
    y, b = integers(2, (40, n), (40, 20))
    if kind == "file":
        np.save(tmp_path / "x.npy", x)
        a = multimm.io.open_array(tmp_path / "x.npy", chunks=(20, 40))
    if kind == "symmetric":
        y, b = x.T, a.T
    c = multimm.matmul(a, b, blocks=20, slabs=10)
    whole = tasks_of(c)
    assert tasks_of(c.blocks[-1, -1]) < whole / 20
    assert tasks_of(c[-3:, -3:]) < whole / 20
    for part in (np.s_[-3:, -3:], np.s_[5], np.s_[:, 7], np.s_[100:250, 60:61]):
        np.testing.assert_array_equal(c[part].compute(scheduler="sync"), (x @ y)[part])
    np.testing.assert_array_equal(c.compute(scheduler="threads"), x @ y)


# ---------------------------------------------------------------- consumers


class Started(SchedulerPlugin):
    """Notes the order in which the scheduler wants tasks to run."""

    name = "started"

    def __init__(self, scheduler):
        self.scheduler, self.priority, self.needs = scheduler, {}, {}

    def transition(self, key, start, finish, *args, **kwargs):
        if start == "released" and (ts := self.scheduler.tasks.get(key)):
            self.priority[key] = ts.priority
            self.needs[key] = {dependency.key for dependency in ts.dependencies}


@pytest.fixture(scope="module")
def cluster():
    with in_threads() as cluster, Client(cluster):
        yield cluster


@pytest.fixture
def started(cluster):
    started = Started(cluster.scheduler)
    cluster.scheduler.add_plugin(started)
    yield started
    cluster.scheduler.remove_plugin(started.name)


def test_what_uses_a_block_comes_right_behind_it(started):
    (x, a), (y, b), (z, c) = integers(3), integers(4), integers(5)
    product = multimm.matmul(a, b, blocks=BLOCK, slabs=SIZE)
    less = product - c.map_blocks(np.negative)
    np.testing.assert_array_equal(abs(less).sum().compute(), abs(x @ y + z).sum())
    blocks = {key for key in started.priority if key[0] == product.name}
    assert len(blocks) == product.npartitions
    priority = started.priority
    for block in blocks:
        (user,) = (key for key, needs in started.needs.items() if block in needs)
        # It, and the block of the other array that it needs, which nothing needs before.
        for key in {user} | started.needs[user]:
            between = [b for b in blocks if priority[block] < priority[b] < priority[key]]
            assert priority[key] >= priority[block]
            assert not between


def test_priorities_that_the_user_sets_stay_with_their_tasks(started):
    (x, a), (y, b) = integers(8), integers(9)
    with dask.annotate(priority=2):
        a = a.map_blocks(np.negative)
    product = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
    with dask.annotate(priority=-5):
        late = product.map_blocks(np.positive)
    client = get_client()
    futures = client.compute([late, product.map_blocks(np.negative)], optimize_graph=False)
    for got, right in zip(client.gather(futures), (-x @ y, x @ y), strict=True):
        np.testing.assert_array_equal(got, right)
    wanted = {a.name: -2, late.name: 5}  # smaller first
    assert wanted.keys() <= {key[0] for key in started.priority}
    for key, (first, *_) in started.priority.items():
        assert first == wanted.get(key[0], 0), key


def test_small_products_of_many_lazy_chunks_make_them_where_they_multiply(cluster):
    (x, a), (y, b) = integers(6, (600, 500), 50), integers(7, (500, 400), 50)
    product = multimm.matmul(a, b)
    assert tasks_of(product[:50, :50]) < 0.75 * tasks_of(product)
    before = fetched(cluster)
    np.testing.assert_array_equal(product.persist().compute(), x @ y)
    assert fetched(cluster) - before < 50  # one task would wait for some 150 of the 200


def fetched(cluster):
    """Blocks that workers have had of others."""
    logs = (worker.transfer_incoming_log for worker in cluster.workers.values())
    return sum(len(fetch["keys"]) for log in logs for fetch in log)


# ------------------------------------------------------------------- memory

#: Rows, k and columns, in chunks of so many: C has 25 blocks, 26 MB.
SIDES, CHUNK = (2560, 128, 2560), 512
#: How many times as much as Dask's own product may be in memory at once; and, where that is little,
#: which share of C.
TIMES, LITTLE = 1.5, 0.3
#: Of X X', of which a task makes two blocks: from 0.27 to 0.34 were seen, written by four threads.
LITTLE_OF_TWO = 0.4
#: How often a product may be run: what threads hold at once is a matter of timing.
RUNS = 6
CONSUMERS = {
    "(C - 1).std()": lambda c: (c - 1).std(),
    "C.sum()": lambda c: c.sum(),
    "C.max(axis=1)": lambda c: c.max(axis=1),
    "the three largest of each row": lambda c: da.argtopk(c, 3, axis=1),
    "C - x": lambda c: abs(c - da.ones(c.shape, chunks=CHUNK, dtype=c.dtype)).max(),
    "C - C.mean(0)": lambda c: abs(c - c.mean(0)).max(),
    "map_blocks": lambda c: c.map_blocks(np.sqrt).sum(axis=0),
    "written": lambda c: da.store(c, Nowhere(), lock=False, compute=False),
}
#: Threads, what uses C, and what it is; `make test` runs those that take least time.
MEMORY = [
    pytest.param(
        threads, user, kind, marks=[pytest.mark.slow] * (user != "(C - 1).std()" or threads > 2)
    )
    for threads in (1, 4) for user in CONSUMERS for kind in ("A B", "X X'")
    # Half of X X' is multiplied, and the other half waits for the means of its columns. One thread
    # takes tasks in their order, whatever they are: few users tell all orders.
    if (user, kind) != ("C - C.mean(0)", "X X'")
    and (threads > 1 or user in ("(C - 1).std()", "C.max(axis=1)", "C - C.mean(0)"))
] + [(2, "(C - 1).std()", kind) for kind in ("small k", "lazy operands")]  # fmt: skip


class Nowhere:
    """A file that forgets."""

    def __setitem__(self, at, block):
        pass


def operands(kind):
    """A and B."""
    m, k, n = SIDES
    k = 4 if kind == "small k" else k
    if kind == "lazy operands":
        rng = da.random.default_rng(1)
        return (rng.random(shape, chunks=CHUNK, dtype="f4") for shape in ((m, k), (k, n)))
    rng = np.random.default_rng(1)
    a, b = (
        da.from_array(rng.random(shape, dtype="f4"), chunks=CHUNK) for shape in ((m, k), (k, n))
    )
    return (a, a.T) if kind == "X X'" else (a, b)


@pytest.mark.alone
@pytest.mark.parametrize(("threads", "user", "kind"), MEMORY)
def test_what_uses_c_holds_no_more_of_it_than_of_dasks_product(threads, user, kind):
    a, b = operands(kind)
    with dask.config.set(scheduler="threads", num_workers=threads):
        theirs, ours = a @ b, multimm.matmul(a, b)
        use = CONSUMERS[user]
        dasks = max(peak_of(use(theirs)) for _ in range(min(threads, 3)))
        little = LITTLE_OF_TWO if kind == "X X'" else LITTLE
        most = max(TIMES * dasks, little * theirs.nbytes)
        assert any(peak_of(use(ours)) < most for _ in range(RUNS))


#: Rows, k and columns of operands in memory, in chunks of 200: joined without bound, blocks of C
#: are several times as wide as Dask's, and A is copied as a whole.
SMALL_IN_MEMORY = {
    "a tall C less its means": ((12_000, 400, 400), "C - C.mean(0)"),
    "a square C less its means": ((6000, 400, 6000), "C - C.mean(0)"),
    "a square C": ((2000, 400, 2000), "C.sum()"),
}


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # by Dask's product
@pytest.mark.parametrize(
    "kind",
    others_slow(SMALL_IN_MEMORY, "a tall C less its means", "a square C"),
)
def test_blocks_of_small_chunks_are_joined_no_further_than_what_uses_c_allows(kind):
    (m, k, n), user = SMALL_IN_MEMORY[kind]
    rng = np.random.default_rng(1)
    a, b = (da.from_array(rng.random(shape), chunks=200) for shape in ((m, k), (k, n)))
    with dask.config.set(scheduler="threads", num_workers=2):
        theirs, ours = a @ b, multimm.matmul(a, b)
        assert ours.npartitions < theirs.npartitions  # some are
        use = CONSUMERS[user]
        little = LITTLE * theirs.nbytes if user == "C.sum()" else 0
        most = max(TIMES * peak_of(use(theirs)), little)
        assert any(peak_of(use(ours)) < most for _ in range(RUNS))


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # by Dask's product
def test_a_large_c_of_uneven_chunks_is_not_held():
    """Chunks of C would be cut by tasks of their own out of blocks that are no chunks."""

    def in_turn(total):
        for size in cycle((100, 250, 190)):
            if total <= 0:
                return
            yield min(size, total)
            total -= size

    def operand(seed, *shape):
        x = np.random.default_rng(seed).random(shape)
        return da.from_array(x, chunks=tuple(map(tuple, map(in_turn, shape))))

    a, b, use = operand(1, 6000, 200), operand(2, 200, 1500), CONSUMERS["C - C.mean(0)"]
    with dask.config.set(scheduler="threads", num_workers=2):
        theirs, ours = a @ b, multimm.matmul(a, b)
        dasks, value = peak_and_value(use(theirs))
        np.testing.assert_allclose(use(ours).compute(), value)
        assert any(peak_of(use(ours)) < TIMES * dasks for _ in range(RUNS))


#: Of 16 MB and less, which one task would multiply in the time of its calls.
SMALL = {
    "X' Y": lambda x: (x.T, x[:, :20]),
    "X v": lambda x: (x, x[0]),
    "X' X": lambda x: (x.T, x),
    "long k": lambda x: (x[:, :40].T, x[:, 40:] + 1),
}


@pytest.mark.parametrize("kind", SMALL)
def test_small_products_of_lazy_chunks_hold_no_more_than_dasks(kind):
    x = da.random.default_rng(1).random((20_000, 100), chunks=(2000, 100))
    a, b = SMALL[kind](x)
    with dask.config.set(scheduler="sync"):
        theirs, ours = a @ b, multimm.matmul(a, b)
        value = ours.compute()  # what is made once, such as the plan
        dasks, expected = peak_and_value(theirs)
        assert peak_of(ours) < TIMES * dasks + 1_000_000
        np.testing.assert_allclose(value, expected)


#: In 64 chunks of 160 kB in float64: joined without bound they are 10 MB, and held twice.
ROWS, COLUMNS, CHUNKS = 200, 100, 64
SMALL_CHUNKS = {
    "X v": lambda x: (x, x[0]),
    "X' X": lambda x: (x.T, x),
    "X' Y": lambda x: (x.T, x[:, :20] + 1),
    "x y": lambda x: (x[:, 0], x[:, 1]),
    "uneven chunks": lambda x: (x.rechunk(((ROWS - 50, ROWS + 50) * (CHUNKS // 2), -1)), x[0]),
    "small in both axes": lambda x: (x.rechunk((ROWS, 50)), x[0]),
    "centred": lambda x: ((x - 1).T, x),
}


def small_chunks(dtype="f8", count=CHUNKS):
    """Made by tasks: what `da.ones` makes is one number, whatever its shape is."""
    x = da.ones((count * ROWS, COLUMNS), chunks=(ROWS, COLUMNS), dtype=dtype)
    return x.map_blocks(np.copy, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    others_slow(
        [*((kind, "f8") for kind in SMALL_CHUNKS), ("X v", "i1")],
        *(("X' X", "f8"), ("uneven chunks", "f8"), ("centred", "f8"), ("X v", "i1")),
    ),
)
def test_products_of_many_small_lazy_chunks_hold_no_more_than_dasks(kind, dtype):
    a, b = SMALL_CHUNKS[kind](small_chunks(dtype))
    with dask.config.set(scheduler="sync"):
        theirs, ours = (a @ b).sum(), multimm.matmul(a, b).sum()
        value = ours.compute()
        dasks, expected = peak_and_value(theirs)
        assert peak_of(ours) < TIMES * dasks + 1_000_000
        np.testing.assert_allclose(value, expected)


@pytest.mark.parametrize("kind", ["X W", "X' Y"])
def test_a_process_says_how_little_it_holds_of_chunks_that_tasks_make(kind):
    x = small_chunks(count=130)
    a, b = {"X W": (x, np.ones((COLUMNS, 20))), "X' Y": (x.T, x[:, :20] + 1)}[kind]
    with dask.config.set(scheduler="threads", num_workers=2):
        plan, product = multimm.plan(a, b), multimm.matmul(a, b).sum()
        product.compute()
        most = plan.peak_bytes + x.nbytes / 10  # what Dask notes of tasks
        assert any(peak_of(product) < most for _ in range(RUNS))
        assert plan.peak_bytes < x.nbytes / 4


@pytest.mark.parametrize("side", ["A", "B"])
def test_an_array_in_memory_is_not_copied_for_one_that_tasks_make(side):
    x = da.ones((400, 4000), chunks=(200, 200)).map_blocks(np.copy)
    w = np.ones((4000, 400))
    a, b = (w.T, x.T) if side == "A" else (x, w)
    with dask.config.set(scheduler="threads", num_workers=2):
        product = multimm.matmul(a, b)
        np.testing.assert_array_equal(product.compute(), np.full((400, 400), 4000.0))
        assert any(peak_of(product) < w.nbytes / 2 for _ in range(RUNS))


def test_dask_puts_chains_of_few_products_in_order():
    """It notes of each all chunks that it is made of: 203 MB for one chain of 10,000 chunks."""
    x = da.ones((10**6, COLUMNS), chunks=(100, COLUMNS)).map_blocks(np.copy)
    with dask.config.set(scheduler="sync"):
        assert multimm.plan(x.T, x).layout.links <= 64


def test_contractions_of_many_small_lazy_chunks_hold_no_more_than_dasks():
    x = small_chunks().reshape(-1, ROWS, COLUMNS)
    with dask.config.set(scheduler="sync"):
        theirs, ours = (f("tij,tik->jk", x, x[..., :20]) for f in (da.einsum, multimm.einsum))
        value = ours.compute()
        dasks, expected = peak_and_value(theirs)
        assert peak_of(ours) < TIMES * dasks + 1_000_000
        np.testing.assert_allclose(value, expected)


#: In 30 chunks of 1.6 MB, made on four workers of one thread: joined without bound they are 48 MB.
ON_WORKERS = {
    "X v": lambda x: (x, x[0]),
    "X' X": lambda x: (x.T, x),
    "X' Y": lambda x: (x.T, x[:, :20] + 1),
    "as small as one task": lambda x: (x[:, :40].T, x[:, 40:44] + 1),
    "stack": lambda x: (x.reshape(-1, ROWS, COLUMNS), np.ones((COLUMNS, 4))),
}


@pytest.mark.alone
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("kind", others_slow(ON_WORKERS, "X' X", "as small as one task"))
def test_lazy_chunks_on_workers_hold_no_more_than_dasks(kind):
    x = da.random.default_rng(1).random((60_000, COLUMNS), chunks=(10 * ROWS, COLUMNS))
    a, b = ON_WORKERS[kind](x)
    theirs, ours = (a @ b).sum(), multimm.matmul(a, b).sum()
    dasks, expected = peak_and_value(theirs)
    np.testing.assert_allclose(ours.compute(), expected)
    most = TIMES * max(dasks, peak_of(theirs)) + 1_000_000
    assert any(peak_of(ours) < most for _ in range(RUNS))


@pytest.mark.alone
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # by Dask's product
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(False, id="exp(-(X X')^2) w"),
        pytest.param(True, id="exp(-(X Y')^2) w", marks=pytest.mark.slow),
    ],
)
def test_workers_hold_no_whole_kernel_matrix(other):
    """Its chunks are let go of once they are multiplied by few columns."""
    x = da.random.default_rng(1).random((3200, 40), chunks=200)
    y = da.random.default_rng(2).random((3200, 40), chunks=200) if other else x
    w = np.random.default_rng(3).random((3200, 4))
    kernel = da.exp(-(multimm.matmul(x, y.T, blocks=200) ** 2))
    product = multimm.matmul(kernel, w)
    expected = np.exp(-((x.compute() @ y.compute().T) ** 2)) @ w

    def held():
        peak, value = peak_and_value(product)
        np.testing.assert_allclose(value, expected)
        return peak

    assert any(held() < 0.95 * kernel.nbytes for _ in range(RUNS))


def test_blocks_for_consumers_cut_no_short_k():
    """Of 10,000 chunks of A blocks of C in 10 columns are made, and k is not cut for them."""
    a, b = da.ones((10**6, 100), chunks=(100, 100)), da.ones((100, 10), chunks=(100, 10))
    with dask.config.set(scheduler="threads", num_workers=2):
        c = multimm.matmul(a, b)
        assert multimm.plan(a, b).tasks == c.npartitions < 2000
