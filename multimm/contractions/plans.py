"""What einsum and tensordot would do, said before they do it: the plans of their products."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from dask.array import PerformanceWarning

from multimm.contractions.functions import einsum_steps, tensordot_steps
from multimm.contractions.pair import Matrices, Term, elementwise
from multimm.contractions.steps import Contraction
from multimm.contractions.subscripts import Labels, written
from multimm.display import html
from multimm.gpu.dtypes import named
from multimm.gpu.kernel_selection import Precision, check_held, check_precision
from multimm.operands import Array, is_dask
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.plan import MatmulPlan

#: Of a sum without steps.
NOTHING = "nothing to compute: axes are named in another order, at most"


@dataclass(frozen=True, repr=False)
class PlannedStep:
    """A step of one or two operands.

    Attributes
    ----------
    subscripts : str
        What it does, as for `multimm.einsum`.
    plan : MatmulPlan or None
        Of its product; None of what is no product of matrices, which Dask computes.
    """

    subscripts: str
    plan: MatmulPlan | None

    def __repr__(self) -> str:
        return str(self.plan or "sums or products of elements, by Dask: not predicted")

    def _repr_html_(self) -> str:
        return html.page(str(self)) if self.plan is None else self.plan._repr_html_()


@dataclass(frozen=True, repr=False)
class ContractionPlan:
    """How a sum over any axes will be computed: ``print(plan)`` is the dry run.

    Attributes
    ----------
    steps : tuple of PlannedStep
        In their order.
    seconds : float
        Predicted time of all products, one after the other.
    bytes_moved : int
        What workers receive for all products.
    peak_bytes : int
        What the fullest worker holds at once and cannot spill, of the largest product.
    tasks : int
        Of all products.
    """

    steps: tuple[PlannedStep, ...]

    @property
    def plans(self) -> tuple[MatmulPlan, ...]:
        """Of the products among the steps."""
        return tuple(step.plan for step in self.steps if step.plan is not None)

    @property
    def seconds(self) -> float:
        """Predicted time of all products, one after the other."""
        return sum(plan.seconds for plan in self.plans)

    @property
    def bytes_moved(self) -> int:
        """What workers receive for all products."""
        return sum(plan.bytes_moved for plan in self.plans)

    @property
    def peak_bytes(self) -> int:
        """What the fullest worker holds at once and cannot spill, of the largest product."""
        return max((plan.peak_bytes for plan in self.plans), default=0)

    @property
    def tasks(self) -> int:
        """Of all products."""
        return sum(plan.tasks for plan in self.plans)

    def check(self) -> ContractionPlan:
        """Return the plan if every product fits.

        Raises
        ------
        MemoryBudgetError
            As that of `MatmulPlan.check`, for the first product that does not.
        """
        for plan in self.plans:
            plan.check()
        return self

    def __repr__(self) -> str:
        texts = [f"{head}\n{step}" for head, step in self._headed()]
        return "\n\n".join(texts) or NOTHING

    def _repr_html_(self) -> str:
        pages = [html.page(head, step._repr_html_()) for head, step in self._headed()]
        return "".join(pages) or html.page(NOTHING)

    def _headed(self) -> list[tuple[str, PlannedStep]]:
        """The steps, and what is said above each."""
        count = len(self.steps)
        heads = (f"step {n} of {count}: {x.subscripts}" for n, x in enumerate(self.steps, 1))
        return [*zip(heads, self.steps, strict=True)]


def plan_einsum(
    operands: Sequence[Any],
    *,
    dtype: Any = None,
    optimize: Any = True,
    precision: Precision = "float32",
    cluster: ClusterSpec | None = None,
) -> ContractionPlan:
    """The plans of the products that `einsum` makes of arrays, or of `MatrixSpec`s."""
    given, hosted = _on_paper(operands)
    return _planned(einsum_steps(given, dtype, optimize), precision, cluster, hosted)


def plan_tensordot(
    a: Any,
    b: Any,
    axes: Any,
    *,
    precision: Precision = "float32",
    cluster: ClusterSpec | None = None,
) -> ContractionPlan:
    """The plans of the products that `tensordot` makes of arrays, or of `MatrixSpec`s."""
    (a, b), hosted = _on_paper([a, b])
    return _planned(tensordot_steps(a, b, axes), precision, cluster, hosted)


def _planned(
    contraction: Contraction, precision: Precision, cluster: ClusterSpec | None, hosted: bool | None
) -> ContractionPlan:
    check_precision(precision)
    check_held(precision, str(contraction.dtype))
    if hosted is False and isinstance(cluster, ClusterSpec):  # on paper: where they are multiplied
        contraction = contraction._replace(gpu=cluster.slowest.kind == "gpu")
    steps: list[PlannedStep] = []

    def multiplied(
        found: Matrices, terms: list[Term], out: Labels, dtype: np.dtype[Any] | None
    ) -> Array:
        product = found.product(precision, dtype)
        if hosted is not None:
            a = _spec(product.a, hosted)
            product = product._replace(a=a, b=a if product.gram else _spec(product.b, hosted))
        steps.append(PlannedStep(_text(terms, out), product.plan(cluster)))
        if hosted is None:
            return found.apart(product.result(), out)
        chunks = tuple(found.chunks[x] for x in out)
        return _paper(chunks, product.step.dtype, len(steps))

    def by_elements(terms: list[Term], out: Labels, dtype: np.dtype[Any] | None) -> Array:
        steps.append(PlannedStep(_text(terms, out), None))
        return elementwise(terms, out, dtype)

    with warnings.catch_warnings():
        # Of the chunks that a result would have Dask warns who computes it.
        warnings.simplefilter("ignore", PerformanceWarning)
        contraction.run(multiplied, by_elements)
    return ContractionPlan(tuple(steps))


def _text(terms: list[Term], out: Labels) -> str:
    return written([term.labels for term in terms], out)


def _on_paper(operands: Sequence[Any]) -> tuple[list[Any], bool | None]:
    """Operands of which nothing is computed; whether they lie in host memory, if on paper alone."""
    arrays = [x for x in operands if hasattr(x, "shape") and hasattr(x, "dtype")]
    specs = [x for x in arrays if isinstance(x, MatrixSpec)]
    if not specs and any(map(is_dask, arrays)):
        return [*operands], None
    made = [
        _paper(
            x.chunks if isinstance(x, MatrixSpec) or is_dask(x) else tuple((n,) for n in x.shape),
            str(x.dtype),
            number,
        )
        if any(x is other for other in arrays)
        else x
        for number, x in enumerate(operands)
    ]
    # One array twice stays one.
    first = {id(x): n for n, x in reversed([*enumerate(operands)])}
    made = [made[first[id(x)]] for x in operands]
    return made, any(x.hosted for x in specs)


def _paper(chunks: Any, dtype: str, number: int) -> da.Array:
    """A Dask array without tasks."""
    meta: Any = np.empty((0,) * len(chunks), named(dtype))
    return da.Array({}, f"on-paper-{number}-{len(chunks)}", chunks, meta=meta)


def _spec(x: Array, hosted: bool) -> MatrixSpec:
    return MatrixSpec(x.shape, str(x.dtype), x.dtype.itemsize, x.chunks, hosted=hosted)
