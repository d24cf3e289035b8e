"""Start workers on this host: one per GPU, or CPU processes where there is no GPU."""

from __future__ import annotations

import logging
import os
import resource
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from multimm.cluster import main_guard
from multimm.cluster.inspect.devices import driver_cuda, free_bytes, install_command
from multimm.cluster.options import (
    LOOPBACK,
    StartOptions,
    check,
    check_certificates,
    cores,
    give_back,
    pool_bytes,
)
from multimm.cluster.plugins import pool_memory
from multimm.errors import ClusterError, KernelError, cause
from multimm.gpu.precompile import Compilation
from multimm.gpu.runtime.trusted_files import own_folder

if TYPE_CHECKING:
    from distributed import Client, Security

logger = logging.getLogger(__name__)

#: Share of a GPU's memory that its worker takes at the start: what CuPy's arrays lie in, peers map,
#: and dask-cuda spills from. It leaves room for the CUDA context and for libraries that
#: allocate past it; and for the pool, which grows where its memory is in pieces.
RMM_POOL_SHARE = 0.8
#: Seconds to wait for a scheduler in this very process, on a busy machine.
CONNECT_SECONDS = 60.0
#: Files that this process opens for a cluster, and for each of its workers: 27, 36, 59 and 84 in
#: all for 1, 2, 4 and 6 CPU workers (distributed 2026.8, Linux). GPU workers take more.
CLUSTER_FILES, WORKER_FILES = 16, 12
#: While workers start, settings of Dask are others, for the whole process: of two starts at a time
#: each would take the other's for those before.
_STARTING = threading.Lock()
BLAS_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

#: Said of workers connected through UCXX.
OPEN_LISTENERS = (
    "UCXX listens on all network interfaces, unencrypted: anyone who reaches this host can run "
    'code in the workers. Use protocol="tcp" (loopback only), or TLS, where that matters.'
)
#: Said where `start` waits for that.
COMPILING = (
    "workers have started, kernels for compute capability %s are still being compiled: once on a "
    "machine, for some seconds"
)


