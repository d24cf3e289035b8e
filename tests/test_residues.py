"""float64 products by residues: moduli, and the proof that the error stays within its bound.

Kernels: test_cuda_on_cpu; products on a GPU: tests/gpu/test_residues_gpu.py.
"""

from __future__ import annotations

from itertools import combinations
from math import gcd, isqrt, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from residue_reference import doubles, joined, looked_at, packed, residues, statistics

from multimm.errors import KernelError
from multimm.gpu.residues import gemm, moduli
from multimm.gpu.residues.certificate import Rows, keeps_bound
from multimm.gpu.residues.formats import FORMATS
from multimm.gpu.residues.moduli import (
    COMPLEX,
    MOST,
    REAL,
    fewest,
    norm_limit,
    product_of,
)
from multimm.planning.cost import memory
from multimm.planning.problem import RESIDUES

COUNTS = range(1, MOST + 1)
U = 2.0**-53
both_systems = pytest.mark.parametrize("system", [REAL, COMPLEX], ids=["real", "complex"])


@both_systems
def test_moduli_are_pairwise_coprime_and_their_residues_are_bytes(system):
    moduli = system.moduli
    assert len(moduli) == MOST
    assert all(gcd(x, y) == 1 for x, y in combinations(moduli, 2))
    assert max(moduli) <= 256
    assert list(moduli) == sorted(moduli, reverse=True)
    assert [product_of(system, n) for n in COUNTS] == [prod(moduli[:n]) for n in COUNTS]


def test_roots_are_those_of_minus_one():
    assert all((i * i + 1) % p == 0 for p, i in zip(*COMPLEX, strict=True))
    assert all(2 * abs(i) < p for p, i in zip(*COMPLEX, strict=True))


@both_systems
@pytest.mark.parametrize("count", COUNTS)
def test_integers_are_known_by_their_residues_up_to_the_ends(system, count):
    most = (product_of(system, count) - 1) // 2
    rng = np.random.default_rng(count)
    shares = [int(x * 2**30) for x in rng.uniform(-1, 1, 50)]
    numbers = [0, 1, -1, most, -most, most - 1, *(most * x >> 30 for x in shares)]
    x = np.array(numbers, object)
    parts = [x, x[::-1]][: system.parts]
    planes = residues(system, parts, count)
    assert planes.shape == (count * system.parts, len(x))
    for at, modulus in enumerate(system.moduli[:count]):
        own = planes[at * system.parts : (at + 1) * system.parts]
        assert all(2 * abs(r) <= modulus for r in own.flat)
        if system is REAL:
            assert not ((own[0] - x) % modulus).any()
    for part, found in zip(parts, joined(system, planes), strict=True):
        assert (found == part).all()


def drawn(data, limit, k):
    """A row of so many integers, of at most that size each."""
    size = st.integers(-limit, limit)
    return np.array(data.draw(st.lists(size, min_size=k, max_size=k)), object)


