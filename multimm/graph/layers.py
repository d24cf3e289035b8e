"""Layers of tasks that Dask's tools may copy under other keys: `clone`, `bind` and their like.

Dask's own copy of a layer of task objects keeps the old keys inside of them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable

from dask._task_spec import Task, TaskRef
from dask.base import clone_key
from dask.highlevelgraph import MaterializedLayer

from multimm.graph.block_task import Key, LabelledTask, after, within


class TaskLayer(MaterializedLayer):
    """Tasks by key, which can be copied under other keys.

    What a subclass knows beside its tasks, its copies know as well.
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
            other = task.substitute(needed, new(key))
            if isinstance(other, LabelledTask):
                other.label = other.label._replace(product=new(other.label.product))
            if bind_to is not None and not needed:
                other, bound = within(other, after, TaskRef(bind_to)), True
            tasks[other.key] = other
        layer = copy.copy(self)
        layer.mapping = tasks
        return layer, bound
