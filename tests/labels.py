"""The tasks of a lazy product, by what their labels say."""

from __future__ import annotations

from multimm.graph.block_task import BlockTask, LabelledTask


def tasks_of(array, kind=None, matrix=""):
    """Its tasks, by key: those of a kind, and of one matrix, where these are given."""
    return {
        key: task
        for key, task in dict(array.__dask_graph__()).items()
        if isinstance(task, LabelledTask)
        and kind in (None, task.label.kind)
        and matrix in ("", task.label.matrix)
    }


def block_tasks(array):
    """Those that make its blocks, by key."""
    tasks = dict(array.__dask_graph__()).items()
    return {key: task for key, task in tasks if isinstance(task, BlockTask)}