@both_systems
@given(st.data())
def test_products_of_residues_are_residues_of_products(system, data):
    count = data.draw(st.sampled_from([2, 3, 14, 16]))
    limit, k = isqrt(product_of(system, count) // 2), 5
    a, b = ([drawn(data, limit // 4, k) for _ in range(system.parts)] for _ in "ab")
    both = zip(residues(system, a, count), residues(system, b, count), strict=True)
    moduli = np.repeat(system.moduli, system.parts).tolist()
    planes = np.array([[x @ y % p] for (x, y), p in zip(both, moduli, strict=False)], object)
    if system is REAL:
        expected = [a[0] @ b[0]]
    else:
        expected = [a[0] @ b[0] - a[1] @ b[1], a[0] @ b[1] + a[1] @ b[0]]
    assert [x.tolist() for x in joined(system, planes)] == [[x] for x in expected]


@both_systems
@given(st.sampled_from(COUNTS[7:]), st.integers(1, 2**15))
def test_rows_within_the_limit_have_products_within_the_range(system, count, k):
    limit = norm_limit(system, count, k)
    rounded = int(limit) + isqrt(k * system.parts) // 2 + 1  # what rounding may make of a norm
    assert 2 * rounded**2 < product_of(system, count)
    assert limit > isqrt(product_of(system, count) // 2) * 0.999


@both_systems
def test_the_fewest_moduli_that_tell_integers_apart(system):
    for bits in range(126):
        count = fewest(system, bits)
        if count is None:
            assert 2 ** (bits + 1) > product_of(system, MOST) * 0.99
            continue
        assert 2 ** (bits + 1) < product_of(system, count)
        assert count == 1 or 2 ** (bits + 1) > product_of(system, count - 1) * 0.99


@both_systems
@pytest.mark.parametrize("count", COUNTS)
def test_limbs_are_their_number_and_sums_of_them_are_exact(system, count):
    parts, whole, inverse = moduli.weights(system, count)

    def number(limbs):
        high, middle, low = map(int, limbs)
        return (high << 84) + (middle << 42) + low

    assert number(whole) == product_of(system, count)
    assert inverse == 2.0**84 / product_of(system, count)
    for part, each in enumerate(parts):
        for at, limbs in enumerate(each):
            assert abs(limbs[0]) <= 2**41
            assert all(abs(x) <= 2**41 for x in limbs[1:])
            weight = number(limbs)
            assert 2 * abs(weight) <= product_of(system, count)
            twice = 1 if system is REAL else 2 * (system.roots[at] if part else 1)
            own = [weight * twice % p for p in system.moduli[:count]]
            assert own == [int(i == at) for i in range(count)]
    # Of two residues the sum, too.
    assert sum(system.moduli) // 2 * system.parts * 2**41 <= 2**53


def test_numbers_of_more_limbs_are_refused():
    with pytest.raises(KernelError, match="three limbs of 42 bits: fewer moduli"):
        moduli.weights.__wrapped__(moduli.System((*REAL.moduli, 191)), MOST + 1)


def test_plans_know_when_they_pay():
    assert memory.RESIDUE_K == gemm.STRETCH
    assert {name: x[2:] for name, x in RESIDUES.items()} == {
        name: (x.start, x.packed, x.joined) for name, x in FORMATS.items()
    }
    for name, x in RESIDUES.items():
        assert x.itemsize == FORMATS[name].usual * FORMATS[name].system.parts
        for sizes in ((1000,) * 3, (1 << 20, 100, 1 << 14), (5000,) * 3, (1 << 14, 1 << 14, 100)):
            assert x.pays(*sizes) == FORMATS[name].pays(*sizes) == (sizes[0] == 5000)


# The proof

KINDS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "rows": lambda rng, shape: rng.random(shape) * 10.0 ** rng.uniform(-8, 8, (shape[0], 1)),
    "tails": lambda rng, shape: np.exp(3 * rng.standard_normal(shape)),
    "graded": lambda rng, shape: np.exp(8 * rng.standard_normal(shape)),
    "mask": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.8),
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.3),
    "integers": lambda rng, shape: rng.integers(-999, 1000, shape).astype(float),
    "few large": lambda rng, shape: np.where(np.arange(shape[1]) % 97, 1, 1e6) * rng.random(shape),
    "zero rows": lambda rng, shape: rng.random(shape) * (np.arange(shape[0]) % 2)[:, None],
}  # fmt: skip


def prepared(x, count):
    """Integers of rows, their scales, and what the host knows of all."""
    found = looked_at(x, 32)
    assert not found.refused
    made = packed(x, found, count, norm_limit(FORMATS[x.dtype.name].system, count, x.shape[1]))
    return made, statistics(found, made)


def integers_of(x):
    """Finite float64 numbers as integers of Python, times one power of two."""
    mantissas, exponents = np.frexp(x)
    whole = (mantissas * 2.0**53).astype(np.int64).astype(object)
    least = int(exponents[x != 0].min(initial=0))
    return whole * 2 ** np.maximum(exponents - least, 0).astype(object), least - 53


#: Of each part of a product: which parts of the operands are multiplied, and signs.
TERMS = {
    1: [[(0, 0, 1)]],
    2: [[(0, 0, 1), (1, 1, -1)], [(0, 1, 1), (1, 0, 1)]],
}


def within_the_bound(x, y, of_x, of_y, share=1.0):
    """Whether each error of the product of integers is at most a share of k u |X||Y'|, exactly.

    Of complex numbers in both parts, each of which is a sum of 2 k products.
    """
    (a, ea), (b, eb) = (integers_of(np.moveaxis(doubles(z), -1, 0)) for z in (x, y))
    k, inverse = x.shape[1] * len(a), int(1 / FORMATS[x.dtype.name].unit)
    scales = of_x.scales.astype(int)[:, None] + of_y.scales.astype(int)
    for terms in TERMS[len(a)]:
        exact = sum(sign * (a[i] @ b[j].T) for i, j, sign in terms)
        sizes = sum(abs(a[i]) @ abs(b[j]).T for i, j, _ in terms)
        ours = sum(sign * (of_x.integers[i] @ of_y.integers[j].T) for i, j, sign in terms)
        for at, own in np.ndenumerate(ours):
            # own 2^-s and exact 2^(ea + eb), times 2^(s + t), t so large that all are integers.
            shift = int(scales[at]) + ea + eb
            up, down = 2 ** max(shift, 0), 2 ** max(-shift, 0)
            if (
                inverse * abs(own * down - exact[at] * up)
                > int(k * 2**20 * share) * sizes[at] * up >> 20
            ):
                return False
    return True


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)), st.integers(0, 10**6),
       st.sampled_from([10, 13, 14, 15, 16]), st.sampled_from([64, 200]))  # fmt: skip
def test_what_is_proved_is_true(left, right, seed, count, k):
    rng = np.random.default_rng(seed)
    x, y = KINDS[left](rng, (5, k)), KINDS[right](rng, (6, k))
    (of_x, rows_x), (of_y, rows_y) = prepared(x, count), prepared(y, count)
    if keeps_bound(rows_x, rows_y, k, U):
        assert within_the_bound(x, y, of_x, of_y)


