"""GPU workers as Slurm jobs, started from a program or a notebook by dask-jobqueue.

    python jobqueue.py --jobs 4 --queue gpu --dry-run     # the job script, and nothing else
    python jobqueue.py --jobs 4 --queue gpu               # scheduler here, workers in 4 jobs

One job is one node with all its GPUs. The scheduler runs here, so that this host must be one that
the nodes can reach. Stops all with Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal

from dask_jobqueue import SLURMCluster


def make_cluster(
    *,
    gpus: int = 8,
    memory: str = "960GB",
    cores: int = 64,
    queue: str | None = None,
    account: str | None = None,
    walltime: str = "01:00:00",
    protocol: str = "ucxx",
    interface: str | None = None,
) -> SLURMCluster:
    """A cluster without workers yet; ``.scale(jobs=4)`` asks for some.

    Parameters
    ----------
    gpus, memory, cores
        Of one node. Each GPU worker gets an even share of the host's memory.
    queue, account, walltime
        As Slurm knows them.
    protocol
        "ucxx", "tls" (with certificates from Dask's configuration, see ``../tls``) or "tcp".
    interface
        Network interface of the workers, such as ``ib0``.
    """
    return SLURMCluster(
        # One thread and one process per GPU: dask-jobqueue divides the memory by `processes`, and
        # dask-cuda starts one worker for each GPU that it sees.
        cores=gpus,
        processes=gpus,
        memory=memory,
        job_cpu=cores,
        queue=queue,
        account=account,
        walltime=walltime,
        protocol=protocol,
        interface=interface,
        worker_command="dask_cuda.cli",
        worker_extra_args=["--rmm-pool-size", "0.8", "--set-rmm-allocator-for-libs", "cupy"],
        job_extra_directives=[f"--gpus-per-node={gpus}", "--nodes=1"],
        local_directory="/tmp",
        scheduler_options={"dashboard_address": "127.0.0.1:0"},
    )


def main() -> None:
    """Start, say how to connect, and wait."""
    parser = argparse.ArgumentParser(description="GPU workers as Slurm jobs.")
    parser.add_argument("--jobs", type=int, default=1, help="nodes")
    parser.add_argument("--gpus", type=int, default=8, help="of one node")
    parser.add_argument("--memory", default="960GB", help="of one node")
    parser.add_argument("--queue")
    parser.add_argument("--account")
    parser.add_argument("--protocol", default="ucxx", choices=("ucxx", "tls", "tcp"))
    parser.add_argument("--interface")
    parser.add_argument("--dry-run", action="store_true", help="print the job script and end")
    options = parser.parse_args()
    with make_cluster(
        gpus=options.gpus,
        memory=options.memory,
        queue=options.queue,
        account=options.account,
        protocol=options.protocol,
        interface=options.interface,
    ) as cluster:
        if options.dry_run:
            print(cluster.job_script())
            return
        cluster.scale(jobs=options.jobs)
        print(f'multimm.cluster.connect("{cluster.scheduler_address}", overlap=True)', flush=True)
        signal.sigwait([signal.SIGINT, signal.SIGTERM])


if __name__ == "__main__":
    main()
