"""Lazy conjugates of operands: which are recognised, and Hermitian products on CPUs."""

from __future__ import annotations

import itertools

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, scattered
from labels import block_tasks
from small import gaussian

import multimm
from multimm.graph.lazy_views import peel
from multimm.graph.lowering import symmetric
from multimm.graph.tasks import multiply
from multimm.planning.spec import LOCAL_TCP, ClusterSpec, DeviceSpec

client = counting_client(4)


def computed(x):
    return x.compute(scheduler="sync")


# What is recognised ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "turned", "conjugated"),
    [
        (lambda x: x.conj(), False, True),
        (lambda x: da.conj(x), False, True),
        (lambda x: np.conj(x), False, True),
        (lambda x: np.conjugate(x), False, True),
        (lambda x: x.conj().T, True, True),
        (lambda x: x.T.conj(), True, True),
        (lambda x: x.conj().conj(), False, False),
        (lambda x: x.conj().T.conj().T.conj(), False, True),
        (lambda x: multimm.transpose(x.conj()), True, True),
    ],
)
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_lazy_conjugates_are_peeled_off(made, turned, conjugated, dtype):
    x = da.from_array(gaussian((30, 20), dtype=dtype), chunks=(7, 6)) + 1
    y = made(x)
    found = peel(y)
    assert (found.turned, found.conjugated) == (turned, conjugated)
    assert (found.array.name, found.array.chunks, found.array.dtype) == (x.name, x.chunks, x.dtype)
    np.testing.assert_array_equal(computed(found.array), computed(x))
    assert y.name not in found.array.dask.layers


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_of_real_numbers_nothing_is_conjugated(dtype):
    x = da.from_array(gaussian((20, 20)).real.astype(dtype), chunks=10)
    found = peel(x.conj().T)
    assert (found.array.name, found.turned, found.conjugated) == (x.name, True, False)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x,
        lambda x: x.conj() + 0,
        lambda x: x.conj().persist(scheduler="sync"),
        lambda x: x.conj()[:, ::-1],
        lambda x: dask.optimize(x.conj())[0],
        lambda x: da.blockwise(np.conjugate, "ji", x, "ij", dtype=x.dtype, align_arrays=False),
        lambda x: da.blockwise(np.conjugate, "ij", x, "ij", dtype="c16", casting="unsafe"),
        lambda x: x.real,
        lambda x: da.conj(x, dtype="c16"),
        lambda x: da.conj(x, where=da.ones((20, 20), dtype=bool, chunks=10), out=None),
    ],
)
def test_what_is_more_than_a_conjugate_stays(other):
    x = da.from_array(gaussian((20, 20)), chunks=10)
    y = other(x)
    found = peel(y)
    assert found.array.name == y.name
    assert (found.turned, found.conjugated) == (False, False)


@pytest.mark.parametrize("dtype", ["?", "i1", "i8"])
def test_integers_are_left_alone(dtype):
    """Of booleans NumPy makes integers."""
    x = da.from_array(gaussian((20, 20)).real.astype(dtype), chunks=10)
    y = np.conj(x)
    assert peel(y).array.name == y.name
    found = computed(multimm.matmul(y.T, y))
    np.testing.assert_array_equal(found, np.conj(computed(x)).T @ np.conj(computed(x)))
    assert found.dtype == (np.conj(computed(x)).T @ np.conj(computed(x))).dtype


def test_a_conjugate_is_a_view_of_a_product_that_is_lazy():
    a, b = (da.from_array(gaussian((20, 20), i), chunks=10) for i in range(2))
    found = multimm.matmul(multimm.matmul(a, b).conj(), b)
    np.testing.assert_array_equal(computed(found), (computed(a) @ computed(b)).conj() @ computed(b))


# What is computed ------------------------------------------------------------------------

