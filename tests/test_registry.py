"""Which configuration a product gets, on paper."""

from __future__ import annotations

import pytest

from multimm.errors import KernelError
from multimm.gpu.registry import REGISTRY, Device, Problem, choose, config_named
from multimm.gpu.tiles import ARCHITECTURES, limits_for

H200 = Device(limits_for(90), 132)


def test_names_are_unique_and_known():
    names = [entry.name for entry in REGISTRY]
    assert len(set(names)) == len(names)
    for entry in REGISTRY:
        assert config_named(entry.name) is entry.config


def test_unknown_name_lists_the_known():
    with pytest.raises(KernelError, match="'huge' is unknown; known are 'large', 'medium'"):
        config_named("huge")


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (Problem(8192, 8192, 8192), "large"),
        (Problem(65536, 65536, 64), "large"),
        (Problem(100_000, 20, 500), "tall"),
        (Problem(20, 100_000, 500), "wide"),
        (Problem(700, 700, 700), "medium"),  # 121 tiles: one turn of 132 multiprocessors
        (Problem(33, 31, 1000), "small"),
        (Problem(32, 32, 32, batch=4096), "small"),
    ],
)
def test_choice_on_an_h200(problem, name):
    config, reason = choose(problem, H200)
    assert config is config_named(name), reason
    assert reason.startswith(f"{name}: ")


def test_reason_counts_tiles_and_padding():
    _, reason = choose(Problem(128 * 7, 128 * 13, 5), Device(limits_for(80), 1))
    assert "large: 91 tiles of 128x128 on 1 multiprocessors, 100% of them inside D" in reason


@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_every_architecture_gets_a_configuration(limits):
    for problem in (Problem(1, 1, 1), Problem(0, 5, 3), Problem(3000, 1000, 2)):
        config, _ = choose(problem, Device(limits, 7))
        assert config.blocks_per_multiprocessor(limits) >= 1
