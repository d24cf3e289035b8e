"""Blocks travel while kernels run: how fast, and that no byte is read or written too early."""

from __future__ import annotations

import itertools
import os
import signal
import time

import dask.array as da
import numpy as np
import pytest
from distributed import wait

import multimm
from multimm.cluster.client import obstacles
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.cluster.plugins.warmup import WarmUp, wait_until_warm

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


@pytest.fixture(scope="module", params=["tcp", "ucxx"])
def client(request):
    with multimm.cluster.start(gpus=2, threads=2, rmm_pool=POOL, protocol=request.param) as client:
        assert obstacles(client) == {}
        # The first task of this module has its worker import it, and what it imports.
        wait([client.submit(make, 1, workers=[address], pure=False) for address in workers(client)])
        yield client


def workers(client):
    return sorted(listed(client))


def met(client):
    return client.run(lambda dask_worker: dask_worker.plugins[WarmUp.name].met)


def test_all_pairs_have_met(client):
    sender, receiver = workers(client)
    assert met(client) == {sender: {receiver}, receiver: {sender}}


def kinds_of_blocks(edge):
    """Arrays as tasks return them: views, in any order of memory, of any dtype; and packed."""
    import cupy
    import ml_dtypes

    x = cupy.arange(edge * edge, dtype="f4").reshape(edge, edge) % 251
    blocks = {
        "C order": x,
        "Fortran order": x.T,
        "every other column": x[:, ::2],
        "backwards": x[::-1, ::-3],
        "stack": x.reshape(edge // 8, 8, edge).transpose(2, 0, 1),
        "a number": x[3, 5],
        "none": x[:0],
        "complex128": x * 1j,
        "bool": x > 9,
        "bfloat16": x.astype(ml_dtypes.bfloat16),
        "packed": multimm.gpu.pack(x, side="b"),
    }
    cupy.cuda.get_current_stream().synchronize()
    return blocks


def one_of(blocks, name):
    return blocks[name]


def as_host(block):
    """What a block holds, and its dtype; of a packed one, what it multiplies to."""
    import cupy

    if not isinstance(block, cupy.ndarray):
        block = multimm.gpu.gemm(cupy.eye(block.shape[0], dtype="f4"), block)
    return str(block.dtype), block.get()


@pytest.mark.parametrize("to", ["worker", "client"])
def test_blocks_of_all_kinds_arrive_as_they_were(client, to):
    sender, receiver = workers(client)
    blocks = client.submit(kinds_of_blocks, 256, workers=[sender], pure=False)
    names = client.submit(list, blocks, workers=[sender]).result()
    if sender.startswith("ucx"):
        names.remove("bfloat16")  # Dask's own way of sending loses the dtype
    sent = client.map(one_of, [blocks] * len(names), names, workers=[sender], pure=False)
    expected = client.gather(client.map(as_host, sent, workers=[sender], pure=False))
    if to == "client":
        found = [as_host(block) for block in client.gather(sent)]
    else:
        found = client.gather(client.map(as_host, sent, workers=[receiver], pure=False))
    for name, (dtype, values), (expected_dtype, expected_values) in zip(
        names, found, expected, strict=True
    ):
        assert dtype == expected_dtype, name
        np.testing.assert_array_equal(values, expected_values, err_msg=name)


def outside_the_pool(edge):
    """A block that a library has taken from the driver, past the pool."""
    import cupy

    memory = cupy.cuda.memory.Memory(4 * edge)
    block = cupy.ndarray(edge, "f4", cupy.cuda.MemoryPointer(memory, 0))
    block[...] = cupy.arange(edge)
    cupy.cuda.get_current_stream().synchronize()
    return block


def test_a_block_outside_the_pool_arrives(client):
    sender, receiver = workers(client)
    block = client.submit(outside_the_pool, 1000, workers=[sender], pure=False)
    found = client.submit(as_host, block, workers=[receiver], pure=False).result()
    np.testing.assert_array_equal(found[1], np.arange(1000, dtype="f4"))


@pytest.mark.parametrize("side", ["sender", "receiver", "both"])
def test_a_block_travels_during_a_second_of_products(client, side):
    sender, receiver = workers(client)
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


_held = []  # on a worker: its pool, and what of it the products are not to have

SPIN = """extern "C" __global__ void spin(long long clocks) {
    long long begin = clock64();
    while (clock64() - begin < clocks) {}
}"""


def poison(left):
    """From now on, memory that is freed is filled with NaN, in the order of stream 0.

    Every other time at once, which whoever still reads it will notice, and else late, which whoever
    writes to it too soon will notice. All but `left` bytes of the pool are taken, so that what is
    freed is soon taken again.
    """
    import cupy
    import rmm

    pool = rmm.mr.get_current_device_resource()
    spin, late = cupy.RawKernel(SPIN, "spin"), itertools.cycle((False, True))

    def give_back(pointer, size, stream):
        with cupy.cuda.Stream.null:
            if size >= 2**20 and next(late):
                spin((1,), (1,), (300_000,))
            cupy.cuda.runtime.memsetAsync(pointer, 0xFF, size, 0)
        pool.deallocate(pointer, size, stream)

    _held.extend([pool, rmm.DeviceBuffer(size=POOL - left)])
    poisoned = rmm.mr.CallbackMemoryResource(pool.allocate, give_back)
    counted = rmm.mr.StatisticsResourceAdaptor(poisoned)
    rmm.mr.set_current_device_resource(counted)
    filled = [rmm.DeviceBuffer(size=left // 8) for _ in range(7)]
    del filled
    cupy.cuda.Device().synchronize()
    counted.push_counters()


def cure():
    """Undo it."""
    import rmm

    rmm.mr.set_current_device_resource(_held[0])
    _held.clear()


def most_used():
    import rmm

    return rmm.mr.get_current_device_resource().allocation_counts.peak_bytes


@pytest.fixture
def poisoned(client, left):
    client.run(poison, left)
    yield
    client.run(cure)


def integers(block, dtype):
    return (block * 4).round().astype(dtype)


def matrix(size, chunk, seed, dtype):
    """Small integers, left on stream 0 by tasks that do not wait for it."""
    import cupy

    rng = da.random.default_rng(cupy.random.default_rng(seed))
    x = rng.standard_normal((size, size), chunks=chunk, dtype="float32")
    return x.map_blocks(integers, dtype, dtype=dtype, meta=x._meta.astype(dtype))


def on_host(x):
    host = x.map_blocks(lambda block: block.get(), meta=np.empty((0, 0), x.dtype))
    return host.compute().astype("f8")


@pytest.mark.parametrize(
    ("size", "edge", "k_tile", "dtype", "precisions", "left"),
    [
        (12288, 2048, 2048, "f4", ("float32", "ieee", "tf32"), 2**30),
        (4096, 512, 2048, "f4", ("ieee",), 2**27),  # in slices of k, with a workspace
        (8192, 1024, 1024, "f8", ("float32",), 5 * 2**27),  # by cuBLAS, with temporaries
    ],
)
def test_products_are_exact_in_a_nearly_full_pool_of_poisoned_memory(
    client, poisoned, size, edge, k_tile, dtype, precisions, left
):
    a, b = (matrix(size, edge, seed, dtype) for seed in (1, 2))
    weights = np.random.default_rng(3).integers(-8, 9, (size, 4)).astype("f8")
    expected = on_host(a) @ (on_host(b) @ weights)
    for precision in precisions:
        blocks = {"precision": precision, "blocks": edge, "slabs": k_tile}
        packs = multimm.plan(a, b, **blocks).layout.operands.packed
        assert bool(packs) == (precision != "ieee" and dtype == "f4")
        reset_received_bytes(client)
        result = on_host(multimm.matmul(a, b, **blocks))
        assert sum(received_bytes(client).values()) >= a.nbytes
        np.testing.assert_array_equal(result @ weights, expected)
        used = [f"{peak / left:.0%}" for peak in client.run(most_used).values()]
        print(f"{precision} {dtype}: {', '.join(used)} of {left >> 20} MiB in use at once")


def test_a_worker_that_is_started_again_overlaps_and_has_met_its_peer(client):
    victim, survivor = workers(client)
    os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (found := workers(client)) == [victim, survivor] or len(found) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (new,) = set(found) - {survivor}
    # As before, the first task has the worker import this module.
    wait(client.submit(make, 1, workers=[new], pure=False))
    assert obstacles(client) == {}
    wait_until_warm(client)
    found = met(client)
    assert found[new] == {survivor}
    assert new in found[survivor]
    for source, target in ((new, survivor), (survivor, new)):
        block = client.submit(make, 16384, workers=[source], pure=False)
        assert client.submit(first_of, block, workers=[target], pure=False).result() == 1.0
        assert client.run(last_transfer, workers=[target])[target] < 0.1
