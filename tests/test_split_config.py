"""Configurations of the split product: rules, budgets, slices of k, choice. No GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import KernelError
from multimm.gpu import kernel_selection
from multimm.gpu.arch import limits_for
from multimm.gpu.emulated import configs
from multimm.gpu.emulated.configs import (
    BROAD_PRODUCTS,
    BROAD_REGISTRY,
    GRAIN,
    MAX_SLICES,
    MIN_SLABS,
    PRODUCTS,
    ROW_ALIGN,
    SLAB,
    SPLIT_REGISTRY,
    SUMS_SHARE,
    broad_pays,
    entries_for,
    pays,
    slices_of,
    split_slices,
    stretch_of,
)
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import MAX_SUMS, Device, entry_named
from multimm.planning import problem
from multimm.planning.cost import memory, time
from multimm.planning.schedule import Largest

CONFIGS = [entry.config for entry in SPLIT_REGISTRY]


def named(name):
    return entry_named(SPLIT_REGISTRY, name).config


def test_the_table():
    entries = (*SPLIT_REGISTRY, *BROAD_REGISTRY)
    names = [entry.name for entry in entries]
    assert len(set(names)) == len({entry.config for entry in entries}) == len(names)
    for entry in entries:
        assert entry.config.broad or named(entry.name) is entry.config
        tensor_clocks = entry.config.products * 128 * entry.config.tile_n * SLAB // 2048
        if entry.config.specific:
            assert 1 < entry.clocks / tensor_clocks < 1.5, "2048 FP16 multiply-adds per clock"
        else:
            assert 1 < entry.clocks / 2 / tensor_clocks < 1.7, "1024 of them"
    with pytest.raises(KernelError, match="'fast' is unknown; known are 'split_wide'"):
        named("fast")


def test_the_kernel_has_the_same_constants():
    text = kernel_text("sgemm_split.cu", CONFIGS[0].defines())
    found = dict(re.findall(r"(\w+) = (\d+)[,;]", text))
    assert int(found["TILE_M"]) == configs.TILE_M
    assert int(found["SLAB"]) == SLAB
    assert int(found["TILE_ROWS"]) == configs.TILE_ROWS
    # Plans, which know no kernels, count with the same.
    assert time.PACKED_ROWS == ROW_ALIGN
    assert problem.ALONE == kernel_selection.ALONE
    assert (1 + int(found["GROUPS"])) * int(found["GROUP_THREADS"]) == CONFIGS[0].threads
    assert int(found["GROUPS"]) * int(found["TILE_ROWS"]) == configs.TILE_M


def test_large_products_on_gpus_with_wgmma_are_made_ready_for_a_wide_range():
    h200, a100 = (Device(limits_for(capability), 132) for capability in (90, 80))
    for precision, products in BROAD_PRODUCTS.items():
        (entry,) = entries_for(h200.limits, products)
        assert entry.config.broad
        assert entry.config.shared_bytes + 1024 <= h200.limits.shared_bytes
        assert broad_pays(8192, 8192, 8192, precision, h200)
        assert not broad_pays(2048, 2048, 2048, precision, h200)
        assert not broad_pays(8192, 8192, 8192, precision, a100)
    assert not any(entry.config.broad for entry in SPLIT_REGISTRY)


@pytest.mark.parametrize(
    ("capability", "float32", "tf32"),
    [(75, False, False), (80, True, True), (86, False, True), (89, False, True),
     (90, True, True), (100, True, True), (103, True, True), (120, False, True)],
)  # fmt: skip
def test_on_which_gpus_tensor_cores_pay(capability, float32, tf32):
    """Where they do a quarter as many multiply-adds as A100s, one product pays, and not three."""
    device = Device(limits_for(capability), 108)
    assert (pays(PRODUCTS["float32"], device), pays(PRODUCTS["tf32"], device)) == (float32, tf32)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 2**21), st.integers(1, 160))
def test_slices_cover_k(m, n, k, multiprocessors):
    slices, length = split_slices(m, n, k, multiprocessors)
    slabs = -(-k // SLAB)
    assert 1 <= slices <= MAX_SLICES
    assert (slices - 1) * length < slabs <= slices * length, "none is empty"
    if slices > 1:
        assert length >= MIN_SLABS
        assert named("split_narrow").tiles(m, n) * slices <= multiprocessors


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 2**21), st.sampled_from([1, 3]),
       st.integers(1, 160))  # fmt: skip
def test_slices_of_long_products_cover_k_and_need_what_plans_reckon_with(m, n, k, products, count):
    device = Device(limits_for(90), count)
    for rows, cols, lower in ((m, n, False), (m, m, True)):
        slices, length = slices_of(rows, cols, k, products, device, lower)
        slabs = -(-k // SLAB)
        assert 1 <= slices <= MAX_SLICES
        assert (slices - 1) * length < slabs <= slices * length
        sums = slices * rows * cols * (slices > 1)
        assert sums <= max(MAX_SUMS, (rows + cols) * k / SUMS_SHARE)
        layout = SimpleNamespace(
            largest=Largest(rows, rows, cols, k), problem=SimpleNamespace(sum_bytes=4)
        )
        assert 4 * sums <= memory._sliced(layout)


@pytest.mark.parametrize(
    ("m", "n", "k", "length"),
    [
        (8192, 8192, 1048576, 32768),
        (8192, 8192, 65535, 65535),
        (8192, 8192, 65536, 32768),
        (8192, 8192, 65537, 32896),  # a multiple of 128
        (2048, 2048, 4194304, 524288),  # of 2^41 multiplications
        (2048, 2048, 99, 99),
        (0, 0, 99, 99),
        (65536, 65536, 65536, 32768),
        (65664, 65664, 65536, 65536),  # of more sums than elements in half of it
        (131072, 131072, 131072, 65536),
    ],
)
def test_a_long_k_is_cut_into_even_stretches(m, n, k, length):
    assert stretch_of(m, n, k) == length
    assert length in (k, -(-length // GRAIN) * GRAIN)
