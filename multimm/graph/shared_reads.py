"""One pass over a file for two products of it: ``X.T @ (X @ Q)``.

Each product reads the blocks of X that it multiplies, in blocks of its own. A block of ``X @ Q`` is
made of one row of X's blocks, and ``X.T @ Y`` multiplies it by that row: what the first product
reads serves the second one, too. That is so of Y as it is, and of what is computed of it block by
block. It is not where Y needs all of X before, as an orthonormal basis does: then X would be held.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import accumulate, product
from math import prod
from typing import Any

import dask.array as da
from dask._task_spec import Alias
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph

from multimm.graph.block_task import BlockTask, Key
from multimm.graph.data_location import ProductLayer, ReadLayer, below, same_blocks
from multimm.graph.label import Kind
from multimm.graph.lowering.operand import reader_of
from multimm.planning.tiling.grid import Blocks


def reads_of(x: da.Array, y: da.Array, axis_x: int, axis_y: int) -> da.Array:
    """A file's array as the product reads it that y is made of; the array itself where none does.

    Parameters
    ----------
    x, y : dask.array.Array
        The operands of another product.
    axis_x, axis_y : int
        Their axes, as stored, that it sums over.
    """
    if x.ndim != 2 or y.ndim != 2 or reader_of(x) is None:
        return x
    for name, numbers in below(y):
        layer = y.dask.layers.get(name)
        if numbers is None and isinstance(layer, ProductLayer) and x.name in layer.reads:
            role, transposed, chunks = layer.reads[x.name]
            free = int(role == "b")  # the axis of C that is one of X
            same_rows = axis_y == free and axis_x == free ^ transposed
            fit = same_rows and {*accumulate(chunks[axis_x])} <= {*accumulate(y.chunks[axis_y])}
            return _as_read(x, y, name, chunks) if fit and _block_by_block(y, name) else x
    return x


def _block_by_block(y: da.Array, product: str) -> bool:
    """Whether each block of y needs no other block of a product than the one in its place."""
    layers, needs, of_it = y.dask.layers, y.dask.dependencies, {product}
    for name in TopologicalSorter(needs).static_order():
        used = needs[name] & of_it
        layer = layers[name]
        if used and not (isinstance(layer, Blockwise) and used <= {*same_blocks(layer, y)}):
            return False
        of_it |= {name} if used else set()
    return True


def _as_read(x: da.Array, y: da.Array, source: str, chunks: tuple[Blocks, ...]) -> da.Array:
    """The array of the blocks that a product reads; x itself where it reads some of them twice."""
    layer: Any = y.dask.layers[source]
    role = layer.reads[x.name][0]
    found: dict[tuple[int, ...], tuple[Key, int]] = {}
    for key, task in layer.mapping.items():
        if not isinstance(task, BlockTask) or task.label.kind is not Kind.READ:
            continue
        if task.label.matrix == role.upper():
            if task.label.block in found:
                return x
            found[task.label.block] = key, layer.rank(task.place, task.place.owner)
    if len(found) != prod(map(len, chunks)):
        return x
    name = f"multimm-read-{source}-{role}"
    at = [*product(*(range(len(sizes)) for sizes in chunks))]
    targets = {index: found[index][0] for index in at}
    tasks = {(name, *index): Alias((name, *index), key) for index, key in targets.items()}
    owners = tuple(found[index][1] for index in at) if layer.spread else ()
    layers = {**y.dask.layers, name: ReadLayer(tasks, targets, owners, layer.workers)}
    graph = HighLevelGraph(layers, {**y.dask.dependencies, name: {source}})
    return da.Array(graph, name, chunks, meta=x._meta)
