"""Products of packed operands on a GPU: exact integers, the accuracy contract, memory, bits."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_arrays import assert_exact, pack_tiles, padded
from wgmma_model import wgmma_model

from multimm.gpu.emulated.configs import SPLIT_REGISTRY, split_slices
from multimm.gpu.product import gemm

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

CANARY = -12345.0
U = 2.0**-24
SCHEMES = {2: "float32", 1: "tf32"}
entries = pytest.mark.parametrize("entry", SPLIT_REGISTRY, ids=[e.name for e in SPLIT_REGISTRY])
RAGGED = [(1, 1, 1), (2, 3, 63), (64, 64, 64), (65, 127, 65), (129, 1, 300), (300, 201, 500),
          (128, 257, 4096), (7, 640, 1000)]  # fmt: skip


def packed(x, side: str, scheme: str = "float32"):
    return pack_tiles(cupy.asarray(x), side=side, scheme=scheme)


def both(a, b, parts: int = 2):
    return packed(a, "a", SCHEMES[parts]), packed(b, "b", SCHEMES[parts])


def integers(rng, *shape: int) -> np.ndarray:
    return rng.integers(-8, 9, shape).astype(np.float32)


def case(rng, m, n, k):
    """Small-integer operands: exact in any order, the result must match bit for bit."""
    a, b = integers(rng, m, k), integers(rng, k, n)
    return a, b, integers(rng, m, n), integers(rng, m, n), a.astype(np.float64) @ b


@entries
def test_small_integers_are_exact_in_padded_unaligned_memory(entry):
    rng = np.random.default_rng(3)
    for m, n, k in RAGGED:
        a, b, c, p, exact = case(rng, m, n, k)
        operands = both(a, b, entry.config.parts)
        extra, offset = rng.integers(0, 4, 3), rng.integers(0, 3, 3)
        (gc, _), (gp, _) = (
            padded(x, int(e), int(o), np.nan)
            for x, e, o in zip((c, p), extra, offset, strict=False)
        )
        canvas, whole = padded(np.zeros_like(c), int(extra[2]), int(offset[2]), CANARY)
        for options, expected in (
            ({}, exact),
            ({"alpha": 2, "beta": -1, "c": gc, "partial": gp}, 2 * (exact + p) - c),
            ({"beta": 3, "c": gc}, exact + 3 * c),
            ({"alpha": -1, "partial": gp}, -(exact + p)),
        ):
            context = f"{entry.name} {m=} {n=} {k=} {list(options)}"
            result = gemm(*operands, out=canvas, config=entry.name, **options)
            assert result is canvas
            assert_exact(result, expected, context)
            canvas[...] = CANARY
            assert bool((whole == CANARY).all()), f"{context}: written outside of D"


def test_what_is_multiplied_by_zero_is_never_read():
    a, b = both(np.ones((70, 200), np.float32), np.ones((200, 90), np.float32))
    c, nan = cupy.ones((70, 90), np.float32), cupy.full((70, 90), np.nan, np.float32)
    assert_exact(gemm(a, b, beta=0, c=nan), np.full((70, 90), 200.0), "beta 0")
    broken = [replace(x, tiles=cupy.full_like(x.tiles, np.nan)) for x in (a, b)]
    result = gemm(*broken, alpha=0, beta=3, c=c, partial=nan)
    assert_exact(result, np.full((70, 90), 3.0), "alpha 0")
    assert_exact(gemm(*broken, alpha=0), np.zeros((70, 90)), "alpha 0, no C")


def multiprocessors() -> int:
    return cupy.cuda.Device().attributes["MultiProcessorCount"]


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize(
    ("m", "n", "k", "sliced"),
    [(1100, 900, 20_000, False), (100, 70, 65_536, True), (1000, 500, 40_000, True)],
    ids=["laid down twice", "short slices", "slices of more than 8192 k"],
)
def test_long_sums_are_exact(m, n, k, sliced, parts):
    slices, _ = split_slices(m, n, k, multiprocessors())
    assert (slices > 1) == sliced
    rng = np.random.default_rng(5)
    a, b, c, p, exact = case(rng, m, n, k)
    operands = both(a, b, parts)
    assert_exact(gemm(*operands), exact, "alone")
    canvas, whole = padded(c, 3, 1, CANARY)
    canvas[...] = np.nan
    gemm(*operands, alpha=2, beta=-1, c=cupy.asarray(c), partial=cupy.asarray(p), out=canvas)
    assert_exact(canvas, 2 * (exact + p) - c, "with C and P")
    canvas[...] = CANARY
    assert bool((whole == CANARY).all())


def drawn(name: str, rng, *shape: int):
    normal = rng.standard_normal(shape, dtype=np.float32)
    if name == "uniform":
        return rng.random(shape, dtype=np.float32)
    if name == "half zeros":
        return cupy.where(rng.random(shape, dtype=np.float32) < 0.5, 0, normal)
    if name == "lognormal":
        return ((rng.random(shape, dtype=np.float32) - 0.5) * cupy.exp(normal)).astype(np.float32)
    return normal


@pytest.mark.parametrize("k", [256, 1000, 4096, 20_000, 131_072])
@pytest.mark.parametrize("name", ["normal", "uniform", "half zeros", "lognormal"])
def test_float32_is_as_accurate_as_promised_and_cublas(name, k):
    rng = cupy.random.default_rng(7)
    a, b = drawn(name, rng, 1024, k), drawn(name, rng, k, 1024)
    result = gemm(packed(a, "a"), packed(b, "b")).astype(np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = abs(a).astype(np.float64) @ abs(b).astype(np.float64)
    error, theirs = abs(result - exact), abs((a @ b).astype(np.float64) - exact)
    worst = float((error / bound).max()) / U
    assert worst <= 24, f"{worst} u"
    rms, their_rms = (float(cupy.sqrt((x**2).mean())) for x in (error, theirs))
    assert rms <= their_rms, f"{rms / their_rms} of cuBLAS FP32's"


@pytest.mark.parametrize("k", [300, 4096, 65_536])
@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_tf32_meets_its_bound(name, k):
    rng = cupy.random.default_rng(11)
    a, b = drawn(name, rng, 200, k), drawn(name, rng, k, 300)
    result = gemm(packed(a, "a", "tf32"), packed(b, "b", "tf32"))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = (2.0**-9 + 2 * k * U) * (abs(a).astype(np.float64) @ abs(b).astype(np.float64))
    assert bool((abs(result - exact) <= bound).all())


@pytest.mark.parametrize("k", [1000, 4096, 20_000, 131_072])
@pytest.mark.parametrize("name", ["normal", "uniform", "half zeros", "lognormal"])
def test_tf32_is_as_accurate_as_cublas(name, k):
    from multimm_benchmarks.cases import Case
    from multimm_benchmarks.cublas import COMPUTE_TF32, Cublas

    rng = cupy.random.default_rng(31)
    a, b = drawn(name, rng, 1024, k), drawn(name, rng, k, 1024)
    theirs = cupy.empty((1024, 1024), np.float32)
    library = Cublas(cupy.cuda.get_current_stream())
    library.gemm_ex(Case(1024, 1024, k), a, b, theirs, COMPUTE_TF32)()
    result = gemm(packed(a, "a", "tf32"), packed(b, "b", "tf32"))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    rms, their_rms = (float(cupy.sqrt(((x - exact) ** 2).mean())) for x in (result, theirs))
    assert 0 < rms <= their_rms, f"{rms / their_rms} of cuBLAS TF32's"


@pytest.mark.parametrize(
    ("parts", "k"),
    [(2, 64), (2, 200), (2, 2500), (2, 9000), (1, 700), (1, 3072), (1, 3100), (1, 9300)],
)
@pytest.mark.parametrize("specific", [True, False], ids=["wgmma", "mma"])
def test_every_bit_is_the_models(parts, k, specific):
    """Hopper's tensor cores sum alike whether they read registers or shared memory."""
    m, n, rows, cols = 1100, 900, 32, 24  # so large that k is not cut into slices
    rng = np.random.default_rng(13)
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = rng.random((n, k)).astype(np.float32)
    config = next(
        entry.config
        for entry in SPLIT_REGISTRY
        if (entry.config.parts, entry.config.specific) == (parts, specific)
    )
    operands = both(a, np.ascontiguousarray(b.T), parts)
    result = gemm(*operands, config=config)[-rows:, -cols:]
    expected = wgmma_model(a[-rows:], b[-cols:], parts=parts)
    np.testing.assert_array_equal(cupy.asnumpy(result).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("parts", [2, 1])
def test_every_configuration_stream_and_run_gives_the_same_bits(parts):
    rng = cupy.random.default_rng(17)
    a, b = rng.standard_normal((500, 9000)), rng.standard_normal((9000, 700))
    operands = both(a.astype(np.float32), b.astype(np.float32), parts)
    names = [entry.name for entry in SPLIT_REGISTRY if entry.config.parts == parts]
    results = [gemm(*operands, config=name) for name in names for _ in range(3)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(cupy.cuda.Stream.null.record())
        results.append(gemm(*operands))
        stream.synchronize()
    first = results[0].view(cupy.uint32)
    for other in results[1:]:
        assert bool((first == other.view(cupy.uint32)).all())


def test_scales_reach_over_all_of_float32():
    rng = np.random.default_rng(19)
    a, b, _, _, exact = case(rng, 40, 30, 100)
    down = np.linspace(-149, 120, 40).round().astype(int)
    across = np.linspace(-149, 120, 30).round().astype(int)
    left, right = np.ldexp(a, down[:, None]), np.ldexp(b, across[None, :])
    left, right = left.astype(np.float32), right.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.ldexp(exact, down[:, None] + across[None, :]).astype(np.float32)
    result = cupy.asnumpy(gemm(*both(left, right)))
    normal = (abs(expected) >= 2.0**-126) | (expected == 0)
    np.testing.assert_array_equal(result[normal], expected[normal])
    # Below, the two factors may round twice.
    assert (abs(result[~normal] - expected[~normal]) <= 2.0**-149).all()
    assert np.isinf(expected).any()
    assert (~normal).any()


def test_result_of_more_than_2_to_31_elements():
    m, n, k = 46_341, 46_349, 3
    if cupy.cuda.Device().mem_info[0] < 3 * m * n * 4:
        pytest.skip("needs 26 GB of free GPU memory")
    a = cupy.arange(m * k, dtype=np.float32).reshape(m, k) % 17
    b = cupy.arange(k * n, dtype=np.float32).reshape(k, n) % 13
    result = gemm(packed(a, "a"), packed(b, "b"))
    for rows in (slice(0, 300), slice(m - 300, m)):
        assert bool((result[rows] == a[rows] @ b).all())
