"""Every call launches what the golden file says, kernel by kernel: see `golden_launches`.

python tests/golden_launches.py --rewrite    after a launch is meant to change
"""

from __future__ import annotations

import json

import pytest
from golden_launches import compare, read

from multimm.gpu.simt import gemm


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


@pytest.mark.parametrize("changed", ["alpha", "grid", "address"])
def test_a_launch_that_differs_is_found(monkeypatch, changed):
    """What is compared are arguments, grids and addresses, not names alone."""
    one = [known for known in read() if known[0].get("precision") == "ieee"][:1]
    monkeypatch.setattr("golden_launches.read", lambda: one)
    assert compare() == []
    before = gemm.prepare

    def other(kernel, tiles, threads, head, stacks, axes, **more):
        if changed == "alpha":
            head = (*head[:4], head[4] + 1, head[5])
        made = before(kernel, tiles + (changed == "grid"), threads, head, stacks, axes, **more)
        return (lambda to: made([to[0] + 4, *to[1:]])) if changed == "address" else made

    monkeypatch.setattr(gemm, "prepare", other)
    assert len(compare()) == 1
