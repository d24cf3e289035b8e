"""cupy.matmul on one GPU: cuBLAS, with both operands in the GPU's memory."""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.peers.base import Array, System, crossing
from benchmarks.sampling import Sample
from benchmarks.sweep_cases import Product


class Cupy(System):
    """One GPU; float32 stays float32."""

    needs: ClassVar = {"gpu": ("cupy",)}
    spreads = False

    @property
    def config(self) -> str:
        import cupy
        from cupy.cuda import cublas, device

        version = cublas.getVersion(device.get_cublas_handle())
        return f"cupy.matmul of CuPy {cupy.__version__} on one GPU, cuBLAS {version}, no TF32"

    def operands(self, product: Product, precision: str, seed: int) -> tuple[Array, Array]:
        import cupy

        from benchmarks.cublas import check_environment

        check_environment()
        cupy.get_default_memory_pool().free_all_blocks()
        rng = cupy.random.default_rng(seed)
        shape = (product.k, product.m) if product.gram else (product.m, product.k)
        a = rng.standard_normal(shape, dtype=cupy.float32)
        b = None
        if not product.gram:
            b = rng.standard_normal((product.k, product.n), dtype=cupy.float32)
        cupy.cuda.Device().synchronize()
        return (a.T, a) if b is None else (a, b)

    def multiply(self, operands: tuple[Array, Array], precision: str) -> Array:
        import cupy

        result = cupy.matmul(*operands)
        cupy.cuda.Device().synchronize()
        return result

    def sample(self, operands: Any, result: Array, at: Sample) -> tuple[Array, Array, Array]:
        a, b = operands
        left, right, found = crossing(a, b, result, at)
        return left.get(), right.get(), found.get()
