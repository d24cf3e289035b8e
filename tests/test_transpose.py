"""Transposes without a GPU: configurations, checks, and the memory that kernels are given."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import LAYOUTS, GPUArray, Kernel, gpu, laid_out, standing_in

from multimm.errors import ArrayTypeError, DTypeError, KernelError, ShapeError
from multimm.gpu.elementwise import transpose as launcher
from multimm.gpu.elementwise.transpose import TransposeConfig, config_for, transpose
from multimm.gpu.runtime.kernel_source import kernel_text

SIZES = (1, 2, 4, 8, 16)
ALIGNMENTS = (1, 2, 4, 8, 16)
CONFIGS = {
    config_for(size, alignment, rows, rows)
    for size, alignment, rows in itertools.product(
        (*SIZES, 3, 12, 24, 40), ALIGNMENTS, (20, 200, 5000)
    )
}


@pytest.fixture(autouse=True)
def cupy():
    with standing_in():
        yield


def bytes_of(dtype: str, *shape: int) -> np.ndarray:
    """Elements of random bytes."""
    size = np.dtype(dtype).itemsize
    raw = np.random.default_rng(5).integers(0, 100, (*shape, size)).astype("u1")
    return raw.view(dtype)[..., 0] if raw.size else np.zeros(shape, dtype)


@given(
    st.sampled_from(["i1", "f2", "f4", "c8", "f8", "c16", "V12", "V3"]),
    st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 80), st.integers(0, 80),
    st.sampled_from(LAYOUTS), st.booleans(),
)  # fmt: skip
def test_every_element_arrives(dtype, batch, rows, cols, layout, into):
    values = bytes_of(dtype, *batch, rows, cols)
    x = laid_out(values, layout)
    out = gpu(np.zeros((*batch, cols, rows), dtype), extra=2) if into else None
    result = transpose(x, out=out)
    assert result.tobytes() == values.swapaxes(-1, -2).tobytes()
    assert result is out if into else result.flags.c_contiguous
    assert x.tobytes() == values.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (3, 64, 1), (1, 1)])
def test_rows_and_columns_are_copied(shape, layout):
    """2^31 tiles of one column of bytes are more blocks than a grid has."""
    values = bytes_of("f4", *shape)
    out = gpu(np.zeros((*shape[:-2], shape[-1], shape[-2]), "f4"), extra=7)
    for result in (
        transpose(laid_out(values, layout)),
        transpose(laid_out(values, layout), out=out),
    ):
        assert result.tobytes() == values.swapaxes(-1, -2).tobytes()
    assert Kernel.launches == []


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 5)])
def test_nothing_is_answered_without_a_launch(shape):
    turned = (*shape[:-2], shape[-1], shape[-2])
    assert transpose(gpu(np.zeros(shape, "f4"))).shape == turned
    for empty in (np.zeros(turned, "f4"), np.zeros(shape, "f4").swapaxes(-1, -2)):
        out = empty.view(GPUArray)
        assert transpose(gpu(np.zeros(shape, "f4")), out=out) is out
    assert Kernel.launches == []


def test_a_kind_that_was_seen_is_not_decided_again(monkeypatch):
    transpose(gpu(bytes_of("f4", 8, 8)), out=gpu(np.zeros((8, 8), "f4")))
    transpose(gpu(bytes_of("f4", 8, 8)))
    monkeypatch.setattr(launcher, "_decided", lambda *_: pytest.fail("decided again"))
    values = np.arange(64, dtype="f4").reshape(8, 8)
    out = gpu(np.zeros((8, 8), "f4"))
    assert transpose(gpu(values), out=out) is out
    assert (np.asarray(out) == values.T).all()
    assert (np.asarray(transpose(gpu(values))) == values.T).all()
    big = gpu(bytes_of("f4", 16, 8))
    for first in (0, 4, 7):
        with pytest.raises(ShapeError, match="may share"):
            transpose(big[:8], out=big[first : first + 8])
    assert transpose(big[:8], out=big[8:]).tobytes() == np.asarray(big[:8]).T.tobytes()


def test_bad_input_is_refused_before_anything_runs():
    a, big = gpu(bytes_of("f4", 2, 3)), gpu(bytes_of("f4", 8, 16))
    far = gpu(np.zeros((3, 2), "f4"))
    far.device_id = 1
    for error, sentence, call in (
        (ShapeError, "a matrix or a stack", lambda: transpose(a[0])),
        (ShapeError, r"out has shape \(2, 3\)", lambda: transpose(a, out=a)),
        (ShapeError, "contiguous columns", lambda: transpose(
            a, out=laid_out(np.zeros((3, 2), "f4"), "F"))),
        (ShapeError, "may share", lambda: transpose(big[:3, :3], out=big[2:5, 2:5])),
        (ShapeError, "cannot be written", lambda: transpose(a, out=big[:3, :4:2])),
        (ShapeError, "some elements", lambda: transpose(
            a, out=np.broadcast_to(big[:1, :2], (3, 2)).view(GPUArray))),
        (DTypeError, "out has dtype", lambda: transpose(a, out=gpu(np.zeros((3, 2))))),
        (ArrayTypeError, "a is a numpy.ndarray", lambda: transpose(np.asarray(a))),
        (ArrayTypeError, "several devices", lambda: transpose(a, out=far)),
        (KernelError, "at most 40 bytes", lambda: transpose(gpu(bytes_of("V48", 4, 4)))),
        (KernelError, "does not fit elements of 4", lambda: transpose(
            a, config=TransposeConfig(8))),
        (KernelError, "begin at multiples of 4 bytes", lambda: transpose(
            a, config=TransposeConfig(4, vector=4, slots=16))),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    assert Kernel.launches == []


def test_neighbouring_columns_do_not_overlap():
    big = gpu(bytes_of("f4", 8, 16))
    left = np.asarray(big[:, :8]).copy()
    transpose(big[:, :8], out=big[:, 8:])
    np.testing.assert_array_equal(np.asarray(big[:, 8:]), left.T)
    np.testing.assert_array_equal(np.asarray(big[:, :8]), left)


@pytest.mark.parametrize("config", sorted(CONFIGS, key=str), ids=str)
def test_shared_memory_is_met_without_conflicts(config):
    """place() of kernels/common/slots.cuh, for the lanes that the hardware serves at a time."""
    text = kernel_text(f"{config.entry}.cu", config.defines())
    body = text.partition("int place(int row, int col) { return ")[2].partition(";")[0]
    scope = {**config.defines(), "PAD": max(1, 4 // config.slot_bytes)}
    place = eval(f"lambda row, col: {body.replace('/', '//')}", scope)
    together = min(32, 128 // config.slot_bytes)

    def turns(slots):
        """How many times a bank is asked for different words."""
        words = {at * config.slot_bytes // 4 + i for at in slots
                 for i in range(max(1, config.slot_bytes // 4))}  # fmt: skip
        return max(Counter(word % 32 for word in words).values())

    for first in range(0, config.threads, together):
        lanes = range(first, first + together)
        at = [(lane % config.slots, lane // config.slots) for lane in lanes]
        written = [place(slot * config.vector, row) for slot, row in at]
        read = [place(row, slot) for slot, row in at]
        assert len({*written}) == len({*read}) == together
        assert turns(written) == turns(read) == 1
