"""GPU blocks between processes of one host: who needs a block copies it from where it lies.

Over TCP Dask copies a GPU block to the host's memory, sends its bytes, and copies them to the
other GPU. Here the message says where in its sender's memory pool the block lies. The receiver has
this pool mapped into its own address space (CUDA IPC), and copies the block over NVLink or PCIe.

- *Streams*, by the rules of `multimm.graph.streams`: the sender waits for stream 0 before it says
  where a block lies. The receiver takes memory in the order of stream 0, and copies on a stream of
  its own that waits for it: neither waits for products.
- *Who asks* is the receiver, when it has mapped the pools of all its peers on this host. The sender
  answers so if both ends of the connection have one address, and the block lies in its pool.
  All else travels as before.
- *A worker that has ended* is unmapped by all (`multimm.cluster.plugins.peer_memory`).

It is a family of Dask's serializers: see `multimm.cluster.plugins.families`.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed import Worker, WorkerPlugin
from distributed.protocol.cuda import cuda_dumps, cuda_loads

from multimm.cluster.inspect.workers import IPC_PLUGIN
from multimm.cluster.plugins.families import NeverReadError, answer, ask, ask_as_client, same_host
from multimm.cluster.plugins.peer_memory import Pool, is_here, own_pool, when_ended
from multimm.cluster.plugins.transport import raise_limits, wait_for_stream_0
from multimm.gpu.arrays import by_dask_cuda, is_cupy
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.runtime.workspace import copy

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: Name of the plugin, and of Dask's family of serializers.
NAME = IPC_PLUGIN
#: Bytes that are copied in less than a moment, in seconds; arbitrary.
SHORT, MOMENT = 2**26, 5e-4
#: The driver's CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
ENABLE_PEERS = 1

#: Where pools of other processes are mapped.
_mapped: dict[Pool, int] = {}
#: Held while a mapped pool is read: it is not unmapped meanwhile.
_reading = threading.Lock()


class _Own(NamedTuple):
    """This process's pool."""

    pool: Pool
    address: int
    size: int


_own: _Own | None = None


class CudaIpc(WorkerPlugin):
    """Has a GPU worker read its peers' blocks where they lie, where they are on the same host.

    Attributes
    ----------
    direct : bool
        Whether it does.
    reason : str
        Why not; empty where another transport takes blocks.
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.direct, self.reason = False, ""

    def setup(self, worker: Worker) -> None:
        """Be ready to answer; `begin` asks."""
        self.direct, self.reason = False, ""
        answer(NAME, say_where, read)  # peers that are concerned ask this one, too
        if not is_concerned(worker):
            return
        global _own
        try:
            _own = _Own(own_pool(), *_own_range())
        except Exception as error:
            self._give_up(f"this worker's memory cannot be shared: {error}")

    async def meet(self, worker: Worker, peer: str) -> None:
        """Map the pool of a peer on this host, which takes some tenths of a second."""
        if not is_concerned(worker):
            return
        told: Any = await worker.rpc(peer).run(function=pickle.dumps(_pool_of))
        pool = told["result"] if told["status"] == "OK" else None
        if pool is not None and is_here(pool):
            try:
                await asyncio.to_thread(_map, pool)
            except Exception as error:
                self._give_up(f"the memory of worker {peer} cannot be mapped ({error})")

    def begin(self, worker: Worker) -> None:
        """Ask peers for blocks as they lie, from now on."""
        if is_concerned(worker) and not self.reason:
            ask(worker.rpc, NAME)
            raise_limits(worker)
            self.direct = True

    def _give_up(self, reason: str) -> None:
        self.reason = f"GPU blocks travel through the host's memory: {reason}"
        logger.warning("%s", self.reason)


def is_concerned(worker: Worker) -> bool:
    """Whether it is a GPU worker whose transport knows nothing of GPUs."""
    return by_dask_cuda(worker) and worker.address.startswith(("tcp:", "tls:"))


def begin_in(client: Client) -> None:
    """Have a client on the workers' host fetch results so, and from the workers themselves."""
    pools = [pool for pool in client.run(_pool_of).values() if pool is not None]
    if pools and all(map(is_here, pools)):
        answer(NAME, say_where, read)
        ask_as_client(client, NAME)


def _pool_of(dask_worker: Worker) -> Pool | None:
    """Runs on a worker: its pool, if it answers so."""
    return _own.pool if _own is not None and is_concerned(dask_worker) else None


def _own_range() -> tuple[int, int]:
    """Address and bytes of the allocation that is RMM's pool, from which CuPy takes its memory."""
    import cupy

    of_rmm = getattr(cupy.cuda.get_allocator(), "__module__", "").partition(".")[0] == "rmm"
    with cupy.cuda.Device(0):
        blocks = [cupy.empty(size, "u1") for size in (1, 2**22)]
        ranges = {_range_of(block.data.ptr) for block in blocks}
    if not of_rmm or len(ranges) > 1:
        raise ValueError(
            "CuPy takes it from no pool of RMM; give start(rmm_pool=), or the workers "
            "--rmm-pool-size and --set-rmm-allocator-for-libs cupy, or use protocol='ucxx'"
        )
    return ranges.pop()


