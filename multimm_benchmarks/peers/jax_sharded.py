"""JAX's sharded product over the devices of one host, at its highest precision and its default."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.peers.base import Array, Machine, System
from multimm_benchmarks.sampling import Sample
from multimm_benchmarks.sweep_cases import Product


class JaxHighest(System):
    """jax.lax.Precision.HIGHEST: float32 products."""

    needs: ClassVar = {"cpu": ("jax",), "gpu": ("jax",)}
    family = "jax"
    imported_ahead = ("jax", "jax.sharding")
    # The first case takes 4 s more; in each XLA takes 6 to 8 to choose an algorithm.
    ready_s, case_s = 6.5, 8.0
    longest = 25.0  # XLA tries cuBLAS's algorithms on the sizes themselves: 20 to 35 on H200s
    precision = "HIGHEST"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._mesh: Any = None

    @property
    def config(self) -> str:
        import jax

        rows, columns = self._mesh.devices.shape
        return (
            f"JAX {jax.__version__}, jit of dot at Precision.{self.precision}, "
            f"A, B and C sharded over a {rows} x {columns} mesh (A' A: A by rows, C by columns)"
        )

    @contextmanager
    def opened(self, others: Sequence[System] = ()) -> Iterator[None]:
        count = self.machine.workers  # the first one opened in a process has the most
        if self.machine.device == "cpu":  # before JAX is imported
            os.environ["JAX_PLATFORMS"] = "cpu"
            os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
        import jax
        from jax.sharding import Mesh

        devices = jax.devices("gpu" if self.machine.device == "gpu" else "cpu")
        if len(devices) < count:
            raise RuntimeError(f"JAX finds {len(devices)} devices, {count} are needed")
        rows = max(r for r in range(1, count + 1) if count % r == 0 and r * r <= count)
        grid = np.array(devices[:count]).reshape(rows, count // rows)
        self._mesh = Mesh(grid, ("x", "y"))
        yield

    def operands(self, product: Product, precision: Precision, seed: int) -> tuple[Array, ...]:
        import jax

        keys = jax.random.split(jax.random.key(seed))
        if product.symmetric:
            made: tuple[Array, ...] = (
                self._normal(product.k, product.m, ("x", "y"), None)(keys[0]),
            )
        else:
            made = (
                self._normal(product.m, product.k, "x", "y")(keys[0]),
                self._normal(product.k, product.n, "x", "y")(keys[1]),
            )
        jax.block_until_ready(made)
        return made

    def multiply(self, operands: tuple[Array, ...], precision: Precision) -> Array:
        return self._product(len(operands) == 1)(*operands).block_until_ready()

    def sample(self, operands: Any, result: Array, at: Sample) -> tuple[Array, Array, Array]:
        taken = self._taken(len(operands) == 1)
        parts = taken(operands[0], operands[-1], result, at.rows, at.columns)
        left, right, found = (np.asarray(part) for part in parts)
        return left, right, found

    def _sharding(self, *axes: Any) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self._mesh, PartitionSpec(*axes))

    @functools.cache  # noqa: B019 - one object in a process that ends with it
    def _normal(self, rows: int, columns: int, *axes: Any) -> Any:
        import jax

        def make(key: Any) -> Any:
            return jax.random.normal(key, (rows, columns), jax.numpy.float32)

        return jax.jit(make, out_shardings=self._sharding(*axes))

    @functools.cache  # noqa: B019
    def _taken(self, symmetric: bool) -> Any:
        """What takes a sample. Compiled once: outside of `jit` each step would be, by itself."""
        import jax

        def take(a: Array, b: Array, c: Array, rows: Array, columns: Array) -> tuple[Array, ...]:
            left = a[:, rows].T if symmetric else a[rows]
            return left, b[:, columns], c[rows][:, columns]

        return jax.jit(take)

    @functools.cache  # noqa: B019
    def _product(self, symmetric: bool) -> Any:
        import jax

        dot = functools.partial(
            jax.numpy.matmul, precision=getattr(jax.lax.Precision, self.precision)
        )
        if symmetric:
            return jax.jit(lambda a: dot(a.T, a), out_shardings=self._sharding(None, ("x", "y")))
        return jax.jit(dot, out_shardings=self._sharding("x", "y"))


class JaxDefault(JaxHighest):
    """jax.lax.Precision.DEFAULT: on NVIDIA GPUs one pass of TF32; on CPUs the same as HIGHEST."""

    needs: ClassVar = {"gpu": ("jax",)}
    promises = ("tf32",)
    case_s = 2.0
    longest = 5.0
    precision = "DEFAULT"
