from __future__ import annotations

import itertools
from threading import get_ident

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from dask.callbacks import Callback
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repeated import others_slow

import multimm
from multimm.checks import tasks
from multimm.checks.operands import prepare
from multimm.checks.sweep import sweep
from multimm.errors import ArrayTypeError, DTypeError, OptionError, ShapeError

verify = multimm.verify

quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def draw(rng, shape, name, scale=1.0):
    dtype = dtype_of(name)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    if dtype.kind == "b":
        return rng.random(shape) < 0.1
    values = rng.normal(size=shape) * scale
    if dtype.kind == "c":
        values = values + 1j * rng.normal(size=shape) * scale
    return values.astype(dtype)


def product(a, b):
    """What a right product of these dtypes is: half formats summed in float32."""
    if a.dtype.name in ("float16", "bfloat16"):
        with np.errstate(over="ignore"):
            return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    return np.matmul(a, b)


def lazy(array, rng):
    chunks = tuple(int(rng.integers(size // 4 + 1, size + 2)) for size in array.shape)
    return da.from_array(array, chunks=chunks, name=False)


def sequential(a, b):
    """The sum in the order of k, each step rounded: the least lucky right product."""
    c = np.zeros((a.shape[0], b.shape[1]), np.result_type(a, b))
    for column, row in zip(a.T, b, strict=True):
        c += column[:, None] * row
    return c


@quick
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from((*FLOATS, *INTEGERS, "bool")),
    sizes=st.tuples(*[st.integers(1, 90)] * 3),
    chunked=st.booleans(),
)
def test_right_products_pass_and_one_wrong_element_fails(seed, name, sizes, chunked):
    rng = np.random.default_rng(seed)
    m, k, n = sizes
    a, b = draw(rng, (m, k), name), draw(rng, (k, n), name)
    right = product(a, b)
    wrong = right.copy()
    at = rng.integers(m), rng.integers(n)
    if name == "bool":
        wrong[at] = not wrong[at]
    elif name in INTEGERS:
        with np.errstate(over="ignore"):
            wrong[at] += wrong.dtype.type(1)
    else:
        result = verify(a, b, right)
        error = max(1.5 * result.detects, 8 * float(np.abs(right[at])) * 2.0**-8)
        value = complex(right[at]) + error
        wrong[at] = value if right.dtype.kind == "c" else value.real
    operands = [lazy(x, rng) if chunked else x for x in (a, b)]
    with dask.config.set(scheduler="sync"):
        assert verify(*operands, lazy(right, rng) if chunked else right)
        if name == "bool" and m > 64:
            return
        assert not verify(*operands, lazy(wrong, rng) if chunked else wrong)


@pytest.mark.parametrize("seed", others_slow(range(3), 0))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adversarial_right_products_pass(seed, dtype):
    rng = np.random.default_rng(seed)
    grade = np.logspace(-15, 15, 48)
    a, b = rng.normal(size=(48, 1500)), rng.normal(size=(1500, 40))
    cases = {
        "graded rows": (grade[:, None] * a, b),
        "graded columns": (a, b * np.logspace(-15, 15, 40)),
        "graded along k": (a * np.logspace(-15, 15, 1500), b),
        "lognormal": (rng.lognormal(0, 4, a.shape), rng.lognormal(0, 4, b.shape)),
        "one sign": (np.abs(a), np.abs(b)),
        "constant": (np.full(a.shape, 0.1), np.full(b.shape, 1 / 3)),
        "cancelling": (np.hstack([a, -a]), np.vstack([b, b])),
        "subnormal": (a * 1e-21, b * 1e-21),
    }
    for case, operands in cases.items():
        a, b = (x.astype(dtype) for x in operands)
        for multiply in (np.matmul, sequential):
            result = verify(a, b, multiply(a, b), seed=seed)
            assert result, (case, multiply, str(result))
            assert result.unchecked == 0


@pytest.fixture(scope="module")
def typical():
    rng = np.random.default_rng(7)
    a = rng.normal(size=(600, 500)).astype(np.float32)
    b = rng.normal(size=(500, 500)).astype(np.float32)
    return a, b, a @ b


def omit_k_tile(a, b, c):
    return c - a[:, 320:384] @ b[320:384]


def swap_blocks(a, b, c):
    c = c.copy()
    c[:128, :128], c[128:256, :128] = c[128:256, :128].copy(), c[:128, :128].copy()
    return c


def transpose_block(a, b, c):
    c = c.copy()
    c[256:384, 256:384] = c[256:384, 256:384].T.copy()
    return c


def one_element(a, b, c):
    c = c.copy()
    c[411, 277] += c.std()
    return c


def half_sums(a, b, c):
    total = np.zeros(c.shape, np.float16)
    for start in range(0, a.shape[1], 50):
        k_tile = slice(start, start + 50)
        total += (a[:, k_tile] @ b[k_tile]).astype(np.float16)
    return total.astype(np.float32)


def add_k_tile_twice(a, b, c):
    return c + a[:, :64] @ b[:64]


def stale_row(a, b, c):
    c = c.copy()
    c[599] = c[598]
    return c


FAULTS = [
    omit_k_tile,
    swap_blocks,
    transpose_block,
    one_element,
    half_sums,
    add_k_tile_twice,
    stale_row,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("chunked", [False, True])
def test_realistic_faults_are_found(typical, fault, chunked, monkeypatch):
    monkeypatch.setattr(tasks, "STRIP", 100_000)  # a block is looked at in several strips
    a, b, c = typical
    wrong = fault(a, b, c)
    if chunked:
        a, b = da.from_array(a, chunks=(200, 400)), da.from_array(b, chunks=(500, 250))
        wrong = da.from_array(wrong, chunks=(300, 100))
    assert verify(a, b, c)
    result = verify(a, b, wrong)
    assert not result
    assert result.worst > 1
    assert str(result).startswith("WRONG")


@pytest.mark.parametrize("shape", [(40, 300), (300, 40), (100, 130)])
@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64"])
def test_what_is_looked_at_does_not_depend_on_strips(shape, dtype, monkeypatch):
    """Nor on which edge of a block they are cut along: the longer one."""
    rng = np.random.default_rng(3)
    a, b = (rng.normal(scale=9, size=at).astype(dtype) for at in (shape, shape[::-1]))
    c = np.where(rng.random((shape[0],) * 2) < 0.01, np.nan if dtype != "int64" else 7, a @ b)
    of = a @ b, c.astype(dtype)
    whole = [verify(a, b, c, seed=1) for c in of]
    monkeypatch.setattr(tasks, "STRIP", 333)
    for one, two in zip(whole, (verify(a, b, c, seed=1) for c in of), strict=True):
        assert (one.ok, one.recomputed, one.unchecked) == (two.ok, two.recomputed, two.unchecked)
        assert one.detects == pytest.approx(two.detects)
        assert one.largest == two.largest


def rounded(x, bits):
    """To significands of so many bits, ties away from zero."""
    half = np.uint32(1 << 23 - bits)
    return (x.view(np.uint32) + half & ~(2 * half - np.uint32(1))).view(np.float32)


@pytest.mark.parametrize("k", [1, 16, 300, 3000])
@pytest.mark.parametrize("signed", [True, False])
def test_what_was_asked_for_as_tf32_is_held_to_its_own_bound(k, signed):
    rng = np.random.default_rng(k)
    a, b = (rng.normal(size=shape).astype("f4") for shape in ((70, k), (k, 90)))
    a, b = (a, b) if signed else (abs(a), abs(b))
    right = rounded(a, 11) @ rounded(b, 11)
    result = verify(a, b, right, precision="tf32")
    assert result, str(result)
    assert verify(a, b, (a @ b).astype("f4"), precision="tf32")
    wrong = right.copy()
    assert result.detects < (abs(a) @ abs(b)).max() / 8
    wrong[33, 7] += np.float32(1.5 * result.detects)
    result = verify(a, b, wrong, precision="tf32")
    assert not result
    assert "c[33, 7]" in str(result)
    if k <= 300:
        for promise in ("float32", "ieee"):
            assert not verify(a, b, right, precision=promise)
    if not signed and k == 300:  # cut off, all errors have one sign, and every row is suspect
        crude = rounded(a, 11) @ (b.view(np.uint32) & np.uint32(0xFFFE0000)).view("f4")
        assert not verify(a, b, crude, precision="tf32")


@pytest.mark.parametrize("k", [16, 300])
def test_complex_products_have_a_bound_of_their_own_at_tf32(k):
    """Each part of a complex number is a sum of twice as many real products."""
    rng = np.random.default_rng(k)
    a, b = (rng.normal(size=(*shape, 2)).astype("f4") for shape in ((70, k), (k, 90)))
    right = rounded(a, 11).view("c8")[..., 0] @ rounded(b, 11).view("c8")[..., 0]
    a, b = a.view("c8")[..., 0], b.view("c8")[..., 0]
    result = verify(a, b, right, precision="tf32")
    assert result, str(result)
    assert not verify(a, b, right)
    assert verify(a, b, a @ b)
    wrong = right.copy()
    wrong[33, 7] += np.complex64(1.5j * result.detects)
    assert result.detects < (abs(a) @ abs(b)).max() / 4
    assert not verify(a, b, wrong, precision="tf32")


def test_detects_is_true_at_its_edge():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(30, 200)).astype("f4"), rng.normal(size=(200, 300)).astype("f4")
    c = (a.astype(float) @ b).astype("f4")
    detects = verify(a, b, c).detects
    for seed in range(20):
        wrong = c.copy()
        wrong[seed, seed] += np.float32(1.01 * detects)
        assert not verify(a, b, wrong, seed=seed)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_detects_is_true_of_few_rows(rows):
    """One that differs moves the median of its block."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(rows, 20)).astype("f4"), rng.normal(size=(20, 4000)).astype("f4")
    c = (a.astype(float) @ b).astype("f4")
    detects = verify(a, b, c).detects
    for column in range(20):
        wrong = c.copy()
        wrong[column % rows, column] += np.float32(1.01 * detects)
        assert not verify(a, b, wrong)


def test_arrays_in_memory_are_checked_in_this_thread_and_no_setting_is_changed_for_others():
    """Two threads that change one, and change it back in turns, leave the change behind."""
    seen = set()
    a = np.ones((30, 30))
    with (
        dask.config.set(scheduler="threads"),
        Callback(pretask=lambda *_: seen.add((dask.config.get("scheduler"), get_ident()))),
    ):
        assert verify(a, a, a @ a)
    assert seen == {("threads", get_ident())}


def test_alpha_and_beta_may_be_integers_of_any_size():
    a = np.ones((5, 5))
    c = multimm.gemm(10**30, a, a, 2**70, a)
    assert verify(a, a, c, alpha=10**30, beta=2**70, c0=a)
    assert not verify(a, a, c, alpha=10**30, beta=2**90, c0=a)
    with pytest.raises(OptionError, match="finite"):
        verify(a, a, c, alpha=10**400)


@pytest.mark.parametrize(
    ("chunked", "value"),
    [
        pytest.param(chunked, value, marks=[pytest.mark.slow] * (chunked is bool(np.isnan(value))))
        for chunked in (False, True)
        for value in (np.nan, np.inf)
    ],
)
def test_non_finite_inputs_reach_what_they_must_and_nothing_else(typical, value, chunked):
    a, b, _ = (x.copy() for x in typical)
    a[3, 5], a[3, 6], b[8, 9], b[10, 499] = value, -value, value, value
    with np.errstate(invalid="ignore"):
        c = a @ b
    assert np.isfinite(c).sum() == 599 * 498

    def check(c):
        arrays = [da.from_array(x, chunks=211) for x in (a, b, c)] if chunked else (a, b, c)
        return verify(*arrays)

    assert check(c)
    assert check(c).unchecked == 0
    for at in [(3, 0), (200, 9), (599, 499)]:
        swallowed = c.copy()
        swallowed[at] = 1.0
        assert not check(swallowed)
    for value in (np.nan, 1e3):
        spread = c.copy()
        spread[200, 10] = value
        assert not check(spread)
    assert not check(typical[2])


def test_non_finite_values_in_c0():
    rng = np.random.default_rng(5)
    a, b, c0 = rng.normal(size=(90, 30)), rng.normal(size=(30, 20)), rng.normal(size=(90, 20))
    c0[4, 5] = np.nan
    right = 2 * a @ b + 3 * c0
    assert verify(a, b, right, alpha=2, beta=3, c0=c0)
    for at, value in [((4, 5), 0.0), ((4, 6), 0.0), ((5, 5), np.nan)]:
        wrong = right.copy()
        wrong[at] = value
        assert not verify(a, b, wrong, alpha=2, beta=3, c0=c0)
    c0[:] = np.nan
    result = verify(a, b, np.full_like(c0, np.nan), beta=1, c0=c0)
    assert result.unchecked == (90 - 64) * 20
    assert "520 elements were not checked" in str(result)


def test_overflow_to_infinity_is_right_where_the_format_ends():
    a, b = np.full((4, 100), 100, np.float16), np.full((100, 3), 10, np.float16)
    a[0] = 1
    right = product(a, b)
    assert np.isinf(right[1:]).all()
    assert np.isfinite(right[0]).all()
    assert verify(a, b, right)
    for at, value in [((1, 1), -np.inf), ((1, 1), np.nan), ((0, 1), np.inf), ((1, 1), 65504.0)]:
        wrong = right.copy()
        wrong[at] = value
        assert not verify(a, b, wrong)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_around_exactly(name):
    rng = np.random.default_rng(8)
    a, b = draw(rng, (40, 60), name), draw(rng, (60, 30), name)
    c = np.matmul(a, b)
    c0 = draw(rng, c.shape, name)
    result = verify(a, b, c)
    assert result
    assert result.detects == 0
    three, five = c.dtype.type(3), c.dtype.type(5)
    assert verify(a, b, three * c + five * c0, alpha=3, beta=5, c0=c0)
    assert verify(a, b, three * c - five * c0, alpha=3, beta=-5, c0=c0)
    assert not verify(a, b, three * c + five * c0, alpha=3, beta=4, c0=c0)
    # Errors of half the range cancel in pairs under any choice of signs.
    half = c.dtype.type(np.iinfo(c.dtype).max // 2 + 1)
    c[7, 3] ^= half
    c[7, 4] ^= half
    assert not verify(a, b, c)


@pytest.mark.parametrize("name", others_slow(["int8", "uint64"], "int8"))
def test_a_wrong_integer_is_missed_as_often_as_is_promised(name):
    rng = np.random.default_rng(9)
    a, b = draw(rng, (4, 6), name), draw(rng, (6, 3), name)
    c = np.matmul(a, b)
    bits, seeds = 8 * c.dtype.itemsize, range(16)
    for zeros in (0, bits - 2, bits - 1):
        wrong = c.copy()
        wrong.view(f"u{c.dtype.itemsize}")[2, 1] ^= 1 << zeros
        missed = sum(bool(verify(a, b, wrong, rounds=1, seed=seed)) for seed in seeds)
        chance = 2.0 ** (zeros - bits)
        deviation = (len(seeds) * chance * (1 - chance)) ** 0.5
        assert abs(missed - len(seeds) * chance) <= 3 * deviation, zeros
    assert "1 - 2^-7" in str(verify(a, b, c, rounds=7))


#: Operands' dtype and that of their product, which holds the sums: of 200 numbers at most.
WHOLE = [
    *(("int8", "float32"), ("uint8", "float32"), ("int8", "float64"), ("int16", "float64")),
    *(("uint16", "float64"), ("int16", "complex128"), ("int8", "complex64"), ("bool", "float16")),
]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("name", "dtype"), WHOLE)
def test_floats_that_hold_sums_of_integers_are_exact(name, dtype, chunked):
    rng = np.random.default_rng(11)
    a, b = draw(rng, (90, 200), name), draw(rng, (200, 40), name)
    c = multimm.matmul(a, b, dtype=dtype)
    assert np.array_equal(c, a.astype("int64") @ b.astype("int64"))
    wrong = [c.copy() for _ in range(3)]
    wrong[0][33, 7] += 1
    # What may be no more than rounding of a product of floats, or is lost in a sum of its row.
    order, little = np.argsort(np.abs(c), axis=None), 1 + 2 * np.finfo(c.dtype).eps
    for one, place in ((wrong[1], order[-1]), (wrong[2], order[np.count_nonzero(c == 0)])):
        one[np.unravel_index(place, c.shape)] *= little
    operands = [lazy(x, rng) if chunked else x for x in (a, b)]
    with dask.config.set(scheduler="sync"):
        result = verify(*operands, lazy(c, rng) if chunked else c, dtype=dtype)
        assert result, result
        assert result.detects == 0
        assert "exact" in str(result)
        for one in (*wrong, c * little):
            assert not verify(*operands, lazy(one, rng) if chunked else one, dtype=dtype)


def test_sums_of_integers_beyond_what_a_float_holds_are_rounded_once():
    a, b = np.full((3, 400), 255, "uint8"), np.full((400, 2), 255, "uint8")
    a[0, 1:] = 0  # this row is exact: 65025
    b[0, 1] = 254
    c = multimm.matmul(a, b, dtype="float32")
    exact = a.astype("int64") @ b.astype("int64")
    assert c.max() < 2**25  # of which float32 holds the even ones
    assert (c != exact).any()
    assert verify(a, b, c, dtype="float32")
    for at, error in (((0, 1), 1), ((2, 0), 64)):
        wrong = c.copy()
        wrong[at] += error
        assert not verify(a, b, wrong, dtype="float32"), at
    # With an alpha, sums are multiplied in floats, and rounded.
    assert verify(a, b, multimm.gemm(0.1, a, b, dtype="float32"), alpha=0.1, dtype="float32")


def test_bool_says_how_much_was_checked():
    rng = np.random.default_rng(10)
    a, b = draw(rng, (200, 30), "bool"), draw(rng, (30, 20), "bool")
    c, c0 = a @ b, draw(rng, (200, 20), "bool")
    result = verify(a, b, c)
    assert result
    assert result.unchecked == (200 - 64) * 20
    assert "64 of 200 rows" in str(result)
    assert verify(a, b, c | c0, beta=1, c0=c0)
    assert not verify(a, b, ~c)
    assert not verify(a, b, c, beta=1, c0=~c)


#: Operands' dtype, C0's, alpha and beta: what gemm keeps A B in is not what it returns.
WIDENED = [
    *(("float32", "float64", 1, 1), ("float32", "complex128", 1j, 0.5)),
    *(("float16", "float64", 1, 1), ("float16", "float32", 3.0, 1), ("float32", "float64", 2, 0)),
    *(("complex64", "complex128", 1, -1), ("uint8", None, 0.5, 0), ("int8", "int64", 1, 1)),
    *(("int8", "int64", 3, -2), ("int8", "float32", 2, 1), ("int8", "float32", 2.0, 1.5)),
    *(("int8", "float16", 1, 0.5), ("uint16", "complex64", 1, 1), ("int8", "int64", 1, 0)),
    *(
        ("bool", "int8", 0.5, -1),
        ("int64", None, 0.5, 0),
        ("uint64", "float32", 3, 1),
        ("int32", None, 2j, 0),
    ),
    *(("bool", None, 0.5, 0), ("bool", "int64", 1, 2), ("bool", "uint8", True, 200)),
    *(("bool", "float16", 1, 1), ("int8", None, 1.0, 0), ("bool", None, 1j, 0)),
]


@pytest.mark.parametrize(
    ("name", "added", "alpha", "beta", "chunked"),
    [(*scaled, i % 2 == 1) for i, scaled in enumerate(WIDENED)],  # NumPy's and lazy ones by turns
)
def test_what_alpha_and_c0_widen_after_the_product(name, added, alpha, beta, chunked):
    rng = np.random.default_rng(15)
    a, b = draw(rng, (50, 90), name), draw(rng, (90, 30), name)
    c0 = None if added is None else draw(rng, (50, 30), added)
    c = multimm.gemm(alpha, a, b, beta, c0)
    assert c.dtype != np.matmul(a, b).dtype
    wrong = c.copy()
    wrong[33, 7] += wrong.dtype.type(1 + abs(wrong[33, 7]) // 8)
    if chunked:
        a, b = lazy(a, rng), lazy(b, rng)
        c0 = None if c0 is None else lazy(c0, rng)
    scale = {"alpha": alpha, "beta": beta, "c0": c0}
    result = verify(a, b, lazy(c, rng) if chunked else c, **scale)
    assert result, str(result)
    assert result.unchecked == 0
    result = verify(a, b, wrong, **scale)
    assert not result
    assert "c[33, 7]" in str(result)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((30,), (30,)),
        ((30,), (30, 20)),
        ((20, 30), (30,)),
        ((4, 20, 30), (30,)),
        ((30,), (3, 30, 20)),
        ((3, 20, 30), (3, 30, 10)),
        ((4, 1, 20, 30), (3, 30, 10)),
        ((20, 30), (2, 1, 30, 10)),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_shapes_of_numpy_matmul(shape_a, shape_b, chunked, monkeypatch):
    monkeypatch.setattr(tasks, "STRIP", 100)
    rng = np.random.default_rng(11)
    a, b = rng.normal(size=shape_a), rng.normal(size=shape_b)
    c = np.asarray(a @ b)
    wrong = c.copy()
    wrong[tuple(rng.integers(size) for size in c.shape)] += 1e-6
    hole = b.copy()
    hole[(-1,) * b.ndim] = np.nan
    if chunked:
        a, b, c, wrong, hole = (lazy(x, rng) for x in (a, b, c, wrong, hole))
    assert verify(a, b, c)
    result = verify(a, b, wrong)
    assert not result
    assert "c[" in str(result)
    assert not verify(a, hole, c)
    holed = np.matmul(np.asarray(a), np.asarray(hole))
    result = verify(a, hole, holed)
    assert bool(result) == np.isfinite(holed).any()
    assert ("nothing could be checked" in str(result)) != bool(result)


def test_transposes_scalars_and_broadcast_c0(typical):
    a, b, c = typical
    for trans_a, trans_b in itertools.product((False, True), repeat=2):
        left, right = (a.T if trans_a else a), (b.T if trans_b else b)
        assert verify(left, right, c, trans_a=trans_a, trans_b=trans_b)
        assert verify(da.from_array(left), right, c, trans_a=trans_a, trans_b=trans_b)
    row = np.arange(500, dtype=np.float32)
    whole = (np.float32(0.5) * c - np.float32(2) * row).astype(np.float32)
    assert verify(a, b, whole, alpha=0.5, beta=-2, c0=row)
    assert not verify(a, b, whole, alpha=0.5, beta=-2, c0=row[::-1])
    assert not verify(a, b, whole, alpha=0.5)
    nan = np.full_like(a, np.nan)
    assert verify(nan, b, 3 * c, alpha=0, beta=3, c0=c)
    assert verify(a, b, c, beta=0, c0=np.full_like(c, np.nan))
    z = (1 + 2j) * c.astype(np.complex64)
    assert verify(a, b, z, alpha=1 + 2j)
    assert not verify(a, b, z.conj(), alpha=1 + 2j)


def behind_empty(array):
    """In the chunks that a filter and `compute_chunk_sizes` may leave."""
    return da.from_array(array, chunks=tuple((0, 0, size) for size in array.shape), name=False)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((5, 1), (1, 3)),
        ((1, 4), (4, 3)),
        ((4, 3), (3, 1)),
        ((1, 4, 3), (3, 2)),
        ((1, 1), (6, 1, 1)),
    ],
)
def test_axes_of_length_1_behind_empty_chunks(shape_a, shape_b):
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=shape_a), rng.normal(size=shape_b)
    c, c0 = a @ b, rng.normal(size=(1, 1))
    operands = behind_empty(a), behind_empty(b)
    assert verify(*operands, behind_empty(c))
    assert verify(*operands, multimm.matmul(*operands))
    assert verify(*operands, 2 * c + 3 * c0, alpha=2, beta=3, c0=behind_empty(c0))
    assert "off by 1e-09" in verify(*operands, behind_empty(c + 1e-9)).reason


def test_a_wrong_row_among_empty_chunks_is_named():
    a, b = np.arange(45.0).reshape(9, 5), np.ones((5, 4))
    rows = (0, 1, 1, 0, 0, 1, 3, 0, 1, 1, 0, 0, 1)  # Dask picks single rows by the mean of these: 0
    c = a @ b
    c[2, 0] += 1
    arrays = da.from_array(a, chunks=(rows, 5)), b, da.from_array(c, chunks=(rows, 4))
    added = multimm.verify(*arrays, beta=1, c0=da.zeros((9, 4), chunks=(rows, 4)))
    for found in (multimm.verify(*arrays), added):
        assert not found
        assert "c[2, 0] is wrong" in str(found)


def test_empty_products():
    assert verify(np.ones((0, 3)), np.ones((3, 2)), np.ones((0, 2)))
    assert verify(np.ones((2, 0)), np.ones((0, 3)), np.zeros((2, 3)))
    assert not verify(np.ones((2, 0)), np.ones((0, 3)), np.ones((2, 3)))
    assert not verify(np.ones((2, 0), int), np.ones((0, 3), int), np.ones((2, 3)), alpha=0.5)
    lazy_c = da.zeros((2, 3), chunks=1)
    assert verify(da.ones((2, 0)), da.ones((0, 3), chunks=1), lazy_c)
    assert not verify(da.ones((2, 0)), da.ones((0, 3), chunks=1), lazy_c + 1)


def test_no_task_sees_more_than_one_block_and_only_rows_of_numbers_are_added():
    rng = np.random.default_rng(12)
    seen = []

    def note(block):
        seen.append(block.nbytes)
        return block

    a, b = (da.from_array(rng.normal(size=(640, 640)), chunks=80) for _ in range(2))
    c = da.from_array((a @ b).compute(), chunks=80)
    c = c.map_blocks(note, meta=np.empty((0, 0)))
    job = prepare(a, b, c, None, (False, False), (1, 0), 20)
    largest = []

    class Largest(dask.callbacks.Callback):
        def _posttask(self, key, result, dsk, state, worker_id):
            largest.append(getattr(result, "nbytes", 0))

    with Largest(), dask.config.set(scheduler="sync"):
        sweep(job, 0)
    assert seen == [80 * 80 * 8] * 64
    # A row panel of all columns would be 640 * 80 * 8; what is kept beside blocks is 25 wide.
    assert max(largest) <= max(80 * 80 * 8, 640 * 25 * 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": np.ones((4, 4))}, ShapeError, "the 4 columns of a must equal the 5 rows"),
        (
            {"c": np.ones((4, 7))},
            ShapeError,
            r"c has shape \(4, 7\): .* \(4, 6\)",
        ),
        ({"a": np.float64(1)}, ShapeError, "0-D"),
        ({"a": np.ones(5), "trans_a": True}, ShapeError, "trans_a"),
        ({"a": np.ones((3, 4, 5)), "b": np.ones((2, 5, 6))}, ShapeError, "broadcast"),
        ({"c": np.ones((4, 6), np.int64)}, DTypeError, "int64, .* pass it as it was made"),
        ({"c": np.ones((4, 6), bool)}, DTypeError, "bool"),
        ({"a": np.ones((4, 5), complex)}, DTypeError, "complex128"),
        ({"a": np.ones((4, 5), object)}, DTypeError, "object"),
        ({"a": np.ones((4, 5), "U3")}, DTypeError, "<U3"),
        ({"a": np.ma.ones((4, 5))}, ArrayTypeError, "Masked"),
        ({"beta": 1}, OptionError, "c0"),
        ({"beta": 1, "c0": np.ones((3, 6))}, ShapeError, "broadcast"),
        ({"alpha": np.nan}, OptionError, "finite"),
        ({"alpha": 1j}, OptionError, "real"),
        ({"alpha": np.ones(3)}, OptionError, "alpha"),
        ({"alpha": "2"}, OptionError, "alpha"),
        ({"precision": "fp16"}, OptionError, "precision='fp16': allowed are 'float32'"),
        ({"rounds": 0}, OptionError, "rounds=0"),
        ({"rounds": 2.5}, OptionError, r"rounds=2\.5"),
        ({"rounds": True}, OptionError, "rounds=True"),
        ({"seed": -1}, OptionError, "seed=-1"),
        ({"seed": None}, OptionError, "seed=None"),
    ],
)
def test_bad_input_is_refused_in_one_line(change, error, message):
    arguments = {"a": np.ones((4, 5)), "b": np.ones((5, 6)), "c": np.full((4, 6), 5.0)} | change
    operands = [arguments.pop(name) for name in "abc"]
    with pytest.raises(error, match=message) as caught:
        verify(*operands, **arguments)
    assert "\n" not in str(caught.value)


LIES = {
    "more than its dtype": lambda block: block + 1j,
    "another dtype": lambda block: block.astype(str),
    "fewer rows": lambda block: block[:1],
    "more dimensions": lambda block: block[None],
    "no array": lambda block: None,
}


@pytest.mark.parametrize("of", ["a", "b", "c", "c0"])
@pytest.mark.parametrize("lie", LIES)
def test_blocks_that_are_not_what_their_array_declares_are_named(lie, of):
    x = np.arange(36.0).reshape(6, 6)
    given = dict.fromkeys(["a", "b"], x) | {"c": x @ x + x, "c0": x}
    lazy = {name: da.from_array(value, chunks=3) for name, value in given.items()}
    assert multimm.verify(**lazy, beta=1)
    lazy[of] = lazy[of].map_blocks(LIES[lie], dtype="f8", meta=np.empty((0, 0)))
    with pytest.raises((ShapeError, DTypeError, ArrayTypeError), match="what is checked"):
        multimm.verify(**lazy, beta=1)