def _range_of(pointer: int) -> tuple[int, int]:
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    places = ctypes.byref(address), ctypes.byref(size)
    _call("cuMemGetAddressRange_v2", *places, ctypes.c_uint64(pointer))
    return address.value, size.value


# ------------------------------------------------------------------ the two ends


def say_where(x: Any, context: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Serialize a block of this process's pool for a process of this host."""
    if _own is None or not (is_cupy(x) or isinstance(x, PackedBlock)) or not same_host(context):
        raise NotImplementedError
    packed, arrays = (None, [x]) if is_cupy(x) else cuda_dumps(x)
    places = [_place(array, _own) for array in arrays]
    wait_for_stream_0()
    return {"pool": astuple(_own.pool), "size": _own.size, "places": places, "packed": packed}, []


def _place(x: Any, own: _Own) -> tuple[int, Sequence[int], Sequence[int], bytes]:
    offset = x.data.ptr - own.address if x.nbytes else 0
    if not 0 <= offset < own.size:
        raise NotImplementedError  # of another pool, or of none
    return offset, x.shape, x.strides, pickle.dumps(x.dtype)  # ml_dtypes' have no text


def read(header: Mapping[str, Any], frames: Sequence[Any]) -> Any:
    """Deserialize: copy a block from the pool of its owner.

    Raises `OSError` where that fails, as if the connection had: Dask asks again.
    """
    import cupy

    pool, size = Pool(*header["pool"]), header["size"]
    try:
        with cupy.cuda.Device(0), _reading:
            address = _address(pool)
            theirs = [_at(address, size, *place) for place in header["places"]]
            ours = [cupy.empty_like(x) for x in theirs]
            stream, event = _copies()
            event.record(cupy.cuda.Stream.null)
            stream.wait_event(event)
            with stream:
                for mine, x in zip(ours, theirs, strict=True):
                    if mine.strides != x.strides:
                        cupy.copyto(mine, x)
                    elif x.nbytes:
                        copy(mine.data.ptr, x.data.ptr, x.nbytes)
            _wait(stream, sum(x.nbytes for x in ours))
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        if is_here(pool):  # else it was lost meanwhile
            reason = f"GPU blocks travel through the host's memory from now on: {error}"
            raise NeverReadError(NAME, reason) from error
        raise OSError(f"the memory of process {pool.pid} was not read: {error}") from error
    except MemoryError as error:
        raise OSError(f"no memory for a block of process {pool.pid}: {error}") from error
    return ours[0] if header["packed"] is None else cuda_loads(header["packed"], ours)


def _at(address: int, size: int, offset: int, shape: Any, strides: Any, dtype: bytes) -> Any:
    """An array as it lies in a mapped pool, to copy from."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, size, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, offset)
    return cupy.ndarray(tuple(shape), pickle.loads(dtype), pointer, tuple(strides))


@functools.cache
def _copies() -> tuple[Any, Any]:
    """The stream for copies, which waits for no product, and an event to put it behind others."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)


def _wait(stream: Any, nbytes: int) -> None:
    """Wait for a copy; for a short one without giving the interpreter up.

    It comes back up to 5 ms later, beside a thread that computes.
    """
    until = time.perf_counter() + (MOMENT if nbytes <= SHORT else 0.0)
    while not stream.done:
        if time.perf_counter() > until:
            stream.synchronize()
            return


# ------------------------------------------------------------------ mapped pools


def _address(pool: Pool) -> int:
    """Where a pool is mapped here; it is mapped if it is not."""
    if pool.pid == os.getpid() and _own is not None:
        return _own.address
    if pool not in _mapped:
        address = ctypes.c_uint64()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle(pool.handle), ENABLE_PEERS)
        _mapped[pool] = address.value
        when_ended(pool, _unmap)
    return _mapped[pool]


def _map(pool: Pool) -> None:
    with _reading:
        _address(pool)


def _unmap(pool: Pool) -> None:
    with _reading:
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(_mapped.pop(pool)))


class _Handle(ctypes.Structure):
    """The driver's CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)

    def __init__(self, handle: bytes) -> None:
        super().__init__((ctypes.c_ubyte * 64).from_buffer_copy(handle))


def _call(name: str, *args: Any) -> None:
    """Call the driver, with device 0 current; other threads run meanwhile, unlike with CuPy."""
    import cupy

    with cupy.cuda.Device(0):
        cupy.cuda.runtime.free(0)  # the device's context is current from now on
        if status := getattr(ctypes.CDLL("libcuda.so.1"), name)(*args):
            raise cupy.cuda.driver.CUDADriverError(status)
