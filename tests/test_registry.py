"""Which configuration a product gets, on paper."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import KernelError
from multimm.gpu.arch import ARCHITECTURES, limits_for
from multimm.gpu.simt.configs import (
    MAX_SLICES,
    MAX_SUMS,
    MIN_SLICE,
    REGISTRY,
    Device,
    _turns,
    choose,
    entry_named,
    predicted_seconds,
    slice_length,
    slices_of_k,
)
from multimm.gpu.strides import GemmSizes

H200 = Device(limits_for(90), 132)


def test_names_are_unique_and_known():
    names = [entry.name for entry in REGISTRY]
    assert len(set(names)) == len(names)
    for entry in REGISTRY:
        assert entry_named(REGISTRY, entry.name).config is entry.config


def test_unknown_name_lists_the_known():
    with pytest.raises(KernelError, match="'huge' is unknown; known are 'large', 'turned'"):
        entry_named(REGISTRY, "huge")


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (GemmSizes(8192, 8192, 8192, scattered_a=True), "large"),
        (GemmSizes(8192, 8192, 8192, scattered_a=True, scattered_b=True), "large"),
        (GemmSizes(8192, 8192, 8192), "large"),
        (GemmSizes(8192, 8192, 8192, scattered_b=True), "turned"),
        (GemmSizes(4096, 4096, 4096, scattered_a=True), "large"),
        (GemmSizes(2048, 2048, 2048, scattered_a=True), "quick"),  # one tile per multiprocessor
        (GemmSizes(2048, 2048, 2048), "quick"),
        (GemmSizes(2048, 2048, 16384, scattered_a=True), "quick"),
        (GemmSizes(2048, 2048, 2048, scattered_b=True), "quick_turned"),
        (GemmSizes(2048, 2048, 2048, scattered_a=True, scattered_b=True), "quick_turned"),
        (GemmSizes(1024, 1024, 1024, scattered_a=True), "wide"),
        (GemmSizes(1024, 1024, 1024, scattered_b=True), "tall"),
        (GemmSizes(5000, 5000, 5000, scattered_a=True), "wide"),
        (GemmSizes(1000, 1000, 1000, batch=64, scattered_a=True), "wide"),
        (GemmSizes(16383, 127, 16385, scattered_a=True, ragged_b=True), "quick_turned"),
        (GemmSizes(1797, 1797, 64, scattered_a=True, ragged_b=True), "slim"),
        (GemmSizes(64, 65536, 64, scattered_a=True), "thin"),
        (GemmSizes(65536, 64, 64, scattered_a=True), "slim"),
        (GemmSizes(512, 512, 512, scattered_a=True), "small"),
        (GemmSizes(32, 32, 32, batch=10_000, scattered_a=True), "tiny"),
    ],
)
def test_choice_on_an_h200(sizes, name):
    config, reason = choose(sizes, H200)
    assert config is entry_named(REGISTRY, name).config, reason
    assert reason.startswith(f"{name}: ")


def test_portable_is_for_gpus_of_little_shared_memory():
    sizes = GemmSizes(4096, 4096, 4096, scattered_a=True)
    assert choose(sizes, Device(limits_for(75), 40))[0] is entry_named(REGISTRY, "portable").config


def test_reason_counts_tiles_padding_and_slices():
    _, reason = choose(
        GemmSizes(128 * 7, 256 * 13, 50_000, scattered_b=True), Device(limits_for(80), 1)
    )
    assert "large: 91 tiles of 128x256 on 1 multiprocessors, 100% of them inside D" in reason
    _, reason = choose(GemmSizes(32, 64, 100_000), H200)
    assert "small: 63 tiles of 32x64 on 132 multiprocessors" in reason
    assert reason.endswith("k cut into 63 slices")


def test_predicted_seconds_grow_with_work_and_have_a_floor():
    launch = predicted_seconds(GemmSizes(1, 1, 1), H200)
    assert 1e-6 < launch < 1e-5
    seconds = predicted_seconds(GemmSizes(8192, 8192, 8192), H200)
    assert 2 * 8192**3 / 67e12 < seconds < 2 * 8192**3 / 45e12
    times = [predicted_seconds(GemmSizes(3000, 3000, k), H200) for k in (10, 100, 1000, 10_000)]
    assert times == sorted(times)


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


def test_slices_fill_a_device_and_leave_a_full_one_alone():
    assert slices_of_k(GemmSizes(64, 64, 1_000_000), H200) == MAX_SLICES
    assert slices_of_k(GemmSizes(768, 3072, 3072), H200) > 1
    assert slices_of_k(GemmSizes(8192, 8192, 8192), H200) == 1
    assert slices_of_k(GemmSizes(128 * 12, 128 * 11, 2000), H200) == 1  # as many as multiprocessors
    assert slices_of_k(GemmSizes(64, 64, 2 * MIN_SLICE - 1), H200) == 1
    assert slices_of_k(GemmSizes(64, 64, 1_000_000, batch=2), H200) == 1
    assert slices_of_k(GemmSizes(0, 64, 1_000_000), H200) == 1
    assert slices_of_k(GemmSizes(3000, 3000, 1_000_000), H200) == 1  # two sums are too large


def test_slices_that_barely_help_are_not_worth_a_launch():
    """What a second launch costs, a small product does not gain."""
    for n in (33, 64, 128, 200):
        assert slices_of_k(GemmSizes(n, n, n), H200) == 1


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 100_000))
def test_slices_do_not_depend_on_layouts(m, n, k):
    """Or the bits of a result would."""
    flags = itertools.product((False, True), repeat=4)
    assert len({slices_of_k(GemmSizes(m, n, k, 1, *each), H200) for each in flags}) == 1


@pytest.mark.parametrize(
    ("warps", "tiles", "resident", "turns"),
    [
        (8, 0.2, 1, 1.1),  # a few multiprocessors have one tile each, alone
        (8, 1.5, 1, 2),
        (8, 1.95, 1, 2.05),  # all have two, and the last of them ends late
        (4, 0.9, 2, 1.1),
        (4, 1.5, 2, 2),
        (4, 1.5, 1, 2.2),  # alone one after another, one warp per scheduler
        (2, 0.9, 8, 2 * 1.1),  # half of the schedulers have nothing to do
        (2, 4.9, 8, 6),  # 10 warps on 4 schedulers: as long as 12
        (4, 3.5, 2, 4),  # more than are resident
        (4, 4.0, 2, 5),  # and never even
        (4, 4.0, 4, 4),  # but all at once are
        (8, 4.0, 1, 4.9),  # nor one after another
    ],
)
def test_turns_of_the_busiest_multiprocessor(warps, tiles, resident, turns):
    assert _turns(warps, tiles, resident, 0.1) == pytest.approx(turns)


def test_ragged_operands_run_at_the_rate_of_scattered_ones():
    scattered = GemmSizes(8192, 8192, 8192, scattered_a=True, scattered_b=True)
    ragged = GemmSizes(8192, 8192, 8192, ragged_a=True, ragged_b=True)
    assert choose(scattered, H200) == choose(ragged, H200)


@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_every_architecture_gets_a_configuration(limits):
    for sizes in (GemmSizes(1, 1, 1), GemmSizes(0, 5, 3), GemmSizes(3000, 1000, 2)):
        config, _ = choose(sizes, Device(limits, 7))
        assert config.blocks_per_multiprocessor(limits) >= 1
