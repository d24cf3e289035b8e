"""Sums of partial results without a GPU: configurations, checks, and what kernels are given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import LAYOUTS, GPUArray, Kernel, gpu, laid_out

from multimm.errors import ArrayTypeError, DTypeError, KernelError
from multimm.gpu import library_gemm
from multimm.gpu.elementwise import reduce
from multimm.gpu.elementwise.reduce import add_partials
from multimm.planning.tiling.grid import merges

pytestmark = pytest.mark.usefixtures("gpu_in_numpy")


def normal(seed: int, *shape: int, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and np.ascontiguousarray(x).tobytes() == y.tobytes()


@given(
    st.integers(1, 20), st.sampled_from([(), (5,), (3, 7), (4, 8), (2, 3, 5), (2, 0), (6, 1)]),
    st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    st.sampled_from([0, 1, -0.3]), st.sampled_from([0, 1, 0.7]),
)  # fmt: skip
def test_the_bits_are_those_of_the_reference(count, shape, layouts, alpha, beta):
    def arranged(seed, layout):
        values = normal(seed, *shape)
        return laid_out(values, layout) if len(shape) > 1 else values.view(GPUArray)

    parts = [arranged(i, layouts[i % 3]) for i in range(count)]
    c = arranged(99, layouts[1])
    expected = library_gemm.add_partials(
        [np.array(x) for x in parts], alpha=alpha, beta=beta, c=np.array(c)
    )
    for _ in range(2):  # the second time, what was decided is kept
        result = add_partials(parts, alpha=alpha, beta=beta, c=c)
        assert result.flags.c_contiguous
        assert same_bits(np.asarray(result), expected)


@pytest.mark.parametrize("count", [1, 2, 5, 63, 64, 65, 128, 200])
def test_the_tree_is_that_of_the_plan(count):
    parts = [normal(i, 3, 4) for i in range(count)]
    sums = dict(enumerate(parts))
    for merge in merges(count, 0):
        left, right = merge.addends
        sums[left] = sums[left] + sums[right]
    result = add_partials([gpu(part) for part in parts])
    assert same_bits(np.asarray(result), sums[0])
    assert len(Kernel.launches) == (1 if count <= 64 else -(-count // 64) + (count % 64 != 1))


def test_what_is_multiplied_by_zero_is_never_handed_over():
    nan = gpu(np.full((3, 5), np.nan, "f4"))
    ones = gpu(np.ones((3, 5), "f4"))
    assert (np.asarray(add_partials([ones, ones], c=nan)) == 2).all()
    (*_, c, _) = Kernel.launches[-1][3]
    assert c.tobytes() == bytes(24)
    assert (np.asarray(add_partials([nan, nan], alpha=0, beta=3, c=ones)) == 3).all()
    assert (np.asarray(add_partials([nan, nan], alpha=0)) == 0).all()


def test_temporaries_are_refused_where_a_graph_is_captured(monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", lambda stream: True)
    plain = gpu(normal(1, 5, 8))
    with pytest.raises(KernelError, match=r"shape \(5, 8\) with strides \(4, 20\) is copied first"):
        add_partials([plain, laid_out(normal(2, 5, 8), "F")])
    with pytest.raises(KernelError, match=f"add at most {reduce.MAX_PARTS} in a call"):
        add_partials([plain] * (reduce.MAX_PARTS + 1))
    assert Kernel.launches == []
    add_partials([plain] * reduce.MAX_PARTS)


def test_large_results_take_several_launches(monkeypatch):
    monkeypatch.setattr(reduce, "MAX_GRID_X", 3)
    monkeypatch.setattr(reduce, "MAX_GRID_Z", 2)
    stacks = [gpu(normal(i, 5, 8, 9), extra=3)[:, :7] for i in range(2)]
    expected = library_gemm.add_partials([np.array(x) for x in stacks])
    assert same_bits(np.asarray(add_partials(stacks)), expected)
    assert len(Kernel.launches) == 3 * 3  # pairs of matrices, triples of rows


def test_a_kind_that_was_seen_is_not_decided_again(monkeypatch):
    def called(seed):
        values = [normal(seed + i, 5, 8) for i in range(3)]
        operands = [gpu(x) for x in values]
        result = add_partials(operands[:2], alpha=0.5, beta=2, c=operands[2])
        expected = library_gemm.add_partials(values[:2], alpha=0.5, beta=2, c=values[2])
        assert same_bits(np.asarray(result), expected)

    called(1)
    monkeypatch.setattr(reduce, "prepared_sum", lambda *_: pytest.fail("decided again"))
    called(10)
    assert len(Kernel.launches) == 2


def test_scalars_may_be_arrays_of_no_dimensions():
    parts = [gpu(normal(i, 3, 4)) for i in range(2)]
    for _ in range(2):
        result = add_partials(parts, alpha=np.array(2.0), beta=np.float32(0))
        assert same_bits(np.asarray(result), np.float32(2) * (parts[0] + parts[1]))


def test_bad_input_is_refused_before_anything_runs():
    a = gpu(normal(1, 4, 6))
    far = gpu(normal(3, 4, 6))
    far.device_id = 1
    for error, sentence, call in (
        (DTypeError, "part 1 has dtype float64", lambda: add_partials(
            [a, gpu(normal(1, 4, 6, dtype="f8"))])),
        (DTypeError, "part 0 has dtype int32", lambda: add_partials(
            [gpu(np.ones((2, 2), "i4"))])),
        (ArrayTypeError, "part 0 is a numpy.ndarray", lambda: add_partials([normal(1, 2, 2)])),
        (ArrayTypeError, "several devices", lambda: add_partials([a, far])),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    assert Kernel.launches == []
