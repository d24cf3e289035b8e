"""Layers of tasks that Dask's tools may copy under other keys: `clone`, `bind` and their like.

Dask's own copy of a layer of task objects keeps the old keys inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Self

from dask._task_spec import Task, TaskRef
from dask.base import clone_key, tokenize
from dask.highlevelgraph import MaterializedLayer

from multimm.graph.block_task import Block, Key, LabelledTask


class TaskLayer(MaterializedLayer):
    """Tasks by key, which can be copied under other keys.

    Subclasses that know more than their tasks say in `renamed` what becomes of it.
    """

    def clone(
        self, keys: Collection[Key], seed: Hashable, bind_to: Key | None = None
    ) -> tuple[TaskLayer, bool]:
        """As `dask.highlevelgraph.Layer.clone`: some keys renamed, in tasks and what they need.

        Parameters
        ----------
        keys : set
            Those that are renamed, of this layer and of others.
        seed : hashable
        bind_to : key, optional
            What tasks wait for that need nothing that is renamed.

        Returns
        -------
        TaskLayer, bool
            And whether a task waits for `bind_to`.
        """
        names: dict[Key, Key] = {}

        def new(key: Key) -> Key:
            """`clone_key`, which hashes each name anew, once for each name."""
            name, *at = key if isinstance(key, tuple) else (key,)
            if name not in names:
                names[name] = clone_key(name, seed)
            return (names[name], *at) if isinstance(key, tuple) else names[name]

        tasks: dict[Key, Task] = {}
        bound = False
        for key, task in self.mapping.items():
            if key not in keys:
                tasks[key] = task
                continue
            needed = {needed: new(needed) for needed in task.dependencies if needed in keys}
            copy = task.substitute(needed, new(key))
            if isinstance(copy, LabelledTask):
                token = tokenize(copy.label.product, seed)
                copy.label = copy.label._replace(product=token)
            if bind_to is not None and not needed:
                copy, bound = _held_back(copy, bind_to), True
            tasks[copy.key] = copy
        layer = self.renamed(tasks, new, bound=bound)
        layer.annotations = self.annotations
        return layer, bound

    def renamed(
        self, tasks: Mapping[Key, Task], new: Callable[[Key], Key], *, bound: bool
    ) -> TaskLayer | Self:
        """A layer of the copied tasks; `new` names keys, `bound` says that some of them wait."""
        return TaskLayer(tasks)


def held(func: Callable[..., Block], gate: Any, *args: Any, **kwargs: Any) -> Block:
    """What a function returns, once something else is done."""
    return func(*args, **kwargs)


def _held_back(task: Task, until: Key) -> Task:
    """The same task, which runs when another one is done."""
    own = {name: getattr(task, name, None) for name in ("label", "place", "sizes")}
    more: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    args = task.func, TaskRef(until), *task.args
    return type(task)(task.key, held, *args, **task.kwargs, **more)
