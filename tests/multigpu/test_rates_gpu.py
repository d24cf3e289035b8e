"""Measured rates of real GPUs and of the links between them."""

from __future__ import annotations

import time

import pytest

import multimm
import multimm.cluster as mc
from multimm.cluster.calibration import probes, store
from multimm.planning.explain.workers import rates as rates_text
from multimm.planning.spec import H200, MatrixSpec

POOL = 16 * 2**30


pytestmark = pytest.mark.usefixtures("rates_file")


def blocks_kept() -> int:
    """Blocks that this worker has ready for others."""
    return probes._kept_block.cache_info().currsize


def measured(client):
    """The spec with measured rates; says what was found, and how long it took."""
    started = time.monotonic()
    spec = mc.describe(client, measure=True)
    took = time.monotonic() - started
    print(f"\n{took:.1f} s: {store.stored()}")
    assert took < 60
    return spec


@pytest.mark.gpu
@pytest.mark.multigpu(1)
def test_the_rates_of_one_gpu_are_measured_and_used_later(rates_file):
    side = MatrixSpec((16384, 16384))
    with mc.start(gpus=1, rmm_pool=POOL) as client:
        assert mc.describe(client).slowest.measured == ""
        device = measured(client).slowest
        store.forget()  # as the next process begins
        assert mc.describe(client).slowest == device
        plan = multimm.plan(side, side)
    packed = dict(device.packed_gflops)
    assert rates_file.exists()
    assert rates_text(plan.cluster) == f"measured {device.measured}"
    if not device.packs:
        assert packed == {}
        return
    assert set(packed) == {"float32", "tf32"}
    assert device.gflops < packed["float32"] < packed["tf32"]
    products = plan.flops / (packed["float32"] * 1e9)
    assert plan.time_terms["block products"] == pytest.approx(products)
    if device.name == H200.name:
        assert device.gflops == pytest.approx(H200.gflops, rel=0.15)


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize(("protocol", "kind"), [("ucxx", "ucxx"), ("tcp", "cuda-ipc")])
def test_the_link_between_two_gpus_is_measured(protocol, kind):
    with mc.start(gpus=2, protocol=protocol, rmm_pool=POOL) as client:
        spec = measured(client)
        assert set(client.run(blocks_kept).values()) == {0}
        shipped = mc.describe(client).link
    (way,) = store.stored().links
    assert (way.protocol, way.between) == (kind, False)
    assert 5.0 < spec.link.gbps < 1000.0
    assert 1e-6 < spec.link.latency_s < 0.1
    assert shipped == spec.link
