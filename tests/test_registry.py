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


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 100_000))
def test_slices_do_not_depend_on_layouts(m, n, k):
    """Or the bits of a result would."""
    flags = itertools.product((False, True), repeat=4)
    assert len({slices_of_k(GemmSizes(m, n, k, 1, *each), H200) for each in flags}) == 1


@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_every_architecture_gets_a_configuration(limits):
    for sizes in (GemmSizes(1, 1, 1), GemmSizes(0, 5, 3), GemmSizes(3000, 1000, 2)):
        config, _ = choose(sizes, Device(limits, 7))
        assert config.blocks_per_multiprocessor(limits) >= 1
