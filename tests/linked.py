"""Workers without a GPU whose tasks bring blocks to one and back, for all that Dask can tell."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from distributed import WorkerPlugin
from distributed.core import Status

from multimm import products
from multimm.cluster.describe import described
from multimm.gpu.transfer import pinned_copy as copies
from multimm.graph.tasks import host_offload
from multimm.planning.spec import H200


def plan_for(monkeypatch, device, **more):
    """Have plans made for workers that have such a device each."""

    def with_devices(client, workers):
        spec = described(client, workers)
        return replace(spec, devices=(device,) * spec.workers, **more)

    monkeypatch.setattr(products, "described", with_devices)


def plan_for_little(monkeypatch, memory_bytes=5 * 10**6):
    """The same for GPUs that hold a part of a product at a time, and tasks that cost little."""
    small = replace(H200, memory_bytes=memory_bytes, gflops=1e6)
    plan_for(monkeypatch, small, task_overhead_s=1e-6, call_s=1e-4)


def link(patch, send=np.copy, fetch=np.copy):
    """Have tasks of this process send NumPy blocks to a GPU, and fetch them, by such functions."""

    def joined(blocks, places, shape):
        whole = np.empty(shape, blocks[0].dtype)
        for block, place in zip(blocks, places, strict=True):
            whole[place] = send(_taken(block))
        return whole

    patch.setattr(host_offload, "_device", lambda: 0)
    for stream in ("own_stream", "computing", "in_order"):
        patch.setattr(host_offload, stream, lambda device: nullcontext())
    patch.setattr(host_offload, "_in_host_memory", lambda block: isinstance(block, np.ndarray))
    patch.setattr(host_offload, "is_cupy", lambda block: True)
    patch.setattr(copies, "all_to_device", lambda blocks: [send(_taken(x)) for x in blocks])
    patch.setattr(copies, "joined_on_device", joined)
    patch.setattr(copies, "to_host", fetch)


def held_up(patch, seconds=30):
    """The same, of which none is fetched before the event that this returns is set, so soon."""
    opened = threading.Event()

    def fetch(block):
        assert opened.wait(seconds)
        return block.copy()

    link(patch, fetch=fetch)
    return opened


def _taken(block):
    """A block that CuPy would take, and read as it is."""
    assert type(block) is np.ndarray
    assert block.dtype.isnative
    return block


def at_rest(cluster):
    """Whether no task runs on workers in threads, and none copies, or waits for its turn to."""
    live = [x.state for x in cluster.workers.values() if x.status is Status.running]
    own = ("_waiting", "_going_up", "_coming_back", "_multiplying")
    turns = [getattr(host_offload, name) for name in own]
    busy = any(state.executing or state.long_running for state in live)
    return not (busy or host_offload._leaving.blocks) and all(
        turn._value == turn._initial_value for turn in turns
    )


class Link(WorkerPlugin):
    """The same for worker processes: a copy takes so many seconds."""

    name = "link"

    def __init__(self, seconds):
        self.seconds = seconds

    def setup(self, worker):
        def copy(block):
            time.sleep(self.seconds)
            return block.copy()

        link(pytest.MonkeyPatch(), copy, copy)
