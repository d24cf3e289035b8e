"""The rungs of the ladder on a GPU; tests/test_cuda_on_cpu.py has every case of theirs."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import padded

from multimm_benchmarks.harness import WrongResultError, operands
from multimm_benchmarks.ladder import RUNGS, run_rung

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy

pytestmark = pytest.mark.gpu

U = 2.0**-24
CANARY = -777.0


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_random_inputs_meet_the_bound_in_padded_unaligned_memory(rung):
    rng = np.random.default_rng(5)
    alpha, beta = np.float32(0.7), np.float32(-1.3)
    for m, n, k in ((129, 257, 63), (256, 128, 1000), (65, 33, 5000)):
        a, b, c = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n))
        )
        for extra, offset in ((0, 0), (4, 4), (3, 1)):  # aligned rows take other instructions
            ga, gb, gc = (padded(x, extra, offset)[0] for x in (a, b, c))
            out, whole = padded(np.full((m, n), np.nan, "f4"), extra, offset, CANARY)
            run_rung(rung, ga, gb, out, alpha=alpha, beta=beta, c=gc)
            product, addend = float(alpha) * (a.astype(float) @ b), float(beta) * c.astype(float)
            bound = abs(float(alpha)) * (k + 2) * U * (abs(a).astype(float) @ abs(b))
            bound += 2 * U * (abs(product) + abs(addend)) + U * abs(product + addend)
            error = abs(cupy.asnumpy(out).astype(float) - (product + addend))
            assert (error <= bound).all(), f"{rung.name} {m=} {n=} {k=}"
            out[...] = CANARY
            assert bool((whole == CANARY).all()), f"{rung.name}: written outside of D"


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
