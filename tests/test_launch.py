"""Launching without a GPU: checks, layouts, batches and scalar types of FP32 products.

Kernels in NumPy do what the CUDA kernels do with the very arguments they are given: addresses,
leading dimensions, batch strides (`stand_in`).
"""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import stand_in
from hypothesis import given
from hypothesis import strategies as st
from stand_in import LAYOUTS, GPUArray, captured, laid_out, no_memory, standing_in

from multimm.errors import ArrayTypeError, DTypeError, KernelError, ShapeError
from multimm.gpu import product
from multimm.gpu.emulated.configs import SPLIT_REGISTRY
from multimm.gpu.kernel_selection import FFMA, Choice, last_choice
from multimm.gpu.runtime import launch_cache
from multimm.gpu.simt import gemm as simt_gemm
from multimm.gpu.simt import split_k, thin

ieee = functools.partial(product.gemm, precision="ieee")


@pytest.fixture(autouse=True, scope="module")
def cupy():
    """The stand-in, for as long as this file's tests run."""
    with standing_in():
        yield sys.modules["cupy"]


@pytest.fixture(autouse=True)
def launches():
    stand_in.Kernel.launches.clear()
    return stand_in.Kernel.launches


def integers(seed: int, shape: tuple[int, ...], layout: str = "C") -> GPUArray:
    rng = np.random.default_rng(seed)
    return laid_out(rng.integers(-8, 9, shape).astype(np.float32), layout)


sizes = st.integers(0, 7)
#: Of few rows, few columns or a short k, large enough that kernels of their own pay.
THIN = [(1, 900, 80), (900, 3, 80), (8, 400, 200), (1000, 7, 300), (750, 752, 5)]
layouts = st.sampled_from(LAYOUTS)
stacks = st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((2, 1), (3,)), ((2, 3), (2, 3)),
                          ((1,), (4,)), ((2, 1, 2), (3, 1))])  # fmt: skip


@given(
    st.tuples(sizes, sizes, sizes) | st.sampled_from(THIN), stacks, st.booleans(), st.booleans(),
    st.tuples(layouts, layouts, layouts, layouts), st.sampled_from([None, *LAYOUTS[:4]]),
    st.sampled_from([0.0, 1.0, -0.5]), st.sampled_from([0.0, 1.0, 2.0]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_gemm_hands_the_right_memory_to_the_kernel(
    mnk, batch, trans_a, trans_b, orders, out_layout, alpha, beta, with_c, with_partial
):
    m, n, k = mnk
    a = integers(1, (*batch[0], *((k, m) if trans_a else (m, k))), orders[0])
    b = integers(2, (*batch[1], *((n, k) if trans_b else (k, n))), orders[1])
    stack = np.broadcast_shapes(*batch)
    c = integers(3, (*stack, m, n), orders[2]) if with_c else None
    partial = integers(4, (m, n), orders[3]) if with_partial else None
    out = None
    if out_layout is not None:
        out = laid_out(np.full((*stack, m, n), np.nan, np.float32), out_layout)
    stand_in.Kernel.launches.clear()
    result = ieee(a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta * with_c, c=c,
                         partial=partial, out=out)  # fmt: skip
    ran = {kernel.name for kernel, *_ in stand_in.Kernel.launches}
    if mnk in THIN:
        assert ran <= {"sgemm_dot", "sgemm_axpy", "sgemm_outer"}

    total = np.asarray(a.swapaxes(-1, -2) if trans_a else a) @ np.asarray(
        b.swapaxes(-1, -2) if trans_b else b
    )
    expected = alpha * (total + (0 if partial is None else np.asarray(partial)))
    expected = expected + (beta * np.asarray(c) if with_c else 0)
    np.testing.assert_array_equal(np.asarray(result), expected)
    assert result.dtype == np.float32
    assert out is None or result is out
    assert out is not None or result.flags.c_contiguous


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"), [(40, 30, 5000, "sgemm_ffma"), (20, 3, 200_000, "sgemm_dot")]
)
@pytest.mark.parametrize("batch", [(), (1,)])
def test_without_memory_for_slices_the_product_is_made_in_one_piece(
    launches, monkeypatch, caplog, batch, m, n, k, kernel
):
    monkeypatch.setattr(split_k, "workspace", no_memory)
    a, b = integers(1, (*batch, m, k), "wide rows"), integers(2, (k, n))
    c, partial = integers(3, (*batch, m, n), "wide rows"), integers(4, (m, n))
    expected = 2 * (np.asarray(a) @ np.asarray(b) + np.asarray(partial)) - 3 * np.asarray(c)
    for _ in range(2):  # the second time by what was kept
        out = ieee(a, b, alpha=2, beta=-3, c=c, partial=partial)
        np.testing.assert_array_equal(np.asarray(out), expected)
    assert [(k.name, grid[2], args[3]) for k, grid, _, args in launches] == [(kernel, 1, 0)] * 2
    assert caplog.text.count("runs in one piece, slower and with other bits") == 2


def test_slices_of_a_captured_product_live_in_memory_of_the_graph():
    """The pool may give its memory to others while the graph is still replayed."""
    a, b, out = integers(1, (40, 5000)), integers(2, (5000, 30)), integers(3, (40, 30))
    stand_in.Kernel.forget()
    with captured():
        ieee(a, b, out=out)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(a) @ np.asarray(b))
    assert stand_in.Kernel.ran == ["take 1", "sgemm_ffma", "add_partials", "free 1"]


