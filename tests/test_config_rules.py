"""Configurations of kernels that no chip runs are refused, with the value that is wrong."""

from __future__ import annotations

import pytest

from multimm.errors import KernelError
from multimm.gpu.elementwise.reduce import AddConfig
from multimm.gpu.elementwise.transpose import TransposeConfig
from multimm.gpu.emulated.configs import MmaConfig, WgmmaConfig
from multimm.gpu.simt.configs import TileConfig
from multimm.gpu.simt.thin import AxpyConfig, DotConfig, OuterConfig

RULES = {
    TileConfig: [
        ((0, 64, 16, 4, 4, 2, 1, 0, 1), "block_m=0.* block_m must be positive"),
        ((64, 64, 16, 4, 4, 2, 0, 0, 1), "group must be positive"),
        ((64, 64, 16, 4, 4, 1, 1, 0, 1), "stages must be at least 2"),
        ((64, 64, 16, 4, 4, 2, 1, 2, 1), "order must be 0"),
        ((60, 64, 16, 6, 4, 2, 1, 0, 1), "multiples of 4"),
        ((40, 64, 16, 4, 4, 2, 1, 0, 1), "block_m must be a multiple of thread_m"),
        ((64, 48, 16, 4, 4, 2, 1, 0, 1), "block_n must be a multiple of thread_n"),
        ((64, 64, 12, 4, 4, 2, 1, 0, 1), "block_k must be a multiple of 8"),
        ((256, 256, 8, 4, 4, 2, 1, 0, 1), "4096 threads"),
        ((256, 64, 16, 16, 8, 2, 1, 0, 1), "must be a multiple of block_m"),
        ((64, 64, 8, 4, 4, 2, 1, 0, 1), "4 \\* 256 threads must divide"),
    ],
    DotConfig: [
        ((3, 1, 8, 1, 8, 1), "power of two"),
        ((1, 3, 8, 1, 8, 1), "halved"),
        ((1, 1, 8, 3, 8, 1), "in one block"),
        ((1, 1, 33, 1, 8, 1), "1 to 32 warps"),
        ((16, 1, 8, 8, 8, 1), "more than 49152"),
    ],
    AxpyConfig: [
        ((3, 32, 8, 4, 8, 1), "power of two"),
        ((1, 32, 8, 3, 8, 1), "1, 2 or 4 words"),
        ((1, 24, 8, 4, 8, 1), "as much as any other"),
        ((1, 32, 8, 4, 0, 1), "at least one"),
        ((16, 32, 8, 4, 8, 1), "more than 49152"),
    ],
    OuterConfig: [((0, 64), "k is 1 to 12"), ((13, 64), "k is"), ((4, 60), "8 warps")],
    WgmmaConfig: [
        ((2, 128, 7, 8), r"products must be 3 \(float32\) or 1"),
        ((3, 96, 7, 8), "tile_n must be a multiple of 64"),
        ((1, 320, 4, 8), "up to 256"),
        ((3, 192, 5, 8), "324 registers per thread, of 232: lower tile_n"),
        ((3, 128, 3, 8), "slots must be at least 4"),
        ((1, 128, 1, 8), "slots must be at least 2"),
        ((3, 128, 8, 8), "263296 bytes of shared memory, a block has at most 232448: lower slots"),
        ((3, 128, 7, 0), "band must be positive"),
    ],
    MmaConfig: [
        ((2, 128, 3, 8), r"products must be 3 \(float32\) or 1"),
        ((3, 192, 3, 8), r"tile_n must be one of \(64, 128\): a thread has registers for no more"),
        ((1, 192, 3, 8), r"one of \(64, 128, 256\)"),
        ((3, 128, 1, 8), "slots must be at least 2: one is filled while another one is multip"),
        ((3, 128, 8, 8), "262144 bytes of shared memory, a block has at most 232448: lower slots"),
        ((3, 128, 3, 0), "band must be positive"),
    ],
    AddConfig: [
        ((2, 3), "4 or 8 bytes"),
        ((4, 0), "64 at most"),
        ((4, 12), "a power of two of parts"),
        ((8, 2, 4), "at most 16 bytes"),
        ((4, 2, 3), "1, 2 or 4 elements"),
        ((4, 2, 4, 0), "at least one vector"),
        ((4, 2, 4, 1, 40), "whole warps"),
    ],
    TransposeConfig: [
        ({"word_bytes": 3}, "1, 2, 4, 8 or 16 bytes"),
        ({"word_bytes": 4, "words": 0}, "at least one word"),
        ({"word_bytes": 4, "vector": 3}, "2, 4, 8 or 16 elements"),
        ({"word_bytes": 8, "vector": 4}, "slots of 32 bytes"),
        ({"word_bytes": 1, "vector": 2}, "whole registers"),
        ({"word_bytes": 4, "words": 3, "vector": 2}, "whole registers"),
        ({"word_bytes": 4, "slots": 64, "threads": 32}, "cover a row of slots"),
        ({"word_bytes": 4, "vector": 2, "slots": 8, "threads": 64}, "lanes that are served"),
        ({"word_bytes": 8, "words": 6}, "49152 are allowed"),
        ({"word_bytes": 4, "skew": 4}, "at least 32 bytes"),
        ({"word_bytes": 4, "skew": 12}, "a power of two"),
        ({"word_bytes": 4, "skew": 32}, "fits the tile"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [(kind, *rule) for kind, rules in RULES.items() for rule in rules],
)
def test_what_no_chip_runs_is_refused(kind, values, sentence):
    with pytest.raises(KernelError, match=sentence):
        kind(**values) if isinstance(values, dict) else kind(*values)
