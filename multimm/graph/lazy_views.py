"""Lazy transposes and conjugates of arrays, which products look through.

The product takes the blocks below them, and is told what became of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import TaskRef
from dask.blockwise import Blockwise

from multimm.graph.tasks.multiply import transpose
from multimm.planning.tiling.rechunk import Index


class Peeled(NamedTuple):
    """An array below lazy transposes and conjugates, and what these made of it."""

    array: da.Array
    turned: bool  #: its last two axes are swapped
    conjugated: bool  #: never of real numbers, which that does not change


def peel(array: da.Array) -> Peeled:
    """The array below lazy transposes of the last two axes, and lazy conjugates.

    Only what is nothing but a transpose or a conjugate is taken off: the topmost layer must be
    Dask's own for ``x.T``, ``x.transpose``, ``x.swapaxes``, ``x.conj``, ``np.conj`` or ours for
    `multimm.transpose`, and read every block of one array once.

    >>> x = da.ones((2, 3), chunks=1)
    >>> peel(x.T)[0] is x, peel(x.T)[0].name == x.name, peel(x.T)[1]
    (False, True, True)
    """
    as_stored = tuple(range(array.ndim))
    swapped = (*as_stored[:-2], *as_stored[:-3:-1])
    turned = conjugated = False
    while (found := _below(array)) is not None:
        below, axes, conjugates = found
        if conjugates:
            conjugated = not conjugated
        elif array.ndim > 1 and axes == swapped:
            turned = not turned
        else:
            break
        array = below
    return Peeled(array, turned, conjugated and array.dtype.kind == "c")


def permuted(array: da.Array) -> tuple[da.Array, Index]:
    """The array below lazy transposes of any axes, and the order in which they take its axes.

    >>> x = da.ones((2, 3, 4), chunks=1)
    >>> below, axes = permuted(x.transpose(2, 0, 1).swapaxes(0, 1))
    >>> below.name == x.name, axes
    (True, (0, 2, 1))
    """
    order = tuple(range(array.ndim))
    while (found := _below(array)) is not None and not found.conjugates:
        array, axes, _ = found
        order = tuple(axes[n] for n in order)
    return array, order


class _Below(NamedTuple):
    """What an array is a lazy view of."""

    array: da.Array
    axes: Index  #: which of its axes is first, and so on
    conjugates: bool  #: or its elements are conjugated, and its axes as they are


def _below(array: da.Array) -> _Below | None:
    """The array that this one is made of by nothing but what the topmost layer does to blocks."""
    layer = array.dask.layers.get(array.name)
    if not isinstance(layer, Blockwise) or len(layer.indices) != 1:
        return None
    (source, before), *_ = layer.indices
    if layer.new_axes or layer.io_deps or layer.annotations or before is None:
        return None
    name, after = str(source), tuple(layer.output_indices)
    if {*before} != {*after} or not len(before) == len({*before}) == array.ndim:
        return None
    axes = tuple(before.index(label) for label in after)
    conjugates = _conjugates(layer.task, axes, array)
    if not (conjugates or transposes(layer.task, axes)):
        return None
    # Every block is to be read once.
    places = [axes.index(n) for n in range(array.ndim)]
    chunks = tuple(array.chunks[place] for place in places)
    if layer.numblocks.get(name) != tuple(map(len, chunks)) or name not in array.dask.layers:
        return None
    graph = array.dask.cull_layers([name])
    below = da.Array(graph, name, chunks, meta=array._meta.transpose(places))
    return _Below(below, axes, conjugates)


def _conjugates(task: Any, axes: Index, array: da.Array) -> bool:
    """Whether a task does nothing but conjugate floating-point or complex blocks.

    (Booleans become integers.)
    """
    return (
        getattr(task, "func", None) is np.conjugate
        and array.dtype.kind in "fc"
        and not task.kwargs
        and len(task.args) == 1
        and isinstance(task.args[0], TaskRef)
        and axes == tuple(range(array.ndim))
    )


def transposes(task: Any, axes: Index) -> bool:
    """Whether a task does nothing but put axes of blocks into that order."""
    func, kwargs, ndim = getattr(task, "func", None), getattr(task, "kwargs", {}), len(axes)
    if func is np.transpose:
        return bool(kwargs.get("axes") == axes)
    if func is np.swapaxes:
        asked = {kwargs["axis1"] % ndim, kwargs["axis2"] % ndim}
    elif func is transpose:
        asked = {ndim - 2, ndim - 1}
    else:
        return False
    moved = {n for n, axis in enumerate(axes) if axis != n}
    return moved == (asked if len(asked) > 1 else set())
