"""Products of blocks inside the tasks of Dask's own algorithms: `da.linalg` writes ``np.dot``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from multimm.gpu.arrays import is_cupy
from multimm.gpu.dtypes import accumulate_dtype, result_dtype
from multimm.graph.block_task import Block
from multimm.graph.tasks.multiply import Step, finished, gemm, stream_for


def dot(a: Block, b: Block) -> Block:
    """`numpy.dot`; of matrices on a GPU by our kernels, where these are faster than its library."""
    if not (is_cupy(a) and is_cupy(b) and a.ndim == b.ndim == 2):
        return np.dot(a, b)
    accumulate = str(accumulate_dtype(a.dtype, b.dtype))
    step = Step(accumulate, str(result_dtype(a.dtype, b.dtype)))
    with stream_for(a):
        return finished(gemm(a, b, step=step))


def with_our_dots(
    arrays: Sequence[da.Array], given: Iterable[da.Array]
) -> tuple[tuple[da.Array, ...], int]:
    """Arrays whose tasks call `dot` in place of NumPy's, and how many of these there are.

    Parameters
    ----------
    arrays : sequence of dask.array.Array
        What one of Dask's functions has made.
    given : iterable of dask.array.Array
        What it was given: their tasks stay as they are.
    """
    known = {name for x in given for name in x.dask.layers}
    changed: dict[str, Any] = {}
    count = 0
    for name, layer in {k: v for x in arrays for k, v in x.dask.layers.items()}.items():
        if name in known:
            continue
        found: list[Any] = []
        if type(layer) is MaterializedLayer:
            tasks = {key: _changed(task, found) for key, task in layer.mapping.items()}
            if found:
                changed[name] = MaterializedLayer(tasks, annotations=layer.annotations)
        elif isinstance(layer, Blockwise) and getattr(layer.task, "func", None) is np.dot:
            found = list(layer.get_output_keys())
            changed[name] = copy.copy(layer)
            changed[name].task = copy.copy(layer.task)
            changed[name].task.func = dot
        count += len(found)
    if not count:
        return tuple(arrays), 0
    made = []
    for x in arrays:
        layers = {name: changed.get(name, layer) for name, layer in x.dask.layers.items()}
        graph = HighLevelGraph(layers, x.dask.dependencies)
        made.append(da.Array(graph, x.name, x.chunks, meta=x._meta))
    return tuple(made), count


def _changed(task: Any, found: list[Any]) -> Any:
    """A task as Dask writes them by hand: a tuple that begins with a function."""
    if isinstance(task, list):
        return [_changed(part, found) for part in task]
    if type(task) is not tuple or not task:
        return task
    func, *args = task
    if func is np.dot:
        found.append(task)
        func = dot
    return (func, *(_changed(part, found) for part in args))
