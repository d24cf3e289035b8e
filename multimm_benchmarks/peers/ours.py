"""multimm itself, on GPU workers or on CPU workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product as pairs
from typing import Any, ClassVar

import dask.array as da

from multimm.gpu.kernel_selection import PRECISIONS, Precision
from multimm.planning.plan import MatmulPlan
from multimm.planning.spec import H200, NVLINK, ClusterSpec, MatrixSpec
from multimm_benchmarks.harness import WrongResultError
from multimm_benchmarks.peers import trace
from multimm_benchmarks.peers.base import Machine
from multimm_benchmarks.peers.on_dask import Home, OnDask
from multimm_benchmarks.sweep_cases import Product, operand_specs, too_large

#: Intervals of a timeline, at most; more make the records unreadable.
MOST_INTERVALS = 4000
#: Where operands lie of which the product does not say it.
AT_HOME = "at home and unpacked"
#: Edge of the products, and seconds, with which a worker's own rate is taken: in full, and quick.
#: Arbitrary: as long as a product, and on a GPU long enough for its clock to settle.
RATE = {"gpu": (16384, 2.0, 0.3), "cpu": (512, 0.3, 0.1)}


class Multimm(OnDask):
    """Operands lie unpacked, in the blocks and at the homes that the plan gives them.

    Those of chunked and of hosted products lie as the product says, and the plan follows them.
    """

    promises = PRECISIONS
    #: Kinds of products whose last run is recorded as a timeline.
    drawn: ClassVar[Collection[str]] = ("strong",)
    needs: ClassVar = {"cpu": (), "gpu": ("cupy", "dask_cuda", "rmm", "numba")}
    returns_early = False  # `multimm.graph.tasks.multiply.finished` waits for every task's stream

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._plans: dict[tuple[Product, str], MatmulPlan] = {}
        self._rates: dict[str, float] = {}
        self._plan: MatmulPlan | None = None
        self._where = ""  #: operands of the last product lie

    @classmethod
    def too_large(cls, product: Product, machine: Machine) -> str:
        from multimm.cluster.inspect.devices import cpu_device

        if product.hosted and (reason := cls.beyond_host(product, machine)):
            return reason
        if machine.device == "cpu":
            each = machine.memory_bytes // machine.workers
            cluster = ClusterSpec.homogeneous(cpu_device(each, 1, spills=True), machine.workers)
            return too_large(product, cluster)
        # Another GPU has other rates and blocks of the same order: memory is what is asked.
        device = replace(H200, memory_bytes=machine.memory_bytes)
        return too_large(product, ClusterSpec.homogeneous(device, machine.workers, NVLINK))

    @property
    def config(self) -> str:
        return f"multimm.matmul, operands {self._where}, {self.workers_text}"

    def prepare(self, product: Product, precision: Precision) -> None:
        """Plan, and take the workers' own rates, before operands fill their memory."""
        super().prepare(product, precision)
        kind = "NumPy blocks" if product.hosted else "in chunks"
        self._where = f"{kind} of {product.chunk} in turn" if product.chunk else AT_HOME
        # That blocks lie in host memory no spec says, only the arrays: these are planned for.
        self._plan = None if product.hosted else self._planned(product, precision)
        self._ideal(precision)

    def operands(
        self, product: Product, precision: Precision, seed: int
    ) -> tuple[da.Array, da.Array]:
        if product.chunk:
            made = self.dealt_out(product, product.chunk, seed)
            if product.hosted:
                self._plan = self._planned(product, precision, made)
            return made
        plan = self._planned(product, precision)
        layout = plan.layout
        b = self.matrix(layout.k_tiles, layout.n_blocks, 2 * seed + 1, _home(plan, "b"), product)
        if product.symmetric:
            return b.T, b
        a = self.matrix(layout.m_blocks, layout.k_tiles, 2 * seed, _home(plan, "a"), product)
        return a, b

    def _planned(
        self, product: Product, precision: Precision, made: tuple[da.Array, da.Array] | None = None
    ) -> MatmulPlan:
        """The plan for operands that lie in the plan's own blocks, where it keeps them.

        For those in the product's chunks, it is the one of `matmul`; once `made`, of the arrays.
        """
        import multimm

        if (product, precision) in self._plans:
            return self._plans[product, precision]
        a, b = made or operand_specs(product, len(self.addresses))
        turned = product.symmetric and not made  # arrays are transposed already

        def planned(a: Any, b: Any) -> MatmulPlan:
            return multimm.plan(a, b, trans_a=turned, precision=precision)

        plan = as_the_plan_keeps_them(planned, (a, b), product)
        self._plans[product, precision] = plan.check()
        return plan

    def multiply(self, operands: tuple[da.Array, da.Array], precision: Precision) -> da.Array:
        import multimm

        return self.run(multimm.matmul(*operands, precision=precision))

    def least_tasks(self, result: da.Array) -> int:
        return self._plan.tasks if self._plan else 0

    def verify(self, operands: Any, result: da.Array, precision: Precision) -> None:
        """Freivalds' check of all of it."""
        import multimm

        a, b = operands
        if not (outcome := multimm.verify(a, b, result, precision=precision)):
            raise WrongResultError(str(outcome))

    def facts(
        self, product: Product, precision: Precision, last: tuple[float, float]
    ) -> dict[str, Any]:
        plan = self._planned(product, precision)
        rows = trace.timeline(self.intervals, last[0], MOST_INTERVALS)
        found = super().facts(product, precision, last)
        return found | {
            "bytes_predicted": plan.bytes_moved,
            "peak_bytes": plan.peak_bytes,
            "plan": str(plan),
            "detail": found["detail"]
            | {
                "predicted_seconds": float(f"{plan.seconds:.6g}"),
                "one_worker_tflops": self._ideal(precision),
                **({"timeline": rows} if rows and product.kind in self.drawn else {}),
            },
        }

    def _ideal(self, precision: Precision) -> float:
        """The sum of every worker's own rate with all of them running, TFLOP/s."""
        if precision not in self._rates:
            edge, full, quick = RATE[self.machine.device]
            seconds = quick if self.machine.quick else full
            rates = [
                self.client.submit(
                    own_rate, precision, edge, seconds, self.gpu, workers=[address], pure=False
                )
                for address in self.addresses
            ]
            self._rates[precision] = float(f"{sum(self.client.gather(rates)):.6g}")
        return self._rates[precision]


