"""Whether two lazy arrays have the same values, though they were written separately.

``(x.T - m[:, None]) @ (x - m)`` is symmetric, and so is what `da.cov` multiplies, x with
``x.T.conj()`` of real numbers. What is computed element by element is followed down to the arrays
that it is computed of, and compared: functions, arguments and which axis of an operand is which.
"""

from __future__ import annotations

import operator
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import GraphNode, Task, TaskRef
from dask.array.chunk import astype, getitem
from dask.array.core import _enforce_dtype
from dask.blockwise import Blockwise, blockwise_token
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.tokenize import tokenize

from multimm.graph.lazy_views import transposes

Axes = tuple[int, ...]

#: Functions that compute each element of elements at the same place, besides NumPy's ufuncs.
_ELEMENTWISE: frozenset[Any] = frozenset(
    [np.where, np.clip, np.nan_to_num, np.real, np.imag, astype]
    + [getattr(operator, name) for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "inv",
        "and_", "or_", "xor", "lt", "le", "eq", "ne", "gt", "ge",
    )]
)  # fmt: skip
#: Tasks that only put axes of length 1 between others: more are not looked through. Arbitrary.
_MOST_TASKS = 4096
#: Layers one above the other that are looked through: below, arrays are what they are called. More
#: would take 0.06 ms each, and of hundreds Python's stack has no room. Arbitrary otherwise.
_MOST_LAYERS = 128


def same_values(a: da.Array, b: da.Array, *, turned: bool) -> bool:
    """Whether `b`, its last two axes swapped if `turned`, has the same values as `a`.

    False where it can't be told from the graphs.

    >>> x = da.ones((4, 3), chunks=2)
    >>> same_values(2 * x, 2 * x.T, turned=True), same_values(2 * x, 3 * x.T, turned=True)
    (True, False)
    """
    if a.dtype != b.dtype or a.ndim != b.ndim:
        return False
    axes = tuple(range(a.ndim))
    other = (*axes[:-2], axes[-1], axes[-2]) if turned else axes
    if a.shape != tuple(b.shape[axis] for axis in other):
        return False
    real = a.dtype.kind in "iuf"  # the conjugate of a real number is itself
    numbers: dict[Any, int] = {}
    left = _Expressions(a.dask, numbers).number(a.name, axes, real=real)
    return left == _Expressions(b.dask, numbers).number(b.name, other, real=real)


class _Expressions:
    """Numbers for what arrays of a graph are: equal for those that have the same values.

    Parameters
    ----------
    graph : HighLevelGraph
    numbers : dict
        Of both graphs: what an array is computed of, and its number.
    """

    def __init__(self, graph: HighLevelGraph, numbers: dict[Any, int]) -> None:
        self._layers = graph.layers
        self._numbers = numbers
        self._known: dict[tuple[str, Axes], int] = {}
        self._layers_above = 0

    def number(self, name: str, axes: Axes, *, real: bool = False) -> int:
        """Of the array of that name, whose axes are those axes of the whole."""
        if (name, axes) not in self._known:
            self._layers_above += 1
            self._known[name, axes] = self._found(name, axes, real)
            self._layers_above -= 1
        return self._known[name, axes]

    def _found(self, name: str, axes: Axes, real: bool) -> int:
        layer = self._layers.get(name) if self._layers_above <= _MOST_LAYERS else None
        if isinstance(layer, Blockwise) and _readable(layer, len(axes)):
            func, inputs = layer.task.func, layer.indices
            if len(inputs) == 1 and transposes(layer.task, _order(layer)):
                return self.number(*self._input(layer, 0, axes), real=real)
            if real and func is np.conjugate and not layer.task.kwargs and _broadcasts(layer):
                return self.number(*self._input(layer, 0, axes), real=real)
            if _is_elementwise(func, layer.task.kwargs) and _broadcasts(layer):
                parts = tuple(self._part(layer, part, axes) for part in layer.task.args)
                return self._numbered((tokenize(func, layer.task.kwargs), parts))
        if type(layer) is MaterializedLayer and (below := self._below(name, layer)) is not None:
            source, kept = below
            return self.number(source, tuple(axes[n] for n in kept))
        return self._numbered((name, axes))

    def _part(self, layer: Blockwise, part: Any, axes: Axes) -> Any:
        """An argument of the function: what an array is, or a value."""
        if not isinstance(part, TaskRef):
            return tokenize(part)
        place = next(n for n in range(len(layer.indices)) if part.key == blockwise_token(n))
        value, labels = layer.indices[place]
        if labels is None:
            return tokenize(value)
        return self.number(*self._input(layer, place, axes))

    def _below(self, name: str, layer: MaterializedLayer) -> tuple[str, tuple[int, ...]] | None:
        """The array that this one is with axes of length 1 between, and which axes are its own."""
        found = _without_new_axes(name, layer)
        if found is None or (below := self._layers.get(found[0])) is None:
            return None
        # All of it, and not the first few blocks.
        return found if len(below) == len(layer.mapping) else None

    def _input(self, layer: Blockwise, place: int, axes: Axes) -> tuple[str, Axes]:
        name, labels = layer.indices[place]
        which = dict(zip(layer.output_indices, axes, strict=True))
        return str(name), tuple(which[label] for label in labels or ())

    def _numbered(self, what: Any) -> int:
        return self._numbers.setdefault(what, len(self._numbers))


