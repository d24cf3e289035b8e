"""dask.array.matmul on the workers that multimm has: what a Dask user calls today."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import dask.array as da

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.peers.base import Machine
from multimm_benchmarks.peers.on_dask import OnDask, empty
from multimm_benchmarks.sweep_cases import Product

#: Longest edge of a block by device, and the block products that each worker gets at least; blocks
#: are cut in half until it does. Arbitrary: 1 GB a block on a GPU, 4 MB on a CPU.
EDGE = {"gpu": 16384, "cpu": 1024}
PRODUCTS = 4


class DaskArray(OnDask):
    """Blocks by rank in the order of their rows; no placement but Dask's own."""

    promises: ClassVar[tuple[str, ...]] = ("float32", "float64")
    needs: ClassVar = {"cpu": (), "gpu": ("cupy", "dask_cuda")}

    _edge = 0  #: of the blocks of the last product
    _hosted = False  #: whether they lie in host memory

    @property
    def config(self) -> str:
        kind = "CuPy" if self.gpu and not self._hosted else "NumPy"
        moved = (
            "moved by map_blocks(cupy.asarray), persisted, back by cupy.asnumpy, "
            if self._hosted else ""
        )  # fmt: skip
        return (
            f"dask.array.matmul of {kind} blocks of at most {self._edge} x {self._edge}, {moved}"
            f"{self.workers_text}"
        )

    def operands(
        self, product: Product, precision: Precision, seed: int
    ) -> tuple[da.Array, da.Array]:
        self._edge = product.chunk or block_edge(product, self.machine)
        self._hosted = product.hosted
        return self.dealt_out(product, self._edge, seed)

    def multiply(self, operands: tuple[da.Array, da.Array], precision: Precision) -> Any:
        if not self._hosted:
            return self.run(da.matmul(*operands))
        import cupy

        # As a Dask user moves them. Persisted: Dask fuses lazy copies into every block product, and
        # each block would go up as often as it is multiplied.
        a, b = (
            da.map_blocks(cupy.asarray, x, dtype=x.dtype, meta=empty(True, x.dtype)).persist()
            for x in operands
        )
        c = da.matmul(a, b)
        return self.run(da.map_blocks(cupy.asnumpy, c, dtype=c.dtype, meta=empty(False, c.dtype)))


def block_edge(product: Product, machine: Machine) -> int:
    """Return the edge of the blocks of A, B and C."""
    edge = EDGE[machine.device]
    while edge > 1:
        blocks = [-(-size // edge) for size in (product.m, product.n, product.k)]
        if math.prod(blocks) >= PRODUCTS * machine.workers:
            break
        edge //= 2
    return edge
