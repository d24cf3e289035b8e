"""Who asks for blocks where they lie, and who says so, on stand-ins: `multigpu` tests copy some."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from contextlib import nullcontext
from dataclasses import astuple
from types import ModuleType, SimpleNamespace

import ml_dtypes
import msgpack
import numpy as np
import pytest
from clusters import asked_families, in_threads
from distributed import Client
from distributed.protocol.serialize import families as known_families
from gpu_pools import pool_of, waiting
from stand_in import GPUArray, fake_cupy

from multimm.cluster.plugins import cuda_ipc, families
from multimm.cluster.plugins.cuda_ipc import CudaIpc
from multimm.cluster.plugins.peer_memory import Pool

BASE, SIZE = 0x7F0000000000, 2**30
HERE = {"sender": {"address": "tcp://10.0.0.1:1"}, "recipient": {"address": "tcp://10.0.0.1:2"}}
ELSEWHERE = {**HERE, "recipient": {"address": "tcp://10.0.0.2:2"}}


class Array:
    """What the sender looks at of an array of CuPy."""

    strides = (4,)

    def __init__(self, offset, nbytes=64):
        self.data, self.nbytes = SimpleNamespace(ptr=BASE + offset), nbytes
        self.shape, self.dtype = (nbytes // 4,), np.dtype("f4")


Array.__module__ = "cupy.stand_in"


class CudaError(RuntimeError):
    """What CuPy raises."""


@pytest.fixture
def process():
    with waiting() as child:
        yield child


@pytest.fixture
def sender(monkeypatch, process):
    """A process with a pool."""
    monkeypatch.setattr(cuda_ipc, "_own", cuda_ipc._Own(pool_of(process), BASE, SIZE))
    monkeypatch.setattr(cuda_ipc, "wait_for_stream_0", lambda: None)


@pytest.fixture
def dask():
    with asked_families():
        yield


def asks_so(rpc):
    return cuda_ipc.NAME in (families.asked(rpc) or ())


# --------------------------------------------------------------------- the sender


@pytest.mark.parametrize("offset", [0, 256, SIZE - 64])
def test_a_block_of_the_pool_is_said_to_lie_there(sender, process, offset):
    header, frames = cuda_ipc.say_where(Array(offset), HERE)
    assert frames == []
    assert Pool(*header["pool"]) == pool_of(process)
    (place,) = header["places"]
    assert place[:3] == (offset, (16,), (4,))


@pytest.mark.parametrize(
    ("block", "context"),
    [
        (np.ones(3), HERE),
        ("text", HERE),
        (Array(-256), HERE),  # of another library's memory
        (Array(SIZE), HERE),
        (Array(0), ELSEWHERE),
        (Array(0), None),  # a transport that does not say who asks
    ],
)
def test_all_else_is_sent_as_before(sender, block, context):
    with pytest.raises(NotImplementedError):
        cuda_ipc.say_where(block, context)


def test_a_process_without_a_pool_sends_as_before():
    with pytest.raises(NotImplementedError):
        cuda_ipc.say_where(Array(0), HERE)


# ------------------------------------------------------------------- both ends


@pytest.fixture
def in_one_pool(sender, monkeypatch):
    """Makes an array of a pool that is NumPy's, which this process both sends from and reads."""
    memory = np.zeros(2**20, "u1")
    address = memory.__array_interface__["data"][0]
    own = cuda_ipc._Own(cuda_ipc._own.pool, address, memory.nbytes)
    monkeypatch.setattr(cuda_ipc, "_own", own)
    monkeypatch.setattr(cuda_ipc, "_address", lambda pool: {own.pool: address}[pool])

    def array(shape, dtype, pointer, strides):
        first = np.frombuffer((ctypes.c_char * 64).from_address(pointer), "u1")
        found = first[: dtype.itemsize].view(dtype)
        return np.lib.stride_tricks.as_strided(found, shape, strides).view(GPUArray)

    cupy = fake_cupy()
    cupy.ndarray, cupy.empty_like = array, np.empty_like
    cupy.cuda.UnownedMemory = lambda address, size, owner, device: address
    cupy.cuda.MemoryPointer = lambda address, offset: address + offset
    cupy.cuda.runtime.CUDARuntimeError = CudaError
    cupy.cuda.driver = SimpleNamespace(CUDADriverError=CudaError)
    cupy.cuda.Stream = SimpleNamespace(null=None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    stream = nullcontext()
    stream.done, stream.wait_event = True, lambda event: None
    event = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(cuda_ipc, "_copies", lambda: (stream, event))
    monkeypatch.setattr(cuda_ipc, "copy", ctypes.memmove)

    def make(values):
        made = memory[512 : 512 + values.nbytes].view(values.dtype).reshape(values.shape)
        made[...] = values
        return made.view(GPUArray)

    return make


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[::-1, ::-3],
        lambda x: x[3:5, 2:4],
        lambda x: x.reshape(2, 3, 2, 6).transpose(3, 0, 2, 1),
        lambda x: x[3, 5:6].reshape(()),
        lambda x: x[:0],
    ],
)
@pytest.mark.parametrize("dtype", ["f4", "c16", "?", ml_dtypes.bfloat16])
def test_a_block_arrives_as_it_was(in_one_pool, view, dtype):
    values = (np.arange(72) % 2).reshape(6, 12).astype(dtype)
    block, expected = view(in_one_pool(values)), view(values)
    header, frames = cuda_ipc.say_where(block, HERE)
    sent = msgpack.loads(msgpack.dumps(header), use_list=False)
    found = cuda_ipc.read(sent, frames)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert not np.shares_memory(found, block) or not found.size
    np.testing.assert_array_equal(found, expected)


