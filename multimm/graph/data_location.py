"""Where the blocks of an operand lie, or will: known of lazy products, asked of data in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Alias, Task
from dask.blockwise import Blockwise

from multimm.graph.block_task import BlockTask, Key, Place, within
from multimm.graph.label import Kind
from multimm.graph.layers import TaskLayer
from multimm.graph.rearranged import RearrangedLayer
from multimm.graph.tasks.host_offload import bring_back, download
from multimm.planning.tiling.grid import Blocks, Coordinate
from multimm.planning.tiling.rechunk import Index


class ProductLayer(TaskLayer):
    """The tasks of a product, and the workers that will have the blocks of the result.

    Parameters
    ----------
    tasks : dict
        By key.
    owners : tuple of int
        By block, row by row, by their places among the workers' addresses; empty if not known.
    workers : int
        How many the product was planned for.
    reads : dict, optional
        By name of an operand that is read from a file into host memory: its role, whether it is
        stored transposed, and in which blocks it is read.
    """

    def __init__(
        self,
        tasks: Mapping[Key, Task],
        owners: tuple[int, ...],
        workers: int,
        reads: Mapping[str, tuple[str, bool, tuple[Blocks, ...]]] | None = None,
    ) -> None:
        super().__init__(tasks)
        self.owners = owners
        self.workers = workers
        self.reads = reads or {}
        #: Another product takes blocks of C from the GPUs, perhaps in a graph of its own.
        self.used_on_gpus = False

    @property
    def spread(self) -> bool:
        """Whether several workers compute it; else Dask, or the plugin, decides on one."""
        places = [task.place for task in self.mapping.values() if isinstance(task, BlockTask)]
        return all(x.pinned for x in places) and len({x.owner for x in places}) > 1

    def rank(self, place: Place, owner: Coordinate) -> int:
        """The place among the addresses of a worker of the grid."""
        rank = place.grid.rank(owner) % self.workers
        return place.numbers[rank] if place.numbers else rank

    def has_made_on(self, array: da.Array) -> tuple[int, ...]:
        """The workers that tasks of an operand's blocks are pinned to, by block; empty if not all.

        By their places among the addresses.
        """
        found: dict[Key, int] = {}
        for task in self.mapping.values():
            if isinstance(task, BlockTask):
                for key, owner in task.place.blocks:
                    if key[0] == array.name and key not in found:
                        found[key] = self.rank(task.place, owner)
        keys = [(array.name, *at) for at in np.ndindex(*array.numblocks)]
        known = all(key in found for key in keys) and self.spread
        return tuple(found[key] for key in keys) if known else ()

    def cull(
        self, keys: Collection[Key], all_hlg_keys: Collection[Key]
    ) -> tuple[TaskLayer, dict[Key, set[Key]]]:
        """What some blocks of C need, and no more.

        Barriers order the tasks of a product; what they wait for is no operand of who waits for
        them. So of a slice of C they wait for those of its tasks alone.

        A block that only its download needs is brought back by the task that makes it: if no other
        product takes any, whose graph Dask may optimize by itself.
        """
        kept: dict[Key, Any] = {}
        barriers: dict[Key, BlockTask] = {}
        needed = {key for key in keys if key in self.mapping}
        while needed:
            key = needed.pop()
            task = self.mapping[key]
            if task.label.kind is Kind.WAIT:
                barriers[key] = task
            else:
                kept[key] = task
                needed.update(
                    dep
                    for dep in task.dependencies
                    if dep in self.mapping and dep not in kept and dep not in barriers
                )
        for key, barrier in barriers.items():
            waits = [ref for ref in barrier.args if ref.key in kept]
            kept[key] = BlockTask(
                key, barrier.func, *waits, label=barrier.label, place=barrier.place
            )
        back = [task for task in kept.values() if task.func is download]
        if back and not self.used_on_gpus:
            uses = Counter(chain.from_iterable(task.dependencies for task in kept.values()))
            uses.update(keys)
            for task in back:
                (below,) = task.dependencies
                if uses[below] == 1 and below in kept:
                    own = task.label, task.kwargs["limit"]
                    kept[task.key] = within(kept.pop(below), bring_back, *own, key=task.key)
        needs = {key: set(task.dependencies) for key, task in kept.items()}
        return TaskLayer(kept, self.annotations), needs


class ReadLayer(TaskLayer):
    """The blocks of a file's array that a product reads, as an array.

    Parameters
    ----------
    tasks : dict
        Other names of them, by key.
    targets : dict
        Their keys, by index: products take these.
    owners : tuple of int
        The workers that read them, block by block; empty if not known.
    workers : int
        As of a `ProductLayer`.
    """

    def __init__(
        self,
        tasks: Mapping[Key, Alias],
        targets: Mapping[Index, Key],
        owners: tuple[int, ...],
        workers: int,
    ) -> None:
        super().__init__(tasks)
        self.targets = targets
        self.owners = owners
        self.workers = workers


def owners_of(array: da.Array, workers: int) -> tuple[int, ...]:
    """The workers that will have the blocks of a lazy product of ours, empty if not known.

    By their places among the addresses, whatever numbers the product's plan gave them.
    Also of what is computed from one block by block, such as ``(a @ b) + 1``: the scheduler
    plugin leaves that where the block is.
    """
    for name, numbers in below(array):
        layer = array.dask.layers.get(name)
        if isinstance(layer, ProductLayer) and layer.owners and layer.workers == workers:
            owners = layer.owners
            return owners if numbers is None else tuple(owners[n] for n in numbers)
    return ()


def makers_of(array: da.Array, beside: Iterable[da.Array], workers: int) -> tuple[int, ...]:
    """The workers on which a product in the graphs of others has a lazy array's blocks made.

    Of `X` in ``X.T @ (X @ Q)``: where `X @ Q` needs them. The scheduler keeps them there. Empty if
    no product does. By their places among the addresses.
    """
    own = array.dask.layers.get(array.name)
    if isinstance(own, ReadLayer):
        return own.owners if own.workers == workers else ()
    layers = (layer for other in beside for layer in reversed(other.dask.layers.values()))
    products = (x for x in layers if isinstance(x, ProductLayer) and x.workers == workers)
    return next((found for x in products if (found := x.has_made_on(array))), ())


def below(array: da.Array) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """The array's name, and those of arrays that it is computed of block by block.

    Of each the numbers of its blocks that the array's blocks are made of, where these are others.
    """
    # Layers may be thousands deep.
    left: list[tuple[str, tuple[int, ...] | None]] = [(array.name, None)]
    seen = set()
    while left:
        name, numbers = left.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name, numbers
        layer = array.dask.layers.get(name)
        if isinstance(layer, RearrangedLayer):
            own = layer.numbers
            below = own if numbers is None else tuple(own[n] for n in numbers)
            left.append((layer.source, below))
        elif isinstance(layer, Blockwise) and not layer.new_axes:
            left += [(source, numbers) for source in same_blocks(layer, array)][::-1]


def same_blocks(layer: Blockwise, array: da.Array) -> Iterator[str]:
    """The arrays of whose blocks each block of a layer is made, one of each, in the same places."""
    for source, indices in layer.indices:
        same = layer.numblocks.get(str(source)) == array.numblocks
        if indices is not None and tuple(indices) == tuple(layer.output_indices) and same:
            yield str(source)


def block_keys(array: da.Array) -> list[Key]:
    """The keys of a persisted array's futures, row by row; none unless every block is a future.

    Of an array whose blocks are views of others, those of the others.
    """
    return _keys_below(array, array.name, array.numblocks)


def _keys_below(array: da.Array, name: str, blocks: tuple[int, ...]) -> list[Key]:
    from distributed import Future

    layer = array.dask.layers.get(name)
    if isinstance(layer, RearrangedLayer):
        below = _keys_below(array, layer.source, layer.blocks)
        return [below[number] for number in layer.numbers] if below else []
    keys = []
    for block in _blocks(array, name, blocks):
        if not isinstance(block, Future):
            return []
        keys.append(block.key)
    return keys


def lie_in_process(array: da.Array) -> bool:
    """Whether an array's blocks are NumPy arrays that its graph has."""
    blocks = _blocks(array, array.name, array.numblocks)
    return all(isinstance(getattr(block, "value", block), np.ndarray) for block in blocks)


