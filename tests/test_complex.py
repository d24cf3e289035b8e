"""Complex products as real ones without a GPU: which ones, of what, and that nothing is rounded."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import gaussian, op
from stand_in import LAYOUTS, Device, GPUArray, Kernel, gpu, laid_out, no_memory, standing_in

from multimm.gpu import complex_gemm, library_gemm, product
from multimm.gpu.complex_gemm import gemm, takes
from multimm.gpu.dtypes import accumulate_dtype, gemm_dtype, result_dtype
from multimm.gpu.kernel_selection import PRECISIONS
from multimm.gpu.runtime import launch, workspace
from multimm.graph.lowering import symmetric
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step

BOTH = (False, True)


def real_gemm(
    a, b, *, precision, trans_a, trans_b, alpha=1.0, beta=0.0, c=None, partial=None,
    out=None, lower=False,
):  # fmt: skip
    """In the place of our product of float32; what is not asked for is NaN."""
    assert precision in PRECISIONS
    assert not isinstance(alpha, complex)
    assert not isinstance(beta, complex)
    for x in (a, b, c, partial, out):
        assert x is None or (type(x) is GPUArray and x.dtype == np.float32)
    left, right = (x.swapaxes(-1, -2) if t else x for x, t in ((a, trans_a), (b, trans_b)))
    made = np.float32(alpha) * (left @ right + (0 if partial is None else partial))
    made = made if beta == 0 else made + np.float32(beta) * c
    if lower:
        assert made.shape[-1] == made.shape[-2]
        made[..., ~np.tri(made.shape[-1], dtype=bool)] = np.nan
    CALLS.append((left.shape, right.shape, lower, a is b))
    if out is None:
        return gpu(made)
    out[...] = made
    return out


CALLS: list = []


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    CALLS.clear()
    with standing_in():
        launch.device_of.cache_clear()
        module = sys.modules["cupy"]
        module.conj = lambda x: gpu(np.conj(x))
        module.broadcast_to = lambda x, shape: np.broadcast_to(x, shape, subok=True)
        monkeypatch.setattr(product, "gemm", real_gemm)
        monkeypatch.setattr(library_gemm, "module_of", lambda *_: np)
        yield module
    launch.device_of.cache_clear()


def stored(x, trans, layout="C"):
    return laid_out(np.ascontiguousarray(x.swapaxes(-1, -2)) if trans else x, layout)


# What is multiplied ----------------------------------------------------------------------


def test_pairs_that_begin_in_the_middle_of_one_are_copied():
    room = gpu(np.zeros((1, 31), "f4"))
    odd = room.reshape(-1)[1:].view("c8")[:15].reshape(3, 5)
    odd[...] = gaussian((3, 5))
    assert odd.data.ptr % 8 == 4
    b = gaussian((5, 4), 2)
    np.testing.assert_array_equal(gemm(odd, gpu(b)), odd @ b)
    np.testing.assert_array_equal(gemm(gpu(b), odd, trans_a=True, trans_b=True), b.T @ odd.T)
    np.testing.assert_array_equal(gemm(gpu(odd), gpu(b), partial=None, c=None), odd @ b)


def test_a_result_of_ones_own():
    a, b = gaussian((4, 6), 1), gaussian((6, 5), 2)
    whole = gpu(np.full((4, 9), 77, "c8"))
    for right in (b, b.real.copy()):
        out = whole[:, 2:7]
        assert gemm(gpu(a), gpu(right), out=out) is out
        np.testing.assert_array_equal(out, a @ right)
        assert (whole[:, :2] == 77).all()
        assert gemm(gpu(a), gpu(right), alpha=2j, out=out) is out
        np.testing.assert_array_equal(out, 2j * (a @ right))


def test_stacks_are_multiplied_one_by_one():
    a, b, c = gaussian((3, 1, 4, 6), 1), gaussian((2, 6, 5), 2), gaussian((3, 2, 4, 5), 3)
    found = gemm(gpu(a), gpu(b), alpha=2, beta=1, c=gpu(c))
    np.testing.assert_array_equal(found, 2 * (a @ b) + c)
    assert len(CALLS) == 6
    found = gemm(gpu(a), gpu(b), alpha=2j, beta=1, c=gpu(c[0, 0]))
    np.testing.assert_array_equal(found, 2j * (a @ b) + c[0, 0])


def test_wider_results_are_summed_in_float32_parts():
    a, b, c = gaussian((4, 6), 1), gaussian((6, 5), 2), gaussian((4, 5), 3, "c16") + 2.0**-40
    found = gemm(gpu(a), gpu(b), beta=1, c=gpu(c), dtype="complex128")
    np.testing.assert_array_equal(found, a @ b + c)
    assert found.dtype == np.complex128


# One array on both sides -----------------------------------------------------------------


@pytest.mark.parametrize(("trans", "conj_a", "conj_b"), [*itertools.product(BOTH, BOTH, BOTH)])
@pytest.mark.parametrize("rows", [1, 31, 70])
def test_one_triangle_makes_all_of_it(trans, conj_a, conj_b, rows):
    x = gaussian((rows, 9))
    a = stored(x, trans)
    flags = {"trans_a": trans, "trans_b": not trans, "conj_a": conj_a, "conj_b": conj_b}
    exact = op(x, False, conj_a) @ op(x, True, conj_b)
    found = np.asarray(gemm(a, a, lower=True, **flags))
    np.testing.assert_array_equal(found, exact)
    mirrored = found.conj().T if conj_a != conj_b else found.T
    np.testing.assert_array_equal(found, mirrored)
    p = gaussian((rows, rows), 2)
    p = p + (p.conj().T if conj_a != conj_b else p.T)
    upper_unknown = np.where(np.tri(rows, dtype=bool), p, np.complex64(complex("nan+nanj")))
    found = gemm(a, a, lower=True, alpha=-3, partial=gpu(upper_unknown), **flags)
    np.testing.assert_array_equal(found, -3 * (exact + p))


def test_a_diagonal_block_is_mirrored_once(monkeypatch):
    """By the kernel that adds its halves."""
    monkeypatch.setattr(complex_gemm, "takes", lambda *_, **__: True)
    monkeypatch.setattr(symmetric, "_mirrored", None)
    monkeypatch.setattr(symmetric, "stream_for", lambda block: nullcontext())
    x = gaussian((33, 20))
    step = Step("complex64", "complex64", trans_b=True, conj_b=True)
    found = symmetric.link_diagonal(gpu(x), step=step, complete=True)
    np.testing.assert_array_equal(found, x @ x.conj().T)


# Tasks -----------------------------------------------------------------------------------

SCALARS = st.sampled_from([1, 2, -1, 1.0, 0.5, 1j, 2 - 1j, 2 + 0j, 0, 0j])


@given(
    kinds=st.tuples(*[st.sampled_from(["f2", "f4", "i1", "c8", "c8"])] * 2),
    kind_c=st.sampled_from([None, "f4", "c8", "c16", "i2"]),
    scalars=st.tuples(SCALARS, SCALARS),
    flags=st.tuples(*[st.booleans()] * 5),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
)
def test_tasks_compute_what_numpy_does(kinds, kind_c, scalars, flags, layouts):
    """Whatever the dtypes of operands, scalars and C."""
    (trans_a, trans_b, conj_a, conj_b, partial), (alpha, beta) = flags, scalars
    a, b = gaussian((4, 6), 1, kinds[0]), gaussian((6, 5), 2, kinds[1])
    c = None if kind_c is None else gaussian((4, 5), 3, kind_c)
    held = accumulate_dtype(a.dtype, b.dtype)
    p = gaussian((4, 5), 4, held) if partial else None
    dtype = gemm_dtype(alpha, result_dtype(a.dtype, b.dtype), beta,
                       None if c is None else c.dtype)  # fmt: skip
    beta = 0 if c is None else beta
    conj_a, conj_b = conj_a and a.dtype.kind == "c", conj_b and b.dtype.kind == "c"
    step = Step(str(held), str(dtype), trans_a, trans_b, alpha, beta, conj_a=conj_a, conj_b=conj_b)
    exact = op(a, False, conj_a).astype("c16") @ op(b, False, conj_b)
    exact = exact + p if partial else exact
    exact = alpha * exact + (beta * c if beta != 0 else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            complex_gemm, "choose_kernel", lambda *_: SimpleNamespace(kernel="sgemm_split")
        )
        found = multiply.gemm(
            stored(a, trans_a, layouts[0]), stored(b, trans_b, layouts[1]),
            None if p is None else gpu(p), gpu(c) if beta != 0 else None, step=step,
        )  # fmt: skip
    if dtype.kind != "i":
        np.testing.assert_array_equal(found, exact)
    assert found.dtype == dtype


# Sums ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3])
def test_parts_are_added_by_the_kernel_of_real_numbers(layout, count):
    parts, c = [gaussian((7, 9), seed) for seed in range(count)], gaussian((7, 9), 9)
    placed, added = [laid_out(x, layout) for x in parts], laid_out(c, layout)
    step = Step("complex64", "complex64", alpha=2 + 0j, beta=-1)
    found = multiply.summed(placed, added, step)
    np.testing.assert_array_equal(found, 2 * sum(parts) - c)
    assert found.dtype == np.complex64
    assert [kernel.name for kernel, *_ in Kernel.launches] == ["add_partials"]
    found = multiply.summed(placed, None, Step("complex64", "complex64"))
    np.testing.assert_array_equal(found, sum(parts))


def test_what_is_not_real_is_left_to_the_library():
    parts, c = [gaussian((7, 9), seed) for seed in range(3)], gaussian((7, 9), 9)
    for alpha, beta, dtype in ((2j, 1, "complex64"), (1, 1j, "complex64"), (2, 1, "complex128")):
        found = multiply.summed(
            [*map(gpu, parts)], gpu(c), Step("complex64", dtype, alpha=alpha, beta=beta)
        )
        np.testing.assert_array_equal(found, alpha * sum(parts) + beta * c)
        assert found.dtype == dtype
    assert Kernel.launches == []


# Which products --------------------------------------------------------------------------


def of(shape, dtype):
    """An array of a shape, without its elements."""
    return np.broadcast_to(np.zeros((), dtype), shape).view(GPUArray)


@pytest.mark.parametrize(
    ("a", "b", "more", "expected"),
    [
        (((2048, 2048), "c8"), ((2048, 2048), "c8"), {}, True),
        (((2048, 2048), "c8"), ((2048, 2048), "c8"), {"precision": "tf32"}, True),
        (((2048, 2048), "c8"), ((2048, 2048), "c8"), {"precision": "ieee"}, False),
        (((2048, 2048), "c8"), ((2048, 2048), "c8"), {"alpha": 0}, False),
        (((64, 64), "c8"), ((64, 64), "c8"), {}, False),
        (((100, 64, 64), "c8"), ((64, 64), "c8"), {}, False),
        (((3, 2048, 2048), "c8"), ((2048, 2048), "c8"), {}, True),
        (((2048, 2048), "c8"), ((2048, 2048), "i1"), {}, True),
        (((2048, 2048), "f4"), ((2048, 2048), "c8"), {"precision": "ieee"}, True),
        (((64, 64), "f4"), ((64, 64), "c8"), {}, False),
        (((2048, 2048), "c16"), ((2048, 2048), "c8"), {"accumulate": "complex128"}, False),
        (((9, 9), "f4"), ((9, 9), "f2"), {"accumulate": "float32"}, True),
        (((9, 9), "f4"), ((9, 9), "i2"), {"accumulate": "float32"}, False),
        (((9, 9), "f4"), ((9, 9), "f4"), {"accumulate": "float32", "dtype": "float64"}, False),
        (((2048,), "c8"), ((2048, 2048), "c8"), {}, False),
    ],
)  # fmt: skip
def test_what_goes_to_the_tensor_cores(a, b, more, expected):
    options = {"accumulate": "complex64", "dtype": "complex64", "precision": "float32", **more}
    assert takes(of(*a), of(*b), **options) is expected


def test_older_gpus_leave_it_to_cublas(monkeypatch):
    monkeypatch.setattr(Device, "compute_capability", "75")
    launch.device_of.cache_clear()
    a = of((2048, 2048), "c8")
    assert not takes(a, a, accumulate="complex64", dtype="complex64", precision="float32")


def test_what_stays_with_the_library_is_conjugated():
    a, b = gaussian((4, 6), 1), gaussian((6, 5), 2)
    found = multiply.gemm(gpu(a), gpu(b), step=Step("complex64", "complex64", conj_a=True))
    np.testing.assert_array_equal(found, a.conj() @ b)
    assert not CALLS


def test_without_memory_for_the_squares_the_library_multiplies(monkeypatch, caplog):
    monkeypatch.setattr(workspace, "workspace", no_memory)
    a, b, c = gaussian((4, 6), 1), gaussian((6, 5), 2), gaussian((4, 5), 3)
    found = gemm(gpu(a), gpu(b), conj_a=True, alpha=2j, beta=1, c=gpu(c))
    np.testing.assert_array_equal(found, 2j * (a.conj() @ b) + c)
    assert "no memory is left" in caplog.text


# Odd values ------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, complex(0, np.inf), complex(1, np.nan)])
def test_infinities_and_nan_are_those_of_the_formula(odd):
    a, b = gaussian((3, 4), 1), gaussian((4, 5), 2)
    a[1, 2] = odd
    with np.errstate(all="ignore"):
        found = np.asarray(gemm(gpu(a), gpu(b)))
        # Which BLAS computes.
        right = a.real @ b.real - a.imag @ b.imag, a.real @ b.imag + a.imag @ b.real
    for part, exact in zip((found.real, found.imag), right, strict=True):
        np.testing.assert_array_equal(np.isfinite(part), np.isfinite(exact))
        np.testing.assert_array_equal(part[[0, 2]], exact[[0, 2]])
