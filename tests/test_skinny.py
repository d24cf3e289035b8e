"""Skinny products without a GPU: how they are cut, rules of their configurations, registers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.gpu.arch import limits_for
from multimm.gpu.runtime.jit import compile_text
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import Device
from multimm.gpu.simt.thin import OuterConfig, way_for
from multimm.gpu.strides import GemmSizes

H200 = Device(limits_for(90), 132)


sizes = st.integers(1, 40) | st.integers(1, 2_000_000)


@given(sizes, sizes, sizes, st.integers(1, 200), st.booleans(), st.booleans(),
       st.sampled_from([1, 24, 132, 148]))  # fmt: skip
def test_every_way_fits_its_product(m, n, k, batch, scattered_a, scattered_b, multiprocessors):
    device = Device(limits_for(90), multiprocessors)
    way = way_for(GemmSizes(m, n, k, batch, scattered_a, scattered_b), device)
    if way is None:
        return
    if way.kernel == "sgemm_outer":
        assert k <= way.config.thin
        return
    assert min(m, n) <= way.config.cols < 2 * min(m, n)
    assert way.turned == (m < n)
    assert (way.kernel == "sgemm_dot") == (scattered_b if way.turned else scattered_a)
    assert way.config.shared_bytes <= 49_152
    assert (way.slices - 1) * way.length < k
    assert way.slices == 1 or (k <= way.slices * way.length and way.length % 512 == 0)
    assert way.slices < 64
    assert batch == 1 or way.slices == 1


#: Of every kernel the configurations of the six shapes that are measured, and the largest.
SHIPPED = [
    ("sgemm_dot", way_for(GemmSizes(4096, 1, 4096, 1, True), H200).config, (0, 0, 0)),
    ("sgemm_dot", way_for(GemmSizes(1000, 1, 8192, 1, True), H200).config, (0, 1, 1)),
    ("sgemm_dot", way_for(GemmSizes(8192, 8, 8192, 1, True), H200).config, (0, 0, 0)),
    ("sgemm_dot", way_for(GemmSizes(8192, 16, 8192, 1, True), H200).config, (0, 0, 0)),
    ("sgemm_axpy", way_for(GemmSizes(1, 4096, 4096, 1), H200).config, (0, 0, 1)),
    ("sgemm_axpy", way_for(GemmSizes(8, 8192, 8192, 1), H200).config, (0, 0, 1)),
    ("sgemm_outer", OuterConfig(7, 128), (0, 0, 0)),
    ("sgemm_outer", OuterConfig(12, 256), (0, 0, 0)),
]


@pytest.mark.parametrize(("kernel", "config", "flags"), SHIPPED, ids=str)
def test_kernels_compile_without_spills(kernel, config, flags):
    defines = {
        **config.defines(),
        **dict(zip(("TRANS_A", "TRANS_B", "TURNED"), flags, strict=True)),
    }
    if kernel == "sgemm_axpy":
        defines["WIDE"] = 1
    usage = compile_text(kernel_text(f"{kernel}.cu", defines), "sm_90").usage[kernel]
    assert usage.spilled == 0
    blocks = getattr(config, "min_blocks", 2)
    assert usage.registers * config.threads * blocks <= 65_536
    assert usage.shared <= 49_152
