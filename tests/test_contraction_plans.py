"""plan and verify of einsum and tensordot: what they say is done, and whether it is right."""

from __future__ import annotations

import html

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client
from repeated import others_slow

import multimm
from multimm import products
from multimm.errors import DTypeError, MemoryBudgetError, OptionError, ShapeError
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning"),
    pytest.mark.filterwarnings("ignore:Increasing number of chunks"),
]
SUMS = {
    "txy,tuv->xyuv": ((50, 6, 7), (50, 5, 4)),
    "tij,tjk->tik": ((3, 8, 9), (3, 9, 5)),
    "ij,ij->": ((8, 9), (8, 9)),
    "ijk,kl->lij": ((4, 5, 6), (6, 7)),
    "ij,j->i": ((7, 8), (8,)),
    "abc,cbd->da": ((4, 5, 6), (6, 5, 3)),
    "...ij,...jk->...ik": ((1, 4, 5), (3, 5, 2)),
}
#: Several steps, and those that are no products.
STEPS = {
    "ij,jk,kl->il": ["ij,jk->ik", "kl,ik->il"],
    "ijm,jk->ik": ["ijm->ij", "ij,jk->ik"],
    "ij,ij->ij": ["ij,ij->ij"],
}


def numbers(shape, dtype="float64", seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 10).astype(dtype)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("subscripts", [*SUMS, *STEPS])
def test_the_plans_are_those_of_the_products_that_are_made(workers, subscripts, monkeypatch):
    terms = subscripts.partition("->")[0].split(",")
    shapes = SUMS.get(subscripts) or [(5, 5, 5)[: len(term)] for term in terms]
    made = []

    def noted(self, cluster=None, answer=None, plan=products.Product.plan):
        made.append(plan(self, cluster, answer))
        return made[-1]

    def compared():
        x = [da.from_array(numbers(shape), chunks=3) for shape in shapes]
        found = multimm.plan(subscripts, *x)
        with monkeypatch.context() as patch:
            patch.setattr(products.Product, "plan", noted)
            multimm.einsum(subscripts, *x)
        # Free memory changes from one call to the next.
        assert [plan.layout for plan in found.plans] == [plan.layout for plan in made]
        if subscripts in STEPS:
            assert [step.subscripts for step in found.steps] == STEPS[subscripts]
            assert found.plans == tuple(step.plan for step in found.steps if step.plan)
        assert found.bytes_moved == sum(plan.bytes_moved for plan in made)
        assert found.tasks == sum(plan.tasks for plan in made)
        assert str(found).count("step ") >= len(found.steps)

    if not workers:
        with dask.config.set(scheduler="sync"):
            return compared()
    with in_threads(workers, memory_limit=0) as cluster, Client(cluster):
        return compared()


def test_on_paper_nothing_is_built():
    field = MatrixSpec((400_000, 160, 320), chunks=((50_000,) * 8, (160,), (320,)))
    cluster = ClusterSpec.homogeneous(H200, 8)
    found = multimm.plan("txy,tuv->xyuv", field, field, cluster=cluster).plans[0]
    assert found.layout.mirrors  # one field twice
    assert found.flops < 2 * 51_200**2 * 400_000
    other = MatrixSpec(field.shape, chunks=field.chunks)
    assert not multimm.plan("txy,tuv->xyuv", field, other, cluster=cluster).plans[0].layout.mirrors
    small = multimm.plan("txy,tuv->xyuv", *[MatrixSpec((9, 90, 90))] * 2, cluster=cluster)
    assert small.check() is small
    assert small.peak_bytes == small.plans[0].peak_bytes
    with pytest.raises(MemoryBudgetError):
        multimm.plan("xt,ty->xy", MatrixSpec((9, 10**15)), MatrixSpec((10**15, 9)), cluster=cluster)


def test_tensordot_is_planned_by_its_axes():
    x = da.from_array(numbers((6, 5, 4)), chunks=3)
    found = multimm.plan(x, x, axes=((0, 1), (0, 1)))
    assert [plan.layout.problem.k for plan in found.plans] == [30]
    matrix = multimm.plan(np.ones((3, 4)), np.ones((4, 5)), axes=1).plans[0].layout.problem
    assert (matrix.m, matrix.k, matrix.n) == (3, 4, 5)


