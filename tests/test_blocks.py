"""Blocks of NumPy's subclasses: plain arrays or a refusal, the same at the call and in tasks."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from small import integers

import multimm
from multimm.errors import ArrayTypeError
from multimm.io import save_array

A = integers((24, 24), 1, "float64")


pytestmark = [
    pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning"),
    pytest.mark.usefixtures("in_this_thread"),
]


class Metres(np.ndarray):
    """Lengths, say: what products of them mean is not ours to know."""


class Mapped(np.memmap):
    """A subclass of one that is known, which may mean anything."""


def matrix(x):
    return np.matrix(x)


def records(x):
    return x.view(np.recarray)


def mapped(x, kind=np.memmap):
    return x.view(kind)


ALIKE = {"matrix": matrix, "recarray": records, "memmap": mapped}
OTHER = {
    "masked": lambda x: np.ma.masked_less(x, 0),
    "masked nowhere": np.ma.array,
    "units": lambda x: x.view(Metres),
    "subclass of memmap": lambda x: mapped(x, Mapped),
}


def unannounced(make, chunks=-1):
    """A Dask array that says nothing of what its blocks are."""
    x = da.from_array(A, chunks=chunks)
    return x.map_blocks(make, dtype=A.dtype, meta=np.empty((0, 0)))


def saved(x, folder):
    save_array(x, folder / "x.npy", overwrite=True)
    return da.from_array(np.load(folder / "x.npy"))


FIXED = {"blocks": 8, "slabs": 8}
#: By name: what is computed of an array, and the right result.
WAYS = {
    "a": (lambda x, _: multimm.matmul(x, da.from_array(A, chunks=12)), A @ A),
    "b": (lambda x, _: multimm.matmul(A, x, **FIXED), A @ A),
    "both": (lambda x, _: multimm.matmul(x.T, x, **FIXED), A.T @ A),
    "parts of k": (lambda x, _: multimm.matmul(x, x, p_k=2, **FIXED), A @ A),
    "c": (lambda x, _: multimm.gemm(1, A, da.from_array(A), 2, x, **FIXED), A @ A + 2 * A),
    "vector": (lambda x, _: multimm.matmul(x, A[0]), A @ A[0]),
    "row": (lambda x, _: multimm.matmul(da.from_array(A[0]), x), A[0] @ A),
    "stack": (lambda x, _: multimm.matmul(np.stack([A, A]), x), np.stack([A @ A] * 2)),
    "transpose": (lambda x, _: multimm.transpose(x), A.T),
    "file": (saved, A),
}


def is_right(c, right):
    """Also what is computed of it: of matrices `*` is another product."""
    for result, expected in ((c, right), (c * c, right * right)):
        found = result.compute() if isinstance(result, da.Array) else result
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunks", [-1, 12, (8, 24)])
def test_blocks_with_an_ndarrays_arithmetic_are_multiplied_as_ndarrays(tmp_path, kind, way, chunks):
    compute, right = WAYS[way]
    is_right(compute(unannounced(ALIKE[kind], chunks), tmp_path), right)


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("way", WAYS)
def test_so_are_operands_and_blocks_that_are_announced(tmp_path, kind, way):
    compute, right = WAYS[way]
    make = ALIKE[kind]
    announced = da.from_array(A, chunks=12).map_blocks(
        make, dtype="f8", meta=make(np.empty((0, 0)))
    )
    is_right(compute(announced, tmp_path), right)
    is_right(compute(make(A), tmp_path), right)


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunks", [-1, 12])
def test_blocks_that_may_mean_something_else_are_refused(tmp_path, kind, way, chunks):
    with pytest.raises(ArrayTypeError, match="dense arrays of NumPy and CuPy") as info:
        WAYS[way][0](unannounced(OTHER[kind], chunks), tmp_path).compute()
    assert type(OTHER[kind](A)).__name__ in str(info.value)
    assert "\n" not in str(info.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("way", WAYS)
def test_so_are_operands_at_the_call(tmp_path, kind, way):
    with pytest.raises(ArrayTypeError, match="dense arrays of NumPy and CuPy"):
        WAYS[way][0](OTHER[kind](A), tmp_path)


@pytest.mark.parametrize("kind", [*ALIKE, *OTHER])
@pytest.mark.parametrize("role", ["a", "b", "c", "c0"])
@pytest.mark.parametrize("spoilt", [None, np.nan])
def test_verify_looks_at_the_same_blocks(kind, role, spoilt):
    right = {"a": A, "b": A, "c": A @ A + A, "c0": A}
    given = right | {role: unannounced((ALIKE | OTHER)[kind], 12)}
    if role == "c":
        made = da.from_array(right["c"], chunks=12)
        given["c"] = made.map_blocks((ALIKE | OTHER)[kind], dtype="f8", meta=np.empty((0, 0)))
    if spoilt is not None and role != "b":
        given["b"] = A.copy()
        given["b"][1, 1] = spoilt
        given["c"] = A @ given["b"] + A if role != "c" else given["c"]

    def check():
        return multimm.verify(given["a"], given["b"], given["c"], beta=1, c0=given["c0"])

    if kind in ALIKE:
        assert bool(check()) == (spoilt is None or role != "c")
    else:
        with pytest.raises(ArrayTypeError, match="dense arrays of NumPy and CuPy"):
            check()
