"""The chunks of a contraction are those of Dask's einsum."""

import dask
import dask.array as da
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.contractions.einsum_chunks import einsum_chunks

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
    size = {x: draw(st.sampled_from((1, 7, 12, 40))) for x in sorted({*"".join(terms)})}
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
    found = []
    while sum(found) < size:
        found.append(draw(st.integers(1, size - sum(found))))
    return found


@given(contractions(), st.sampled_from((0.5, 1.25, 4)))
def test_chunks_are_those_of_dask(case, tolerance):
    subscripts, chunks = case
    terms, _, out = subscripts.partition("->")
    arrays = [da.empty(tuple(map(sum, own)), chunks=own, dtype="float32") for own in chunks]
    with dask.config.set({"array.chunk-size-tolerance": tolerance}):
        theirs = da.einsum(subscripts, *arrays).chunks
        ours = einsum_chunks(terms.split(","), chunks, out)
    assert tuple(ours[x] for x in out) == theirs


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
