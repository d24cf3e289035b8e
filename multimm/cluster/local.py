"""This process as a cluster of one worker."""

from __future__ import annotations

import resource

from multimm.cluster.calibration import store
from multimm.cluster.inspect.devices import cpu_device, current_gpu
from multimm.planning.devices import SHARED_MEMORY, DeviceSpec
from multimm.planning.hardware import ClusterSpec, at_once
from multimm.settings import threads

#: Scheduler time per task within one process: 0.05 to 0.2 ms in products of 640 and 4608 tasks
#: of 8 x 8 blocks on two cores, where distributed takes 0.5 (`ClusterSpec.task_overhead_s`).
LOCAL_TASK_OVERHEAD_S = 1e-4
#: Seconds of a product without tasks there; arbitrary, of the order seen.
LOCAL_CALL_S = 2e-3
#: Memory is counted in so many parts of all that there is. What is free changes all the time, and a
#: plan is made anew for any other number. Arbitrary otherwise.
STEPS = 128


def local(*, gpu: bool = False) -> ClusterSpec:
    """This process as a cluster of one worker, for Dask's threaded and synchronous schedulers.

    It has the memory that is free, and no more than its address space is limited to (``ulimit
    -v``); what the process holds already is left out.

    As many tasks run at the same time as Dask's configuration says at the call: one where
    ``scheduler`` is the synchronous one, else ``num_workers``, or one per core; on a GPU one.
    What is passed to ``compute`` later is not known here.

    Parameters
    ----------
    gpu : bool
        Describe the current CUDA device (imports CuPy) instead of the CPU.

    Returns
    -------
    ClusterSpec
        With the rates that were measured here, or the shipped ones.

    Raises
    ------
    OptionError
        Dask's setting ``num_workers`` is no whole number above 0.
    """
    # Nothing spills without distributed.
    device = current_gpu(spills=False) if gpu else _cpu()
    spec = ClusterSpec(
        (device,),
        SHARED_MEMORY,
        threads=at_once((device,), _threads()),
        task_overhead_s=LOCAL_TASK_OVERHEAD_S,
        call_s=LOCAL_CALL_S,
    )
    return store.applied(spec, store.stored())


def _cpu() -> DeviceSpec:
    """The cores of this process, and the memory that it can still have."""
    import psutil  # type: ignore[import-untyped]
    from dask.system import CPU_COUNT
    from distributed.system import memory_limit

    own, every = psutil.Process().memory_info(), memory_limit()
    limit = min(every, own.rss + psutil.virtual_memory().available)
    held = own.rss
    bound = resource.getrlimit(resource.RLIMIT_AS)[0]
    if bound != resource.RLIM_INFINITY and bound - own.vms < limit - held:
        limit, held = bound, own.vms  # code and stacks count, too
    step = max(1, every // STEPS)
    return cpu_device(
        limit // step * step or limit,
        CPU_COUNT,
        spills=False,
        process_bytes=min(limit, -(-held // step) * step),
    )


def _threads() -> int:
    import dask
    from dask.base import named_schedulers
    from dask.system import CPU_COUNT

    scheduler = dask.config.get("scheduler", None)
    if isinstance(scheduler, str):
        scheduler = named_schedulers.get(scheduler.lower())
    if scheduler is named_schedulers["sync"]:
        return 1
    return threads() or CPU_COUNT
