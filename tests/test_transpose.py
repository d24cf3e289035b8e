"""Transposes without a GPU: configurations, checks, and the memory that kernels are given."""

from __future__ import annotations

import itertools
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import LAYOUTS, GPUArray, Kernel, gpu, laid_out

from multimm.errors import ArrayTypeError
from multimm.gpu.elementwise import transpose as launcher
from multimm.gpu.elementwise.transpose import config_for, transpose
from multimm.gpu.runtime import launch
from multimm.gpu.runtime.kernel_source import kernel_text

SIZES = (1, 2, 4, 8, 16)
ALIGNMENTS = (1, 2, 4, 8, 16)
CONFIGS = {
    config_for(size, alignment, rows, rows)
    for size, alignment, rows in itertools.product(
        (*SIZES, 3, 12, 24, 40), ALIGNMENTS, (20, 200, 5000)
    )
}


pytestmark = pytest.mark.usefixtures("gpu_in_numpy")


def bytes_of(dtype: str, *shape: int) -> np.ndarray:
    """Elements of random bytes."""
    size = np.dtype(dtype).itemsize
    raw = np.random.default_rng(5).integers(0, 100, (*shape, size)).astype("u1")
    return raw.view(dtype)[..., 0] if raw.size else np.zeros(shape, dtype)


@given(
    st.sampled_from(["i1", "f2", "f4", "c8", "f8", "c16", "V12", "V3"]),
    st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 80), st.integers(0, 80),
    st.sampled_from(LAYOUTS),
)  # fmt: skip
def test_every_element_arrives(dtype, batch, rows, cols, layout):
    values = bytes_of(dtype, *batch, rows, cols)
    x = laid_out(values, layout)
    result = transpose(x)
    assert result.tobytes() == values.swapaxes(-1, -2).tobytes()
    assert result.flags.c_contiguous
    assert x.tobytes() == values.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (3, 64, 1), (1, 1)])
def test_rows_and_columns_are_copied(shape, layout):
    """2^31 tiles of one column of bytes are more blocks than a grid has."""
    values = bytes_of("f4", *shape)
    result = transpose(laid_out(values, layout))
    assert result.tobytes() == values.swapaxes(-1, -2).tobytes()
    assert Kernel.launches == []


def test_stacks_are_cut_at_the_grid_limit(monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_Z", 4)
    values = bytes_of("f8", 11, 2, 3)
    assert transpose(gpu(values)).tobytes() == values.swapaxes(-1, -2).tobytes()
    assert [grid[2] for _, grid, _, _ in Kernel.launches] == [4, 4, 3]


def test_a_repeated_matrix_and_strides_that_no_kernel_walks(caplog):
    caplog.set_level(logging.DEBUG, logger="multimm")
    values = bytes_of("f4", 8, 16)
    stack = np.broadcast_to(gpu(values), (5, 8, 16)).view(GPUArray)
    assert (np.asarray(transpose(stack)) == values.T).all()
    assert len(Kernel.launches) == 1
    transpose(gpu(values)[::-1, ::2])
    assert len(Kernel.launches) == 1
    assert "transpose copies: strides (-64, 8)" in caplog.text


def test_a_kind_that_was_seen_is_not_decided_again(monkeypatch):
    transpose(gpu(bytes_of("f4", 8, 8)))
    monkeypatch.setattr(launcher, "_decided", lambda *_: pytest.fail("decided again"))
    values = np.arange(64, dtype="f4").reshape(8, 8)
    assert (np.asarray(transpose(gpu(values))) == values.T).all()


def test_arrays_elsewhere_are_refused_before_anything_runs():
    with pytest.raises(ArrayTypeError, match=r"a is a numpy\.ndarray"):
        transpose(bytes_of("f4", 2, 3))
    assert Kernel.launches == []


@pytest.mark.parametrize("config", sorted(CONFIGS, key=str), ids=str)
def test_shared_memory_is_met_without_conflicts(config):
    """place() of kernels/common/slots.cuh, for the lanes that the hardware serves at a time."""
    text = kernel_text(f"{config.entry}.cu", config.defines())
    body = text.partition("int place(int row, int col) { return ")[2].partition(";")[0]
    slot_bytes = config.vector * config.word_bytes
    scope = {**config.defines(), "PAD": max(1, 4 // slot_bytes)}
    place = eval(f"lambda row, col: {body.replace('/', '//')}", scope)
    together = min(32, 128 // slot_bytes)

    def turns(slots):
        """How many times a bank is asked for different words."""
        words = {at * slot_bytes // 4 + i for at in slots
                 for i in range(max(1, slot_bytes // 4))}  # fmt: skip
        return max(Counter(word % 32 for word in words).values())

    for first in range(0, config.threads, together):
        lanes = range(first, first + together)
        at = [(lane % config.slots, lane // config.slots) for lane in lanes]
        written = [place(slot * config.vector, row) for slot, row in at]
        read = [place(row, slot) for slot, row in at]
        assert len({*written}) == len({*read}) == together
        assert turns(written) == turns(read) == 1
