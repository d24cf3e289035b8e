"""The chunks of a contraction: the operands', cut where large; for `accelerate`, Dask's."""

from itertools import accumulate
from math import prod

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import multimm
from multimm.contractions.einsum_chunks import TIMES, einsum_chunks, limited_chunks, own_chunks

SUBSCRIPTS = (
    "ij,jk->ik",
    "bij,bjk->kbi",
    "ij,kl,jl->ik",
    "iij,jk->ik",
    "ij,ij->",
    "ij,j->i",
    "ij->j",
)


@st.composite
def contractions(draw):
    """Subscripts, and chunks of each operand: along an axis those of two operands may differ."""
    subscripts = draw(st.sampled_from(SUBSCRIPTS))
    terms, _, out = subscripts.partition("->")
    terms = terms.split(",")
    size = {x: draw(st.sampled_from((0, 1, 7, 12, 40))) for x in sorted({*"".join(terms)})}
    own = {x: tuple(draw(cut(n))) for x, n in size.items()}
    chunks = []
    for term in terms:
        alone = len({*term}) == len(term)
        each = {x: tuple(draw(cut(size[x]))) if x in out and alone else own[x] for x in term}
        chunks.append(tuple(each[x] for x in term))
    return subscripts, chunks


@st.composite
def cut(draw, size):
    """Sizes that add up to one."""
    found = [] if size else [0]
    while sum(found) < size:
        found.append(draw(st.integers(1, size - sum(found))))
    return found


@pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # Dask's own, of many
@given(contractions(), st.sampled_from((0.5, 1.25, 4)))
def test_chunks_are_those_of_dask(case, tolerance):
    subscripts, chunks = case
    terms, _, out = subscripts.partition("->")
    arrays = [da.empty(tuple(map(sum, own)), chunks=own, dtype="float32") for own in chunks]
    with dask.config.set({"array.chunk-size-tolerance": tolerance}):
        theirs = da.einsum(subscripts, *arrays).chunks
        ours = einsum_chunks(terms.split(","), chunks, out)
    assert tuple(ours[x] for x in out) == theirs


def test_an_axis_without_elements_counts_as_one_element():
    chunks = [((2,), (0,)), ((0,), (8,)), ((2, 1, 1),)]
    arrays = [da.empty(tuple(map(sum, own)), chunks=own) for own in chunks]
    theirs = da.einsum("il,lk,j->jikl", *arrays).chunks
    ours = einsum_chunks(["il", "lk", "j"], chunks, "jikl")
    assert tuple(ours[x] for x in "jikl") == theirs
    assert len(ours["j"]) == 4


def test_a_broadcast_axis_has_the_chunks_of_the_other_operand():
    found = einsum_chunks(["ij", "ij"], [((1,), (3, 3)), ((2, 2), (6,))], "ij")
    assert found == {"i": (2, 2), "j": (3, 3)}


def test_dask_is_not_asked_for_small_blocks(monkeypatch):
    """To ask it takes as long as all else of a call whose plan is known."""
    monkeypatch.setattr(da, "einsum", None)
    assert einsum_chunks(["ij", "jk"], [((4, 4), (9,)), ((9,), (2, 2))], "ik") == {
        "i": (4, 4), "k": (2, 2)
    }  # fmt: skip
    with pytest.raises(TypeError):  # an outer product's blocks are larger
        einsum_chunks(["ij", "jk"], [((90,), (1,)), ((1,), (90,))], "ik")


@given(contractions(), st.sampled_from((1, 3, 20, 10**6)))
@example(("bij,bjk->kbi", [((7,), (16,), (1,)), ((7,), (1,), (1,))]), 3)
def test_blocks_are_the_operands_cut_down_to_a_limit(case, most):
    subscripts, chunks = case
    terms, _, out = subscripts.partition("->")
    given = terms.split(","), chunks, out, np.dtype("float32"), False
    with dask.config.set({"array.chunk-size": 4 * most}):
        made, own = limited_chunks(*given), own_chunks(*given)
    largest = max(prod(map(max, each)) for each in chunks)  # pieces of those would be small
    if largest:  # else every element is 0
        limit = max(most, min(largest, TIMES * most))
        assert prod(max(x) for x in made.values()) <= 2 * limit  # parts are whole
    for label, blocks in made.items():
        assert {*accumulate(own[label])} <= {*accumulate(blocks)}
        if len(own[label]) == 1:
            assert len({*blocks[:-1]}) <= 1
    if most == 10**6:
        assert made == own


#: Chunks of "x,y->z", the limit of a block in elements, and where the result is cut.
CUTS = {
    "rows and columns are cut alike, and only where they begin": (
        ("txy,tuv->xyuv", [((4,) * 5, (80,), (160,))] * 2, 80**2 * 160**2 // 4),
        {"x": (40, 40), "y": (160,), "u": (40, 40), "v": (160,)},
    ),
    "a result in pieces as large as its operands is not cut": (
        ("pqrs,pi->iqrs", [((9, 9), (9, 9), (9, 9), (18,)), ((9, 9), (4,))], 9**3 * 4),
        {"i": (4,), "q": (9, 9), "r": (9, 9), "s": (18,)},
    ),
    "a batch is cut before its matrices": (
        ("zij,zjk->zik", [((8,), (10,), (3,)), ((8,), (3,), (10,))], 200),
        {"z": (2,) * 4, "i": (10,), "k": (10,)},
    ),
}


@pytest.mark.parametrize("what", CUTS)
def test_large_results_are_cut(what):
    (subscripts, chunks, most), expected = CUTS[what]
    terms, _, out = subscripts.partition("->")
    with dask.config.set({"array.chunk-size": 4 * most}):
        found = limited_chunks(terms.split(","), chunks, out, np.dtype("float32"), gpu=False)
    assert found == expected


def test_blocks_on_gpus_may_be_larger():
    labels, chunks = ["tx", "tu"], [((4,) * 5, (640,))] * 2
    with dask.config.set({"array.chunk-size": 4 * 320**2 // TIMES}):
        found = [
            limited_chunks(labels, chunks, "xu", np.dtype("float32"), x) for x in (True, False)
        ]
    assert found[0] == {"x": (320, 320), "u": (320, 320)}
    assert len(found[1]["x"]) > 2


def test_rows_and_columns_of_one_array_twice_are_cut_alike():
    x = da.ones((8, 1000), chunks=(8, 1000), dtype="f4")
    with dask.config.set({"array.chunk-size": 800_000}):  # a fifth of the result
        rows, columns = multimm.einsum("ti,tj->ij", x, x).chunks
    assert rows == columns
    assert len(rows) > 1
