"""The task that makes a block: what it does, where and when, and what it says when it fails.

What it runs is in `multimm.graph.tasks`. The scheduler's plugins look at label and place alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, Self, TypeVar

from dask._task_spec import GraphNode, Task, TaskRef

from multimm.errors import ShapeError
from multimm.failures import note
from multimm.graph.label import Label
from multimm.planning.tiling.grid import Coordinate, Grid
from multimm.shapes import Shape

Block = Any  #: a NumPy or CuPy array, or a packed operand
Key = Any  #: a Dask key: a string, or a tuple that begins with one

# A task may need hundreds of blocks. Each object is pickled twice and made twice on its way to a
# worker, so that what many of them share stands there once.
Sizes = tuple[tuple[Shape, tuple[Key, ...]], ...]  #: shapes, and which blocks should have them
Inputs = tuple[tuple[Coordinate, tuple[Key, ...]], ...]  #: places, and the blocks kept there

Shared = TypeVar("Shared", bound=Hashable)


def together(
    keys: Iterable[Key], shared: Iterable[Shared]
) -> tuple[tuple[Shared, tuple[Key, ...]], ...]:
    """The keys of what has the same place, or shape, together: as `Inputs`, or `Sizes`.

    >>> together("abc", [(2, 3), (1, 3), (2, 3)])
    (((2, 3), ('a', 'c')), ((1, 3), ('b',)))
    """
    found: dict[Shared, list[Key]] = {}
    for key, one in zip(keys, shared, strict=True):
        found.setdefault(one, []).append(key)
    return tuple((one, tuple(own)) for one, own in found.items())


class Place(NamedTuple):
    """Where and when a task should run, for the scheduler plugin.

    Workers are named by coordinates in a grid, so that the same task finds its place on a
    cluster of another size.
    """

    grid: Grid  #: as planned
    workers: int  #: that it was planned for; the grid may use fewer, or wrap around them
    owner: Coordinate  #: of the task's result
    #: Smaller first: row panel and step; of what prepares, its kind, of all else `Kind.MULTIPLY`;
    #: then, within these, row and column.
    order: tuple[int, ...]
    inputs: Inputs = ()  #: operand blocks and where they belong
    numbers: tuple[int, ...] = ()  #: of each rank's worker, by address; empty: the ranks
    pinned: bool = True  #: else Dask decides

    @property
    def row_panel(self) -> int:
        """The pass over C's rows that it is in."""
        return self.order[0]

    @property
    def step(self) -> tuple[int, int]:
        """Row panel, and step of it."""
        return self.order[:2]  # type: ignore[return-value]

    @property
    def blocks(self) -> Iterator[tuple[Key, Coordinate]]:
        """Each of the operand blocks, and where it belongs."""
        return ((key, owner) for owner, keys in self.inputs for key in keys)


def after(awaited: Any, func: Callable[..., Block], *args: Any, **kwargs: Any) -> Block:
    """What a function returns, as a task that waits for others; until then these are kept."""
    return func(*args, **kwargs)


class LabelledTask(Task):
    """A task that says what it does, and that Dask merges with no other: its key survives."""

    label: Label

    __slots__ = ("label",)
    # The annotation makes dask treat it as a part of the task when it copies one.

    def __init__(
        self, key: Key, func: Callable[..., Block], /, *args: Any, label: Label, **kwargs: Any
    ) -> None:
        self.label = label
        super().__init__(key, func, *args, **kwargs)

    @property
    def block_fusion(self) -> bool:
        """Dask asks this before it merges tasks."""
        return True

    def copy(self) -> Self:
        """The same task again."""
        return copy.copy(self)


class BlockTask(LabelledTask):
    """A task with a place.

    It knows what shapes the blocks should have that it is given as they are in their arrays. No
    kernel does: of two that are wrong alike, the result looks right.
    """

    place: Place
    sizes: Sizes

    __slots__ = ("place", "sizes")

    def __init__(
        self,
        key: Key,
        func: Callable[..., Block],
        /,
        *args: Any,
        label: Label,
        place: Place,
        sizes: Sizes = (),
        **kwargs: Any,
    ) -> None:
        self.place, self.sizes = place, sizes
        super().__init__(key, func, *args, label=label, **kwargs)

    @property
    def block_fusion(self) -> bool:
        """Dask merges what it places with what makes its block: that is never held."""
        return self.place.pinned

    def __call__(self, values: Any = ()) -> Block:
        """Run the task; an error says which block it was to make, of which ones, and where."""
        try:
            for planned, keys in self.sizes:
                for key in keys:
                    if key in values:  # not where a task was put in place of it
                        check_shape(values[key], planned, key)
            return super().__call__(values)  # type: ignore[no-untyped-call]
        except Exception as error:
            inputs = [key for key, _ in self.place.blocks if not self._made_here(key)]
            note(error, str(self.label), inputs)
            raise

    def _made_here(self, key: Key) -> bool:
        """Whether another task of the same product makes it: its label would say the same."""
        name = key[0] if isinstance(key, tuple) else key
        return str(name).endswith(self.label.product)

    def substitute(self, subs: Mapping[Key, Any], key: Key | None = None) -> Self:
        """The same task of other inputs, or under another key, which its place knows as well.

        Of a task in place of an input, it knows the inputs.
        """
        made: Self = super().substitute(subs, key)  # type: ignore[assignment, arg-type]
        put = {old: subs[old] for old in self.dependencies & subs.keys()}
        if made is not self and put:
            new = {old: _keys(x) for old, x in put.items()}
            inputs = tuple((owner, _renamed(keys, new)) for owner, keys in self.place.inputs)
            made.place = self.place._replace(inputs=inputs)
            new |= {old: () for old, x in put.items() if isinstance(x, GraphNode)}
            made.sizes = tuple((shape, _renamed(keys, new)) for shape, keys in self.sizes)
        return made


def within(task: Task, func: Callable[..., Block], *first: Any, key: Key | None = None) -> Any:
    """The same task, whose function another one calls: it is given that one behind `first`."""
    own = {name: getattr(task, name, None) for name in ("label", "place", "sizes")}
    more: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    args = (*first, task.func, *task.args)
    return type(task)(task.key if key is None else key, func, *args, **task.kwargs, **more)


def _keys(put: Any) -> Iterable[Key]:
    """What is needed where a key, a reference or a task stands."""
    if isinstance(put, GraphNode):
        return put.dependencies
    return (put.key if isinstance(put, TaskRef) else put,)


def _renamed(keys: tuple[Key, ...], new: Mapping[Key, Iterable[Key]]) -> tuple[Key, ...]:
    return tuple(chain.from_iterable(new.get(key, (key,)) for key in keys))


def check_shape(block: Block, planned: Shape, key: Key = None, of: str = "an operand") -> None:
    """Raise `ShapeError` for a block, of a key, that is not what its array's chunks say."""
    found = getattr(block, "shape", planned)  # what is no array says so itself
    if found != planned:
        which = "" if key is None else f": it is {key!r}"
        raise ShapeError(
            f"a block of {of} has shape {found}, its array's chunks say {planned}{which}; make "
            "the array with chunks= as its function returns them"
        )
