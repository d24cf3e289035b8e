"""What the parts of packed operands do not carry: which launch adds it, with which arguments."""

from __future__ import annotations

import numpy as np
import pytest
import stand_in
import test_split
from pack_reference import joined, pack_reference, split, swizzled
from stand_in import gpu, laid_out, memory, standing_in

from multimm.gpu.emulated import outliers
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.product import gemm
from multimm.gpu.runtime import launch


class Kernel:
    """What kernels/split_residuals.cu computes, in NumPy."""

    def __init__(self, defines):
        self.parts, self.cap = defines["PARTS"], defines["CAP"]

    def __call__(self, grid, block, args):
        launches.append((grid, args))
        assert block == (256, 1, 1)
        assert isinstance(args[3], np.float32)
        m, n, k, alpha, *rest = args
        *_, d, ldd, counts = rest
        assert counts == 0
        sides = [self.operand(rows, k, *given) for rows, given in ((m, rest[:5]), (n, rest[5:10]))]
        (a, r), (b, s) = ((carried.astype("f8"), rests.astype("f8")) for carried, rests in sides)
        memory(d, (m, n), (ldd, 1), "f4")[...] += alpha * (r @ (b + s).T + a @ s.T)

    def operand(self, rows, k, tiles, exponents, count, places, values):
        assert count <= self.cap
        height = -(-rows // 128) * 128
        shape = (height // 64, -(-k // 64), self.parts, 64, 64)
        flat = swizzled(memory(tiles, (int(np.prod(shape)),), (1,), "f2").reshape(shape))
        plain = flat.transpose(2, 0, 3, 1, 4).reshape(self.parts, height, -1)[:, :rows, :k]
        low = plain[1] if self.parts == 2 else np.zeros_like(plain[0])
        rests = np.zeros((rows, k), "f4")
        if count:
            at = np.divmod(memory(places, (count,), (1,), "u8"), np.uint64(2**32))
            rests[at] = memory(values, (count,), (1,), "f4")
        es = memory(exponents, (height,), (1,), "i4")[:rows]
        parts = split(np.zeros((1, 1), "f4"))._replace(
            high=plain[0], low=low, exponents=es, rest=np.zeros_like(rests)
        )
        return joined(parts), rests


launches: list[tuple] = []


@pytest.fixture(autouse=True)
def kernels():
    launches.clear()
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_loaded", lambda text, name, *_: test_split.Kernel(text, name))
        patch.setattr(outliers, "kernel_for", lambda ident, file, entry, d: Kernel(dict(d)))
        launch.device_of.cache_clear()
        yield
    launch.device_of.cache_clear()


def flat(x):
    return gpu(np.ascontiguousarray(x).reshape(1, -1)).reshape(x.shape)


def packed(x, side, scheme="float32"):
    """A block of rows x k; the list in an order of its own."""
    made = pack_reference(x, 2 if scheme == "float32" else 1)
    listed = made.residuals[::-1]
    at = listed["row"].astype("u8") * 2**32 + listed["k"].astype("u8")
    found = (flat(at), flat(listed["value"])) if len(listed) else ()
    return PackedBlock(*x.shape, side, scheme, flat(made.tiles), flat(made.exponents), 0,
                       len(listed), *found)  # fmt: skip


def with_tiny_elements(rows, k, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-1000, 1001, (rows, k)).astype("f4")
    x[rng.integers(0, rows, 5), rng.integers(0, k, 5)] = np.float32(1.2345678e-8)
    x[2, 7] = np.float32(2.3456789e-8)
    return x


@pytest.mark.parametrize("layout", ["C", "F", "wide rows", "wide columns"])
@pytest.mark.parametrize("scheme", ["float32", "tf32"])
@pytest.mark.parametrize("alpha", [1.0, -2.0])
def test_every_term_of_the_product_is_there(alpha, scheme, layout):
    x, y = with_tiny_elements(70, 90, 2), with_tiny_elements(50, 90, 3)
    y[11] = 0
    y[11, 7] = 1.5  # meets the tiny element of x alone
    x[9], y[9] = 0, 0
    x[9, [4, 5]], y[9, [4, 6]] = [np.float32(1.2345678e-9), 900], [np.float32(1.2345678e-9), 900]
    a, b = packed(x, "a", scheme), packed(y, "b", scheme)
    d = laid_out(np.full((70, 50), np.nan, "f4"), layout)
    for _ in range(2):  # the second time by what was kept
        gemm(a, b, alpha=alpha, out=d)
    exact = alpha * (x.astype("f8") @ y.T.astype("f8"))
    scale = np.abs(x.astype("f8")) @ np.abs(y.T.astype("f8"))
    assert (np.abs(d - exact) <= (90 * 2.0**-24 if scheme == "float32" else 2.0**-9) * scale).all()
    assert d[9, 9] == np.float32(alpha) * np.float32(1.2345678e-9) ** 2
    assert [grid for grid, _ in launches] == [(2, 1, 1)] * 2


def test_what_is_multiplied_by_zero_is_not_read():
    d = gpu(np.full((70, 50), 3, "f4"))
    for _ in range(2):
        operands = packed(with_tiny_elements(70, 90, 2), "a"), packed(np.ones((50, 90), "f4"), "b")
        gemm(*operands, alpha=0, out=d)
        assert (d == 0).all()
    assert launches == []


def test_they_are_added_on_the_device_that_holds_them(monkeypatch):
    import cupy

    entered, current = [], []

    class Device(stand_in.Device):
        def __enter__(self):
            current.append(self.id)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(Kernel, "__call__", lambda *_: entered.append(list(current)))
    a = packed(with_tiny_elements(70, 90, 2), "a")
    b = packed(np.ones((50, 90), "f4"), "b")
    for x in (*a.arrays().values(), *b.arrays().values()):
        x.device_id = 3
    gemm(a, b)
    assert entered == [[3]]