BOTH = (False, True)
OPTIONS = ({}, {"blocks": 8}, {"blocks": (9, 7), "slabs": 5}, {"blocks": 16, "p_k": 3})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("turned", "conj_a", "conj_b"), [*itertools.product(BOTH, BOTH, BOTH)])
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_products_of_conjugates_are_exact(options, turned, conj_a, conj_b, dtype):
    a, b = gaussian((30, 22), 1, dtype), gaussian((22, 26), 2, dtype)
    x = da.from_array(a.T.copy() if turned else a, chunks=(9, 8))
    x = x.T if turned else x
    y = da.from_array(b, chunks=(7, 10))
    x, y = x.conj() if conj_a else x, y.conj() if conj_b else y
    exact = (a.conj() if conj_a else a) @ (b.conj() if conj_b else b)
    found = multimm.matmul(x, y, **options)
    assert not any("conj" in name for name in found.dask.layers)
    np.testing.assert_array_equal(computed(found), exact)
    assert found.dtype == dtype


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("turned", "conj_a", "conj_b"), [*itertools.product(BOTH, BOTH, BOTH)])
def test_products_of_one_array_are_hermitian_or_symmetric(options, turned, conj_a, conj_b):
    x = gaussian((22, 30)) if turned else gaussian((30, 22))
    a = da.from_array(x, chunks=(9, 8))
    left, right = (a.T, a) if turned else (a, a.T)
    left, right = left.conj() if conj_a else left, right.conj() if conj_b else right
    m, n = (x.T, x) if turned else (x, x.T)
    exact = (m.conj() if conj_a else m) @ (n.conj() if conj_b else n)
    found = multimm.matmul(left, right, **options)
    np.testing.assert_array_equal(computed(found), exact)
    c = gaussian((30, 30), 3)
    added = multimm.gemm(-2, left, right, 1j, c, **options)
    np.testing.assert_array_equal(computed(added), -2 * exact + 1j * c)
    scaled = multimm.gemm(1 + 2j, left, right, **options)
    np.testing.assert_array_equal(computed(scaled), (1 + 2j) * exact)


def halves(array):
    tasks = block_tasks(array).values()
    diagonal = [t for t in tasks if t.kwargs.get("verb") is symmetric.link_diagonal]
    return diagonal, [t for t in tasks if t.func is multiply.adjoint]


@pytest.mark.parametrize("p_k", [1, 2])
def test_half_of_a_hermitian_product_is_computed_and_the_rest_is_its_conjugate(p_k):
    x = (np.random.default_rng(0).standard_normal((60, 40, 2)).astype("f4").view("c8"))[..., 0]
    a = da.from_array(x, chunks=(20, 20))
    product = multimm.matmul(a, a.conj().T, blocks=20, slabs=20, p_k=p_k)
    diagonal, turned = halves(product)
    assert len(diagonal) == 3 * 2
    assert len(turned) == 3
    found = computed(product)
    assert (found == found.conj().T).all()
    assert not np.diag(found).imag.any()
    assert multimm.verify(a, a.conj().T, product)
    assert not multimm.verify(a, a.T, product)


def test_a_hermitian_product_times_i_is_not_hermitian():
    a = da.from_array(gaussian((40, 20)), chunks=20)
    product = multimm.gemm(1j, a, a.conj().T, blocks=20)
    assert halves(product) == ([], [])
    half = multimm.gemm(2 + 0j, a, a.conj().T, blocks=20)
    assert len(halves(half)[0]) == 2
    x = computed(a)
    np.testing.assert_array_equal(computed(half), 2 * (x @ x.conj().T))


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_diagonal_that_is_no_number_stays_none(odd):
    x = gaussian((12, 9))
    x[3, 2] = odd
    a = da.from_array(x, chunks=6)
    with np.errstate(all="ignore"):
        found = computed(multimm.matmul(a, a.conj().T, blocks=6))
        exact = x @ x.conj().T
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))


def test_verify_and_plan_take_conjugates():
    a, b = (da.from_array(gaussian((40, 40), i), chunks=20) for i in range(2))
    assert multimm.verify(a.conj(), b, multimm.matmul(a.conj(), b))
    assert not multimm.verify(a, b, multimm.matmul(a.conj(), b))
    cluster = ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 10**9, 50.0, 20.0), 4, LOCAL_TCP)
    assert multimm.plan(a.conj().T, a, cluster=cluster).layout.problem.symmetric
    assert not multimm.plan(a.conj().T, b, cluster=cluster).layout.problem.symmetric


@pytest.mark.parametrize("tall", [False, True])
def test_on_workers_that_hold_the_blocks(client, tall):
    """Also where partial products of what each of them has are added."""
    x = gaussian((600, 40) if tall else (120, 100))
    a = scattered(
        client, x, (50, 40) if tall else (30, 25), [i % 4 for i in range(12 if tall else 16)]
    )
    np.testing.assert_array_equal(multimm.matmul(a.conj().T, a).compute(), x.conj().T @ x)
    np.testing.assert_array_equal(multimm.matmul(a, a.T.conj()).compute(), x @ x.conj().T)
    w = gaussian((x.shape[1], 7), 5)
    np.testing.assert_array_equal(multimm.matmul(a.conj(), w).compute(), x.conj() @ w)
    b = da.from_array(w, chunks=30).conj()
    np.testing.assert_array_equal(multimm.matmul(a, b).compute(), x @ w.conj())