# ------------------------------------------------------------------- the receiver


@pytest.fixture
def cupy_that_fails(monkeypatch):
    cupy = ModuleType("cupy")

    def device(number):
        raise CudaError("peer access is not supported")

    errors = SimpleNamespace(CUDARuntimeError=CudaError, CUDADriverError=CudaError)
    cupy.cuda = SimpleNamespace(Device=device, runtime=errors, driver=errors)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize("lost", [False, True])
def test_who_cannot_read_asks_for_blocks_as_before(cupy_that_fails, process, lost):
    """But not if their owner was lost: others can be read."""
    header = {"pool": astuple(pool_of(process)), "size": SIZE, "places": [], "packed": None}
    if lost:
        process.kill()
        process.wait()
    with pytest.raises(OSError, match="peer access is not supported") as failure:
        cuda_ipc.read(header, [])
    assert isinstance(failure.value, families.NeverReadError) == (not lost)
    assert ("through the host's memory from now on" in str(failure.value)) == (not lost)


def a_gpu_worker(monkeypatch, pool):
    """One of dask-cuda's, whose peer says which pool it has."""

    class Peer:
        def __call__(self, address):
            return self

        async def run(self, function):
            return {"status": "OK", "result": pool}

    monkeypatch.setattr(cuda_ipc, "by_dask_cuda", lambda worker: True)
    monkeypatch.setattr(cuda_ipc, "raise_limits", lambda worker: None)
    return SimpleNamespace(address="tcp://10.0.0.1:1", rpc=Peer())


@pytest.mark.parametrize("mapped", [True, False])
def test_a_worker_asks_once_it_has_mapped_its_peers(dask, monkeypatch, process, mapped):
    def map_pool(pool):
        if not mapped:
            raise CudaError("no")

    monkeypatch.setattr(cuda_ipc, "_map", map_pool)
    worker, plugin = a_gpu_worker(monkeypatch, pool_of(process)), CudaIpc()
    asyncio.run(plugin.meet(worker, "tcp://10.0.0.1:2"))
    assert not asks_so(worker.rpc)
    plugin.begin(worker)
    assert asks_so(worker.rpc) == plugin.direct == mapped
    assert (
        "through the host's memory: the memory of worker tcp://10.0.0.1:2" in plugin.reason
    ) == (not mapped)


def test_a_pool_on_another_host_is_not_mapped(dask, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_map", lambda pool: 1 / 0)
    there = Pool("another boot", 1, "1", b"")
    worker, plugin = a_gpu_worker(monkeypatch, there), CudaIpc()
    asyncio.run(plugin.meet(worker, "tcp://10.0.0.2:2"))
    plugin.begin(worker)
    assert plugin.direct


@pytest.mark.parametrize("address", ["ucxx://10.0.0.1:1", "inproc://10.0.0.1/1/2"])
def test_other_transports_are_left_alone(dask, monkeypatch, address):
    worker, plugin = a_gpu_worker(monkeypatch, None), CudaIpc()
    worker.address = address
    plugin.setup(worker)  # would import CuPy
    plugin.begin(worker)
    assert plugin.reason == ""
    assert not plugin.direct
    assert cuda_ipc.NAME in known_families  # peers that ask so may be asking it


def test_cpu_workers_are_left_alone(dask):
    with in_threads(1, protocol="tcp", memory_limit=0) as cluster, Client(cluster) as client:
        client.register_plugin(CudaIpc())
        cuda_ipc.begin_in(client)
        assert not asks_so(client.rpc)
        assert not client.direct_to_workers
