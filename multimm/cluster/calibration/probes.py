"""What measures rates on a worker: `calibration.run` has all workers run it at once.

Nothing here runs as a task: a worker that is lost would be waited for.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from multimm.errors import ClusterError
from multimm.gpu.arrays import by_dask_cuda
from multimm.gpu.kernel_selection import Precision

if TYPE_CHECKING:
    from distributed import Worker

#: Seconds of copies.
COPY_SECONDS = 0.03
#: Transfers at least, however long they take.
LEAST_TRANSFERS = 3
#: On CPUs the fastest product counts, for whoever else uses the cores makes it slower. Another one
#: took at most so many times as long, and it itself so many times its thread's time. Arbitrary.
ALIKE = 1.15
#: Until that is so, products may take so many times the seconds that are meant for them.
PATIENCE = 3


class Effort(NamedTuple):
    """What is measured, and for how long."""

    edge: int  #: rows and columns of what is computed
    k: int  #: of the blocks that are multiplied
    product_seconds: float  #: of products, for each precision
    block_bytes: int  #: of the blocks that travel
    copy_bytes: int  #: of the blocks that are copied
    link_seconds: float  #: of transfers


async def product_rate(
    dask_worker: Worker, *, precision: Precision, efforts: Mapping[str, Effort]
) -> float:
    """Runs on a worker: GFLOP/s of block products in all threads that tasks run in.

    Once its warm-up is over: right behind `start()` an H200 seemed to reach 21 and 40 TFLOP/s in
    place of 53.5.
    """
    from multimm.cluster.plugins.warmup import wait_until_over

    await wait_until_over(dask_worker)
    gpu = by_dask_cuda(dask_worker)
    effort = efforts["gpu" if gpu else "cpu"]
    shape = effort.edge, effort.k
    # A worker has a GPU for itself, whose power limit makes later products slower.
    fastest = not gpu
    return await _in_all_threads(
        dask_worker, product_gflops, precision, shape, effort.product_seconds, gpu, fastest
    )


async def copy_rate(dask_worker: Worker, *, efforts: Mapping[str, Effort]) -> float:
    """Runs on a worker: GB/s that all threads together read and write of its blocks' memory."""
    gpu = by_dask_cuda(dask_worker)
    effort = efforts["gpu" if gpu else "cpu"]
    return await _in_all_threads(dask_worker, copy_gbps, effort.copy_bytes, COPY_SECONDS, gpu)


async def _in_all_threads(dask_worker: Worker, call: Callable[..., float], *given: Any) -> float:
    """The sum of what it returns in each thread that tasks run in."""
    loop, pool = asyncio.get_running_loop(), dask_worker.executors["default"]
    threads = (loop.run_in_executor(pool, call, *given) for _ in range(dask_worker.state.nthreads))
    return float(sum(await asyncio.gather(*threads)))


def product_gflops(
    precision: Precision,
    shape: tuple[int, int],
    seconds: float,
    gpu: bool,
    fastest: bool = False,
    *,
    adds: bool = False,
) -> float:
    """Runs in a thread of a worker: GFLOP/s of what tasks call, on normal numbers.

    They are float64 at that precision, else float32. Rows and k are `shape`, and there are as many
    columns as rows. Operands are packed before, as those of a product of float32 are. If it `adds`,
    every product adds to a sum, which plans count beside it. The mean rate, or that of the
    `fastest` product, if another one is `ALIKE`.

    Raises
    ------
    ClusterError
        If it asks for the fastest, and products are not alike.
    """
    from multimm.graph.tasks.multiply import Step, multiply, pack

    rows, k = shape
    dtype = "float64" if precision == "float64" else "float32"
    step = Step(dtype, dtype, precision=precision)
    a, b = normal(1, (rows, k), gpu, dtype), normal(2, (k, rows), gpu, dtype)
    if gpu and precision in ("float32", "tf32"):
        a, b = pack(a, role="a", step=step), pack(b, role="b", step=step)
    first = multiply(a, b, step=step)
    partial = first if adds else None
    flops, times = 2 * rows**2 * k, list[tuple[float, float]]()
    while True:
        start, started = time.perf_counter(), time.thread_time()
        multiply(a, b, partial, step=step)
        times.append((time.perf_counter() - start, time.thread_time() - started))
        spent = sum(passed for passed, _ in times)
        if spent < seconds:
            continue
        if not fastest:
            return len(times) * flops / spent / 1e9
        if len(times) == 1:
            continue
        (best, busy), (second, _), *_ = sorted(times)
        if second <= ALIKE * best <= ALIKE**2 * busy:
            return flops / best / 1e9
        if spent >= PATIENCE * seconds:
            raise ClusterError(
                f"the two fastest of {len(times)} equal products took {best:.3g} and {second:.3g} "
                f"s, {busy:.3g} s of them on a core: something else uses the cores"
            )


def copy_gbps(nbytes: int, seconds: float, gpu: bool) -> float:
    """Runs in a thread of a worker: GB/s read and written where a block is copied.

    On CPUs to a new one each time, as those are that tasks make: 64 MB and more take pages of the
    system, at 24 GB/s on an EPYC, where memory that was used before takes 39 GB/s.
    """
    from multimm.graph.tasks.multiply import finished

    block = normal(0, (nbytes // 4,), gpu)
    other = finished(block.copy())
    count, start = 0, time.perf_counter()
    while True:
        if gpu:
            other[...] = block
        else:
            del other
            other = block.copy()
        finished(other)
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count * 2 * nbytes / elapsed / 1e9


async def fetch_seconds(
    dask_worker: Worker, *, peers: Mapping[str, str], nbytes: int, seconds: float, gpu: bool
) -> float:
    """Runs on a worker: median seconds for a block from its peer, through Dask's transport."""
    from multimm.cluster.plugins.families import asked

    peer, how = peers[dask_worker.address], asked(dask_worker.rpc)
    function, arguments = pickle.dumps(_kept_block), pickle.dumps({"nbytes": nbytes, "gpu": gpu})
    times: list[float] = []
    end = 0.0
    # The first one makes the block, and the connection.
    while len(times) <= LEAST_TRANSFERS or time.perf_counter() < end:
        start = time.perf_counter()
        answer: Any = await dask_worker.rpc(peer).run(
            function=function, kwargs=arguments, serializers=how, deserializers=how
        )
        times.append(time.perf_counter() - start)
        if answer["status"] != "OK":
            raise ClusterError(f"{peer} did not send a block")
        del answer
        end = end or time.perf_counter() + seconds
    return median(times[1:])


@functools.cache
def _kept_block(nbytes: int, gpu: bool) -> Any:
    """Runs on the peer: a block where its blocks lie, the same one each time."""
    return normal(0, (nbytes // 4,), gpu)


def forget_blocks() -> None:
    """Runs on a worker: give the blocks back."""
    _kept_block.cache_clear()


def normal(
    seed: int | Sequence[int], shape: tuple[int, ...], gpu: bool, dtype: str = "float32"
) -> Any:
    """Runs on a worker: complete when this returns, for other streams may read it."""
    if gpu:
        import cupy as xp
    else:
        import numpy as xp
    from multimm.graph.tasks.multiply import finished

    return finished(xp.random.default_rng(seed).standard_normal(shape, dtype=dtype))