def start(
    *,
    gpus: int | None = None,
    workers: int | None = None,
    threads: int = 1,
    memory_limit: int | str | None = None,
    protocol: Literal["tcp", "ucxx"] | None = None,
    rmm_pool: float | int | str | None = RMM_POOL_SHARE,
    security: Security | None = None,
    dashboard_address: str | None = ":8787",
    seldom_collect_garbage: bool | None = None,
) -> Client:
    """Start a cluster on this host and return a client that owns it.

    With GPUs: one dask-cuda worker each, with an RMM memory pool that CuPy uses and from which
    other workers copy the blocks they need (CUDA IPC; over NVLink where there is one). Without: CPU
    worker processes. All talk TCP on the loopback interface. NumPy blocks and results are copied
    from the memory of the worker that has them, where the system lets them (Linux).
    ``with start() as client:`` and ``client.close()`` both end the workers too.

    Before it returns, all pairs of workers have exchanged a block and the kernels are compiled.
    GPU blocks travel while products are computed; `connect` says what that asks of other libraries'
    tasks (`overlap`).

    Loopback is open to every user of this host: whoever connects to the scheduler there can run
    code as you. On a host that others log in to, give
    ``security=distributed.Security.temporary()`` (which needs the package cryptography): only who
    has these certificates can connect, and blocks travel as without.
    ``protocol="ucxx"`` listens on all network interfaces, unencrypted, and cannot do otherwise.

    What workers spill goes to a folder that is this user's alone, in ``temporary-directory`` of
    Dask's configuration, or where temporary files are.

    The first time that workers of a kind are started on a machine, and again after 90 days, and
    GPUs also with another driver, it takes about a second more: their rates are measured, for plans
    to go by, and kept in the user's cache. ``multimm.measure-at-start`` of Dask's configuration,
    if false, leaves that out.

    A script must call this under ``if __name__ == "__main__":``, because worker processes
    import the script again.

    Parameters
    ----------
    gpus : int, optional
        Number of GPU workers, at most the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible.
        0: CPU workers. Default: all GPUs, unless `workers` is given.
    workers : int, optional
        Number of CPU worker processes; asks for CPU workers also where there are GPUs.
        Default: one per core, at most 4.
    threads : int
        Tasks that one worker runs at the same time. Each CPU worker's BLAS gets an even
        share of the cores, divided by this, unless ``OMP_NUM_THREADS`` and its like are set.
    memory_limit : int or str, optional
        Host memory of one worker, bytes or such as ``"2GB"``, past which Dask spills to disk; at
        least 120 MB, which a worker process needs for itself.
        Default: an even share of nine tenths of what this host has free; for GPU workers at
        least a quarter of their GPU's memory, unless a container or a batch job has less.
    protocol : {"tcp", "ucxx"}, optional
        How messages travel. Default: ``"tcp"``, with TLS where `security` is given. A GPU block
        that cannot be copied from its owner's pool, as with ``rmm_pool=None``, passes through the
        host's memory, and a log message says so. ``"ucxx"``, for GPUs, sends it over NVLink then,
        too; it needs distributed-ucxx, and an idle worker uses a whole core.
    rmm_pool : float, int or str, optional
        Size of each GPU's memory pool: a share below 1, bytes, or such as ``"100GB"``.
        None: no pool; CuPy then allocates by itself.
    security : distributed.Security, optional
        TLS credentials, with ``require_encryption``. Default: no encryption.
    dashboard_address : str, optional
        Where Dask's dashboard is served: on the loopback interface, or with ``"host:8787"`` on that
        address. ``client.dashboard_link`` says which port it has, another one where this is taken.
        The dashboard needs bokeh, which is imported when a page is opened; without it, the page
        says so. It has no TLS. None: no dashboard.
    seldom_collect_garbage : bool, optional
        A full collection of garbage halts the scheduler, which runs in this process. True: until
        the last cluster that was started so is closed, Python looks for garbage a tenth as often
        (`gc.set_threshold`); then the thresholds are what they were. False: the collector is left
        alone, as by `connect`. Default: ``multimm.seldom-collect-garbage`` of Dask's
        configuration, or True.

    Returns
    -------
    distributed.Client
        The current client from now on; multimm's plugins are installed.

    Raises
    ------
    OptionError
        A number out of range, an unknown protocol, options that exclude each other, or credentials
        that would not encrypt, or lack a certificate.
    ClusterError
        GPU packages are missing, this process may not open enough files, or the workers do not
        start.
    """
    main_guard.require()
    with _STARTING, ExitStack() as meanwhile:
        _require_folder()
        options = check(
            gpus, workers, threads, memory_limit, protocol, rmm_pool, security, dashboard_address
        )
        _require_files(options.workers)
        if security is not None:
            check_certificates(security, "scheduler", "worker", "client")
        if options.gpus:
            _require_gpu_packages(options.protocol)
            _require_memory(options)
        compilations = [
            meanwhile.enter_context(Compilation(capability, cores()))
            for capability in sorted({gpu.capability for gpu in options.gpus} - {0})
        ]
        return _started(options, seldom_collect_garbage, compilations)


def _started(
    options: StartOptions,
    seldom_collect_garbage: bool | None,
    compilations: Sequence[Compilation],
) -> Client:
    """What `start` returns, when kernels are compiled too."""
    from multimm.cluster import dashboard
    from multimm.cluster.calibration.run import measure_at_first_start
    from multimm.cluster.client import ClusterClient, set_up_cluster
    from multimm.cluster.plugins.gc_policy import SeldomGarbage, is_wanted

    garbage = (SeldomGarbage(),) if is_wanted(seldom_collect_garbage) else ()
    missing = _missing(options)
    with main_guard.watched() as unguarded:
        try:
            with private_scratch(), dashboard.on_any_port():
                cluster = _gpu_cluster(options) if options.gpus else _cpu_cluster(options)
            _leave_lost_workers_to_their_nannies(cluster)
            if options.dashboard_address is None:
                dashboard.unlink(cluster)
            else:
                dashboard.serve(cluster.scheduler)
        except Exception as error:
            if unguarded():
                raise ClusterError(main_guard.UNGUARDED) from None
            # Whatever a worker process dies of comes back as RuntimeError, OSError, ...
            raise ClusterError(
                f"the workers did not start ({_root(error)}): see what they printed (a command "
                "shows it with --debug), and `multimm doctor`"
            ) from error
    try:
        client = ClusterClient(cluster, timeout=CONNECT_SECONDS, security=options.security)
    except BaseException as error:
        cluster.close()
        if not isinstance(error, Exception):
            raise
        raise ClusterError(
            f"the workers started, but their scheduler did not answer ({_root(error)}): they were "
            "stopped; see `multimm doctor`"
        ) from error
    # A nanny that starts a worker again writes them into this process's environment again.
    client.borrowed = missing
    try:
        _wait_for_kernels(compilations)
        set_up_cluster(client, *garbage, overlap=True)
        measure_at_first_start(client)
    except BaseException:
        client.close()
        raise
    return client


