"""dask-cuda clusters on real GPUs: kinds, memory, transports and the shared pool."""

from __future__ import annotations

import psutil
import pytest

import multimm.cluster as mc
from multimm.cluster.inspect.devices import driver_cuda, visible_gpus
from multimm.cluster.inspect.host_report import findings, gather, usable
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.errors import OptionError
from multimm.planning.spec import LOCAL_TCP, NVLINK

POOL = 4 * 2**30


def block(rows: int):
    import cupy

    x = cupy.ones((rows, 1024), dtype=cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    return x


def total(x) -> float:
    return float(x.sum())


def pool_shared() -> bool:
    """Memory that CuPy hands out comes from RMM's pool."""
    import cupy
    import rmm

    before = cupy.get_default_memory_pool().total_bytes()
    x = cupy.empty(2**20, dtype=cupy.uint8)
    own_pool_unused = cupy.get_default_memory_pool().total_bytes() == before
    resource = rmm.mr.get_current_device_resource()
    return own_pool_unused and x.nbytes == 2**20 and "Pool" in type(resource).__name__


@pytest.mark.gpu
@pytest.mark.multigpu(1)
def test_this_host_is_usable_and_its_gpus_are_found():
    assert usable(findings(gather()))
    assert driver_cuda() >= (12, 0)
    with pytest.raises(OptionError, match="this host has"):
        mc.start(gpus=len(visible_gpus()) + 1)


@pytest.mark.gpu
@pytest.mark.multigpu(1)
def test_one_gpu_worker_shares_its_pool_with_cupy():
    with mc.start(gpus=1, rmm_pool=POOL) as client:
        spec = mc.describe(client)
        (device,) = spec.devices
        assert (device.kind, device.memory_bytes > POOL, device.spills) == ("gpu", True, True)
        assert all(client.run(pool_shared).values())
        assert client.submit(total, client.submit(block, 8)).result() == 8 * 1024


@pytest.mark.gpu
@pytest.mark.multigpu(1)
def test_cpu_workers_beside_a_gpu_are_described_as_cpu():
    with mc.start(workers=2, memory_limit="1GiB") as client:
        spec = mc.describe(client)
        assert [device.kind for device in spec.devices] == ["cpu", "cpu"]
        assert spec.devices[0].memory_bytes == 2**30


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize(
    ("protocol", "pool", "link"),
    [("tcp", POOL, NVLINK), ("ucxx", POOL, NVLINK), ("tcp", None, LOCAL_TCP)],
)
def test_blocks_travel_between_two_gpus_and_are_counted(protocol, pool, link):
    with mc.start(gpus=2, protocol=protocol, rmm_pool=pool) as client:
        spec = mc.describe(client)
        assert [device.kind for device in spec.devices] == ["gpu", "gpu"]
        assert spec.link == link
        assert all(address.startswith(protocol) for address in spec.addresses)
        first, second = spec.addresses
        reset_received_bytes(client)
        made = client.submit(block, 4096, workers=[first])
        assert client.submit(total, made, workers=[second]).result() == 4096 * 1024
        assert received_bytes(client) == {first: 0, second: 4 * 4096 * 1024}


@pytest.mark.gpu
@pytest.mark.multigpu(1)
def test_gpu_workers_listen_on_loopback_only():
    # A UCXX cluster that this process had before may leave a listener behind.
    before = listeners()
    with mc.start(gpus=1, rmm_pool=POOL):
        added = listeners() - before
    assert {address for _, address, _ in added} == {"127.0.0.1"}


def listeners() -> set[tuple[int, str, int]]:
    """Process, address and port of all that this process and its children listen on."""
    return {
        (process.pid, connection.laddr.ip, connection.laddr.port)
        for process in (psutil.Process(), *psutil.Process().children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
