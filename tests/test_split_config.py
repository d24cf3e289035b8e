"""Configurations of the split product: rules, budgets, slices of k, choice. No GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import KernelError
from multimm.gpu import kernel_selection
from multimm.gpu.arch import ARCHITECTURES, limits_for
from multimm.gpu.emulated import configs
from multimm.gpu.emulated.configs import (
    GRAIN,
    MAX_SLICES,
    MIN_SLABS,
    PRODUCTS,
    ROW_ALIGN,
    SLAB,
    SPLIT_REGISTRY,
    SUMS_SHARE,
    SplitConfig,
    choose_split,
    entries_for,
    pays,
    slices_of,
    split_slices,
    stretch_of,
)
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import MAX_SUMS, Device, entry_named
from multimm.planning import problem, schedule
from multimm.planning.cost import memory

SMS = 132
H200 = Device(limits_for(90), SMS)
CONFIGS = [entry.config for entry in SPLIT_REGISTRY]


def named(name):
    return entry_named(SPLIT_REGISTRY, name).config


def test_budgets():
    config = SplitConfig(3, 128, 7, 8, True)
    assert config.parts == 2
    # Two tiles of A and two of B are 32 KB: 7 slots, 14 barriers, and 1 KB to align them.
    assert config.shared_bytes == 7 * 32768 + 14 * 8 + 1024
    assert config.defines() == {
        "PARTS": 2, "CAP": 1024, "TILE_N": 128, "SLOTS": 7, "BAND": 8,
    }  # fmt: skip
    single = SplitConfig(1, 256, 4, 5, True)
    assert single.defines() == {
        "PARTS": 1, "CAP": 1024, "TILE_N": 256, "SLOTS": 4, "BAND": 5,
    }  # fmt: skip
    assert single.shared_bytes == 4 * 49152 + 8 * 8 + 1024
    assert single.tiles(129, 257) == 4
    assert config.tiles(128, 129) == 2


def test_the_table():
    names = [entry.name for entry in SPLIT_REGISTRY]
    assert len(set(names)) == len(set(CONFIGS)) == len(names)
    for entry in SPLIT_REGISTRY:
        assert named(entry.name) is entry.config
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
    assert (schedule.PACKED_ROWS, schedule.PACKED_K) == (ROW_ALIGN, SLAB)
    assert problem.ALONE == kernel_selection.ALONE
    assert (1 + int(found["GROUPS"])) * int(found["GROUP_THREADS"]) == CONFIGS[0].threads
    assert int(found["GROUPS"]) * int(found["TILE_ROWS"]) == configs.TILE_M


def test_of_mma():
    """A slot has 32 k of both parts: of 128 + 128 rows, 32 KB."""
    config = SplitConfig(3, 128, 3, 8, False)
    assert config.shared_bytes == 3 * 32768
    assert SplitConfig(1, 256, 4, 8, False).shared_bytes == 4 * 24576
    assert config.defines() == {"PARTS": 2, "CAP": 1024, "TILE_N": 128, "SLOTS": 3, "BAND": 8}
    assert (config.entry, config.threads) == ("sgemm_split_mma", 256)


@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_what_runs_on_which_gpu(limits):
    names = [entry.name for entry in entries_for(limits)]
    wgmma = ["split_wide", "split_narrow", "tf32_wide", "tf32_narrow"]
    mma = ["mma_wide", "mma_narrow", "tf32_mma_wide", "tf32_mma_narrow"]
    assert names == {75: [], 90: wgmma}.get(limits.capability, mma)
    for entry in entries_for(limits, 3):
        assert entry.config.parts == 2
        # A block may have all but 1 KB of what a multiprocessor has.
        assert entry.config.shared_bytes + 1024 <= limits.shared_bytes


@pytest.mark.parametrize(
    ("capability", "float32", "tf32"),
    [(75, False, False), (80, True, True), (86, False, True), (89, False, True),
     (90, True, True), (100, True, True), (103, True, True), (120, False, True)],
)  # fmt: skip
def test_on_which_gpus_tensor_cores_pay(capability, float32, tf32):
    """Where they do a quarter as many multiply-adds as A100s, one product pays, and not three."""
    device = Device(limits_for(capability), 108)
    assert (pays(PRODUCTS["float32"], device), pays(PRODUCTS["tf32"], device)) == (float32, tf32)


def test_other_gpus_choose_among_what_they_run():
    a100 = Device(limits_for(80), 108)
    assert choose_split(8192, 8192, 8192, 3, a100)[0] == named("mma_wide")
    assert choose_split(512, 512, 8192, 3, a100)[0] == named("mma_narrow")
    assert choose_split(8192, 8192, 8192, 1, a100)[0] == named("tf32_mma_wide")
    with pytest.raises(KernelError, match=r"compute capability 8\.0 or newer, this one has 7\.5"):
        choose_split(8192, 8192, 8192, 3, Device(limits_for(75), 40))


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 2**21), st.integers(1, 160))
def test_slices_cover_k(m, n, k, multiprocessors):
    slices, length = split_slices(m, n, k, multiprocessors)
    slabs = -(-k // SLAB)
    assert 1 <= slices <= MAX_SLICES
    assert (slices - 1) * length < slabs <= slices * length, "none is empty"
    if slices > 1:
        assert length >= MIN_SLABS
        assert named("split_narrow").tiles(m, n) * slices <= multiprocessors


@pytest.mark.parametrize(
    ("m", "n", "k", "slices"),
    [(8192, 8192, 8192, 1), (1024, 1024, 1024, 1), (128, 128, 262_144, 63), (512, 512, 4096, 4),
     (512, 512, 512, 1), (64, 64, 1_048_576, 63), (0, 5, 4096, 1), (2000, 1, 100_000, 8)],
)  # fmt: skip
def test_slices(m, n, k, slices):
    assert split_slices(m, n, k, SMS)[0] == slices


@pytest.mark.parametrize(
    ("m", "n", "k", "products", "name"),
    [(8192, 8192, 8192, 3, "split_wide"), (4096, 4096, 4096, 3, "split_wide"),
     (2048, 2048, 2048, 3, "split_wide"), (1024, 1024, 1024, 3, "split_narrow"),
     (16384, 16384, 16384, 1, "tf32_wide"), (4096, 4096, 4096, 1, "tf32_wide"),
     (1024, 1024, 1024, 1, "tf32_narrow"), (1, 1, 1, 3, "split_narrow")],
)  # fmt: skip
def test_choice(m, n, k, products, name):
    config, reason = choose_split(m, n, k, products, H200)
    assert config == named(name)
    assert reason.startswith(f"{name}: {config.tiles(m, n)} tiles of 128x{config.tile_n} on 132")


@pytest.mark.parametrize(
    ("size", "k", "products", "name", "tiles", "slices"),
    [(8192, 8192, 3, "split_wide", 64 * 65 // 2, 1), (4096, 2**18, 3, "split_wide", 528, 1),
     (8192, 8192, 1, "tf32_wide", 32 * 33, 1), (2048, 2**18, 3, "split_wide", 136, 7),
     (512, 2**18, 3, "split_wide", 10, 13), (300, 64, 3, "split_narrow", 11, 1)],
)  # fmt: skip
def test_a_triangle_fills_the_device(size, k, products, name, tiles, slices):
    config, reason = choose_split(size, size, k, products, H200, lower=True)
    assert (config, config.tiles(size, size, lower=True)) == (named(name), tiles)
    assert reason.startswith(f"{name}: {tiles} tiles")
    assert slices_of(size, size, k, products, H200, True)[0] == slices
    clocks = {lower: choose_clocks(size, k, products, lower) for lower in (False, True)}
    assert clocks[True] <= clocks[False]


def choose_clocks(size, k, products, lower):
    """Of the chosen configuration with the chosen slices."""
    cut = slices_of(size, size, k, products, H200, lower)
    return configs._fastest(size, size, cut, products, H200, lower)[1]


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
            m_blocks=(rows,), row_sizes=(rows,), n_blocks=(cols,), k_tiles=(k,)
        )
        assert 4 * sums <= memory._sliced(layout)


@pytest.mark.parametrize(
    ("m", "n", "k", "products", "lower"),
    [(2048, 2048, 2**20, 3, True), (2048, 2048, 2**20, 1, True), (3072, 3072, 2**19, 3, True),
     (3072, 3072, 2**19, 1, True), (1536, 1536, 2**19, 3, False), (1536, 1536, 2**19, 1, False),
     (3072, 3072, 2**18, 3, False), (2560, 2560, 2**18, 1, False), (512, 512, 2**21, 1, False)],
)  # fmt: skip
def test_long_products_keep_all_multiprocessors_busy(m, n, k, products, lower):
    """In one piece the last turn had few tiles: 0.55 to 0.87 of the device worked."""
    slices, _ = slices_of(m, n, k, products, H200, lower)
    tiles = choose_split(m, n, k, products, H200, lower)[0].tiles(m, n, lower) * slices
    assert slices > 1
    assert tiles / (-(-tiles // SMS) * SMS) > 0.94


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


def test_long_products_run_on_wide_tiles():
    """Where the power limit decides, what travels for a tile costs more."""
    for k, name in ((10_000, "split_narrow"), (12_288, "split_wide")):
        assert choose_split(3072, 3072, k, 3, H200)[0] == named(name)
    for entry in SPLIT_REGISTRY:
        assert entry.clocks <= entry.long_clocks


def test_the_reason_names_slices():
    assert choose_split(128, 128, 262_144, 3, H200)[1].endswith("k cut into 63 slices")
    with pytest.raises(KernelError, match="2 products were asked for"):
        choose_split(5, 5, 5, 2, H200)
