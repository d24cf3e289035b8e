"""numpy.matmul on the host's cores: what a laptop has without anything."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from multimm.gpu.kernel_selection import Precision
from multimm_benchmarks.peers.base import Array, Machine, System, crossing, normal
from multimm_benchmarks.sampling import Sample
from multimm_benchmarks.sweep_cases import Product

#: Products that would take longer are left out; arbitrary.
LONGEST_SECONDS = 60.0


class NumpyMatmul(System):
    """One process, BLAS with all cores."""

    promises: ClassVar[tuple[str, ...]] = ("float32", "float64")
    needs: ClassVar = {"cpu": (), "gpu": ()}
    runs_on: ClassVar[str | None] = "cpu"
    spreads = False
    hosts = True
    warms_up = False
    ready_s, case_s = 2.0, 2.5

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._kept: tuple[Product, tuple[Array, Array]] | None = None

    @classmethod
    def too_large(cls, product: Product, machine: Machine) -> str:
        seconds = product.flops / (machine.gflops * 1e9)
        if seconds > LONGEST_SECONDS:
            return f"would take about {seconds:.0f} s for each run"
        return cls.beyond_host(product, machine)

    @property
    def config(self) -> str:
        return "numpy.matmul in one process, its BLAS with the threads it takes by default"

    def operands(self, product: Product, precision: Precision, seed: int) -> tuple[Array, Array]:
        """Return the same ones for every run: nothing is remembered between calls here.

        Drawing them takes longer than most products.
        """
        if self._kept is None or self._kept[0] != product:
            self._kept = None  # before there are others
            self._kept = product, self._made(product, seed)
        return self._kept[1]

    @staticmethod
    def _made(product: Product, seed: int) -> tuple[Array, Array]:
        if product.symmetric:
            a = normal(product.k, product.m, seed, product.dtype)
            return a.T, a
        a = normal(product.m, product.k, 2 * seed, product.dtype)
        return a, normal(product.k, product.n, 2 * seed + 1, product.dtype)

    def multiply(self, operands: tuple[Array, Array], precision: Precision) -> Array:
        return np.matmul(*operands)

    def sample(self, operands: Any, result: Array, at: Sample) -> tuple[Array, Array, Array]:
        a, b = operands
        return crossing(a, b, result, at)
