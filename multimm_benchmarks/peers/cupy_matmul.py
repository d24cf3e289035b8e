"""cupy.matmul on one GPU: cuBLAS, with both operands in the GPU's memory."""

from __future__ import annotations

from typing import Any, ClassVar

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.peers.base import Array, System, crossing
from multimm_benchmarks.sampling import Sample
from multimm_benchmarks.sweep_cases import Product

#: Elements that are drawn at once: 1 GB.
STRIPE = 2**28


class Cupy(System):
    """One GPU; float32 stays float32."""

    promises: ClassVar[tuple[str, ...]] = ("float32", "float64")
    needs: ClassVar = {"gpu": ("cupy",)}
    spreads = False
    imported_ahead = ("cupy",)
    ready_s, case_s = 1.5, 0.8

    @property
    def config(self) -> str:
        import cupy
        from cupy.cuda import cublas, device

        version = cublas.getVersion(device.get_cublas_handle())
        return f"cupy.matmul of CuPy {cupy.__version__} on one GPU, cuBLAS {version}, no TF32"

    def operands(self, product: Product, precision: Precision, seed: int) -> tuple[Array, Array]:
        import cupy

        from multimm_benchmarks.cublas import check_environment

        check_environment()
        cupy.get_default_memory_pool().free_all_blocks()
        rng = cupy.random.default_rng(seed)
        shape = (product.k, product.m) if product.symmetric else (product.m, product.k)
        a = _normal(rng, *shape, product.dtype)
        b = None if product.symmetric else _normal(rng, product.k, product.n, product.dtype)
        cupy.cuda.Device().synchronize()
        return (a.T, a) if b is None else (a, b)

    def multiply(self, operands: tuple[Array, Array], precision: Precision) -> Array:
        import cupy

        result = cupy.matmul(*operands)
        cupy.cuda.Device().synchronize()
        return result

    def sample(self, operands: Any, result: Array, at: Sample) -> tuple[Array, Array, Array]:
        a, b = operands
        left, right, found = crossing(a, b, result, at)
        return left.get(), right.get(), found.get()


def _normal(rng: Any, rows: int, columns: int, dtype: str) -> Array:
    """A matrix drawn in stripes: its elements may be more than a generator's index can count."""
    import cupy

    made = cupy.empty((rows, columns), dtype)
    step = max(1, STRIPE // columns)
    for first in range(0, rows, step):
        stripe = made[first : first + step]
        stripe[...] = rng.standard_normal(stripe.shape, dtype=dtype)
    return made