def as_the_plan_keeps_them(
    planned: Callable[[Any, Any], MatmulPlan], given: tuple[Any, Any], product: Product
) -> MatmulPlan:
    """The plan of operands that lie in its own blocks, where it keeps them, or as they are given.

    Parameters
    ----------
    planned : callable
        The plan of two operands.
    given : tuple of MatrixSpec or Array
        Those in the product's chunks, if it has any; else nobody knows how they lie.
    product : Product
    """
    plan = planned(*given)
    for _ in range(0 if product.chunk else 3):  # what a plan is given it mostly keeps
        b = _lying(plan, "b")
        kept = (b if product.symmetric else _lying(plan, "a")), b
        if kept == given:
            break
        given, plan = kept, planned(*kept)
    return plan


def _lying(plan: MatmulPlan, role: str) -> MatrixSpec:
    """An operand in the blocks of a plan, with the workers that keep them."""
    chunks, home, spec = plan.layout.operand_chunks(role), _home(plan, role), plan.layout.spec(role)
    owners = tuple(home(*block) for block in pairs(*(range(len(sizes)) for sizes in chunks)))
    return MatrixSpec(spec.shape, spec.dtype, chunks=chunks, owners=owners)


def _home(plan: MatmulPlan, role: str) -> Home:
    """The worker that keeps a block of an operand, by the block's row and column."""

    def of(i: int, j: int) -> int:
        block, slab = (i, j) if role == "a" else (j, i)
        rank = plan.layout.tiles.owners(role, 0, block)[slab]
        return plan.cluster.number(rank % plan.cluster.workers)

    return of


def own_rate(precision: Precision, edge: int, seconds: float, gpu: bool) -> float:
    """Runs on a worker: TFLOP/s of block products with operands packed before, as in a product.

    What efficiency is stated against, taken anew in each run. Predictions are made from the rates
    that `describe` knows, whose origin the record's plan states.
    """
    from multimm.cluster.calibration.probes import product_gflops

    return product_gflops(precision, (edge, edge), seconds, gpu, adds=True) / 1e3
