"""Every rung of the ladder keeps the contract of kernels/README.md."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from multimm_benchmarks.harness import WrongResultError, operands
from multimm_benchmarks.ladder import RUNGS, run_rung

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

rungs = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
U = 2.0**-24
CANARY = -777.0
EDGES = (1, 3, 8, 31, 33, 64, 127, 128, 129, 257)


def integers(rng, *shape):
    return rng.integers(-8, 9, shape).astype(np.float32)


def padded(values, extra, offset, fill=np.nan):
    """A copy in the left columns of wider rows full of `fill`, `offset` elements in."""
    rows, cols = values.shape
    whole = cupy.full(rows * (cols + extra) + offset, fill, np.float32)
    view = whole[offset:].reshape(rows, cols + extra)[:, :cols]
    view[...] = cupy.asarray(values)
    return view, whole


def shapes(rng, count):
    picked = [(int(m), int(n), int(k)) for m, n, k in rng.choice(EDGES, (count, 3))]
    return [*picked, (256, 256, 64), (512, 128, 40), (128, 384, 0), (5, 0, 7), (0, 5, 7)]


@rungs
def test_integers_are_exact_in_padded_unaligned_memory(rung):
    rng = np.random.default_rng(3)
    for m, n, k in shapes(rng, 30):
        a, b, c = integers(rng, m, k), integers(rng, k, n), integers(rng, m, n)
        # Aligned rows take other instructions than the rest: both are wanted.
        extras, offsets = rng.choice([0, 1, 4, 8], 4), rng.choice([0, 1, 4], 4)
        (ga, _), (gb, _), (gc, _) = (
            padded(x, int(e), int(o)) for x, e, o in zip((a, b, c), extras, offsets, strict=False)
        )
        out, whole = padded(np.full((m, n), np.nan), int(extras[3]), int(offsets[3]), CANARY)
        run_rung(rung, ga, gb, out, alpha=2, beta=-1, c=gc)
        wrong = np.argwhere(~(cupy.asnumpy(out) == 2 * (a.astype(float) @ b) - c))
        assert not wrong.size, f"{rung.name} {m=} {n=} {k=} {extras} {offsets}: at {wrong[0]}"
        out[...] = CANARY
        assert bool((whole == CANARY).all()), f"{rung.name} {m=} {n=} {k=}: written outside of D"


@rungs
def test_what_is_multiplied_by_zero_is_never_read(rung):
    ones = cupy.ones((130, 130), np.float32)
    nan = cupy.full((130, 130), np.nan, np.float32)
    out = cupy.empty_like(ones)
    assert bool((run_rung(rung, ones, ones, out) == 130).all())
    assert bool((run_rung(rung, ones, ones, out, beta=0, c=nan) == 130).all())
    assert bool((run_rung(rung, nan, nan, out, alpha=0, beta=3, c=ones) == 3).all())
    empty = run_rung(rung, ones[:, :0], ones[:0], out, alpha=np.inf, beta=2, c=ones)
    assert bool((empty == 2).all())


@rungs
def test_random_inputs_meet_the_bound(rung):
    rng = np.random.default_rng(5)
    alpha, beta = np.float32(0.7), np.float32(-1.3)
    for m, n, k in ((129, 257, 63), (256, 128, 1000), (65, 33, 5000)):
        a, b, c = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n))
        )
        out = cupy.full((m, n), np.nan, np.float32)
        run_rung(rung, *map(cupy.asarray, (a, b)), out, alpha=alpha, beta=beta, c=cupy.asarray(c))
        left, right = a.astype(float), b.astype(float)
        product, addend = float(alpha) * (left @ right), float(beta) * c.astype(float)
        bound = abs(float(alpha)) * (k + 2) * U * (abs(left) @ abs(right))
        bound += 2 * U * (abs(product) + abs(addend)) + U * abs(product + addend)
        error = abs(cupy.asnumpy(out).astype(float) - (product + addend))
        assert (error <= bound).all(), f"{rung.name} {m=} {n=} {k=}"


@rungs
def test_subnormals_and_infinities_are_those_of_ieee(rung):
    tiny, half = (cupy.asarray(np.full((1, 1), x, np.float32)) for x in (2.0**-130, 0.5))
    out = cupy.empty((1, 1), np.float32)
    assert float(cupy.asnumpy(run_rung(rung, tiny, half, out))[0, 0]) == 2.0**-131
    rng = np.random.default_rng(7)
    a, b = integers(rng, 40, 50), integers(rng, 50, 60)
    a[3, 7], a[5, 8], b[9, 11] = np.inf, np.nan, -np.inf
    out = cupy.empty((40, 60), np.float32)
    with np.errstate(invalid="ignore"):
        expected = a.astype(float) @ b.astype(float)
    got = cupy.asnumpy(run_rung(rung, cupy.asarray(a), cupy.asarray(b), out))
    np.testing.assert_array_equal(got, expected)


@rungs
def test_rows_2_to_31_elements_apart(rung):
    if cupy.cuda.Device().mem_info[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    far = cupy.zeros((3, 2**31 + 5), np.float32)[:, -3:]
    near = np.arange(9, dtype=np.float32).reshape(3, 3)
    far[...] = cupy.asarray(near)
    out = cupy.zeros((3, 3), np.float32)
    run_rung(rung, far, far, out, beta=1, c=far)
    np.testing.assert_array_equal(cupy.asnumpy(out), near @ near + near)
    run_rung(rung, out, cupy.asarray(near), far)
    np.testing.assert_array_equal(cupy.asnumpy(far), (near @ near + near) @ near)


@pytest.mark.parametrize("letters", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("batch", "extra", "offset"), [(0, 0, 0), (0, 1, 0), (0, 3, 1), (5, 0, 0)])
def test_cublas_is_called_as_meant(letters, batch, extra, offset):
    from multimm_benchmarks.cases import Case
    from multimm_benchmarks.cublas import Cublas
    from multimm_benchmarks.harness import Reference

    case = Case(37, 53, 71, letters, batch, extra, offset)
    a, b, out = operands(cupy, case)
    library = Cublas(cupy.cuda.Stream.null)
    reference = Reference(cupy, case, a, b)
    calls = [library.sgemm(case, a, b, out), library.lt(case, a, b, out)]
    assert calls[0] is not None
    for call in filter(None, calls):
        assert reference.check(out, call).componentwise < 73
    with pytest.raises(WrongResultError):
        reference.check(out, lambda: None)
