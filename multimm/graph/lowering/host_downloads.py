"""The tasks that bring a product's blocks back to host memory.

They are in the product's own layer: a block that nobody else needs is multiplied and brought back
by one task (`multimm.graph.data_location.ProductLayer.cull`), for each takes Dask 2.5 ms.
"""

from __future__ import annotations

from math import prod

import dask.array as da
import numpy as np
from dask._task_spec import TaskRef
from dask.highlevelgraph import HighLevelGraph

from multimm.graph.block_task import Key, LabelledTask
from multimm.graph.data_location import ProductLayer
from multimm.graph.label import Kind
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.host_offload import download


def downloads(made: str, keys: Keys, limit: int | None) -> dict[Key, LabelledTask]:
    """Tasks by key, one for each chunk of C; `made` is the first entry of the keys of what a GPU
    has of it, and `limit` as in `download`.
    """
    name, tasks = keys.name("downloaded"), {}
    for at in np.ndindex(*map(len, keys.layout.result.chunks)):
        key, label = (name, *at), keys.label(Kind.DOWNLOAD, block=at)
        below = TaskRef((made, *at))
        tasks[key] = LabelledTask(key, download, below, label=label, limit=limit)
    return tasks


def taken_below(array: da.Array) -> da.Array:
    """`below_download` for a product: tasks of the one below leave what it takes to it."""
    if (below := below_download(array)) is not array:
        array.dask.layers[array.name].used_on_gpus = True
    return below


def below_download(array: da.Array) -> da.Array:
    """What a product's chunks are on the GPUs, of a lazy one that brings them back.

    Any other array itself. The tasks stay in the layer of the product: that of what is returned has
    none, and hands on what it is asked for.
    """
    layer = array.dask.layers.get(array.name)
    if not (isinstance(layer, ProductLayer) and prod(array.numblocks)):
        return array
    task = layer.mapping.get((array.name, *(0,) * array.ndim))
    # One that waits for something else does so here: there is nothing to take from below.
    if task is None or task.func is not download or len(task.dependencies) > 1:
        return array
    ((name, *_),) = task.dependencies
    layers = {**array.dask.layers, name: ProductLayer({}, layer.owners, layer.workers)}
    needs = {**array.dask.dependencies, name: {array.name}}
    graph = HighLevelGraph(layers, needs).cull_layers([name])
    return da.Array(graph, name, array.chunks, meta=array._meta)
