"""Pieces of an operand multiplied where they lie, along k too, as the tasks of one worker do."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import assert_exact, padded, pieces_of

from multimm.graph.lowering.sub_blocks import multiply_bands
from multimm.graph.tasks.multiply import Step

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

#: Of rows, and of k: blocks large enough for tensor cores, some that are not, and odd ones.
ROWS, ALONG_K, COLUMNS = (1200, 513, 7), (1024, 300, 33), 130
#: A block of C that begins and ends within a piece of 1200 and of 513 rows.
PART = slice(100, 1500)


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Whole numbers whose products and sums all precisions hold exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape)


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("precision", ["float32", "ieee", "tf32"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("added", [False, True])
def test_each_piece_is_multiplied_once(turned, wide, precision, dtype, added):
    sums = "float64" if dtype == "float64" else "float32"
    step = Step(sums, sums, "a" in turned, "b" in turned, precision=precision)
    k, m = sum(ALONG_K), PART.stop - PART.start
    x, w = values((sum(ROWS), k), 1), values((k, COLUMNS), 2)
    p, d = values((m, COLUMNS), 3), values((m, COLUMNS), 4)
    expected = x[PART].astype("f8") @ w + added * p
    if added:
        step = replace(step, alpha=2, beta=3)
        expected = 2 * expected + 3 * d
    chunks, where = (ROWS, ALONG_K), (PART, slice(0, k))
    if wide:
        x, w, p, d, expected = x.T, w.T, p.T, d.T, expected.T
        chunks, where = chunks[::-1], where[::-1]
    large, small = ("b", "a") if wide else ("a", "b")
    if large in turned:
        x, chunks, where = x.T, chunks[::-1], where[::-1]
    w = w.T if small in turned else w
    x, w = x.astype(dtype), w.astype(dtype)
    whole = pieces_of(x, chunks, where, lambda block: padded(block, 3, 1)[0])
    other = cupy.asarray(np.ascontiguousarray(w))
    more = {}
    if added:
        more = {"partial": cupy.asarray(p, sums), "c": cupy.asarray(d, sums)}
    operands = (other, whole) if wide else (whole, other)
    result = multiply_bands(*operands, banded=large, step=step, **more)
    assert_exact(result, expected.astype(sums), (turned, wide, precision, dtype, added))
