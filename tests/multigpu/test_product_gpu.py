"""Products on dask-cuda workers through UCXX: placed, counted, verified, and after a loss."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from distributed import wait

import multimm
from multimm import products
from multimm.cluster.describe import described
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.cluster.plugins.warmup import wait_until_warm
from multimm.planning.cost import time as planned_time

pytestmark = pytest.mark.gpu

SIZE, BLOCK = 4096, 512
POOL = 8 * 2**30


def matrix(seed, chunks=BLOCK):
    import cupy

    rng = da.random.default_rng(cupy.random.default_rng(seed))
    return rng.standard_normal((SIZE, SIZE), chunks=chunks, dtype="float32")


def integers(seed):
    """Small integers, made on the GPUs again whenever a block is lost."""
    return da.map_blocks(_some, matrix(seed), dtype="float32", meta=matrix(seed)._meta)


def _some(block):
    return (block * 4).round()


@pytest.mark.multigpu(1)
@pytest.mark.parametrize("protocol", ["ucxx", "tcp"])
def test_one_gpu(protocol):
    with multimm.cluster.start(gpus=1, protocol=protocol, rmm_pool=POOL):
        a, b = matrix(1).persist(), matrix(2).persist()
        c = multimm.matmul(a, b, blocks=BLOCK).persist()
        assert type(c._meta).__module__.startswith("cupy")
        assert multimm.verify(a, b, c)
        assert bool((multimm.transpose(c) == c.T).all().compute())


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("protocol", ["ucxx", "tcp"])
def test_two_gpus_move_the_2d_bound(protocol):
    with multimm.cluster.start(gpus=2, protocol=protocol, rmm_pool=POOL) as client:
        reset_received_bytes(client)
        a, b = matrix(1), matrix(2)
        plan = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK)
        c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK).persist()
        wait(c)
        received = received_bytes(client)
        assert sum(received.values()) <= 1.05 * plan.bytes_bound
        assert plan.bytes_bound == SIZE * SIZE * 4
        assert multimm.verify(a, b, c)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_integers_travel_as_they_are(dtype):
    """A byte an element, and the sums of 4096 products of all of int8 are exact."""

    def wide(block):
        return (block * 40).round().clip(-128, 127).astype("int8")

    with multimm.cluster.start(gpus=2, rmm_pool=POOL) as client:
        a, b = (matrix(seed).map_blocks(wide, dtype="int8") for seed in (1, 2))
        plan = multimm.plan(a, b, dtype=dtype, blocks=BLOCK, slabs=BLOCK)
        assert "exact" in str(plan)
        reset_received_bytes(client)
        c = multimm.matmul(a, b, dtype=dtype, blocks=BLOCK, slabs=BLOCK).persist()
        wait(c)
        assert plan.bytes_bound == SIZE * SIZE
        assert sum(received_bytes(client).values()) <= 1.05 * plan.bytes_bound
        assert multimm.verify(a, b, c, dtype=dtype)
        x, y = (_on_host(z).astype("f8") for z in (a, b))
        np.testing.assert_array_equal(_on_host(c), (x @ y).astype(dtype))


@pytest.mark.multigpu(2)
def test_parts_of_k_on_two_gpus_have_the_bits_of_one():
    results = []
    for gpus in (1, 2):
        with multimm.cluster.start(gpus=gpus, rmm_pool=POOL):
            c = multimm.matmul(matrix(3), matrix(4), blocks=1024, slabs=600, p_k=3)
            results.append(c.map_blocks(lambda x: x.get(), meta=np.empty((0, 0), "f4")).compute())
    np.testing.assert_array_equal(*results)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("blocks", [None, 1024])
def test_complex_products_on_two_gpus(blocks):
    with multimm.cluster.start(gpus=2, rmm_pool=POOL):
        x = (matrix(7, 1024) + 1j * matrix(8, 1024)).persist()
        assert x.dtype == "complex64"
        c = multimm.matmul(x.conj(), x, blocks=blocks).persist()
        assert multimm.verify(x.conj(), x, c)
        plan = multimm.plan(x.conj().T, x, blocks=blocks)
        assert "on tensor cores" in str(plan)
        h = multimm.matmul(x.conj().T, x, blocks=blocks).persist()
        assert multimm.verify(x.conj().T, x, h)
        if plan.layout.mirrors:
            assert bool((h == h.conj().T).all().compute())


@pytest.mark.multigpu(2)
def test_a_killed_gpu_worker_does_not_change_the_product():
    with multimm.cluster.start(gpus=2, rmm_pool=POOL) as client:
        a, b = integers(5), integers(6)
        c = multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK)
        future = client.compute(c.map_blocks(lambda x: x.get(), meta=np.empty((0, 0), "f4")))
        time.sleep(0.3)
        pids = client.run(os.getpid)
        os.kill(pids[max(pids)], signal.SIGKILL)
        result = future.result(timeout=120)
        np.testing.assert_array_equal(result, _on_host(a) @ _on_host(b))


@pytest.mark.multigpu(2)
def test_killed_gpu_workers_come_back_with_all_of_their_memory():
    import cupy

    def own(dask_worker):
        return os.getpid(), int(cupy.cuda.runtime.memGetInfo()[0])

    with multimm.cluster.start(gpus=2) as client:
        a, b = integers(8), integers(9)
        exact = _on_host(a) @ _on_host(b)
        free = min(left for _, left in client.run(own).values())
        for turn in range(5):
            future = client.compute(multimm.matmul(a + 0, b + 0, blocks=BLOCK, slabs=BLOCK))
            time.sleep(0.3)
            workers = client.run(own)
            victim = sorted(workers)[turn % 2]
            os.kill(workers[victim][0], signal.SIGKILL)
            killed = time.monotonic()
            np.testing.assert_array_equal(future.result(timeout=120).get(), exact)
            while victim in (found := client.scheduler_info()["workers"]) or len(found) < 2:
                assert time.monotonic() < killed + 30
                time.sleep(0.1)
            print(f"back {time.monotonic() - killed:.1f} s after the loss")
            wait_until_warm(client)
            # A pool of the same size as before, and nothing of the killed worker's beside it.
            assert min(left for _, left in client.run(own).values()) > free - 2**30


def _on_host(x):
    return x.map_blocks(lambda block: block.get(), meta=np.empty((0, 0), "f4")).compute()


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("chunk", [600, 512, 4096])
def test_operands_in_other_chunks_are_cut_where_they_lie(chunk):
    with multimm.cluster.start(gpus=2, rmm_pool=POOL) as client:
        a, b = (matrix(seed, chunk).persist() for seed in (7, 8))
        wait([a, b])
        # Packed blocks would be a bit larger.
        fixed = {"blocks": 2048, "slabs": 1024, "precision": "ieee"}
        plan = multimm.plan(a, b, **fixed)
        reset_received_bytes(client)
        c = multimm.matmul(a, b, **fixed).persist()
        wait(c)
        received = sum(received_bytes(client).values())
        assert plan.bytes_recut > 0
        assert received == plan.bytes_received + plan.bytes_recut
        assert multimm.verify(a, b, c)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("columns", [4096, 2600])
def test_a_tall_operand_in_small_chunks_stays_where_it_lies(precision, columns):
    """Partial products of C travel, and are joined, or added; so much as was planned."""
    with multimm.cluster.start(gpus=2, rmm_pool=3 * POOL) as client:
        a, b = (
            assigned(client, tall((2**18, 4096), 1024, columns, 9)),
            tall((4096, 1024), 4096, 1024, 10),
        )
        c = multiplied(client, a, b.persist(), precision)
        assert multimm.plan(a, b, precision=precision).layout.in_place.adds == (columns < 4096)
        assert multimm.verify(a, b, c, precision=precision)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("rows", [8192, 2**18])
def test_long_operands_in_small_chunks_stay_where_they_lie(rows):
    """The small one travels in coalesced transfers, or as the one block that it is."""
    with multimm.cluster.start(gpus=2, rmm_pool=3 * POOL) as client:
        a, b = (
            assigned(client, tall((2**18, 4096), 8192, 2600, 11)),
            tall((2**18, 16), rows, 16, 12),
        )
        b = assigned(client, b)
        c = multiplied(client, a.T, b, "float32")
        assert multimm.plan(a.T, b).layout.partial_products.coalesced == (rows == 8192)
        assert multimm.verify(a.T, b, c)


def tall(shape, rows, columns, seed):
    import cupy

    rng = da.random.default_rng(cupy.random.default_rng(seed))
    return rng.standard_normal(shape, chunks=(rows, columns), dtype="float32")


def assigned(client, x):
    """Its chunks on two workers: rows of some on one of them, of others on both."""
    addresses = sorted(client.scheduler_info(-1)["workers"])
    rows, columns = map(range, x.numblocks)
    owners = {(i, j): addresses[i // (1 + j) % 2] for i in rows for j in columns}
    placed = {}
    for address in addresses:
        own = [at for at in owners if owners[at] == address]
        if own:
            blocks = client.persist([x.blocks[at] for at in own], workers=address)
            placed |= dict(zip(own, blocks, strict=True))
    x = da.block([[placed[i, j] for j in columns] for i in rows]).persist()
    wait(x)
    return x


def multiplied(client, a, b, precision):
    """The product, once what moves for it is what was planned."""
    wait([a, b])
    plan = multimm.plan(a, b, precision=precision)
    assert plan.layout.in_place is not None
    assert plan.layout.in_place.joined
    reset_received_bytes(client)
    c = multimm.matmul(a, b, precision=precision).persist()
    wait(c)
    assert sum(received_bytes(client).values()) == plan.bytes_moved
    return c


ONE_OR_TWO = [pytest.param(n, marks=pytest.mark.multigpu(n)) for n in (1, 2)]


@pytest.mark.parametrize("gpus", ONE_OR_TWO)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "float32"), ("float64", "ieee")])
def test_numpy_blocks_are_multiplied_on_gpus_and_come_back(gpus, dtype, precision):
    with multimm.cluster.start(gpus=gpus, rmm_pool=POOL) as client:
        rng = da.random.default_rng(0)
        a, b = (rng.standard_normal((SIZE, SIZE), chunks=1024, dtype=dtype) for _ in "ab")
        a, b = a.persist(), b.persist()
        wait([a, b])
        plan = multimm.plan(a, b, precision=precision, blocks=2048, slabs=1024)
        c = multimm.matmul(a, b, precision=precision, blocks=2048, slabs=1024)
        c = c.persist()
        wait(c)
        assert all(client.run(_has_uploaded).values())
        assert "of C from there" in str(plan)
        assert type(c._meta) is np.ndarray
        assert all(type(block) is np.ndarray for block in client.gather(client.futures_of(c)))
        assert multimm.verify(a, b, c)
        d = multimm.matmul(multimm.matmul(a, b), a)  # what lies between never leaves the GPUs
        assert multimm.verify(c, a, d)


def _has_uploaded():
    from multimm.gpu.transfer import pinned_copy

    return pinned_copy._road.cache_info().currsize > 0


@pytest.mark.parametrize("gpus", ONE_OR_TWO)
def test_numpy_operands_that_do_not_fit_stay_in_host_memory(gpus, monkeypatch):
    """As if a GPU had 0.8 GB: it never holds more than the plan says."""

    def small(client, workers):
        spec = described(client, workers)
        devices = tuple(replace(device, memory_bytes=8 * 10**8) for device in spec.devices)
        return replace(spec, devices=devices)

    monkeypatch.setattr(products, "described", small)
    monkeypatch.setitem(planned_time.SPILL_RATE, "gpu", 1e9)  # rather than to spill
    with multimm.cluster.start(gpus=gpus, rmm_pool=POOL) as client:
        rng = da.random.default_rng(1)
        a = rng.integers(-8, 9, (8192, 12288), chunks=3000).astype("float32").persist()
        b = rng.integers(-8, 9, (12288, 8192), chunks=2500).astype("float32").persist()
        wait([a, b])
        fixed = {"blocks": 2048, "slabs": 4096, "precision": "ieee"}
        plan = multimm.plan(a, b, **fixed)
        assert plan.layout.stream
        assert "blocks taken from host memory when they" in " ".join(str(plan).split())
        client.run(_count_bytes)
        c = multimm.matmul(a, b, **fixed).persist()
        wait(c)
        assert max(client.run(_most_bytes).values()) <= plan.peak_bytes
        np.testing.assert_array_equal(c[:500].compute(), a[:500].compute() @ b.compute())


def _count_bytes():
    import rmm

    counted = rmm.mr.StatisticsResourceAdaptor(rmm.mr.get_current_device_resource())
    rmm.mr.set_current_device_resource(counted)


def _most_bytes():
    import rmm

    return rmm.mr.get_current_device_resource().allocation_counts.peak_bytes