def _readable(layer: Blockwise, ndim: int) -> bool:
    """Whether each block is made of one block of each input, none of whose axes is gone."""
    out = layer.output_indices
    return (
        len(out) == len({*out}) == ndim
        and not (layer.new_axes or layer.io_deps or layer.annotations)
        and isinstance(layer.task, Task)
        and all(
            labels is None or (len({*labels}) == len(labels) and {*labels} <= {*out})
            for _, labels in layer.indices
        )
        and all(
            not isinstance(part, TaskRef)
            or any(part.key == blockwise_token(n) for n in range(len(layer.indices)))
            for part in layer.task.args
        )
    )


def _is_elementwise(func: Any, kwargs: dict[str, Any]) -> bool:
    if func is _enforce_dtype:
        func = kwargs["enforce_dtype_function"]
    if isinstance(func, np.ufunc):
        return func.signature is None
    try:
        return func in _ELEMENTWISE
    except TypeError:  # not hashable
        return False


def _order(layer: Blockwise) -> Axes:
    """Which axis of the only input is the first of the output, and so on."""
    labels = tuple(layer.indices[0][1] or ())
    return tuple(labels.index(label) for label in layer.output_indices if label in labels)


def _broadcasts(layer: Blockwise) -> bool:
    """Whether each element of a block is made of the elements in its place, and of scalars.

    Last axes of inputs are last ones of blocks, as Dask itself writes it. Not so where somebody
    names them otherwise, or gives the task of each block an array.
    """
    scalars = [*layer.task.kwargs.values(), *(x for x, labels in layer.indices if labels is None)]
    scalars += [part for part in layer.task.args if not isinstance(part, TaskRef)]
    out, inputs = layer.output_indices, [labels for _, labels in layer.indices if labels]
    return all(out[-len(labels) :] == tuple(labels) for labels in inputs) and all(
        not isinstance(x, list | tuple | dict | TaskRef | GraphNode) and np.ndim(x) == 0
        for x in scalars
    )


def _without_new_axes(name: str, layer: MaterializedLayer) -> tuple[str, tuple[int, ...]] | None:
    """As `_Expressions._below`, if each block is made of the one in its place."""
    if len(layer.mapping) > _MOST_TASKS:
        return None
    found = {_new_axes(task) for task in layer.mapping.values()}
    only = found.pop() if len(found) == 1 else None
    if only is None:
        return None
    source, index = only
    kept = tuple(n for n, part in enumerate(index) if part == "whole")
    for key, task in layer.mapping.items():
        if not isinstance(key, tuple) or key[0] != name:
            return None
        at = key[1:]
        if task.args[0].key != (source, *(at[n] for n in kept)):
            return None
    return source, kept


def _new_axes(task: Any) -> tuple[str, tuple[str, ...]] | None:
    """Of a task that is no more than ``block[:, None]``: the array, and each part of the index."""
    if not (
        isinstance(task, Task) and task.func in (operator.getitem, getitem) and len(task.args) == 2
    ):
        return None
    source, index = task.args
    if not (isinstance(source, TaskRef) and isinstance(source.key, tuple)):
        return None
    if not isinstance(index, tuple | list):
        return None
    parts = tuple(
        "new" if part is None else "whole" if part == slice(None) else "" for part in index
    )
    if "" in parts or parts.count("whole") != len(source.key) - 1:
        return None
    return str(source.key[0]), parts
