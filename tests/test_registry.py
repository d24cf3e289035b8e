"""Which configuration a product gets, on paper; of a skinny one how it is cut, and registers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.gpu.arch import ARCHITECTURES, limits_for
from multimm.gpu.runtime.jit import compile_text
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import (
    MAX_SLICES,
    MAX_SUMS,
    MIN_SLICE,
    REGISTRY,
    Device,
    choose,
    slice_length,
    slices_of_k,
)
from multimm.gpu.simt.thin import outer_config, way_for
from multimm.gpu.strides import GemmSizes

H200 = Device(limits_for(90), 132)


@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 300_000), st.integers(1, 200))
def test_slices_cover_k(m, n, k, multiprocessors):
    sizes, device = GemmSizes(m, n, k), Device(limits_for(90), multiprocessors)
    slices = slices_of_k(sizes, device)
    assert 1 <= slices <= MAX_SLICES
    if slices > 1:
        length = slice_length(k, slices)
        assert (slices - 1) * length < k <= slices * length  # none is empty
        assert length >= MIN_SLICE
        assert slices * m * n <= MAX_SUMS


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 100_000))
def test_slices_do_not_depend_on_layouts(m, n, k):
    """Or the bits of a result would."""
    flags = itertools.product((False, True), repeat=4)
    assert len({slices_of_k(GemmSizes(m, n, k, 1, *each), H200) for each in flags}) == 1


@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_every_architecture_gets_a_configuration(limits):
    for sizes in (GemmSizes(1, 1, 1), GemmSizes(0, 5, 3), GemmSizes(3000, 1000, 2)):
        device = Device(limits, 7)
        config = choose(sizes, device, slices_of_k(sizes, device))
        assert config.blocks_per_multiprocessor(limits) >= 1
    legal = [x.config for x in REGISTRY if x.config.blocks_per_multiprocessor(limits)]
    assert max(config.block_m * config.block_n for config in legal) >= 128 * 128
    assert min(config.block_m * config.block_n for config in legal) <= 32 * 64


# Skinny products

sizes = st.integers(1, 40) | st.integers(1, 2_000_000)


@given(sizes, sizes, sizes, st.integers(1, 200), st.booleans(), st.booleans(),
       st.sampled_from([1, 24, 132, 148]))  # fmt: skip
def test_every_way_fits_its_product(m, n, k, batch, scattered_a, scattered_b, multiprocessors):
    device = Device(limits_for(90), multiprocessors)
    way = way_for(GemmSizes(m, n, k, batch, scattered_a, scattered_b), device)
    if way is None:
        return
    kernel, defines = way.config.kernel, way.config.defines
    if kernel == "sgemm_outer":
        assert k <= defines["THIN"]
        return
    assert min(m, n) <= defines["COLS"] < 2 * min(m, n)
    assert way.turned == (m < n)
    assert (kernel == "sgemm_dot") == (scattered_b if way.turned else scattered_a)
    assert way.config.shared_bytes <= 49_152
    assert (way.slices - 1) * way.length < k
    assert way.slices == 1 or (k <= way.slices * way.length and way.length % 512 == 0)
    assert way.slices < 64
    assert batch == 1 or way.slices == 1


#: Of every kernel the configurations of the six shapes that are measured, and the largest.
SHIPPED = [
    (way_for(GemmSizes(4096, 1, 4096, 1, True), H200).config, (0, 0, 0)),
    (way_for(GemmSizes(1000, 1, 8192, 1, True), H200).config, (0, 1, 1)),
    (way_for(GemmSizes(8192, 8, 8192, 1, True), H200).config, (0, 0, 0)),
    (way_for(GemmSizes(8192, 16, 8192, 1, True), H200).config, (0, 0, 0)),
    (way_for(GemmSizes(1, 4096, 4096, 1), H200).config, (0, 0, 1)),
    (way_for(GemmSizes(8, 8192, 8192, 1), H200).config, (0, 0, 1)),
    (outer_config(7, 128), (0, 0, 0)),
    (outer_config(12, 256), (0, 0, 0)),
]


@pytest.mark.parametrize(("config", "flags"), SHIPPED, ids=str)
def test_kernels_compile_without_spills(config, flags):
    kernel = config.kernel
    defines = {
        **config.defines,
        **dict(zip(("TRANS_A", "TRANS_B", "TURNED"), flags, strict=True)),
    }
    if kernel == "sgemm_axpy":
        defines["WIDE"] = 1
    usage = compile_text(kernel_text(f"{kernel}.cu", defines), "sm_90").usage[kernel]
    assert usage.spilled == 0
    blocks = config.defines.get("MIN_BLOCKS", 2)
    assert usage.registers * config.threads * blocks <= 65_536
    assert usage.shared <= 49_152
