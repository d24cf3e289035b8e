"""Shapes that do not fit are refused in the same words, whoever is asked."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np
import pytest

import multimm
from multimm.errors import ShapeError
from multimm.gpu.validate import product_shape
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec
from multimm.shapes import check_operands

Call = Callable[..., object]


def said(call: Call, *args: object, **options: object) -> str:
    with pytest.raises(ShapeError) as caught:
        call(*args, **options)
    return str(caught.value)


def specs(call: Call) -> Call:
    """`call` of matrices without values."""
    return lambda a, b, **options: call(MatrixSpec(a.shape), MatrixSpec(b.shape), **options)


def shapes(call: Call) -> Call:
    return lambda a, b, **options: call(a.shape, b.shape, **options)


def lazily(call: Call) -> Call:
    return lambda a, b, **options: call(da.from_array(a), da.from_array(b), **options)


def verify(a: np.ndarray, b: np.ndarray, **options: bool) -> object:
    return multimm.verify(a, b, np.ones((4, 4)), **options)


def gemm(a: np.ndarray, b: np.ndarray, **options: bool) -> object:
    return multimm.gemm(1, a, b, **options)


STACKS = [multimm.matmul, lazily(multimm.matmul), verify, specs(multimm.plan), specs(Problem)]
TRANSPOSING = [gemm, lazily(gemm), verify, specs(multimm.plan)]


@pytest.mark.parametrize("call", [*STACKS, gemm, shapes(product_shape)])
def test_lengths_of_k_that_differ(call):
    assert said(call, np.ones((3, 4)), np.ones((5, 6))) == (
        "a has shape (3, 4) and b has shape (5, 6): the 4 columns of a must equal the 5 rows of b; "
        "transpose one of them or swap them, if that is what is meant"
    )


@pytest.mark.parametrize("call", [*TRANSPOSING, shapes(product_shape)])
def test_what_is_transposed_is_said(call):
    a, b = np.ones((3, 4)), np.ones((5, 6))
    assert said(call, a, b, trans_a=True).startswith(
        "a has shape (3, 4) and is transposed, and b has shape (5, 6): the 3 columns of op(a) must "
        "equal the 5 rows of b; "
    )
    assert said(call, a, b, trans_b=True).startswith(
        "a has shape (3, 4) and b has shape (5, 6) and is transposed: the 4 columns of a must "
        "equal the 6 rows of op(b); "
    )


@pytest.mark.parametrize("call", [*STACKS, shapes(product_shape)])
def test_stacks_that_do_not_broadcast(call):
    assert said(call, np.ones((2, 3, 4)), np.ones((3, 4, 5))) == (
        "a has shape (2, 3, 4) and b has shape (3, 4, 5): the dimensions before the last two must "
        "broadcast, each pair from the right equal or with a 1; reshape one so that they do"
    )


@pytest.mark.parametrize("call", [multimm.matmul, lazily(multimm.matmul), verify])
def test_vectors_are_said_as_they_were_given(call):
    for a, b in (((4, 1), (5, 4)), ((3, 4), (5,)), ((3,), (4,)), ((2, 3, 4), (2, 5, 4)),
                 ((0, 3), (0, 3))):  # fmt: skip
        assert said(call, np.ones(a), np.ones(b)).startswith(f"a has shape {a} and b has shape {b}")
    assert "a has shape (3,) and b has shape (4, 5): the 3 columns of a must equal the 4 rows" in (
        said(call, np.ones(3), np.ones((4, 5)))
    )
    assert "of a must equal the 2 rows of b" in said(call, np.ones((2, 3)), np.ones(2))


@pytest.mark.parametrize(
    ("a", "b", "flags"),
    [
        ((3, 4), (4, 5), (False, False)),
        ((4, 3), (4, 5), (True, False)),
        ((3, 4), (5, 4), (False, True)),
        ((4,), (4,), (False, False)),
        ((7, 1, 3, 4), (2, 4, 5), (False, False)),
        ((0, 3, 0), (1, 0, 5), (False, False)),
    ],
)
def test_what_fits_is_let_through(a, b, flags):
    check_operands(a, b, *flags)