COUNTED = [("complex64", 6), ("complex64", 7), ("complex128", 14), ("complex128", 15)]


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)), st.integers(0, 10**6),
       st.sampled_from(COUNTED), st.sampled_from([0, 10, 30]))  # fmt: skip
def test_what_is_proved_of_complex_numbers_is_true_of_both_parts(left, right, seed, of, less):
    """Also where imaginary parts are so many bits smaller."""
    rng = np.random.default_rng(seed)
    (dtype, count), k = of, 64
    x, y = (
        (KINDS[kind](rng, (n, k)) + 1j * np.ldexp(KINDS[kind](rng, (n, k)), -less)).astype(dtype)
        for n, kind in ((5, left), (6, right))
    )
    (of_x, rows_x), (of_y, rows_y) = prepared(x, count), prepared(y, count)
    if keeps_bound(rows_x, rows_y, 2 * k, FORMATS[dtype].unit):
        assert within_the_bound(x, y, of_x, of_y)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_normal_complex_numbers_are_proved_and_nearly_real_ones_are_not(dtype):
    of = FORMATS[dtype]
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, 2, 12, 256))
    x, y = (a + 1j * b for a, b in parts)
    (of_x, rows_x), (of_y, rows_y) = (prepared(z.astype(dtype), of.usual) for z in (x, y))
    assert keeps_bound(rows_x, rows_y, 512, of.unit)
    assert within_the_bound(x.astype(dtype), y.astype(dtype), of_x, of_y, share=0.1)
    x.imag *= 2.0**-40
    (of_x, rows_x) = prepared(x.astype(dtype), of.usual)
    assert not keeps_bound(rows_x, rows_y, 512, of.unit)


def test_normal_numbers_are_proved_with_14_moduli_and_err_far_less():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 1024)), rng.standard_normal((16, 1024))
    (of_x, rows_x), (of_y, rows_y) = prepared(x, 14), prepared(y, 14)
    assert keeps_bound(rows_x, rows_y, 1024, U)
    assert within_the_bound(x, y, of_x, of_y, share=0.1)
    assert not keeps_bound(*(prepared(z, 13)[1] for z in (x, y)), 1024, U)


def test_a_bound_that_does_not_hold_is_not_proved():
    """With fewer moduli the error is beyond the bound, and is seen."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 200)), rng.standard_normal((8, 200))
    for count in (10, 11):
        (of_x, rows_x), (of_y, rows_y) = prepared(x, count), prepared(y, count)
        assert not within_the_bound(x, y, of_x, of_y)
        assert not keeps_bound(rows_x, rows_y, 200, U)


def test_what_is_proved_is_true_where_all_numbers_are_rounded_the_same_way():
    k, proved = 64, []
    y = np.ones((3, k))
    for power in range(38, 48):
        x = 2.0**power + np.arange(5 * k).reshape(5, k) % 9 + 15 / 32
        found = looked_at(x, 32)
        made = packed(x, found, 14, 1.5 * 2**power * k**0.5)
        of_y, rows_y = prepared(y, 14)
        assert not made.scales.any()
        assert not rows_y.rounded
        proved.append(keeps_bound(statistics(found, made), rows_y, k, U))
        assert not proved[-1] or within_the_bound(x, y, made, of_y), power
    x = 2.0**48 + np.arange(k)[None] % 9 + 0.25  # of the bound half is used
    found = looked_at(x, 32)
    made = packed(x, found, 14, 1.5 * 2**48 * k**0.5)
    assert within_the_bound(x, y, made, of_y)
    assert not within_the_bound(x, y, made, of_y, share=0.1)


@pytest.mark.parametrize("kind", ["graded", "sparse"])
def test_rows_of_few_large_numbers_are_not_proved(kind):
    rng = np.random.default_rng(1)
    x, y = KINDS[kind](rng, (32, 512)), KINDS[kind](rng, (32, 512))
    assert not keeps_bound(*(prepared(z, 14)[1] for z in (x, y)), 512, U)


def test_one_row_of_few_large_numbers_is_enough_to_refuse():
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 16, 512))
    assert keeps_bound(*(prepared(z, 14)[1] for z in (x, y)), 512, U)
    x[5, 1:] *= 1e-9
    assert not keeps_bound(*(prepared(z, 14)[1] for z in (x, y)), 512, U)


def test_integers_are_exact_whatever_they_are():
    rng = np.random.default_rng(3)
    x = rng.integers(-(2**20), 2**20, (10, 300)).astype(float) * 2.0**-7
    x *= rng.random(x.shape) < 0.1
    (of_x, rows_x) = prepared(x, 14)
    assert not rows_x.rounded
    assert (of_x.integers[0] * 2.0 ** -of_x.scales[:, None].astype(float) == x).all()


def test_larger_integers_prove_more():
    rows = Rows(True, 2.0**40, 20.0, (0.6, 0.8, 0.9))
    assert not keeps_bound(rows, rows, 512, U)
    assert keeps_bound(rows.scaled(2.0**20), rows.scaled(2.0**20), 512, U)
    assert rows.scaled(2.0).norm == 2.0**41
