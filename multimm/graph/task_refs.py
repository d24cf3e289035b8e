"""A task's references to many others."""

from __future__ import annotations

from collections.abc import Iterable

from dask._task_spec import GraphNode, List, TaskRef

from multimm.graph.block_task import Key


class Refs(List):
    """A list of what other tasks return: `refs` makes it of their keys.

    It is pickled as these keys. Each reference would be pickled, and made again, by Python: twice
    on the way to a worker, a microsecond each time, and a task may have hundreds.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[object, ...]:
        # Dask may put what a task returns, or makes of others, in place of a reference.
        return refs, ([x.key if isinstance(x, TaskRef) else x for x in self.args],)


def refs(keys: Iterable[Key | GraphNode]) -> Refs:
    """A list of what the tasks of some keys return, for a task that is given it."""
    return Refs(*(key if isinstance(key, GraphNode) else TaskRef(key) for key in keys))
