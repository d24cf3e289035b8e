"""The systems that are compared: what each multiplies, and how all of them are measured."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import dask
import dask.array as da
import distributed
import numpy as np
import pytest

import multimm
from benchmarks import cublas
from benchmarks.harness import WrongResultError
from benchmarks.peers import __main__ as group_main
from benchmarks.peers import cupy_matmul, ours, system, trace
from benchmarks.peers.__main__ import job
from benchmarks.peers.base import Machine, System, crossing, measure, normal
from benchmarks.peers.on_dask import OnDask, RunError, elements
from benchmarks.sweep_cases import Product

pytestmark = pytest.mark.slow

GB = 10**9
CPU = Machine("cpu", 2, 8 * GB, 8 * GB, 60.0)
GPU = Machine("gpu", 2, 8 * GB, 8 * GB, 60.0)
SQUARE = Product("strong", "square", 40, 40, 40)
RECTANGLE = Product("rectangular", "r", 40, 24, 56)
GRAM = Product("tall", "t", 24, 24, 200, gram=True)
PRODUCTS = [SQUARE, RECTANGLE, GRAM]


# How all are measured


class Toy(System):
    """Multiplies NumPy arrays, and keeps a diary."""

    def __init__(self, machine=CPU, spoil=0.0, takes=1.0):
        super().__init__(machine)
        self.diary, self.now, self.spoil, self.takes = [], 0.0, spoil, takes

    def operands(self, product, precision, seed):
        self.diary.append(f"operands {seed}")
        self.now += 100.0
        return normal(product.m, product.k, seed), normal(product.k, product.n, seed + 1000)

    def before(self):
        self.now += 10.0

    def multiply(self, operands, precision):
        self.diary.append("multiply")
        self.now += self.takes
        return operands[0] @ operands[1] + np.float32(self.spoil)

    def after(self, result):
        self.diary.append("after")

    def sample(self, operands, result, at):
        self.diary.append("sample")
        self.at = at
        return crossing(*operands, result, at)

    def verify(self, operands, result, precision):
        self.diary.append("verify")

    def facts(self, product, precision, last):
        return {"plan": "p"}


def test_every_run_has_fresh_operands_and_the_clock_sees_the_product_alone():
    toy, steps = Toy(), []
    found = measure(toy, SQUARE, "float32", 3, lambda: steps.append(1), lambda: toy.now)
    assert found["seconds"] == [1.0] * 3
    assert found["plan"] == "p"
    assert 0 < found["errors"]["componentwise_u"] < 40
    assert toy.diary == [
        *("operands 0", "multiply", "after", "sample", "verify"),
        *(word for run in (1, 2, 3) for word in (f"operands {run}", "multiply", "after")),
    ]
    assert len(steps) == 4


def test_a_wrong_product_is_never_timed():
    for spoil in (1e-2, np.nan):
        toy = Toy(spoil=spoil)
        with pytest.raises(WrongResultError):
            measure(toy, SQUARE, "float32", 3)
        assert toy.diary.count("multiply") == 1


# One by one


class OnToyGpu(np.ndarray):
    """An array that has to be fetched."""

    def get(self):
        return np.asarray(self)


@pytest.fixture
def cupy(monkeypatch):
    """What the peer uses of CuPy."""
    module = ModuleType("cupy")
    module.__version__, module.float32 = "14", np.float32
    waits = []

    class Generator:
        def __init__(self, seed):
            self.rng = np.random.default_rng(seed)

        def standard_normal(self, shape, dtype):
            return self.rng.standard_normal(shape, dtype=dtype).view(OnToyGpu)

    module.random = SimpleNamespace(default_rng=Generator)
    module.matmul = np.matmul
    module.empty = lambda shape, dtype: np.full(shape, np.nan, dtype).view(OnToyGpu)
    module.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    module.cuda = ModuleType("cupy.cuda")
    module.cuda.Device = lambda: SimpleNamespace(synchronize=lambda: waits.append(1))
    module.cuda.cublas = SimpleNamespace(getVersion=lambda handle: 130100)
    module.cuda.device = SimpleNamespace(get_cublas_handle=lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    for name in cublas.OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    module.waits = waits
    return module


@pytest.mark.parametrize("product", PRODUCTS)
def test_cupy_is_waited_for(cupy, product, monkeypatch):
    monkeypatch.setattr(cupy_matmul, "STRIPE", 500)
    one = system("cupy")(GPU)
    assert len(measure(one, product, "float32", 2)["seconds"]) == 2
    assert len(cupy.waits) == 6  # for operands and for the result, of three runs
    assert "cuBLAS 130100" in one.config


def test_cupy_is_not_measured_with_tf32(cupy, monkeypatch):
    monkeypatch.setenv("CUPY_TF32", "1")
    with pytest.raises(RuntimeError, match="CUPY_TF32 set"):
        measure(system("cupy")(GPU), SQUARE, "float32", 2)


class Ready(np.ndarray):
    """An array that can be waited for."""

    def block_until_ready(self):
        return self


@pytest.fixture
def jax(monkeypatch):
    """What the peer uses of JAX, on two devices."""
    jax, sharding = ModuleType("jax"), ModuleType("jax.sharding")
    shardings, precisions = [], []
    jax.__version__ = "0"
    jax.devices = lambda kind: [f"{kind}:0", f"{kind}:1"]

    def jit(call, out_shardings):
        shardings.append(out_shardings)
        return lambda *arguments: call(*arguments)

    def matmul(a, b, precision):
        precisions.append(precision)
        return (a @ b).view(Ready)

    def normals(key, shape, dtype):
        return np.random.default_rng(key).standard_normal(shape, dtype=dtype).view(Ready)

    jax.jit = jit
    jax.random = SimpleNamespace(
        key=lambda seed: seed, split=lambda key: (2 * key, 2 * key + 1), normal=normals
    )
    jax.numpy = SimpleNamespace(matmul=matmul, float32=np.float32)
    jax.lax = SimpleNamespace(Precision=SimpleNamespace(HIGHEST="highest", DEFAULT="default"))
    jax.block_until_ready = lambda arrays: arrays
    sharding.Mesh = lambda devices, names: SimpleNamespace(devices=devices, names=names)
    sharding.NamedSharding = lambda mesh, spec: spec
    sharding.PartitionSpec = lambda *axes: axes
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.sharding", sharding)
    jax.shardings, jax.precisions = shardings, precisions
    return jax


@pytest.mark.parametrize("name", ["jax highest", "jax default"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_jax_is_sharded_and_labelled(jax, name, product):
    one = system(name)(GPU)
    with one.opened():
        assert len(measure(one, product, one.promise, 2)["seconds"]) == 2
        assert name.partition(" ")[2].upper() in one.config
        assert "1 x 2 mesh" in one.config
    assert set(jax.precisions) == {name.partition(" ")[2]}
    expected = {(("x", "y"), None), (None, ("x", "y"))} if product.gram else {("x", "y")}
    assert set(jax.shardings) == expected
    assert one.promise == ("float32" if "highest" in name else "tf32")


@pytest.mark.parametrize("name", ["multimm", "dask.array"])
def test_products_on_workers_are_placed_and_counted(name):
    one = system(name)(CPU)
    with one.opened():
        for product in (Product("strong", "s", 300, 260, 280), GRAM):
            found = measure(one, product, "float32", 2)
            assert len(found["seconds"]) == 2
            assert found["bytes_received"] >= 0
            assert found["detail"]["tasks"] >= 1
            assert 0 < found["detail"]["first_task_s"] < found["seconds"][-1]
            if name == "multimm":
                assert found["bytes_received"] == found["bytes_predicted"]
                assert found["detail"]["one_worker_tflops"] > 0
                assert ("timeline" in found["detail"]) == (product.kind == "strong")
                one.verify(*_spoilt(one, product))
        assert f"2 CPU workers of multimm.cluster.start over {'tcp'}" in one.config


@pytest.mark.parametrize("name", ["multimm", "dask.array"])
def test_operands_come_in_chunks_that_lie_in_turn(name):
    one = system(name)(CPU)
    square = Product("chunked", "c", 1200, 1200, 1200, chunk=350)
    tall = Product("chunked", "t", 256, 256, 60000, gram=True, chunk=8000)
    with one.opened():
        for product in (square, tall):
            a, b = one.operands(product, "float32", 1)
            edges = min(product.chunk, product.k), min(product.chunk, product.n)
            assert tuple(max(sizes) for sizes in b.chunks) == edges
            assert (a.name == b.T.name) == product.gram
            keys = [key for row in b.__dask_keys__() for key in row]
            holders = one.client.who_has([b.dask[key] for key in keys])
            for at, key in enumerate(keys):
                assert list(holders[key]) == [one.addresses[at % 2]]
            del a, b
            found = measure(one, product, "float32", 1)
            if name == "multimm":
                assert found["bytes_received"] == found["bytes_predicted"] > 0
                assert "chunks of" in one.config
        if name == "multimm":
            # Of the tall one sums alone travel.
            assert found["bytes_received"] <= 256 * 256 * 4


def _spoilt(one, product):
    """A product with one element off: verify must see it, and is told so by the caller."""
    operands = one.operands(product, "float32", 7)
    result = one.multiply(operands, "float32")
    spoilt = result.map_blocks(spoil, dtype=result.dtype)
    with pytest.raises(WrongResultError, match="WRONG"):
        one.verify(operands, spoilt, "float32")
    return operands, result, "float32"


def spoil(block):
    out = block.copy()
    out[0, 0] += 100
    return out


@pytest.mark.parametrize(("name", "waits"), [("multimm", 0), ("dask.array", 1)])
def test_gpus_are_waited_for_where_tasks_return_early(name, waits, monkeypatch):
    monkeypatch.setattr(distributed, "wait", lambda result: None)
    one, seen = system(name)(GPU), []
    one.client = SimpleNamespace(run=seen.append)
    assert one.run(SimpleNamespace(persist=lambda: "there")) == "there"
    assert len(seen) == waits


def test_a_run_whose_tasks_did_not_run_is_none(monkeypatch):
    ran = {"w": [("multiply", "('x', 0, 0)", 0.0, 1.0), ("transfer", "('x', 0, 1)", 0.0, 1.0)]}
    one = OnDask(CPU)
    one.client = SimpleNamespace(run=lambda call: ran)
    result = SimpleNamespace(numblocks=(1, 2))
    statuses = {(0, 0): "finished", (0, 1): "finished"}

    def fail():
        raise MemoryError("of a GPU")

    def futures(_):
        return [
            SimpleNamespace(key=("x", *at), status=s, result=fail) for at, s in statuses.items()
        ]

    monkeypatch.setattr("distributed.client.futures_of", futures)
    with pytest.raises(RunError, match="1 of 2 blocks were not computed in this run"):
        one.after(result)
    ran["w"].append(("multiply", "('x', 0, 1)", 1.0, 2.0))
    one.after(result)
    ran["w"].append(("add", "other", 2.0, 3.0))
    one.after(result)
    ran["w"].pop()
    with pytest.raises(RunError, match="2 tasks ran, 3 did before"):
        one.after(result)
    one.prepare(SQUARE, "float32")
    one.after(result)
    statuses[0, 1] = "lost"
    with pytest.raises(RunError, match="1 of 2 blocks are not there: lost"):
        one.after(result)
    statuses[0, 1] = "error"
    with pytest.raises(MemoryError, match="of a GPU"):
        one.after(result)


def test_elements_are_taken_out_of_blocks_one_task_each():
    matrix = np.random.default_rng(0).standard_normal((90, 40), dtype=np.float32)
    blocks = da.from_array(matrix, chunks=((30, 0, 25, 35), (13, 27)))
    rows, columns = np.array([0, 12, 13, 39]), np.array([29, 30, 54, 55, 89])
    for found, expected in (
        (elements(blocks.T, rows=rows), matrix.T[rows]),
        (elements(blocks, columns=rows), matrix[:, rows]),
        (elements(blocks.T, rows, columns), matrix.T[rows][:, columns]),
        (elements(blocks.T, rows[:0], columns), matrix.T[:0, columns]),
    ):
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.compute(), expected)
    # A task of its own for a transposed block would count as a second operand in memory.
    names = {str(key[0]) for key in dict(dask.optimize(elements(blocks.T, rows))[0].dask)}
    assert not [name for name in names if name.startswith(("transpose", "getitem", "rechunk"))]


def test_a_block_in_flight_that_another_task_asks_for_is_one_transfer():
    plugin, sent = trace.Trace(), ("sent", 0, 0)
    plugin.setup(SimpleNamespace(state=SimpleNamespace(tasks={sent: SimpleNamespace(run_spec=1)})))
    for start, finish in (("released", "fetch"), ("fetch", "flight"), ("flight", "fetch"),
                          ("flight", "memory"), ("memory", "released")):  # fmt: skip
        plugin.transition(("packed", 0, 0), start, finish)
    assert [kind for kind, *_ in plugin.intervals] == ["transfer"]
    # A task that secedes lasts until it is done.
    for start, finish in (("ready", "executing"), ("executing", "long-running")):
        plugin.transition(sent, start, finish)
    assert len(plugin.intervals) == 1
    plugin.transition(sent, "long-running", "memory")
    assert plugin.intervals.pop()[1] == str(sent)
    for start, finish in (("fetch", "flight"), ("flight", "missing")):  # its sender is gone
        plugin.transition(("packed", 0, 1), start, finish)
    assert len(plugin.intervals) == 1


def test_tasks_are_named_for_the_timeline():
    x = da.ones((4, 4), chunks=2)
    product = dict(multimm.matmul(x, x + 1, blocks=2, slabs=2, p_k=2).dask)
    kinds = {trace.kind_of(key, task) for key, task in product.items()}
    assert kinds == {"multiply", "add", "other"}
    assert trace.kind_of("sum-aggregate-1", None) == "add"
    assert trace.kind_of("operand-1", None) == "other"
    rows = {"b": [("pack", "k", 11.0, 12.5)], "a": [("multiply", "k", 12.0, 13.0)]}
    assert trace.timeline(rows, 10.0, 2) == [[1, 1.0, 2.5, "pack"], [0, 2.0, 3.0, "multiply"]]
    assert trace.timeline(rows, 10.0, 1) is None


def test_the_rate_of_one_worker_is_that_of_its_block_products():
    rate = ours.own_rate("float32", 64, 0.05, False)
    assert 1e-6 < rate < 10


# A group from within


class Failing(Toy):
    """Fails with the message that its product is named for."""

    config = "toy"

    def multiply(self, operands, precision):
        self.spoil = np.nan if self.spoilt else 0.0
        if self.broken:
            raise ValueError("out of\nmemory")
        return super().multiply(operands, precision)

    def prepare(self, product, precision):
        self.broken, self.spoilt = product.name == "broken", product.name == "spoilt"


@pytest.mark.parametrize(
    ("name", "last"),
    [("spoilt", {"wrong": 1}), ("broken", {"failed": 1, "reason": "ValueError: out of memory"})],
)
def test_a_group_says_what_went_wrong_and_ends(monkeypatch, name, last):
    monkeypatch.setattr(group_main, "system", lambda name: Failing)
    products = [Product("s", text, 20, 20, 20) for text in ("right", name, "right")]
    said = []
    group_main.run(job("toy", CPU, [(p, "float32", 2) for p in products]), said.append)
    assert [next(iter(message)) for message in said] == [
        *("opened", "step", "step", "step", "done"),
        next(iter(last)),
    ]
    assert said[4]["config"] == "toy"
    assert len(said[4]["seconds"]) == 2
    assert last.items() <= said[-1].items()
    json.dumps(said)
