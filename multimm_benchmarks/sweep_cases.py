"""The products of the scaling sweep, and on which machines they fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from multimm.errors import OptionError
from multimm.planning.matrix import itemsize_of
from multimm.planning.spec import ClusterSpec, MatrixSpec
from multimm.planning.tiling.grid import regular

Name = TypeVar("Name", bound=str)
#: How often "steady" is repeated, and how much slower than the median its slowest run may be.
STEADY_RUNS, STEADY_RATIO = 20, 1.15
#: Edges of weak scaling are multiples of this, so that all worker counts have even blocks.
STEP = 256


@dataclass(frozen=True, slots=True)
class Product:
    """One product to time: op(A) m x k by B k x n.

    Parameters
    ----------
    kind : str
        A key of `KINDS`.
    name : str
        As in the records.
    m, n, k : int
    scaling : str
        "strong", "weak" or "": what a figure over worker counts shows.
    symmetric : bool
        The product of a.T and a, where A is k x m; otherwise of two matrices.
    repeats : int
        0 leaves it to the sweep.
    chunk : int
        Edge of the blocks that operands come in, dealt out to workers in turn. 0 leaves blocks and
        places to the system.
    hosted : bool
        Operands and result lie in host memory, also where GPUs multiply them: as NumPy blocks of
        `chunk` for systems on Dask, as whole arrays for others.
    dtype : str
        Of the operands and the result.
    """

    kind: str
    name: str
    m: int
    n: int
    k: int
    scaling: str = ""
    symmetric: bool = False
    repeats: int = 0
    chunk: int = 0
    hosted: bool = False
    dtype: str = "float32"

    def at(self, precision: str) -> Product:
        """Return the product that a precision is measured on: of float64 numbers at "float64"."""
        return replace(self, dtype="float64") if precision == "float64" else self

    @property
    def flops(self) -> int:
        """Multiplications and additions of the definition."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Of all operands and the result."""
        operands = self.m * self.k + (0 if self.symmetric else self.k * self.n)
        return itemsize_of(self.dtype) * (operands + self.m * self.n)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of the products on one kind of machine."""

    strong: tuple[int, ...]
    weak: int  #: edge on one worker
    tall: tuple[tuple[int, int], ...]
    rectangular: tuple[tuple[int, int, int], ...]
    chunked: tuple[tuple[int, int, int], ...]  #: rows and columns of an operand, edge of its chunks
    projected: tuple[tuple[int, int, int, int], ...]  #: of X W: X's, W's columns, edge of a chunk
    hosted: tuple[tuple[int, int], ...]  #: edge of a square in host memory, and of its chunks
    steady: int
    per: str  #: what a worker is called


#: By device, and whether it is to be over soon. Those of CPU take seconds on a few cores.
SIZES = {
    # Of tall ones, what eight GPUs have together, and what one of them has of it. 5792: the largest
    # square of Dask's own 128 MiB, in which it cuts rows of 8192; those of 2048 come 16384 at once.
    ("gpu", False): Sizes((32768, 65536, 131072), 32768,
                          ((1048576, 8192), (8388608, 8192), (4194304, 2048), (33554432, 2048)),
                          ((65536, 16384, 65536), (16384, 16384, 262144)),
                          ((32768, 32768, 5792), (16384, 16384, 2000), (4194304, 2048, 131072)),
                          ((4194304, 2048, 1024, 16384), (1048576, 8192, 1024, 16384),
                           (1048576, 8192, 1024, 5792)),
                          ((32768, 8192),), 32768, "GPU"),
    ("gpu", True): Sizes((16384,), 8192, ((262144, 4096),), ((32768, 4096, 16384),),
                         ((16384, 16384, 5792),), (), ((16384, 4096),), 16384, "GPU"),
    ("cpu", False): Sizes((4096,), 2048, ((131072, 512),), ((6144, 1536, 6144),),
                          ((4096, 4096, 700), (131072, 512, 4096)),
                          ((131072, 512, 64, 1024), (65536, 1024, 64, 700)), (), 1024, "worker"),
    ("cpu", True): Sizes((1024,), 512, ((16384, 128),), ((2048, 256, 1024),),
                         ((1024, 1024, 300), (16384, 128, 1024)), (), (), 2048, "worker"),
}  # fmt: skip


def _square(edge: int, kind: str, name: str, **more: Any) -> Product:
    return Product(kind, name, edge, edge, edge, **more)


def _strong(sizes: Sizes, _: int) -> list[Product]:
    return [_square(n, "strong", f"strong square {n}", scaling="strong") for n in sizes.strong]


def _weak(sizes: Sizes, workers: int) -> list[Product]:
    """The same memory per worker: n grows as the square root of the workers."""
    edge = max(STEP, round(sizes.weak * math.sqrt(workers) / STEP) * STEP)
    name = f"weak square {sizes.weak} per {sizes.per}"
    return [_square(edge, "weak", name, scaling="weak")]


def _tall(sizes: Sizes, _: int) -> list[Product]:
    return [
        Product("tall", f"tall AtA {rows} x {columns}", columns, columns, rows, "strong", True)
        for rows, columns in sizes.tall
    ]


def _rectangular(sizes: Sizes, _: int) -> list[Product]:
    return [
        Product("rectangular", f"rectangular {m} x {n} x {k}", m, n, k, "strong")
        for m, n, k in sizes.rectangular
    ]


def _chunked(sizes: Sizes, _: int) -> list[Product]:
    """Operands as a user may have them: a square one twice, a tall one by its transpose, or X W."""
    found = [
        Product("chunked", f"chunked square {rows} in {chunk}", rows, rows, rows, chunk=chunk)
        if rows == columns
        else Product("chunked", f"chunked AtA {rows} x {columns} in {chunk}", columns, columns,
                     rows, symmetric=True, chunk=chunk)
        for rows, columns, chunk in sizes.chunked
    ]  # fmt: skip
    return found + [
        Product("chunked", f"chunked X W {m} x {k} x {n} in {chunk}", m, n, k, chunk=chunk)
        for m, k, n, chunk in sizes.projected
    ]


def _host(sizes: Sizes, _: int) -> list[Product]:
    """Operands in the host memory of GPU workers; of CPU workers all have them there."""
    return [
        _square(edge, "host", f"host square {edge} in {chunk}", chunk=chunk, hosted=True)
        for edge, chunk in sizes.hosted
    ]


def _steady(sizes: Sizes, _: int) -> list[Product]:
    """Runs in a row; only multimm does them, with the most workers."""
    name = f"steady square {sizes.steady}"
    return [_square(sizes.steady, "steady", name, repeats=STEADY_RUNS)]


#: In the order in which they are run.
KINDS = {
    "strong": _strong, "weak": _weak, "tall": _tall, "rectangular": _rectangular,
    "chunked": _chunked, "host": _host, "steady": _steady,
}  # fmt: skip


def products(sizes: Sizes, workers: int, kinds: Sequence[str]) -> list[Product]:
    """Return the products of some kinds for a number of workers."""
    return [product for kind in kinds for product in KINDS[kind](sizes, workers)]


def chosen(given: str | Iterable[str] | None, known: Sequence[Name], what: str) -> tuple[Name, ...]:
    """Return the names that a list such as ``"strong,weak"`` gives; all without one.

    Raises
    ------
    OptionError
        Names an unknown one, and lists the known.
    """
    if given is None:
        return tuple(known)
    names = given.split(",") if isinstance(given, str) else given
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if name not in known:
            raise OptionError(f"no {what} is called {name!r}; known are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def too_large(product: Product, cluster: ClusterSpec) -> str:
    """Return why multimm cannot hold a product without spilling; empty where it can.

    Raises
    ------
    MemoryBudgetError
        If the plan needs more at once than it may take.
    """
    plan = _plan(product, cluster)
    terms = plan.memory_terms | plan.spill_terms
    need = sum(terms.values())
    have = plan.budget_bytes
    if need <= have:
        plan.check()
        return ""
    return (
        f"needs {need / 1e9:.3g} GB on each of {cluster.workers} workers; "
        f"{have / 1e9:.3g} GB may be used without spilling"
    )


def _plan(product: Product, cluster: ClusterSpec) -> Any:
    import multimm

    a, b = operand_specs(product, cluster.workers)
    return multimm.plan(a, b, trans_a=product.symmetric, cluster=cluster)


def operand_specs(product: Product, workers: int) -> tuple[MatrixSpec, MatrixSpec]:
    """A and B as they are stored: in chunks on workers in turn, or nobody knows how."""
    shapes = (product.m, product.k), (product.k, product.n)

    def spec(shape: tuple[int, int]) -> MatrixSpec:
        if not product.chunk:
            return MatrixSpec(shape, product.dtype)
        chunks = tuple(regular(size, product.chunk) for size in shape)
        owners = (at % workers for at in range(math.prod(map(len, chunks))))
        return MatrixSpec(shape, product.dtype, chunks=chunks, owners=tuple(owners))

    b = spec(shapes[1])
    return b if product.symmetric else spec(shapes[0]), b
