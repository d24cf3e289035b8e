"""What uses C: slices compute what they need, and consumers of blocks come right behind these."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

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
@pytest.mark.parametrize("kind", ["product", "symmetric", "file"])
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
