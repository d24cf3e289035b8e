"""Which configuration a product gets, on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import KernelError
from multimm.gpu.registry import (
    MAX_SLICES,
    MIN_SLICE,
    REGISTRY,
    Device,
    Problem,
    choose,
    config_named,
    slice_length,
    slices_of_k,
)
from multimm.gpu.tiles import ARCHITECTURES, limits_for

H200 = Device(limits_for(90), 132)


def test_names_are_unique_and_known():
    names = [entry.name for entry in REGISTRY]
    assert len(set(names)) == len(names)
    for entry in REGISTRY:
        assert config_named(entry.name) is entry.config


def test_unknown_name_lists_the_known():
    with pytest.raises(KernelError, match="'huge' is unknown; known are 'large', 'turned'"):
        config_named("huge")


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (Problem(8192, 8192, 8192, scattered_a=True), "large"),
        (Problem(8192, 8192, 8192, scattered_a=True, scattered_b=True), "busy"),
        (Problem(8192, 8192, 8192), "tight"),
        (Problem(8192, 8192, 8192, scattered_b=True), "turned"),
        (Problem(2048, 2048, 2048, scattered_a=True), "quick"),
        (Problem(1024, 1024, 1024, scattered_a=True), "wide"),
        (Problem(1024, 1024, 1024, scattered_b=True), "tall"),
        (Problem(512, 512, 512), "small"),
        (Problem(33, 31, 1000), "small"),
        (Problem(32, 32, 32, batch=4096), "small"),
    ],
)
def test_choice_on_an_h200(problem, name):
    config, reason = choose(problem, H200)
    assert config is config_named(name), reason
    assert reason.startswith(f"{name}: ")


def test_reason_counts_tiles_padding_and_slices():
    _, reason = choose(
        Problem(128 * 7, 256 * 13, 5000, scattered_a=True), Device(limits_for(80), 1)
    )
    assert "large: 91 tiles of 128x256 on 1 multiprocessors, 100% of them inside D" in reason
    _, reason = choose(Problem(32, 64, 100_000), H200)
    assert "small: 64 tiles of 32x64 on 132 multiprocessors" in reason
    assert reason.endswith("k cut into 64 slices")


@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 300_000), st.integers(1, 200))
def test_slices_cover_k(m, n, k, multiprocessors):
    problem, device = Problem(m, n, k), Device(limits_for(90), multiprocessors)
    slices = slices_of_k(problem, device)
    assert 1 <= slices <= MAX_SLICES
    if slices > 1:
        length = slice_length(k, slices)
        assert (slices - 1) * length < k <= slices * length  # none is empty
        assert length >= MIN_SLICE


def test_only_long_sums_of_few_values_are_cut():
    assert slices_of_k(Problem(64, 64, 2048), H200) == 8
    assert slices_of_k(Problem(64, 64, 2047), H200) == 1
    assert slices_of_k(Problem(64, 64, 1_000_000, batch=2), H200) == 1
    assert slices_of_k(Problem(64 * 67, 64, 4096), H200) == 1  # 67 squares: more than 66


@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_every_architecture_gets_a_configuration(limits):
    for problem in (Problem(1, 1, 1), Problem(0, 5, 3), Problem(3000, 1000, 2)):
        config, _ = choose(problem, Device(limits, 7))
        assert config.blocks_per_multiprocessor(limits) >= 1
