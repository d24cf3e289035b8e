"""Tile configurations: budgets, rules, and the index maths that the kernel file itself states."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import KernelError
from multimm.gpu.registry import REGISTRY
from multimm.gpu.source import kernel_text
from multimm.gpu.tiles import ARCHITECTURES, ArchLimits, TileConfig, TransposeConfig, limits_for

CONFIGS = [entry.config for entry in REGISTRY]
names = pytest.mark.parametrize("config", CONFIGS, ids=[entry.name for entry in REGISTRY])

_CONSTANT = re.compile(r"^constexpr int (\w+) = ([^;]+);", re.MULTILINE)
_FUNCTION = re.compile(
    r"^__device__ constexpr int (\w+)\(([^)]*)\) \{ return ([^;]+); \}", re.MULTILINE
)


def thread_map(config: TileConfig) -> dict:
    """The functions of kernels/common/thread_map.cuh, read from there and run as Python.

    They are single expressions of non-negative ints, for which C's / is Python's //.
    """
    text = kernel_text("common/thread_map.cuh", config.defines())
    scope: dict = dict(config.defines())
    for name, value in _CONSTANT.findall(text):
        scope[name] = eval(value.replace("/", "//"), scope)
    for name, parameters, body in _FUNCTION.findall(text):
        arguments = ", ".join(re.findall(r"int (\w+)", parameters))
        scope[name] = eval(f"lambda {arguments}: {body.replace('/', '//')}", scope)
    return scope


def wavefronts(addresses: list[int]) -> int:
    """How many turns the 32 banks need for the distinct 4-byte words of one request."""
    return max(Counter(word % 32 for word in set(addresses)).values())


def warps(config: TileConfig) -> list[range]:
    return [range(first, first + 32) for first in range(0, config.threads, 32)]


@names
def test_map_is_read_from_the_kernel_file(config):
    scope = thread_map(config)
    expected = {"owned_row", "owned_col", "strip_row", "strip_col", "pitch"}
    expected |= {"along_k_x", "along_k_k", "along_x_x", "along_x_k"}
    assert expected <= scope.keys()
    assert scope["THREADS"] == config.threads


@names
def test_every_value_of_a_tile_is_owned_once(config):
    f = thread_map(config)
    owned = Counter(
        (f["owned_row"](thread, i), f["owned_col"](thread, j))
        for thread in range(config.threads)
        for i in range(config.thread_m)
        for j in range(config.thread_n)
    )
    assert set(owned) == set(itertools.product(range(config.block_m), range(config.block_n)))
    assert set(owned.values()) == {1}


@names
@pytest.mark.parametrize("way", ["along_k", "along_x"])
@pytest.mark.parametrize("side", ["block_m", "block_n"])
def test_every_element_of_a_k_tile_is_loaded_once(config, way, side):
    f, span = thread_map(config), getattr(config, side)
    loads = span * config.block_k // config.threads
    seen = Counter(
        (f[f"{way}_x"](thread, load, span), f[f"{way}_k"](thread, load, span))
        for thread in range(config.threads)
        for load in range(loads)
    )
    assert set(seen) == set(itertools.product(range(span), range(config.block_k)))
    assert set(seen.values()) == {1}


@names
@pytest.mark.parametrize("way", ["along_k", "along_x"])
@pytest.mark.parametrize("side", ["block_m", "block_n"])
def test_shared_writes_are_conflict_free_and_global_reads_whole_sectors(config, way, side):
    f, span = thread_map(config), getattr(config, side)
    for load, warp in itertools.product(
        range(span * config.block_k // config.threads), warps(config)
    ):
        at = [(f[f"{way}_x"](t, load, span), f[f"{way}_k"](t, load, span)) for t in warp]
        assert wavefronts([k * f["pitch"](span) + x for x, k in at]) == 1
        # In memory the contiguous index runs over whole, aligned runs of 8 floats.
        runs = Counter((k // 8, x) if way == "along_k" else (x // 8, k) for x, k in at)
        assert set(runs.values()) == {8}


@names
def test_shared_reads_are_conflict_free(config):
    f = thread_map(config)
    for warp in warps(config):
        for first, span in (("strip_row", config.block_m), ("strip_col", config.block_n)):
            words = {f[first](thread) + word for thread in warp for word in range(4)}
            assert f["pitch"](span) % 4 == 0  # 16-byte reads stay aligned in every row
            assert all(f[first](thread) % 4 == 0 for thread in warp)
            assert wavefronts(list(words)) == -(-len(words) // 32)


@given(st.sampled_from(CONFIGS), st.integers(1, 300), st.integers(1, 300), st.integers(1, 9))
def test_banded_grid_visits_every_tile_once(config, m, n, band):
    """The arithmetic of banded_tile in kernels/common/index.cuh."""
    rows, cols = -(-m // config.block_m), -(-n // config.block_n)
    seen = []
    for block in range(rows * cols):
        first = block // (band * cols) * band
        rest, height = block % (band * cols), min(rows - first, band)
        seen.append((first + rest % height, rest // height))
    assert sorted(seen) == list(itertools.product(range(rows), range(cols)))


def test_budgets_by_hand():
    config = TileConfig(128, 128, 8, 8, 8, 2)
    assert config.threads == 16 * 16
    assert config.accumulators_per_thread == 64
    assert config.shared_bytes == 2 * 8 * (132 + 132) * 4
    assert config.registers_per_thread == 128  # 65536 / (2 blocks * 256 threads)
    wide = TileConfig(32, 128, 16, 4, 8, 4)
    assert wide.threads == 8 * 16
    assert wide.accumulators_per_thread == 32
    assert wide.shared_bytes == 2 * 16 * (36 + 132) * 4


def test_residency_is_the_scarcest_resource():
    config = TileConfig(128, 128, 8, 8, 8, 2)  # 256 threads, 128 registers, 16896 + 1024 bytes
    plenty = {"shared_bytes": 10**9, "threads": 10**6, "registers": 10**9, "blocks": 10**3}
    for scarce, expected in (
        ({"shared_bytes": 5 * 17_920 + 17}, 5),
        ({"threads": 3 * 256 + 13}, 3),
        ({"registers": 7 * 32_768 + 11}, 7),
        ({"blocks": 11}, 11),
    ):
        limits = ArchLimits(90, **{**plenty, **scarce})
        assert config.blocks_per_multiprocessor(limits) == expected


@names
@pytest.mark.parametrize("limits", ARCHITECTURES, ids=lambda limits: limits.name)
def test_every_configuration_is_resident_as_promised(config, limits):
    # Turing holds half the threads of Ampere; elsewhere min_blocks is kept.
    promised = 1 if limits.capability == 75 else config.min_blocks
    assert config.blocks_per_multiprocessor(limits) >= promised


def test_defines_name_every_field():
    assert TileConfig(128, 32, 16, 8, 4, 3).defines() == {
        "BLOCK_M": 128, "BLOCK_N": 32, "BLOCK_K": 16, "THREAD_M": 8, "THREAD_N": 4,
        "MIN_BLOCKS": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((0, 64, 16, 4, 4, 1), "block_m must be positive"),
        ((64, 64, 16, 4, 4, 0), "min_blocks must be positive"),
        ((60, 64, 16, 6, 4, 1), "multiples of 4"),
        ((40, 64, 16, 4, 4, 1), "block_m must be a multiple of thread_m"),
        ((64, 48, 16, 4, 4, 1), "block_n must be a multiple of thread_n"),
        ((64, 64, 12, 4, 4, 1), "block_k must be a multiple of 8"),
        ((256, 256, 8, 4, 4, 1), "4096 threads"),
        ((256, 64, 16, 16, 8, 1), "must be a multiple of block_m"),
        ((128, 128, 64, 8, 8, 1), "49152 are allowed"),
    ],
)
def test_rules_name_the_values(values, sentence):
    with pytest.raises(KernelError, match=sentence) as caught:
        TileConfig(*values)
    assert f"block_m={values[0]}" in str(caught.value)


def test_transpose_elements():
    assert TransposeConfig(8, 2).defines() == {"WORD_BYTES": 8, "WORDS": 2}
    assert TransposeConfig(8, 2).shared_bytes == 32 * 33 * 16
    for word_bytes, words in ((3, 1), (4, 0), (8, 6)):
        with pytest.raises(KernelError):
            TransposeConfig(word_bytes, words)


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_transpose_reads_columns_without_conflicts(word_bytes):
    """tile[lane][col], as PAD in kernels/transpose.cu has it; 8-byte words take two turns."""
    pitch = TransposeConfig(word_bytes, 1).shared_bytes // word_bytes // 32
    for group in (range(16), range(16, 32)) if word_bytes == 8 else (range(32),):
        for col in range(32):
            words = [
                ((lane * pitch + col) * word_bytes + byte) // 4
                for lane in group
                for byte in range(0, word_bytes, 4)
            ]
            assert wavefronts(words) == 1


def test_limits_fall_back_to_the_nearest_older():
    assert limits_for(90).capability == 90
    assert limits_for(87).capability == 86
    assert limits_for(121).name == "sm_120"
    with pytest.raises(KernelError, match=r"7\.0: the kernels need 7\.5"):
        limits_for(70)
