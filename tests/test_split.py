"""Products of packed operands without a GPU: what is refused, and what is launched."""

from __future__ import annotations

import numpy as np
import pytest
import stand_in
from pack_reference import pack_reference, swizzled
from stand_in import GPUArray, below, gpu, laid_out, memory, standing_in

from multimm.errors import ArrayTypeError, DTypeError, KernelError, OptionError, ShapeError
from multimm.gpu.arch import Device, limits_for, tiles_of
from multimm.gpu.emulated.configs import (
    SPLIT_REGISTRY,
    choose_split,
)
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.product import gemm
from multimm.gpu.runtime import launch
from multimm.gpu.simt import split_k
from multimm.gpu.simt.configs import REGISTRY, entry_named


class Kernel(stand_in.Kernel):
    """What both kernels compute, in NumPy: slice by slice from packed tiles."""

    def __call__(self, grid, block, args, shared_mem=0):
        if self.name == "add_partials":
            assert (self.defines["REFUSED"], args[-1]) == (0, 0)
            super().__call__(grid, block, args[:-1])
            return
        stand_in.Kernel.launches.append((self, grid, block, args))
        assert block == {"sgemm_split": (384, 1, 1), "sgemm_split_mma": (256, 1, 1)}[self.name]
        assert shared_mem == self.max_dynamic_shared_size_bytes > 48 << 10
        assert [type(x) for x in args] == [int] * 4 + [np.float32] * 2 + [int] * 12
        self.multiply(grid, *args)

    def multiply(self, grid, m, n, slabs, step, alpha, beta, a, ea, b, eb, c, ldc, p, ldp, d, ldd,
                 apart, counts):  # fmt: skip
        assert counts == 0
        slices = -(-slabs // step) if step else 1
        lower = "LOWER" in self.defines
        tiles = tiles_of(m, n, 128, self.defines["TILE_N"], lower) * slices
        assert grid == (min(tiles, 132), 1, 1)

        def operand(tiles, exponents, rows):
            height, parts = -(-rows // 128) * 128, self.defines["PARTS"]
            shape = height // 64, slabs, parts, 64, 64
            flat = swizzled(memory(tiles, (np.prod(shape),), (1,), "f2").reshape(shape))
            values = flat.transpose(2, 0, 3, 1, 4).reshape(parts, height, -1).astype(float)
            values = values[0] + (values[1] / 2048 if parts == 2 else 0)
            return np.ldexp(values, memory(exponents, (height, 1), (1, 1), "i4"))[:rows]

        def matrix(pointer, ld):
            return memory(pointer, (m, n), (ld, 1), "f4")

        for i in range(slices):
            part = slice(i * step * 64, (i + 1) * step * 64 if step else None)
            total = np.zeros((m, n))
            if alpha != 0:
                total += operand(a, ea, m)[:, part] @ operand(b, eb, n)[:, part].T
                total += matrix(p, ldp) if p else 0
            total = alpha * total
            if c and beta != 0:
                total += beta * matrix(c, ldc)
            made = below(m, n, 128, self.defines["TILE_N"]) if lower else np.ones((m, n), bool)
            matrix(d + 4 * i * apart, ldd)[made] = total[made]


@pytest.fixture(autouse=True)
def launches():
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_loaded", lambda text, entry, *_: Kernel(text, entry))
        patch.setattr(split_k, "workspace", lambda shape, device: (
            gpu(np.full(shape, np.nan, "f4")), lambda: None))  # fmt: skip
        launch.device_of.cache_clear()
        yield stand_in.Kernel.launches
    launch.device_of.cache_clear()


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
