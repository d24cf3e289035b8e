"""Start a scheduler and GPU workers on hosts that SSH reaches, and keep them until Ctrl-C.

    python start.py --protocol tls node1 node1 node2 node3

The first host gets the scheduler, each further one a worker for each of its GPUs: name the first
twice to use its GPUs, too. All hosts need the same packages at the same place, and, for TLS, the
same certificates at the same place: this host's Dask configuration goes with every process.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

from distributed import SSHCluster

#: What multimm.cluster.start() takes on one host, too; CuPy and UCXX share the pool.
GPU_WORKER = {"rmm_pool_size": 0.8, "rmm_allocator_external_lib_list": ["cupy"]}


def make_cluster(
    hosts: list[str],
    *,
    protocol: str = "ucxx",
    memory_limit: str = "100GB",
    interface: str | None = None,
    gpus: bool = True,
    connect_options: dict[str, Any] | None = None,
    remote_python: str | None = None,
) -> Any:
    """Scheduler and workers, when all have started.

    Parameters
    ----------
    hosts
        The scheduler's first.
    protocol
        "ucxx", "tls" or "tcp".
    memory_limit
        Host memory of one worker; on a host with several GPUs each has one worker.
    interface
        Network interface of scheduler and workers, such as ``ib0``.
    gpus
        False: one CPU worker on each host, without dask-cuda.
    connect_options
        For asyncssh; what ``~/.ssh/config`` says holds anyway.
    remote_python
        The interpreter on the hosts. Default: the path of this one.
    """
    common = {"protocol": protocol, **({"interface": interface} if interface else {})}
    worker = {"memory_limit": memory_limit, "nthreads": 1, "local_directory": "/tmp", **common}
    return SSHCluster(
        hosts,
        connect_options=connect_options or {},
        worker_class="dask_cuda.CUDAWorker" if gpus else "distributed.Nanny",
        worker_options={**worker, **(GPU_WORKER if gpus else {})},
        # The dashboard has no TLS: not beyond this host.
        scheduler_options={"port": 0, "dashboard_address": "127.0.0.1:0", **common},
        remote_python=remote_python,
    )


def main() -> None:
    """Start, say how to connect, and wait."""
    parser = argparse.ArgumentParser(description="A cluster on hosts that SSH reaches.")
    parser.add_argument("hosts", nargs="+", help="the scheduler's, then the workers'")
    parser.add_argument("--protocol", default="ucxx", choices=("ucxx", "tls", "tcp"))
    parser.add_argument("--memory-limit", default="100GB", help="host memory of one worker")
    parser.add_argument("--interface")
    parser.add_argument("--cpu", action="store_true", help="CPU workers")
    parser.add_argument("--remote-python", help="the interpreter on the hosts")
    options = parser.parse_args()
    if len(options.hosts) < 2:
        parser.error("one host for the scheduler and at least one for workers are needed")
    with make_cluster(
        options.hosts,
        protocol=options.protocol,
        memory_limit=options.memory_limit,
        interface=options.interface,
        gpus=not options.cpu,
        remote_python=options.remote_python,
    ) as cluster:
        print(f'multimm.cluster.connect("{cluster.scheduler_address}", overlap=True)', flush=True)
        signal.sigwait([signal.SIGINT, signal.SIGTERM])


if __name__ == "__main__":
    main()
