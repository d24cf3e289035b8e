"""Sums of partial results without a GPU: configurations, checks, and what kernels are given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import LAYOUTS, GPUArray, Kernel, gpu, laid_out, standing_in

from multimm.errors import ArrayTypeError, DTypeError, KernelError, OptionError, ShapeError
from multimm.gpu import library_gemm
from multimm.gpu.elementwise import reduce
from multimm.gpu.elementwise.reduce import add_partials
from multimm.planning.tiling.grid import merges


@pytest.fixture(autouse=True)
def cupy():
    with standing_in():
        yield


def normal(seed: int, *shape: int, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and np.ascontiguousarray(x).tobytes() == y.tobytes()


@given(
    st.integers(1, 20), st.sampled_from([(), (5,), (3, 7), (4, 8), (2, 3, 5), (2, 0)]),
    st.sampled_from(["f4", "f8"]), st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    st.sampled_from([0, 1, -0.3]), st.sampled_from([0, 1, 0.7]),
    st.sampled_from([None, "C", "F", "wide rows"]),
)  # fmt: skip
def test_the_bits_are_those_of_the_reference(count, shape, dtype, layouts, alpha, beta, into):
    def arranged(seed, layout):
        values = normal(seed, *shape, dtype=dtype)
        return laid_out(values, layout) if len(shape) > 1 else values.view(GPUArray)

    parts = [arranged(i, layouts[i % 3]) for i in range(count)]
    c = arranged(99, layouts[1])
    out = None
    if into:
        empty = np.zeros(shape, dtype)
        out = laid_out(empty, into) if len(shape) > 1 else empty.view(GPUArray)
    result = add_partials(parts, alpha=alpha, beta=beta, c=c, out=out)
    expected = library_gemm.add_partials(
        [np.array(x) for x in parts], alpha=alpha, beta=beta, c=np.array(c)
    )
    assert result is out if into else result.flags.c_contiguous
    assert same_bits(np.asarray(result), expected)


@pytest.mark.parametrize("count", [1, 3, 70])
@pytest.mark.parametrize("beta", [0, 0.7])
def test_a_column_of_a_wider_array_is_written_and_nothing_beside_it(count, beta):
    whole = gpu(np.full((6, 4), 7, "f4"))
    parts, c = [gpu(normal(i, 6, 1)) for i in range(count)], gpu(normal(99, 6, 1))
    out = whole[:, 2:3]
    expected = library_gemm.add_partials(
        [np.array(x) for x in parts], alpha=2.0, beta=beta, c=np.array(c)
    )
    for _ in range(2):  # the second time, too
        whole[...] = 7
        assert add_partials(parts, alpha=2.0, beta=beta, c=c, out=out) is out
        assert same_bits(np.array(out), expected)
        assert (np.delete(np.array(whole), 2, 1) == 7).all()


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


def test_out_may_be_an_operand():
    values = [normal(i, 5, 8) for i in range(3)]
    for place in range(3):
        operands = [gpu(x, extra=4) for x in values]
        result = add_partials(operands[:2], beta=2, c=operands[2], out=operands[place])
        assert result is operands[place]
        expected = library_gemm.add_partials(values[:2], beta=2, c=values[2])
        assert same_bits(np.asarray(result), expected)


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


def test_a_kind_that_was_seen_is_not_decided_again(monkeypatch):
    def called(seed, *, place=None):
        values = [normal(seed + i, 5, 8) for i in range(3)]
        operands = [gpu(x) for x in values]
        out = gpu(np.zeros((5, 8), "f4")) if place is None else operands[place]
        result = add_partials(operands[:2], alpha=0.5, beta=2, c=operands[2], out=out)
        assert result is out
        expected = library_gemm.add_partials(values[:2], alpha=0.5, beta=2, c=values[2])
        assert same_bits(np.asarray(result), expected)

    called(1)
    stacked = normal(7, 2, 5, 8)
    first = add_partials(gpu(stacked))
    monkeypatch.setattr(reduce, "prepared_sum", lambda *_: pytest.fail("decided again"))
    called(10)
    called(20, place=0)
    called(30, place=2)
    assert same_bits(np.asarray(add_partials(gpu(stacked))), np.asarray(first))
    other = normal(8, 2, 5, 8)
    assert same_bits(np.asarray(add_partials(gpu(other))), library_gemm.add_partials(list(other)))
    assert len(Kernel.launches) == 7
    big = gpu(normal(1, 16, 8))
    with pytest.raises(ShapeError, match="out and part 1 may share"):
        add_partials(
            [gpu(normal(1, 5, 8)), big[:5]], alpha=0.5, beta=2, c=gpu(normal(2, 5, 8)), out=big[2:7]
        )


def test_one_stacked_part_is_no_stack_of_parts():
    values = gpu(normal(1, 2, 3, 4))
    assert add_partials(values).shape == (3, 4)
    assert add_partials([values]).shape == (2, 3, 4)
    assert add_partials(values).shape == (3, 4)


def test_bad_input_is_refused_before_anything_runs():
    a, big = gpu(normal(1, 4, 6)), gpu(normal(2, 16, 16))
    far = gpu(normal(3, 4, 6))
    far.device_id = 1
    for error, sentence, call in (
        (ShapeError, "no parts", lambda: add_partials([])),
        (ShapeError, r"part 1 has shape \(4, 5\)", lambda: add_partials([a, a[:, :5]])),
        (ShapeError, r"c has shape", lambda: add_partials([a], beta=1, c=a[:2])),
        (OptionError, "no c was given", lambda: add_partials([a], beta=1)),
        (ShapeError, r"out has shape", lambda: add_partials([a], out=a[:2])),
        (ShapeError, "out and part 1 may share", lambda: add_partials(
            [a, big[:4, :6]], out=big[2:6, :6])),
        (ShapeError, "out and c may share", lambda: add_partials(
            [a], beta=1, c=big[:4, :6], out=big[:4, 1:7])),
        (ShapeError, "out and part 0 may share", lambda: add_partials(
            [big[:4, :4]], out=big[:4, :4].T)),
        (ShapeError, "cannot be written", lambda: add_partials([a], out=big[:4, :12:2])),
        (ShapeError, "some elements", lambda: add_partials(
            [a], out=np.broadcast_to(big[0, :6], (4, 6)).view(GPUArray))),
        (DTypeError, "part 1 has dtype float64", lambda: add_partials(
            [a, gpu(normal(1, 4, 6, dtype="f8"))])),
        (DTypeError, "float32 and float64 can be added", lambda: add_partials(
            [gpu(np.ones((2, 2), "i4"))])),
        (ArrayTypeError, "part 0 is a numpy.ndarray", lambda: add_partials([normal(1, 2, 2)])),
        (ArrayTypeError, "several devices", lambda: add_partials([a, far])),
        (OptionError, "alpha is 1j", lambda: add_partials([a], alpha=1j)),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    assert Kernel.launches == []


def test_neighbouring_columns_do_not_overlap():
    big = gpu(normal(1, 8, 16))
    left = np.asarray(big[:, :8]).copy()
    add_partials([big[:, :8], big[:, :8]], out=big[:, 8:])
    assert (np.asarray(big[:, 8:]) == 2 * left).all()
