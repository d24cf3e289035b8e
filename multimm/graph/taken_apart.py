"""A product whose own tasks rearrange operands and result: tasks for that alone take longer.

On two CPU workers that share two cores a task of nothing takes a millisecond or two, scheduler,
transport and worker together; `multimm.graph.rearranged` has one for each block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import dask.array as da
from dask._task_spec import Task
from dask.highlevelgraph import HighLevelGraph

from multimm.gpu.arrays import is_cupy
from multimm.graph.block_task import Block, BlockTask, Key, within
from multimm.graph.data_location import ProductLayer
from multimm.graph.rearranged import RearrangedLayer, rearrange

#: On GPUs so many tasks may each rearrange a block that they share. Arbitrary: a GPU copies a block
#: of 500 MB in about a millisecond, and a task of its own takes longer.
MOST_COPIES = 4


def of_stored_blocks(array: da.Array) -> da.Array:
    """The same product; tasks rearrange operand blocks themselves, if few copies are made for it.

    Parameters
    ----------
    array : dask.array.Array
        A product, perhaps of arrays of `multimm.graph.rearranged`.
    """
    layer = array.dask.layers[array.name]
    if not isinstance(layer, ProductLayer):
        return array
    layers: dict[str, Any] = dict(array.dask.layers)
    needs = {name: {*names} for name, names in array.dask.dependencies.items()}
    sources = [name for name in needs[array.name] if isinstance(layers[name], RearrangedLayer)]
    flat: dict[Key, Any] = {key: task for name in sources for key, task in layers[name].items()}
    used = Counter(key for task in layer.values() for key in task.dependencies if key in flat)
    most = MOST_COPIES if is_cupy(array._meta) else 1
    own = {key: flat[key] for key, uses in used.items() if _made_by_users(flat[key], uses, most)}
    if not own:
        return array
    tasks = {key: task.substitute(own) for key, task in layer.items()}
    layers[array.name] = ProductLayer(tasks, layer.owners, layer.workers)
    for name in sources:
        if layers[name].keys() & own.keys():
            needs[array.name] |= needs[name]
        if used.keys() & layers[name].keys() <= own.keys():
            needs[array.name].discard(name)
    return _of_layers(layers, needs, array)


def _made_by_users(task: Task, uses: int, most: int) -> bool:
    """Whether so many tasks rearrange a block themselves: no more than `most`, or without a copy.

    Of a block that is cut, all would travel.
    """
    _, change = task.args
    return change.where is None and (uses <= most or change.views)


def _of_layers(
    layers: Mapping[str, Any], needs: Mapping[str, set[str]], array: da.Array
) -> da.Array:
    """The same array, of those of the layers that it needs, in their order."""
    kept = HighLevelGraph(layers, needs).cull_layers([array.name]).dependencies
    graph = HighLevelGraph({name: x for name, x in layers.items() if name in kept}, kept)
    return da.Array(graph, array.name, array.chunks, meta=array._meta)


def with_makers(array: da.Array, own: Collection[str], several: bool) -> da.Array:
    """The same product; its tasks make the blocks of another one that they alone take.

    Between two tasks on a worker lie messages to the scheduler and back, some milliseconds.

    Parameters
    ----------
    array : dask.array.Array
        A product.
    own : collection of str
        Names of products whose blocks nobody else needs.
    several : bool
        Whether a task may make several blocks: threads beside its own have less to do then.
    """
    layer = array.dask.layers[array.name]
    if not isinstance(layer, ProductLayer):
        return array
    layers: dict[str, Any] = dict(array.dask.layers)
    needs = {name: {*names} for name, names in array.dask.dependencies.items()}
    for name in needs[array.name] & {*own}:
        below = layers[name]
        if isinstance(below, ProductLayer) and (tasks := _after_makers(below, layer, several)):
            layer = ProductLayer({**layer, **tasks}, layer.owners, layer.workers, layer.reads)
            needs[array.name] |= needs[name]
            taken = {key for task in layer.values() for key in task.dependencies}
            left = {key: task for key, task in below.items() if key in taken}
            layers[name] = ProductLayer(left, (), below.workers, below.reads)
            if not left:
                needs[array.name].remove(name)
    layers[array.name] = layer
    return _of_layers(layers, needs, array)


def _after_makers(below: ProductLayer, layer: ProductLayer, several: bool) -> dict[Key, BlockTask]:
    """Tasks of a product that make all of the blocks that they take of another one.

    None where one of these is needed by another task, too, or made of more of that product.
    """
    takes = {key: task.dependencies & below.keys() for key, task in layer.items()}
    uses = Counter(key for task in below.values() for key in task.dependencies)
    uses.update(key for blocks in takes.values() for key in blocks)
    alone = {
        key
        for key, task in below.items()
        if uses[key] == 1 and not task.dependencies & below.keys()
    }
    found = {}
    for key, blocks in takes.items():
        if blocks and blocks <= alone and (several or len(blocks) == 1):
            made = _after_their_makers(sorted(blocks), below, layer[key], layer)
            if made is not None:
                found[key] = made
    return found


def _after_their_makers(
    blocks: Sequence[Key], below: ProductLayer, user: BlockTask, layer: ProductLayer
) -> BlockTask | None:
    """A task that makes the blocks that it takes, if all are for the same worker."""
    place = user.place
    at = map(place.grid.place, range(place.grid.workers))
    places = {layer.rank(place, one): one for one in at}  # in the user's grid, by rank
    inputs = [(at, tuple(key for key in keys if key not in blocks)) for at, keys in place.inputs]
    for key in blocks:
        maker = below[key]
        if below.rank(maker.place, maker.place.owner) != layer.rank(place, place.owner):
            return None
        for at, keys in maker.place.inputs:
            if (there := places.get(below.rank(maker.place, at))) is None:
                return None
            inputs.append((there, keys))
    made = user.substitute({key: below[key] for key in blocks})
    made.place = place._replace(inputs=tuple(inputs))
    return made


def by_its_tasks(array: da.Array) -> da.Array:
    """The same array, whose blocks are made by the tasks of the product that it rearranges.

    As it is, where blocks of that product are needed by more than one task each.

    Parameters
    ----------
    array : dask.array.Array
        Of `multimm.graph.rearranged`.
    """
    layer = array.dask.layers[array.name]
    below = array.dask.layers.get(layer.source) if isinstance(layer, RearrangedLayer) else None
    if not isinstance(below, ProductLayer):
        return array
    last: dict[Key, Any] = {key: task for task in layer.values() for key in task.dependencies}
    others = {key for task in below.values() for key in task.dependencies}
    if len(last) < len(layer) or others & last.keys():
        return array
    tasks = {key: task for key, task in below.items() if key not in last}
    for key, outer in last.items():
        _, change = outer.args
        tasks[outer.key] = within(below[key], then, change, key=outer.key)
    owners = tuple(below.owners[number] for number in layer.numbers) if below.owners else ()
    layers = {**array.dask.layers, array.name: ProductLayer(tasks, owners, below.workers)}
    needs = {**array.dask.dependencies, array.name: array.dask.dependencies[layer.source]}
    return _of_layers(layers, needs, array)


def then(change: Any, func: Callable[..., Block], *args: Any, **kwargs: Any) -> Block:
    """What a function makes, rearranged."""
    return rearrange(func(*args, **kwargs), change)
