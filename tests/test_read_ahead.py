"""Operands that tasks make: a product has no more of them in memory than Dask's own has."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, WorkerPlugin
from peaks import peak_of
from repeated import others_slow

import multimm

pytestmark = pytest.mark.alone

#: Shape and chunks of A, and of B; None: B is A transposed.
PRODUCTS = {
    "X X' of a wide X": ((300, 40_000), (300, 500), None, None),
    "one block of C": ((300, 30_000), (300, 500), (30_000, 400), (400, 400)),
    "two blocks of C": ((600, 30_000), (300, 500), (30_000, 300), (500, 300)),
    "four blocks of C": ((600, 30_000), (300, 500), (30_000, 600), (500, 300)),
    "small chunks": ((300, 20_000), (150, 200), (20_000, 300), (200, 150)),
    "X' X of a tall X": ((40_000, 300), (500, 300), None, None),
    "large chunks": ((1200, 12_000), (1200, 300), (12_000, 1200), (300, 1200)),
    "squares": ((2000, 2000), (400, 400), (2000, 2000), (400, 400)),
}
#: How many times as much as Dask's own product may be in memory at once; and, where that is little,
#: which share of the operands.
TIMES, LITTLE = 1.5, 0.3
#: How often a product may be run: what threads hold at once is a matter of timing.
RUNS = 3
#: Threads and a product; `make test` runs those that take least time.
TABLE = [
    pytest.param(threads, name, marks=[pytest.mark.slow] * (threads == 1 or at < 5))
    for at, name in enumerate(PRODUCTS) for threads in (1, 4)
    if threads > 1 or name in ("four blocks of C", "squares")  # nothing is made ahead by one
]  # fmt: skip


def operands(name: str) -> tuple[da.Array, da.Array]:
    """A and B, made by tasks that take their time: others run meanwhile."""

    def made(seed: int, shape: Any, chunks: Any) -> da.Array:
        return da.random.default_rng(seed).random(shape, chunks=chunks, dtype="f4")

    shape, chunks, other, others = PRODUCTS[name]
    a = made(0, shape, chunks)
    if other is not None:
        return a, made(1, other, others)
    return (a, a.T) if shape[0] < shape[1] else (a.T, a)


@pytest.mark.parametrize(("threads", "name"), TABLE)
def test_threads_hold_no_more_of_lazy_operands_than_dasks_product(threads, name):
    a, b = operands(name)
    with dask.config.set(scheduler="threads", num_workers=threads):
        most = max(TIMES * peak_of(a @ b), LITTLE * (a.nbytes + b.nbytes))
        assert any(peak_of(multimm.matmul(a, b)) < most for _ in range(RUNS))


class Most(WorkerPlugin):
    """The most bytes of blocks that a worker had at once."""

    def setup(self, worker: Any) -> None:
        self.worker, self.bytes = worker, 0

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        held = (ts.nbytes or 0 for ts in self.worker.state.tasks.values() if ts.state == "memory")
        self.bytes = max(self.bytes, sum(held))


@pytest.mark.parametrize("workers", others_slow([1, 2], 2))
def test_workers_of_several_threads_hold_no_more_of_them_either(workers):
    x = da.random.default_rng(0).random((30_000, 250), chunks=(250, 250))
    held = []
    for product in (x.T @ x, multimm.matmul(x.T, x)):
        with (
            in_threads(workers, 4 // workers, memory_limit=0) as cluster,
            Client(cluster) as client,
        ):
            client.register_plugin(Most(), name="most")
            c = product.sum().compute()
            held.append(sum(w.plugins["most"].bytes for w in cluster.workers.values()))
        np.testing.assert_allclose(c, (x.sum(axis=1) ** 2).sum().compute(scheduler="threads"))
    theirs, ours = held
    assert ours < max(TIMES * theirs, LITTLE * x.nbytes)


def test_two_products_with_one_operand_take_one_pass_over_it():
    """X Q and X' (X Q), as randomized decompositions ask for them: X is made once, never whole."""
    x = da.random.default_rng(0).random((48_000, 250), chunks=(1200, 250))
    q = np.random.default_rng(1).random((250, 8))
    exact = x.compute(scheduler="threads")
    exact = (exact @ q).sum(), (exact.T @ (exact @ q)).sum()

    def held(matmul: Any) -> int:
        with in_threads(2, 1, memory_limit=0) as cluster, Client(cluster) as client:
            client.register_plugin(Most(), name="most")
            y = matmul(x, da.from_array(q, chunks=(250, 8)))
            sums = dask.compute(y.sum(), matmul(x.T, y).sum())
            np.testing.assert_allclose(sums, exact)
            return sum(w.plugins["most"].bytes for w in cluster.workers.values())

    most = max(TIMES * held(da.matmul), LITTLE * x.nbytes)
    assert any(held(multimm.matmul) < most for _ in range(RUNS))
