"""Blocks travel while kernels run: how fast, and that no byte is read or written too early."""

from __future__ import annotations

import time

import dask.array as da
import numpy as np
import pytest
from distributed import wait

import multimm
from multimm.cluster.transport import obstacles
from multimm.cluster.warm import wait_until_warm
from multimm.cluster.worker import received_bytes, reset_received_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

#: Just above what the products below have in use at once.
POOL = 6 * 2**30


def make(edge):
    import cupy

    x = cupy.ones((edge, edge), dtype=cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    return x


def busy(seconds):
    """Keep the GPU busy with products, as a task does."""
    import cupy

    from multimm.graph.streams import own_stream

    with own_stream(0):
        x = cupy.ones((8192, 8192), dtype=cupy.float32)
        out = cupy.empty_like(x)
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            for _ in range(8):
                multimm.gpu.gemm(x, x, precision="ieee", out=out)
            cupy.cuda.get_current_stream().synchronize()
    return began, time.monotonic()


def last_transfer(dask_worker):
    return dask_worker.transfer_incoming_log[-1]["duration"]


def first_of(block):
    return float(block[0, 0])


@pytest.fixture(scope="module")
def client():
    with multimm.cluster.start(gpus=2, threads=2, rmm_pool=POOL) as client:
        assert obstacles(client) == {}
        yield client


def test_all_pairs_have_met(client):
    sender, receiver = sorted(client.scheduler_info()["workers"])
    assert wait_until_warm(client) == {sender: {receiver}, receiver: {sender}}


@pytest.mark.parametrize("side", ["sender", "receiver", "both"])
def test_a_block_travels_during_a_second_of_products(client, side):
    sender, receiver = sorted(client.scheduler_info()["workers"])
    block = client.submit(make, 16384, workers=[sender], pure=False)
    wait(block)
    at = {"sender": [sender], "receiver": [receiver], "both": [sender, receiver]}[side]
    works = [client.submit(busy, 1.0, workers=[address], pure=False) for address in at]
    time.sleep(0.3)
    began = time.monotonic()
    assert client.submit(first_of, block, workers=[receiver]).result() == 1.0
    ended = time.monotonic()
    assert all(first < began and ended < last for first, last in client.gather(works))
    took = client.run(last_transfer, workers=[receiver])[receiver]
    print(f"{side} busy: transfer {took * 1e3:.0f} ms, with its task {(ended - began) * 1e3:.0f}")
    assert took < 0.1
    assert ended - began < 0.1


def poison(size):
    """From now on, memory that is freed is filled with NaN, in the order of stream 0."""
    import cupy
    import rmm

    pool = rmm.mr.get_current_device_resource()
    counts = {"used": 0, "peak": 0}

    def take(size, stream):
        pointer = pool.allocate(size, stream)
        counts["used"] += size
        counts["peak"] = max(counts.values())
        return pointer

    def give_back(pointer, size, stream):
        cupy.cuda.runtime.memsetAsync(pointer, 0xFF, size, 0)
        counts["used"] -= size
        pool.deallocate(pointer, size, stream)

    resource = rmm.mr.CallbackMemoryResource(take, give_back)
    resource.counts = counts
    rmm.mr.set_current_device_resource(resource)
    held = [rmm.DeviceBuffer(size=size // 8) for _ in range(7)]
    del held
    cupy.cuda.Device().synchronize()
    counts["peak"] = 0


def most_used():
    import rmm

    return rmm.mr.get_current_device_resource().counts["peak"]


def integers(block):
    return (block * 4).round()


def matrix(size, chunk, seed):
    """Small integers, left on stream 0 by tasks that do not wait for it."""
    import cupy

    rng = da.random.default_rng(cupy.random.default_rng(seed))
    x = rng.standard_normal((size, size), chunks=chunk, dtype="float32")
    return x.map_blocks(integers, dtype="float32", meta=x._meta)


def on_host(x):
    host = x.map_blocks(lambda block: block.get(), meta=np.empty((0, 0), "f4"))
    return host.compute()


def test_products_are_exact_in_a_nearly_full_pool_of_poisoned_memory(client):
    size, chunk = 16384, 2048
    client.run(poison, POOL)
    weights = np.random.default_rng(3).integers(-8, 9, (size, 4)).astype("f8")
    a, b = matrix(size, chunk, 1), matrix(size, chunk, 2)
    x, y = on_host(a).astype("f8"), on_host(b).astype("f8")
    expected = x @ (y @ weights)
    for precision in ("float32", "ieee", "tf32"):
        blocks = {"precision": precision, "blocks": chunk, "slabs": chunk}
        assert multimm.plan(a, b, **blocks).layout.packs == (precision != "ieee")
        reset_received_bytes(client)
        result = on_host(multimm.matmul(a, b, **blocks))
        assert sum(received_bytes(client).values()) >= 4 * size * size
        np.testing.assert_array_equal(result.astype("f8") @ weights, expected)
        print(precision, {w: f"{p / 2**30:.2f} GiB" for w, p in client.run(most_used).items()})
