"""A plan becomes a lazy Dask array, of the tasks that `multimm.graph.builder` makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize

from multimm.graph.block_task import Block
from multimm.graph.builder import Builder
from multimm.graph.gather import Gatherer
from multimm.graph.keys import KEY_VERSION, Keys
from multimm.graph.operand import Operand
from multimm.graph.owners import ProductLayer
from multimm.graph.tasks import Step
from multimm.planning.gathered import GatheredLayout
from multimm.planning.plan import MatmulPlan


def build(
    plan: MatmulPlan, a: da.Array, b: da.Array, c: da.Array | None, step: Step, meta: Block
) -> da.Array:
    """The lazy array alpha op(A) op(B) + beta C.

    Parameters
    ----------
    plan : MatmulPlan
    a, b : dask.array.Array
        As stored: transposed if ``step.trans_a``, ``step.trans_b``. The same in a Gram product.
    c : dask.array.Array or None
        Shape of the result; None when beta is zero.
    step : Step
        Of the last task of each block; the ones before it only add up.
    meta : array
        An empty block of the result.

    Returns
    -------
    dask.array.Array
        Nothing has been computed.
    """
    layout = plan.layout
    declared = None if c is None else c.dtype
    step = replace(step, dtype_a=a.dtype, dtype_b=b.dtype, dtype_c=declared)
    operands = [Operand("a", a, layout, step.trans_a)]
    if not layout.mirrors:  # or A's blocks serve both sides
        operands.append(Operand("b", b, layout, step.trans_b))
    parents: list[Any] = [operand.array for operand in operands if operand.reader is None]
    addend = None if c is None else Operand("c", c, layout, transposed=False)
    if c is not None:
        parents.append(c)
    names = [operand.array.name for operand in operands]
    cluster, added = plan.cluster, None if c is None else c.name
    token = tokenize(KEY_VERSION, names, added, layout, plan.precision, step, cluster.numbers)
    keys = Keys(token, layout, addend is not None)
    tasks = (
        Gatherer(layout, cluster, operands, step, keys).tasks()
        if isinstance(layout, GatheredLayout)
        else Builder(layout, cluster, operands, addend, step, keys).tasks()
    )
    owners = tuple(map(cluster.number, layout.result_owners(cluster.workers)))
    layer = ProductLayer(tasks, owners, cluster.workers)
    chunks = (*layout.stack, *layout.sides)
    high = HighLevelGraph.from_collections(keys.name("matmul"), layer, dependencies=parents)
    return da.Array(high, keys.name("matmul"), chunks, meta=meta)
