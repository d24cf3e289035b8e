"""A plan becomes a lazy Dask array, of the tasks that `multimm.graph.lowering.task_graph` makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize

from multimm.graph.block_task import Block, BlockTask, Key, LabelledTask, within
from multimm.graph.data_location import ProductLayer
from multimm.graph.label import Kind
from multimm.graph.lowering.host_downloads import downloads, taken_below
from multimm.graph.lowering.host_uploads import uploads
from multimm.graph.lowering.operand import Operand
from multimm.graph.lowering.owner_computes import Gatherer
from multimm.graph.lowering.result_chunks import handed_out
from multimm.graph.lowering.task_graph import Builder
from multimm.graph.task_keys import KEY_VERSION, Keys
from multimm.graph.tasks.host_offload import on_device
from multimm.graph.tasks.multiply import Step
from multimm.planning.cost.memory import download_limit
from multimm.planning.plan import MatmulPlan
from multimm.planning.schedule import Schedule


def build(
    plan: MatmulPlan, a: da.Array, b: da.Array, c: da.Array | None, step: Step, meta: Block
) -> da.Array:
    """The lazy array alpha op(A) op(B) + beta C.

    Parameters
    ----------
    plan : MatmulPlan
    a, b : dask.array.Array
        As stored: transposed if ``step.trans_a``, ``step.trans_b``. The same in a symmetric
        product.
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
    if layout.problem.downloaded:  # of a product that is still lazy, what lies on GPUs
        a, b = taken_below(a), taken_below(b)
        c = None if c is None else taken_below(c)
    declared = None if c is None else c.dtype
    step = replace(step, dtype_a=a.dtype, dtype_b=b.dtype, dtype_c=declared)
    names = [a.name] if layout.mirrors else [a.name, b.name]  # or A's blocks serve both sides
    cluster, added = plan.cluster, None if c is None else c.name
    token = tokenize(_token(layout), names, added, plan.precision, step, cluster.numbers)
    keys = Keys(token, layout, cluster, c is not None)
    operands = [Operand("a", a, layout, step.trans_a, keys.uploaded("a"))]
    if not layout.mirrors:
        goes_up = keys.uploaded("a" if a.name == b.name else "b")  # one array on both sides once
        operands.append(Operand("b", b, layout, step.trans_b, goes_up))
    parents: list[Any] = [x.array for x in operands if x.needed]
    addend = None if c is None else Operand("c", c, layout, False, keys.uploaded("c"))
    if c is not None:
        parents.append(c)
    tasks: Mapping[Key, LabelledTask] = _tasks(operands, addend, step, keys)
    owners = tuple(map(cluster.number, layout.result.owners(cluster.workers)))
    reads = {
        x.array.name: (x.role, x.transposed, x.chunks)
        for x in operands
        if x.reader is not None and not x.uploaded and not layout.problem.in_one
    }
    name = keys.name("chunk" if layout.result.hands_out else "matmul")
    if layout.problem.downloaded and not layout.problem.in_one:
        tasks = {**tasks, **downloads(name, keys, download_limit(layout, cluster))}
        name = keys.name("downloaded")
    layer = ProductLayer(tasks, owners, cluster.workers, reads)
    high = HighLevelGraph.from_collections(name, layer, dependencies=parents)
    return da.Array(high, name, layout.result.chunks, meta=meta)


def _tasks(
    operands: list[Operand], addend: Operand | None, step: Step, keys: Keys
) -> dict[Key, BlockTask]:
    """All of a product's tasks but those that bring C back to host memory."""
    layout = keys.layout
    tasks = (
        Builder(operands, addend, step, keys).tasks()
        if layout.in_place is None
        else Gatherer(layout.in_place, operands, step, keys).tasks()
    )
    if layout.problem.in_one:
        # One that reads a block reads it; all others work on a GPU.
        tasks = {
            key: task if task.label.kind is Kind.READ else within(task, on_device)
            for key, task in tasks.items()
        }
    elif layout.problem.uploaded:
        inputs = [*operands, addend] if addend else operands
        tasks |= uploads([*tasks.values()], inputs, keys)
    return tasks | handed_out(keys, tasks)


@lru_cache(maxsize=128)  # of as many as plans are kept
def _token(layout: Schedule) -> str:
    return str(tokenize(KEY_VERSION, layout))