def _blocks(array: da.Array, name: str, blocks: tuple[int, ...]) -> Iterator[Any]:
    """What a layer has for each block, row by row; None where it is not there, or not written out.

    No more is looked at than is asked for: a layer may have a million.
    """
    layer = array.dask.layers.get(name)
    known = layer if layer is not None and layer.is_materialized() else {}
    return (known.get((name, *at)) for at in product(*map(range, blocks)))


def source_keys(array: da.Array) -> list[Key]:
    """`block_keys` of an array, or of one that it is computed of block by block, such as ``x - 1``.

    None where there are no such futures.
    """
    for name, numbers in below(array):
        if numbers is None and (keys := _keys_below(array, name, array.numblocks)):
            return keys
    return []


def where_blocks_lie(holders: Sequence[Sequence[str]], addresses: Sequence[str]) -> tuple[int, ...]:
    """The workers that hold the blocks of a persisted array, by their place in `addresses`.

    Parameters
    ----------
    holders : sequence of sequence of str
        Of each of `block_keys`: the addresses of those that have the block.
    addresses : sequence of str

    Returns
    -------
    tuple of int
        By block, row by row. Empty unless every block is in memory on one of the workers.
    """
    ranks = {address: rank for rank, address in enumerate(addresses)}
    each = [*map(tuple, holders)]  # of hundreds of blocks, which are held by few sets of workers
    first = {
        those: min((ranks[at] for at in those if at in ranks), default=-1) for those in {*each}
    }
    found = [first[those] for those in each]
    return () if -1 in found else tuple(found)
