"""Tile configurations: budgets, rules, and the index maths that the kernel file itself states."""

from __future__ import annotations

from collections import Counter

import pytest
from kernel_maths import functions_of

from multimm.errors import KernelError
from multimm.gpu.arch import ArchLimits, limits_for
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import REGISTRY, TileConfig

CONFIGS = [entry.config for entry in REGISTRY]
names = pytest.mark.parametrize("config", CONFIGS, ids=[entry.name for entry in REGISTRY])


def thread_map(config: TileConfig) -> dict:
    """The functions of kernels/common/warp_map.cuh."""
    defines = config.defines()
    return functions_of(kernel_text("common/warp_map.cuh", defines), **defines)


def copied(config: TileConfig, side: str, way: str, floats: int = 1):
    """For every copy and thread of a k tile: x and k of its first float."""
    f, span = thread_map(config), getattr(config, side)
    for copy in range(span * config.block_k // (config.threads * floats)):
        for thread in range(config.threads):
            if way == "along_k":
                yield copy, thread, f["along_k_x"](thread, copy), f["along_k_k"](thread, copy)
            else:
                yield (copy, thread, f["along_x_x"](thread, span, floats),
                       f["along_x_k"](thread, copy, span, floats))  # fmt: skip


def wavefronts(addresses: list[int]) -> int:
    """How many turns the 32 banks need for the distinct 4-byte words of one request."""
    return max(Counter(word % 32 for word in set(addresses)).values())


ways = pytest.mark.parametrize(
    ("way", "floats"), [("along_k", 1), ("along_x", 1), ("along_x", 4)], ids=str
)


@names
@ways
@pytest.mark.parametrize("side", ["block_m", "block_n"])
def test_shared_writes_are_conflict_free_and_global_reads_whole_sectors(config, way, floats, side):
    pitch = thread_map(config)["pitch"](getattr(config, side), int(way == "along_k"))
    assert pitch % 4 == 0  # 16-byte reads stay aligned in every row
    requests: dict = {}
    for copy, thread, x, k in copied(config, side, way, floats):
        # Copies of 16 bytes are served 8 lanes at a time.
        requests.setdefault((copy, thread * floats // 32), []).append((x, k))
    for at in requests.values():
        words = [k * pitch + x + i for x, k in at for i in range(floats)]
        assert len(words) == 32
        assert wavefronts(words) == 1
        # In memory the contiguous index runs over whole, aligned runs of 8 floats.
        runs = Counter((k // 8, x) if way == "along_k" else (x // 8, k) for x, k in at)
        assert set(runs.values()) == {8 // floats}


@names
def test_shared_reads_are_conflict_free_for_16_lanes_at_a_time(config):
    f = thread_map(config)
    for warp in (range(start, start + 32) for start in range(0, config.threads, 32)):
        for first in ("strip_row", "strip_col"):
            for lanes in (warp[:16], warp[16:]):
                words = {f[first](thread) + word for thread in lanes for word in range(4)}
                assert wavefronts(list(words)) == 1
                at = [f[first](thread) for thread in lanes]
                # Two groups of 8 lanes are served together where pairs of lanes read the same.
                neighbours = all(at[i] == at[i + 1] for i in range(0, 16, 2))
                next_but_one = all(at[i] == at[i + 2] for i in (0, 1, 4, 5, 8, 9, 12, 13))
                assert neighbours or next_but_one


def test_residency_is_the_scarcest_resource():
    config = TileConfig(128, 128, 8, 8, 8, 2, 1, 0, 2)  # 256 threads, 128 registers, 16896 + 1024
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
def test_every_configuration_is_resident_as_promised(config):
    assert config.blocks_per_multiprocessor(limits_for(90)) >= config.min_blocks


def test_limits_fall_back_to_the_nearest_older():
    assert limits_for(90).capability == 90
    assert limits_for(87).capability == 86
    assert limits_for(121).name == "sm_120"
    with pytest.raises(KernelError, match=r"7\.0: the kernels need 7\.5"):
        limits_for(70)
