"""What nobody can compute is refused at once, and what is empty is planned."""

from __future__ import annotations

import time
from itertools import product

import dask.array as da
import numpy as np
import pytest

import multimm
from multimm.errors import MemoryBudgetError, OptionError
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

GPUS = ClusterSpec.homogeneous(H200, 8)
SQUARE = MatrixSpec((3000, 3000))


@pytest.mark.alone
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
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        multimm.plan(*map(MatrixSpec, shapes), **options)
    assert time.monotonic() - begun < 1
    assert "\n" not in str(caught.value)


def test_a_product_refuses_what_its_plan_does():
    x = da.ones((3000, 3000), chunks=1000)
    for options in ({"p_k": 2**40}, {"blocks": 1}):
        with pytest.raises((OptionError, MemoryBudgetError)):
            multimm.matmul(x, x, **options)


@pytest.mark.parametrize("precision", ["float32", "ieee", "tf32"])
def test_empty_products_are_planned_on_gpus(precision):
    for m, k, n in product((0, 1, 256, 70_000), repeat=3):
        if 0 in (m, k, n):
            plan = multimm.plan(
                MatrixSpec((m, k)), MatrixSpec((k, n)), cluster=GPUS, precision=precision
            )
            plan.check()
            assert tuple(map(sum, plan.chunks)) == (m, n)
    empty = MatrixSpec((0, 256))
    multimm.plan(empty, empty, cluster=GPUS, trans_b=True, precision=precision).check()
    multimm.plan(MatrixSpec((0, 5, 6)), MatrixSpec((6, 7)), cluster=GPUS).check()


# ------------------------------------------------------- reading Zarr's chunks


@pytest.mark.parametrize("shards", [None, (200, 100)])
def test_blocks_are_read_few_storage_chunks_at_a_time(tmp_path, monkeypatch, shards):
    zarr = pytest.importorskip("zarr")
    from multimm.files import boxes

    monkeypatch.setattr(boxes.boxes, "__defaults__", (20_000,))
    x = np.random.default_rng(0).random((600, 230))
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(100, 50), shards=shards)
    asked = []
    get = zarr.Array.__getitem__

    def counted(self, where):
        part = get(self, where)
        asked.append(part.nbytes)
        return part

    monkeypatch.setattr(zarr.Array, "__getitem__", counted)
    lazy = multimm.io.open_array(tmp_path / "x.zarr", chunks=(333, 230))
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), x)
    assert max(asked) <= 100 * 50 * 8
