"""A cluster over four hosts, each a network namespace: run by test_hosts.py, prints what it saw.

    on_hosts.py STRANGER

must be started where it may change the network of its namespace, which plays the switch and the
host of scheduler and client:

    10.77.0.1   the switch (a bridge); scheduler and client
    10.77.0.2   a worker        each in a namespace of its own, on a veth pair
    10.77.0.3   a worker        whose other end is a port of the bridge
    10.77.0.4   a worker

Dask's configuration comes from the environment; STRANGER is the directory of another authority's
certificates. Everything here ends with the process group; namespaces end with their processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from distributed import Client, Security

import multimm
from multimm.errors import ClusterError
from multimm.graph.block_task import BlockTask

SCHEDULER = "10.77.0.1"
WORKERS = ("10.77.0.2", "10.77.0.3", "10.77.0.4")
ADDRESS = f"tls://{SCHEDULER}:8786"
SIZE, BLOCK = 1200, 240  # 5 x 5 x 5 block products
DASK = (sys.executable, "-W", "ignore", "-m", "dask")

#: Waits for its end of the cable, then becomes the worker.
HOST = """
read -r _
ip link set lo up
ip address add "$1/24" dev eth0
ip link set eth0 up
shift
exec "$@"
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def build_switch() -> None:
    ip("link", "set", "lo", "up")
    ip("link", "add", "switch", "type", "bridge")
    ip("address", "add", f"{SCHEDULER}/24", "dev", "switch")
    ip("link", "set", "switch", "up")


def port_of(host: str) -> str:
    """The port of the switch that a host's cable ends in."""
    return "port" + host.rsplit(".", 1)[1]


def add_host(address: str) -> subprocess.Popen[str]:
    """A host with a worker."""
    command = (*DASK, "worker", ADDRESS, "--nthreads=1", "--memory-limit=1GB", "--no-nanny")
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-ec", HOST, "sh", address, *command, f"--host={address}"],
        stdin=subprocess.PIPE,
        text=True,
    )
    here, there = Path("/proc/self/ns/net"), Path(f"/proc/{process.pid}/ns/net")
    while there.readlink() == here.readlink():  # until `unshare` has done its work
        time.sleep(0.01)
    port = port_of(address)
    ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    ip("link", "set", port, "master", "switch", "up")
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()
    return process


def slow(block: np.ndarray) -> np.ndarray:
    time.sleep(0.03)
    return block


def operand(seed: int) -> da.Array:
    """Lazy, so that lost blocks can be made again; small integers, so that sums are exact."""
    drawn = da.random.default_rng(seed).integers(-8, 9, (SIZE, SIZE), chunks=BLOCK)
    made = drawn.astype("float32")
    return made.map_blocks(slow, meta=made._meta)


def owners(dask_scheduler) -> dict[str, tuple[str, set[str]]]:
    """Of each block product, its state and the workers that it is pinned to."""
    tasks = dask_scheduler.tasks.values()
    blocks = [ts for ts in tasks if isinstance(ts.run_spec, BlockTask)]
    return {str(ts.key): (ts.state, set(ts.worker_restrictions or ())) for ts in blocks}


def refused(address: str, security: Security | None) -> str:
    try:
        multimm.cluster.connect(address, timeout=5, security=security).close()
    except ClusterError as error:
        return str(error)
    return "connected"


def product(client: Client, seed: int, cut: str | None = None) -> dict[str, object]:
    """One verified product; `cut` names the host whose cable is pulled in mid-run.

    "seconds" are those of the whole product, or those after the loss was noticed.
    """
    a, b = operand(seed), operand(seed + 1)
    x, y = (lazy.compute(scheduler="threads") for lazy in (a, b))
    started = time.monotonic()
    future = client.compute(multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK))
    seen: dict[str, object] = {}
    if cut is not None:
        before: dict[str, tuple[str, set[str]]] = {}
        while sum(state == "memory" for state, _ in before.values()) < 12:
            assert not future.done(), "the product was over before the cable was pulled"
            before = client.run_on_scheduler(owners)
        ip("link", "set", port_of(cut), "down")
        pulled = time.monotonic()
        while any(cut in worker for worker in client.scheduler_info(n_workers=-1)["workers"]):
            time.sleep(0.1)
            client.sync(client._update_scheduler_info)
        noticed = time.monotonic()
        after = client.run_on_scheduler(owners)
        kept = [key for key in before if key in after and cut not in str(before[key][1])]
        seen = {
            "kept": len(kept),
            "moved": [key for key in kept if before[key][1] != after[key][1]],
            "to notice": noticed - pulled,
        }
        started = noticed
    result = future.result(timeout=60)
    seen["seconds"] = time.monotonic() - started
    seen["right"] = bool((result == x @ y).all())
    return seen


def main(stranger: str) -> None:
    build_switch()
    subprocess.Popen([*DASK, "scheduler", f"--host={SCHEDULER}", "--no-dashboard"])
    for address in WORKERS:
        add_host(address)
    seen: dict[str, object] = {}
    with multimm.cluster.connect(ADDRESS, timeout=30, security=Security(), overlap=True) as client:
        client.wait_for_workers(len(WORKERS), timeout=60)
        seen["workers"] = sorted(client.scheduler_info(n_workers=-1)["workers"])
        seen["spread"] = product(client, 0)
        files = {"tls_ca_file": f"{stranger}/ca.pem", "tls_client_cert": f"{stranger}/client.pem"}
        own = Security()
        seen["stranger"] = refused(ADDRESS, Security(require_encryption=True, **files))
        files["tls_ca_file"] = own.tls_ca_file
        seen["half a stranger"] = refused(ADDRESS, Security(require_encryption=True, **files))
        with dask.config.set({"distributed.comm.require-encryption": False}):
            seen["without TLS"] = refused(ADDRESS.replace("tls", "tcp"), None)
        seen["cut"] = product(client, 2, cut=WORKERS[-1])
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