def test_copies_are_refused_where_a_graph_is_captured(launches):
    a, b, out = integers(1, (5, 7)), integers(2, (7, 3)), integers(3, (5, 3))
    with captured():
        with pytest.raises(
            KernelError, match=r"\(5, 7\) with strides \(28, -4\) is copied first, into"
        ):
            ieee(integers(1, (5, 7), "reversed"), b, out=out)
        with pytest.raises(KernelError, match="pass an array with contiguous rows"):
            ieee(a, b, beta=1, c=integers(3, (5, 3), "F"), out=out)
        assert launches == []
        ieee(integers(1, (5, 7), "F"), b, out=out)


def test_operands_are_checked_before_anything_runs(launches):
    a, b = integers(1, (2, 3)), integers(2, (3, 5))
    elsewhere = integers(2, (3, 5))
    elsewhere.device_id = 1
    big, square = integers(3, (8, 16)), integers(4, (4, 4))
    for error, sentence, call in (
        (ShapeError, "the 3 columns of a must equal the 2 rows of b", lambda: ieee(a, a)),
        (ShapeError, "a matrix or a stack", lambda: ieee(a[0], b)),
        (ShapeError, "must broadcast", lambda: ieee(
            integers(1, (2, 2, 2)), integers(1, (3, 2, 2)))),
        (ShapeError, r"c has shape \(1, 5\)", lambda: ieee(a, b, c=b[:1], beta=1)),
        (ShapeError, "out has shape", lambda: ieee(a, b, out=b)),
        (ShapeError, "out and a may share", lambda: ieee(
            big[:2, :3], b, out=big[:2, 2:7])),
        (ShapeError, "out and a may share", lambda: ieee(square, square, out=square)),
        (ShapeError, "cannot be written to", lambda: ieee(a, b, out=big[:2, :10:2])),
        (ShapeError, "some elements", lambda: ieee(
            a, b, out=np.broadcast_to(big[:1, :5], (2, 5)).view(GPUArray))),
        (DTypeError, "b has dtype float64", lambda: ieee(
            a, b.astype(np.float64).view(GPUArray))),
        (ArrayTypeError, "b is a numpy.ndarray", lambda: ieee(a, np.asarray(b))),
        (ArrayTypeError, "several devices", lambda: ieee(a, elsewhere)),
        (KernelError, "'best' is unknown", lambda: ieee(a, b, config="best")),
        (ShapeError, "the product is 2 x 5: only a square one", lambda: ieee(a, b, lower=True)),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    assert launches == []


def test_neighbouring_columns_of_one_matrix_do_not_overlap():
    big = integers(3, (8, 16))
    a, b = np.asarray(big[:, :8]).copy(), np.asarray(integers(2, (8, 8)))
    ieee(big[:, :8], integers(2, (8, 8)), out=big[:, 8:])
    np.testing.assert_array_equal(np.asarray(big[:, 8:]), a @ b)
    np.testing.assert_array_equal(np.asarray(big[:, :8]), a)


@pytest.mark.parametrize(("m", "n", "k"), [(20, 40, 30), (1, 80, 900), (750, 752, 5)])
def test_a_product_of_the_same_kind_decides_nothing_again(launches, monkeypatch, m, n, k):
    a, b = integers(1, (m, k)), integers(2, (k, n))
    ieee(a, b)
    monkeypatch.setattr(simt_gemm, "choose", None)
    monkeypatch.setattr(thin, "way_for", None)
    for seed in (3, 4):
        a[...], b[...] = integers(seed, a.shape), integers(seed + 10, b.shape)
        result = ieee(a, b)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(a) @ np.asarray(b))
    assert len(launches) == 3


def test_a_lower_product_decides_nothing_for_a_whole_one(launches):
    a, b, out = integers(1, (700, 50)), integers(2, (50, 700)), integers(3, (700, 700))
    for lower in (True, True, False):
        ieee(a, b, out=out, lower=lower)
    assert ["LOWER" in kernel.defines for kernel, *_ in launches] == [True, True, False]


def test_each_precision_is_kept_with_its_own_reason(launches):
    a, b = integers(1, (20, 30)), integers(2, (30, 40))
    launch_cache.forget()
    reasons = {"float32": "k = 30 is shorter than 256", "ieee": "FP32 multiply-adds were asked for"}
    for promise in reasons:
        assert launch_cache.product(a, b, promise) is None
        product.gemm(a, b, precision=promise)
    for promise, reason in reasons.items():
        np.testing.assert_array_equal(
            launch_cache.product(a, b, promise), np.asarray(a) @ np.asarray(b)
        )
        assert last_choice() == Choice(FFMA, promise, reason)
    assert len(launches) == 4


def test_a_configuration_is_named_for_one_call_alone(launches):
    a, b = integers(1, (20, 30)), integers(2, (30, 40))
    launch_cache.forget()
    for _ in range(2):
        product.gemm(a, b, config="wide")
        assert last_choice().kernel == FFMA
    assert launch_cache.product(a, b, "float32") is None
    product.gemm(a, b)
    assert [kernel.defines["BLOCK_N"] for kernel, *_ in launches[:2]] == [128, 128]
    assert launches[2][0].defines["BLOCK_N"] != 128
    with pytest.raises(KernelError, match="is none of sgemm_ffma: pass a TileConfig"):
        product.gemm(a, b, config=SPLIT_REGISTRY[0].config)