def _wait_for_kernels(compilations: Sequence[Compilation]) -> None:
    """Nothing depends on it but time: what goes wrong is logged."""
    for compilation in compilations:
        if not compilation.is_over():
            logger.warning(COMPILING, compilation.capability)
        try:
            compilation.wait()
        except KernelError as error:
            # A product that needs the kernel will say so again, to whom it concerns.
            logger.warning("kernels were not compiled beforehand: %s", error)


def _require_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ClusterError(
            "the current folder is gone, and no worker process can start in it: change to one that "
            "is there"
        ) from None


def _require_files(workers: int) -> None:
    """A scheduler that can open no more waits in silence."""
    import psutil  # type: ignore[import-untyped]

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + CLUSTER_FILES + WORKER_FILES * workers
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ClusterError(
            f"this process may have {allowed} files open, and needs {needed} for workers={workers}:"
            " allow more before it begins, with `ulimit -n 1024`, or ask for fewer workers"
        )


def _require_gpu_packages(protocol: str) -> None:
    needed = ["cupy", "dask_cuda", "rmm", "numba"]
    if protocol == "ucxx":
        needed.append("distributed_ucxx")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ClusterError(
            f"this host has GPUs, but {', '.join(missing)} cannot be imported: run "
            f"{install_command(driver_cuda())}, or ask for CPU workers with gpus=0"
        )


def _require_memory(options: StartOptions) -> None:
    for gpu in options.gpus:
        pool, free = pool_bytes(options.rmm_pool, gpu), free_bytes(gpu)
        if free is not None and pool > free:
            raise ClusterError(
                f"GPU {gpu.ident} has {free / 1e9:.1f} GB free, and its worker's memory pool is to "
                f"take {pool / 1e9:.1f} GB (rmm_pool={options.rmm_pool!r}): end what uses the GPU "
                "(see nvidia-smi), leave the GPU out with CUDA_VISIBLE_DEVICES, or give a smaller "
                "rmm_pool"
            )


def _common(options: StartOptions) -> dict[str, Any]:
    import dask

    return {
        # Said here for workers that are added later, too: see `private_scratch`.
        "local_directory": dask.config.get("temporary-directory"),
        "threads_per_worker": options.threads,
        # Never "auto": where memory is added on demand, the first reading is far too small.
        "memory_limit": options.memory_limit,
        "protocol": options.protocol,
        "host": LOOPBACK,
        "security": options.security,
        # The scheduler serves HTTP (health, metrics) in any case. The dashboard comes there when
        # it is opened.
        "dashboard_address": options.dashboard_address or f"{LOOPBACK}:0",
        "scheduler_kwargs": {"dashboard": False},
        "silence_logs": logging.ERROR,
    }


def _cpu_cluster(options: StartOptions) -> Any:
    from distributed import LocalCluster

    with _blas_threads(options):
        return LocalCluster(n_workers=options.workers, processes=True, **_common(options))


def _gpu_cluster(options: StartOptions) -> Any:
    from dask_cuda import LocalCUDACluster

    if options.protocol == "ucxx":
        logger.warning(OPEN_LISTENERS)
    return LocalCUDACluster(**on_gpus(options))


