"""The systems that are compared: what each multiplies, and how all of them are measured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import forked

from multimm_benchmarks.harness import WrongResultError
from multimm_benchmarks.peers import system
from multimm_benchmarks.peers.__main__ import Work, job, run
from multimm_benchmarks.peers.base import Machine, System, crossing, measure, normal
from multimm_benchmarks.peers.on_dask import OnDask, RunError, elements
from multimm_benchmarks.sweep_cases import Product

pytestmark = pytest.mark.slow

GB = 10**9
CPU = Machine("cpu", 2, 8 * GB, 8 * GB, 60.0)
GPU = Machine("gpu", 2, 8 * GB, 8 * GB, 60.0)
SQUARE = Product("strong", "square", 40, 40, 40)
GRAM = Product("tall", "t", 24, 24, 200, symmetric=True)
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


@pytest.fixture(scope="module", params=["multimm", "dask.array"])
def opened(request):
    """Each of these systems, with its workers."""
    one = system(request.param)(CPU)
    with forked(), one.opened():
        yield request.param, one


def test_products_on_workers_are_placed_and_counted(opened):
    name, one = opened
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


@pytest.mark.parametrize("chunk", [0, 120])
def test_products_of_float64_are_of_float64_throughout(opened, chunk):
    name, one = opened
    square = Product("strong", "s", 300, 260, 280, chunk=chunk)
    for product in (square, replace(GRAM, chunk=chunk)):
        found = measure(one, product.at("float64"), "float64", 1)
        assert 0 < found["errors"]["rel_error"] < 1e-14
        assert 0.05 < found["errors"]["componentwise_u"] < 30
        if name == "multimm":
            assert found["detail"]["one_worker_tflops"] > 0
            if not chunk:
                assert found["bytes_received"] == found["bytes_predicted"]


@pytest.mark.parametrize("symmetric", [False, True])
def test_float64_of_one_process_is_held_to_its_own_bound(symmetric):
    one, product = system("numpy")(CPU), replace(SQUARE, symmetric=symmetric).at("float64")
    assert product.bytes == 2 * replace(product, dtype="float32").bytes
    assert measure(one, product, "float64", 1)["errors"]["componentwise_u"] < 20
    operands = one.operands(product, "float64", 0)
    assert {x.dtype.name for x in operands} == {"float64"}
    rounded = np.matmul(*(x.astype("f4") for x in operands)).astype("f8")
    one.multiply = lambda operands, precision: rounded
    with pytest.raises(WrongResultError, match="are allowed"):
        measure(one, product, "float64", 1)


def test_operands_come_in_chunks_that_lie_in_turn(opened):
    name, one = opened
    square = Product("chunked", "c", 820, 820, 820, chunk=240)
    tall = Product("chunked", "t", 256, 256, 20000, symmetric=True, chunk=2700)
    for product in (square, tall):
        a, b = one.operands(product, "float32", 1)
        edges = min(product.chunk, product.k), min(product.chunk, product.n)
        assert tuple(max(sizes) for sizes in b.chunks) == edges
        assert (a.name == b.T.name) == product.symmetric
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


# A group from within


def test_systems_of_a_group_share_their_workers(monkeypatch):
    started, real = [], OnDask.started
    monkeypatch.setattr(OnDask, "started", lambda one: started.append(one) or real(one))
    work = [Work(name, CPU, product, "float32", 1) for product in (SQUARE, GRAM)
            for name in ("multimm", "dask.array")]  # fmt: skip
    said = []
    with forked():
        run(job(work), said.append)
    assert len(started) == 1
    assert [m["opened"] for m in said if "opened" in m] == [0, 1]
    done = {m["done"]: m["config"].partition(" ")[0] for m in said if "done" in m}
    assert done == {0: "multimm.matmul,", 1: "dask.array.matmul",
                    2: "multimm.matmul,", 3: "dask.array.matmul"}  # fmt: skip
