"""Products of packed operands without a GPU: what is refused, and what is launched."""

from __future__ import annotations

import numpy as np
import pytest
import stand_in
from pack_reference import pack_reference
from stand_in import GPUArray, gpu, laid_out, standing_in

from multimm.errors import ArrayTypeError, DTypeError, KernelError, OptionError, ShapeError
from multimm.gpu.arch import Device, limits_for
from multimm.gpu.emulated.configs import (
    SPLIT_REGISTRY,
    choose_split,
)
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.product import gemm
from multimm.gpu.simt.configs import REGISTRY, entry_named


@pytest.fixture(autouse=True)
def launches():
    with standing_in():
        yield stand_in.Kernel.launches


def on_gpu(x: np.ndarray) -> GPUArray:
    return gpu(x.reshape(1, -1)).reshape(x.shape)


def packed(x: np.ndarray, side: str, parts: int = 2) -> PackedBlock:
    """`x` is rows x k."""
    made = pack_reference(x, parts)
    assert made.uncarried == 0
    scheme = {1: "tf32", 2: "float32"}[parts]
    return PackedBlock(*x.shape, side, scheme, on_gpu(made.tiles), on_gpu(made.exponents))


def both(a: np.ndarray, b: np.ndarray, parts: int = 2) -> tuple[PackedBlock, PackedBlock]:
    return packed(a, "a", parts), packed(b, "b", parts)


def case(m, n, k):
    """Small-integer operands, C and P, and the exact product; B is n x k."""
    rng = np.random.default_rng(m + n + k)
    shapes = ((m, k), (n, k), (m, n), (m, n))
    a, b, c, p = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    return a, b, c, p, a.astype(float) @ b.T


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (70, 130, 100), (129, 1, 2000), (5, 65, 64), (1, 66, 1100)]
)
def test_everything_reaches_the_kernel(m, n, k, parts):
    a, b, c, p, exact = case(m, n, k)
    operands = both(a, b, parts)
    np.testing.assert_array_equal(gemm(*operands), exact)
    for layout in stand_in.LAYOUTS[:4]:
        out = laid_out(np.full((m, n), np.nan, np.float32), layout)
        result = gemm(*operands, alpha=2, beta=-1, c=laid_out(c, layout),
                          partial=laid_out(p, "reversed"), out=out)  # fmt: skip
        assert result is out
        np.testing.assert_array_equal(out, 2 * (exact + p) - c, layout)


def test_configurations_are_taken_by_value_and_name(launches):
    a, b = both(np.ones((5, 100), np.float32), np.ones((6, 100), np.float32))
    for entry in SPLIT_REGISTRY[:2]:
        for config in (entry.name, entry.config):
            gemm(a, b, config=config)
            assert launches[-1][0].defines == entry.config.defines()
            assert launches[-1][0].max_dynamic_shared_size_bytes == entry.config.shared_bytes
    with pytest.raises(KernelError, match="other products than the 3 that are needed"):
        gemm(a, b, config=entry_named(SPLIT_REGISTRY, "tf32_wide").config)
    with pytest.raises(KernelError, match="'fast' is unknown"):
        gemm(a, b, config="fast")


def test_older_gpus_are_refused():
    with pytest.raises(KernelError, match=r"8\.0 or newer, this one has 7\.5: use precision"):
        choose_split(5, 5, (1, 2), 3, Device(limits_for(75), 40))


def test_operands_that_do_not_fit_are_refused(launches):
    left, right = (np.ones((rows, 100), np.float32) for rows in (20, 30))
    a, b = both(left, right)
    single, shorter = packed(right, "b", 1), packed(right[:, :90], "b")
    good, wide = (gpu(np.zeros((20, n), np.float32)) for n in (30, 31))
    elsewhere = gpu(np.zeros((20, 30), np.float32))
    elsewhere.device_id = 1
    for error, message, call in (
        (ShapeError, "the 100 columns of a must equal the 90 rows of b", lambda: gemm(a, shorter)),
        (OptionError, "a was packed for float32 and b for tf32", lambda: gemm(a, single)),
        (ArrayTypeError, r"several devices \({'packed': 0, 'c': 1}\)", lambda: gemm(
            a, b, beta=1, c=elsewhere)),
        (ShapeError, "out has shape", lambda: gemm(a, b, out=wide)),
        (ShapeError, "c has shape", lambda: gemm(a, b, beta=1, c=wide)),
        (ShapeError, "may share memory", lambda: gemm(a, b, beta=1, c=good, out=good)),
        (DTypeError, "float32", lambda: gemm(a, b, beta=1, c=good.astype(np.float64))),
        (ArrayTypeError, "CuPy", lambda: gemm(a, b, partial=np.zeros((20, 30), "f4"))),
        (KernelError, "none of packed operands: pass a SplitConfig", lambda: gemm(
            a, b, config=entry_named(REGISTRY, "large").config)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    assert launches == []