def test_plan_knows_the_dtype_of_einsum():
    x = MatrixSpec((64, 64), "int8")
    (made,) = multimm.plan("ij,jk->ik", x, x, dtype="int64").plans
    assert made.layout.problem.dtype == "int64"
    assert made.layout.problem.exact


BAD_PLANS = {
    "options of matrices": (lambda x: multimm.plan("ij,jk", x, x, blocks=2), OptionError),
    "a dtype of tensordot": (lambda x: multimm.plan(x, x, axes=1, dtype="f4"), OptionError),
    "axes and subscripts": (lambda x: multimm.plan("ij,jk", x, x, axes=1), OptionError),
    "three matrices": (lambda x: multimm.plan(x, x, x), OptionError),
    "subscripts": (lambda x: multimm.plan("ij,jk->z", x, x), OptionError),
    "shapes": (lambda x: multimm.plan("ij,jk", x, x[:3]), ShapeError),
    "objects": (lambda x: multimm.plan("ij,jk", x, x.astype(object)), DTypeError),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_what_cannot_be_planned_is_refused_in_one_line(name):
    call, kind = BAD_PLANS[name]
    with pytest.raises(kind) as refused:
        call(da.ones((4, 4), chunks=2))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", others_slow(["float32", "int32", "complex64"], "complex64"))
@pytest.mark.parametrize("subscripts", SUMS)
def test_verify_tells_a_right_sum_from_a_wrong_one(subscripts, dtype):
    arrays = [numbers(shape, dtype, n) for n, shape in enumerate(SUMS[subscripts])]
    lazy = [da.from_array(x, chunks=3) for x in arrays]
    operands = {"float32": arrays, "int32": lazy, "complex64": [lazy[0], arrays[1]]}[dtype]
    right = multimm.einsum(subscripts, *operands)
    assert multimm.verify(subscripts, *operands, right)
    wrong = np.array(right)
    wrong[(-1,) * wrong.ndim] += 50
    assert not multimm.verify(subscripts, *operands, wrong)
    assert not multimm.verify(subscripts, *operands, da.from_array(wrong, chunks=2))


def test_verify_of_tensordot_and_of_a_dtype():
    x = numbers((4, 5, 6))
    axes = (0, 1), (0, 1)
    right = multimm.tensordot(x, x, axes)
    assert multimm.verify(x, x, right, axes=axes)
    assert not multimm.verify(x, x, right + 1e-9, axes=axes)
    y = np.full((9, 9), 100, "int8")
    wide = multimm.einsum("ij,kj->ik", y, y, dtype="float32")
    assert multimm.verify("ij,kj->ik", y, y, wide, dtype="float32")
    assert not multimm.verify("ij,kj->ik", y, y, wide + 1, dtype="float32")


BAD_CHECKS = {
    "two steps": lambda x: multimm.verify("ij,jk,kl->il", x, x, x, x),
    "no product": lambda x: multimm.verify("ij,ij->ij", x, x, x),
    "one operand": lambda x: multimm.verify("ij->ji", x, x),
    "a sum before": lambda x: multimm.verify("ij,kl->ik", x, x, x),
    "no result": lambda x: multimm.verify("ij,jk->ik", x, x),
    "another shape": lambda x: multimm.verify("ij,jk->ik", x, x, x[:3]),
    "four matrices": lambda x: multimm.verify(x, x, x, x),
    "both": lambda x: multimm.verify("ij,jk->ik", x, x, x, axes=1),
    "a scalar": lambda x: multimm.verify("ij,jk->ik", x, x, x, alpha=2),
}


@pytest.mark.parametrize("name", BAD_CHECKS)
def test_what_cannot_be_checked_is_refused_in_one_line(name):
    with pytest.raises((OptionError, ShapeError)) as refused:
        BAD_CHECKS[name](np.ones((4, 4)))
    assert len(str(refused.value).splitlines()) == 1


def test_it_is_shown_step_by_step_in_text_and_in_notebooks():
    a, b, c = (MatrixSpec(shape) for shape in ((40, 30), (30, 20), (20, 10)))
    found = multimm.plan("ij,jk,kl->l", a, b, c)
    assert repr(found) == str(found)
    page = found._repr_html_()
    for step in found.steps:
        assert f": {step.subscripts}" in repr(found)
        assert f": {html.escape(step.subscripts)}" in page
        assert step.plan is None or step.plan._repr_html_() in page
