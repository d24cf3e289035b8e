"""What multimm and dask.array have in common: workers, operands placed on them, what they moved."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product as pairs
from typing import Any, ClassVar

import dask.array as da
import numpy as np

from benchmarks.peers import trace
from benchmarks.peers.base import Array, System
from benchmarks.sampling import Sample
from benchmarks.sweep_cases import Product
from multimm.cluster.describe import listed
from multimm.cluster.probes import normal

Blocks = tuple[int, ...]
#: (row, column) of a block -> the rank of the worker that keeps it, workers in order of address.
Home = Callable[[int, int], int]


class RunError(Exception):
    """A run that did not do what was to be timed."""


class OnDask(System):
    """Workers of `multimm.cluster.start`: one per GPU, or CPU processes."""

    #: Whether tasks return before their kernels have run.
    returns_early: ClassVar[bool] = True

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        self.client: Any = None
        self.addresses: list[str] = []
        self.intervals: dict[str, list[trace.Interval]] = {}
        self._executed = 0

    def started(self) -> AbstractContextManager[Any]:
        """Return a client that owns its workers."""
        import multimm

        gpus = self.machine.workers if self.gpu else None
        workers = None if self.gpu else self.machine.workers
        client: AbstractContextManager[Any] = multimm.cluster.start(gpus=gpus, workers=workers)
        return client

    @contextmanager
    def opened(self) -> Iterator[None]:
        with self.started() as self.client:
            self.client.register_plugin(trace.Trace())
            self.addresses = sorted(listed(self.client))
            yield

    @property
    def gpu(self) -> bool:
        """Whether blocks lie on GPUs."""
        return self.machine.device == "gpu"

    @property
    def workers_text(self) -> str:
        """The workers, for `config`."""
        kind = "GPU" if self.gpu else "CPU"
        protocol = self.addresses[0].partition(":")[0]
        return f"{len(self.addresses)} {kind} workers of multimm.cluster.start over {protocol}"

    def matrix(self, rows: Blocks, columns: Blocks, seed: int, home: Home) -> da.Array:
        """Return a matrix of normal blocks, kept where `home` says, in memory, with new keys."""
        from dask.highlevelgraph import HighLevelGraph
        from distributed import wait

        name = f"operand-{uuid.uuid4().hex}"
        graph: dict[Any, Any] = {}  # with the array's own keys: nothing is left to be renamed
        for i, j in pairs(range(len(rows)), range(len(columns))):
            graph[name, i, j] = self.client.submit(
                normal, [seed, i, j], (rows[i], columns[j]), self.gpu,
                workers=[self.addresses[home(i, j) % len(self.addresses)]], pure=False,
                key=(name, i, j),
            )  # fmt: skip
        wait(list(graph.values()))
        layers = HighLevelGraph.from_collections(name, graph)
        return da.Array(layers, name, (rows, columns), meta=empty(self.gpu))

    def run(self, product: da.Array) -> da.Array:
        """Compute a lazy product and wait for the workers, and for GPUs that are not done then."""
        from distributed import wait

        result: da.Array = product.persist()
        wait(result)
        if self.gpu and self.returns_early:
            self.client.run(synchronize)
        return result

    def before(self) -> None:
        from multimm.cluster.worker import reset_received_bytes

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

    def prepare(self, product: Product, precision: str) -> None:
        self._executed = 0

    def sample(self, operands: Any, result: da.Array, at: Sample) -> tuple[Array, Array, Array]:
        a, b = operands
        parts = (a[at.rows], b[:, at.columns], result[at.rows][:, at.columns])
        hosted = [part.map_blocks(to_host, meta=np.empty((0, 0), np.float32)) for part in parts]
        left, right, found = da.compute(*hosted)
        return left, right, found

    def facts(self, product: Product, precision: str, last: tuple[float, float]) -> dict[str, Any]:
        from multimm.cluster.worker import received_bytes

        begun = [since for rows in self.intervals.values() for kind, _, since, _ in rows
                 if kind != "transfer"]  # fmt: skip
        return {
            "bytes_received": sum(received_bytes(self.client).values()),
            "detail": {"tasks": self._executed, "first_task_s": round(min(begun) - last[0], 5)},
        }


def empty(gpu: bool) -> Array:
    """Return a block without elements, of the kind that the others are."""
    if not gpu:
        return np.empty((0, 0), np.float32)
    import cupy

    return cupy.empty((0, 0), cupy.float32)


def to_host(block: Array) -> Array:
    """Runs on a worker: the block as NumPy."""
    return block.get() if hasattr(block, "get") else block


def synchronize() -> None:
    """Runs on a worker: waits for its GPU."""
    import cupy

    cupy.cuda.Device().synchronize()
