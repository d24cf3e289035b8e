"""Every call launches what the golden file says, kernel by kernel: see `golden_launches`.

python tests/golden_launches.py --rewrite    after a launch is meant to change
"""

from __future__ import annotations

import json

from golden_launches import compare, read


def test_calls_launch_what_they_launched_before():
    different = compare()
    lines = ["\n  ".join(map(json.dumps, change)) for change in different[:3]]
    assert not different, f"{len(different)} calls launch something else:\n" + "\n".join(lines)


def test_golden_launches_are_of_all_kernels():
    kernels = {event[0] for _, does in read() for event in does["launches"] if event[0][1:]}
    calls = [json.dumps(call) for call, _ in read()]
    assert len(calls) == len(set(calls)) >= 300
    assert kernels >= {
        "sgemm_ffma", "sgemm_dot", "sgemm_axpy", "sgemm_outer", "sgemm_split", "sgemm_split_mma",
        "split_pack", "split_residuals", "unpack", "transpose", "transpose_skewed", "add_partials",
        "expand_complex", "split_complex", "join_complex", "mirror_complex",
    }  # fmt: skip
