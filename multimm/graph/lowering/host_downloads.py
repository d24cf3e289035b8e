"""The tasks that bring a product's blocks back to host memory, in a layer of their own."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import TaskRef
from dask.highlevelgraph import HighLevelGraph

from multimm.graph.block_task import LabelledTask
from multimm.graph.data_location import ProductLayer
from multimm.graph.label import Kind
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.host_offload import download


def downloaded(array: da.Array, keys: Keys, limit: int | None) -> da.Array:
    """The lazy array of a product's blocks in host memory; `limit` as in `download`."""
    name, tasks = keys.name("downloaded"), {}
    for at in np.ndindex(*array.numblocks):
        key, label = (name, *at), keys.label(Kind.DOWNLOAD, block=at)
        below = TaskRef((array.name, *at))
        tasks[key] = LabelledTask(key, download, below, label=label, limit=limit)
    product = array.dask.layers[array.name]
    layer = ProductLayer(tasks, product.owners, product.workers)
    upstream: Any = array
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[upstream])
    return da.Array(graph, name, array.chunks, meta=array._meta)


def below_download(array: da.Array) -> da.Array:
    """What `downloaded` was made of; any other array itself."""
    layer = array.dask.layers.get(array.name)
    if not isinstance(layer, ProductLayer):
        return array
    task = next(iter(layer.mapping.values()))
    # One that waits for something else does so here: there is nothing to take from below.
    if task.label.kind is not Kind.DOWNLOAD or len(task.dependencies) > 1:
        return array
    ((name, *_),) = task.dependencies
    return da.Array(array.dask.cull_layers([name]), name, array.chunks, meta=array._meta)
