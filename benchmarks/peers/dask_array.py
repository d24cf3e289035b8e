"""dask.array.matmul on the workers that multimm has: what a Dask user calls today."""

from __future__ import annotations

from typing import Any, ClassVar

import dask.array as da

from benchmarks.peers.on_dask import OnDask
from benchmarks.sweep_cases import Product
from multimm.planning.grid import regular

#: Longest edge of a block by device: 16384 is what the sketches ran fastest with on H200s (1 GB a
#: block); on CPU cores some MB.
EDGE = {"gpu": 16384, "cpu": 1024}


class DaskArray(OnDask):
    """Blocks by rank in the order of their rows; no placement but Dask's own."""

    needs: ClassVar = {"cpu": (), "gpu": ("cupy", "dask_cuda")}

    @property
    def config(self) -> str:
        return (
            f"dask.array.matmul of {'CuPy' if self.gpu else 'NumPy'} blocks of at most "
            f"{EDGE[self.machine.device]} x {EDGE[self.machine.device]}, {self.workers_text}"
        )

    def operands(self, product: Product, precision: str, seed: int) -> tuple[da.Array, da.Array]:
        edge = EDGE[self.machine.device]
        m, n, k = (self._blocks(size, edge) for size in (product.m, product.n, product.k))
        if product.gram:
            a = self.matrix(k, m, seed, lambda i, j: i * len(m) + j)
            return a.T, a
        a = self.matrix(m, k, 2 * seed, lambda i, j: i * len(k) + j)
        return a, self.matrix(k, n, 2 * seed + 1, lambda i, j: i * len(n) + j)

    def _blocks(self, size: int, edge: int) -> tuple[int, ...]:
        """At least as many blocks along an edge as there are workers, so that all have work."""
        return regular(size, min(edge, max(1, -(-size // self.machine.workers))))

    def multiply(self, operands: tuple[da.Array, da.Array], precision: str) -> Any:
        return self.run(da.matmul(*operands))
