"""What multimm and dask.array have in common: workers, operands placed on them, what they moved."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import product as pairs
from typing import Any, ClassVar

import dask.array as da
import numpy as np

from multimm.cluster.calibration.probes import normal
from multimm.cluster.inspect.cluster_spec import listed
from multimm.gpu.arrays import to_numpy
from multimm.gpu.kernel_selection import Precision
from multimm.planning.tiling.grid import regular
from multimm_benchmarks.peers import base, trace
from multimm_benchmarks.peers.base import Array, Machine, System
from multimm_benchmarks.sampling import Sample
from multimm_benchmarks.sweep_cases import Product

Blocks = tuple[int, ...]
#: (row, column) of a block -> the rank of the worker that keeps it, workers in order of address.
Home = Callable[[int, int], int]


class RunError(Exception):
    """A run that did not do what was to be timed."""


class OnDask(System):
    """Workers of `multimm.cluster.start`: one per GPU, or CPU processes."""

    chunked = True
    hosts = True
    family = "dask"
    restarts = True
    ready_s, case_s = 8.5, 0.9
    #: Whether tasks return before their kernels have run.
    returns_early: ClassVar[bool] = True

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        self.client: Any = None
        self.addresses: list[str] = []
        self.intervals: dict[str, list[trace.Interval]] = {}
        self._executed = 0

    @classmethod
    def too_large(cls, product: Product, machine: Machine) -> str:
        reason = cls.beyond_host(product, machine) if product.hosted else ""
        return reason or super().too_large(product, machine)

    def started(self) -> AbstractContextManager[Any]:
        """Return a client that owns its workers."""
        import multimm

        gpus = self.machine.workers if self.gpu else None
        workers = None if self.gpu else self.machine.workers
        client: AbstractContextManager[Any] = multimm.cluster.start(gpus=gpus, workers=workers)
        return client

    @contextmanager
    def opened(self, others: Sequence[System] = ()) -> Iterator[None]:
        for other in others:
            if isinstance(other, OnDask) and other.machine.workers == self.machine.workers:
                self.client, self.addresses = other.client, other.addresses
                yield
                return
        with self.started() as self.client:
            self.client.register_plugin(trace.Trace())
            self.addresses = sorted(listed(self.client))
            yield

    @property
    def gpu(self) -> bool:
        """Whether GPUs multiply, and have all blocks that are not hosted."""
        return self.machine.device == "gpu"

    @property
    def workers_text(self) -> str:
        """The workers, for `config`."""
        kind = "GPU" if self.gpu else "CPU"
        protocol = self.addresses[0].partition(":")[0]
        return f"{len(self.addresses)} {kind} workers of multimm.cluster.start over {protocol}"

    def matrix(
        self, rows: Blocks, columns: Blocks, seed: int, home: Home, product: Product
    ) -> da.Array:
        """Return a matrix of normal blocks, kept where `home` says, in memory, with new keys.

        Those of hosted products are NumPy's also on GPU workers, which have one thread for tasks:
        others help.
        """
        from dask.highlevelgraph import HighLevelGraph
        from distributed import wait

        name, hosted, dtype = f"operand-{uuid.uuid4().hex}", product.hosted, product.dtype
        graph: dict[Any, Any] = {}  # with the array's own keys: nothing is left to be renamed
        for i, j in pairs(range(len(rows)), range(len(columns))):
            own, shape = [seed, i, j], (rows[i], columns[j])
            task = (
                (base.normal, *shape, own, dtype) if hosted
                else (normal, own, shape, self.gpu, dtype)
            )  # fmt: skip
            graph[name, i, j] = self.client.submit(
                *task, workers=[self.addresses[home(i, j) % len(self.addresses)]], pure=False,
                key=(name, i, j),
            )  # fmt: skip
        wait(list(graph.values()))
        layers = HighLevelGraph.from_collections(name, graph)
        meta = empty(self.gpu and not hosted, dtype)
        return da.Array(layers, name, (rows, columns), meta=meta)

    def dealt_out(self, product: Product, edge: int, seed: int) -> tuple[da.Array, da.Array]:
        """Return operands in blocks of at most that edge, by rank in the order of their rows."""
        m, n, k = (regular(size, edge) for size in (product.m, product.n, product.k))
        b = self.matrix(k, n, 2 * seed + 1, lambda i, j: i * len(n) + j, product)
        if product.symmetric:
            return b.T, b
        return self.matrix(m, k, 2 * seed, lambda i, j: i * len(k) + j, product), b

    def run(self, product: da.Array) -> da.Array:
        """Compute a lazy product and wait for the workers, and for GPUs that are not done then."""
        from distributed import wait

        result: da.Array = product.persist()
        wait(result)
        if self.gpu and self.returns_early:
            self.client.run(synchronize)
        return result

    def before(self) -> None:
        from multimm.cluster.plugins.transfer_counter import reset_received_bytes

        if self.gpu:
            self.client.run(synchronize)
        self.client.run(trace.taken)
        reset_received_bytes(self.client)

    def after(self, result: da.Array) -> None:
        """Assert that all blocks of the result were computed in this run, by as many tasks."""
        from distributed.client import futures_of

        self.intervals = self.client.run(trace.taken)
        futures = futures_of(result)
        for future in futures:
            if future.status == "error":
                future.result()  # says what went wrong on the worker
        if bad := [future.status for future in futures if future.status != "finished"]:
            raise RunError(f"{len(bad)} of {len(futures)} blocks are not there: {bad[0]}")
        done = {key for rows in self.intervals.values() for kind, key, *_ in rows
                if kind != "transfer"}  # fmt: skip
        if missing := {str(future.key) for future in futures} - done:
            raise RunError(f"{len(missing)} of {len(futures)} blocks were not computed in this run")
        if len(done) < max(self._executed, self.least_tasks(result)):
            raise RunError(f"{len(done)} tasks ran, {self._executed} did before")
        self._executed = len(done)

    def least_tasks(self, result: da.Array) -> int:
        """Return how many tasks a run of the last product has at least."""
        return int(np.prod(result.numblocks))

    def prepare(self, product: Product, precision: Precision) -> None:
        self._executed = 0

    def sample(self, operands: Any, result: da.Array, at: Sample) -> tuple[Array, Array, Array]:
        a, b = operands
        crossing = elements(result, at.rows, at.columns)
        left, right, found = da.compute(
            elements(a, rows=at.rows), elements(b, columns=at.columns), crossing
        )
        return left, right, found

    def facts(
        self, product: Product, precision: Precision, last: tuple[float, float]
    ) -> dict[str, Any]:
        from multimm.cluster.plugins.transfer_counter import received_bytes

        begun = [since for rows in self.intervals.values() for kind, _, since, _ in rows
                 if kind != "transfer"]  # fmt: skip
        return {
            "bytes_received": sum(received_bytes(self.client).values()),
            "detail": {"tasks": self._executed, "first_task_s": round(min(begun) - last[0], 5)},
        }


def empty(gpu: bool, dtype: Any) -> Array:
    """Return a block without elements, of the kind that the others are."""
    if not gpu:
        return np.empty((0, 0), dtype)
    import cupy

    return cupy.empty((0, 0), dtype)


def elements(matrix: da.Array, rows: Array | None = None, columns: Array | None = None) -> da.Array:
    """Return where some rows and some columns of a matrix cross, as NumPy; None is all of them.

    One task for each block, where it lies. Dask's own indexing makes transposed blocks, and copies
    of those that an index splits, results of their own: operands that fill half of the workers'
    memory are then spilled to be looked at.

    Parameters
    ----------
    matrix : dask.array.Array
    rows, columns : numpy.ndarray of int, optional
        Sorted.
    """
    own = [_by_block(*axis) for axis in zip((rows, columns), matrix.chunks, strict=True)]
    chunks = tuple(
        given if index is None else tuple(map(len, parts))
        for index, parts, given in zip((rows, columns), own, matrix.chunks, strict=True)
    )
    found: da.Array = da.map_blocks(
        taken_out, matrix, *own, chunks=chunks, meta=np.empty((0, 0), matrix.dtype)
    )
    return found


def _by_block(index: Array | None, chunks: Blocks) -> list[Any]:
    """What of an axis is wanted of each block, counted from the block's begin."""
    if index is None:
        return [slice(None)] * len(chunks)
    begins = np.cumsum((0, *chunks))
    cuts = np.searchsorted(index, begins)
    return [index[cuts[i] : cuts[i + 1]] - begins[i] for i in range(len(chunks))]


def taken_out(
    block: Array, by_row: list[Any], by_column: list[Any], block_id: tuple[int, int]
) -> Array:
    """Runs on a worker: elements of a block as NumPy, gathered on its device."""
    return to_numpy(block[by_row[block_id[0]]][:, by_column[block_id[1]]])


def synchronize() -> None:
    """Runs on a worker: waits for its GPU."""
    import cupy

    cupy.cuda.Device().synchronize()