def on_gpus(options: StartOptions) -> dict[str, Any]:
    """What dask-cuda's cluster is given: GPU workers as `start` sets them up."""
    from multimm.cluster.plugins.warmup import TASKS

    return {
        "CUDA_VISIBLE_DEVICES": [gpu.ident for gpu in options.gpus],
        "rmm_pool_size": options.rmm_pool,
        # What tasks need is imported before there are any; and a worker that replaces a killed one
        # waits for the memory that this one had.
        "preload": [TASKS, pool_memory.__name__],
        # Without a pool there is nothing to share, and CuPy's own pool is the faster one.
        "rmm_allocator_external_lib_list": None if options.rmm_pool is None else "cupy",
        **_common(options),
    }


def _leave_lost_workers_to_their_nannies(cluster: Any) -> None:
    """A cluster never stops the nanny of a lost worker, and forgets one that has ended.

    distributed stops it, `distributed.deploy.lost-worker-timeout` (15 s) after a loss, where no
    worker of that name is there at that moment: also one that was started again since, and lost
    again, or one that waits longer for the memory of its GPU. Nobody would start it again. Of a
    worker that was retired the nanny ends by itself, and `scale` replaces it once it is forgotten.
    """
    import asyncio

    import dask
    from dask.utils import parse_timedelta
    from distributed.deploy.cluster import Cluster

    def update(op: str, message: Any) -> None:
        Cluster._update_worker_status(cluster, op, message)
        if op == "remove":
            delay = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            asyncio.get_running_loop().call_later(delay, forget)

    def forget() -> None:
        for name, nanny in [*cluster.workers.items()]:
            if nanny.status.name in ("closing_gracefully", "closing", "closed", "failed"):
                cluster._futures.add(asyncio.ensure_future(nanny.close()))
                del cluster.workers[name]

    cluster._update_worker_status = update


@contextmanager
def private_scratch() -> Iterator[None]:
    """Have nodes that are started inside take a folder of this user's alone.

    Dask would take /tmp/dask-scratch-space, whoever made it: workers load from there what they
    have spilled, and import modules that lie there. This one has the name that Dask gives it where
    another user was first, so that what a killed worker left is removed by the next one.
    """
    import dask

    base = Path(dask.config.get("temporary-directory") or tempfile.gettempdir())
    mine = base / f"dask-scratch-space-{os.geteuid()}"
    try:
        folder = str(own_folder(mine, create=True))
    except OSError:
        folder = tempfile.mkdtemp(prefix="dask-scratch-space-", dir=base)
    with dask.config.set({"temporary-directory": folder}):
        yield


def _share(options: StartOptions) -> int:
    """Threads of BLAS in each worker; distributed's default beside GPUs."""
    return 1 if options.gpus else max(1, cores() // (options.workers * options.threads))


def _missing(options: StartOptions) -> dict[str, str]:
    """What nannies write into this process's environment, for nobody has set it."""
    return {name: str(_share(options)) for name in BLAS_VARIABLES if name not in os.environ}


@contextmanager
def _blas_threads(options: StartOptions) -> Iterator[None]:
    """CPU workers' processes started inside give their BLAS an even share of the cores.

    distributed's default is one thread per process, which leaves cores idle when there are
    fewer workers than cores; BLAS's own default, all cores in each, has them fight for them.
    BLAS reads the variable when it is loaded, so it must be set before the process starts.
    """
    import dask

    # distributed lets the environment win over its configuration, and writes the values it
    # used into this process's environment: without clean-up, the first call would decide
    # for all later ones.
    count, missing = _share(options), _missing(options)
    settings = {f"distributed.nanny.pre-spawn-environ.{name}": count for name in BLAS_VARIABLES}
    try:
        with dask.config.set(settings):
            yield
    finally:
        give_back(missing)


def _root(error: BaseException) -> str:
    """The first cause, in one line: distributed wraps what went wrong several times.

    It also asserts that a nanny has started as it closes one that has not.
    """
    below = error.__context__ if isinstance(error, AssertionError) else error.__cause__
    return cause(error) if below is None else _root(below)
